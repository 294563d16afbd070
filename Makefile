# `make demo`, `make test` and `make check` each set up .venv first, on a machine with nothing but Python and make.

PYTHON ?= python3
# A plain version pin: where pip finds a CPU build under it, that is the one taken.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test check format venv clean

demo: venv
	$(PY) -m gpusync.cli demo

test: venv
	$(PY) -m pytest $(PYTEST_ARGS)

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
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet --editable ".[dev,server,blake3]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist
