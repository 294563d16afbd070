"""What ``import gpusync`` costs and offers, each checked in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpusync
from gpusync import errors
from tests import support

HEAVY = ("torch", "cupy", "numpy", "typer", "rich", "starlette", "uvicorn", "zstandard", "xxhash")


def run_python(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_heavy_library(repository: Path) -> None:
    code = f"import sys, gpusync; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code, repository) == "[]"


def test_errors_and_reports_load_no_heavy_library(repository: Path) -> None:
    code = (
        "import sys, gpusync\n"
        "gpusync.ChainError, gpusync.PullReport\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run_python(code, repository) == "[]"


def test_pulling_and_verifying_on_disk_load_no_torch(repository: Path, tmp_path: Path) -> None:
    base, published, _ = support.make_stream(tmp_path, versions=2)
    code = (
        "import sys, gpusync\n"
        f"places = {str(tmp_path / 'local')!r}, {str(base)!r}, {str(published)!r}\n"
        "gpusync.pull(*places, 1), gpusync.pull(*places, 2), gpusync.verify(places[0])\n"
        "print([name for name in ('torch', 'cupy') if name in sys.modules])"
    )
    assert run_python(code, repository) == "[]"


@pytest.mark.parametrize(
    ("encoding", "loaded"),
    [("xor", False), ("overwrite", False), ("xor_sparse", False), ("xor_rows", True)],
)
def test_a_small_pull_loads_numba_for_xor_rows_alone(
    repository: Path, tmp_path: Path, encoding: str, loaded: bool
) -> None:
    base, published, _ = support.make_stream(tmp_path, versions=1, encoding=encoding)
    code = (
        "import sys, gpusync\n"
        f"gpusync.pull({str(tmp_path / 'local')!r}, {str(base)!r}, {str(published)!r}, 1)\n"
        "print('numba' in sys.modules)"
    )
    assert run_python(code, repository) == str(loaded)


def test_warmup_compiles_every_loop(repository: Path) -> None:
    code = (
        "import gpusync, gpusync.compiled as c\n"
        "c._Loop.compile = lambda loop: None\n"
        "gpusync.warmup('cpu')\n"
        "print(*sorted({loop.module for loop in c._loops}))"
    )
    sources = (repository / "gpusync").rglob("*.py")
    with_loops = [path for path in sources if "\n@compiled(" in path.read_text()]
    modules = sorted(
        ".".join(path.relative_to(repository).with_suffix("").parts) for path in with_loops
    )
    assert len(modules) > 5
    assert run_python(code, repository).split() == modules


@pytest.mark.parametrize(
    "module",
    ["gpusync.engines.vllm_weights", "gpusync.live.apply", "gpusync.publisher.publish"],
)
def test_importing_a_module_loads_no_numba(repository: Path, module: str) -> None:
    """vLLM's workers, which import the mount before they start, would not start with it."""
    code = f"import sys, {module}; print('numba' in sys.modules)"
    assert run_python(code, repository) == "False"


def test_every_public_name_resolves(repository: Path) -> None:
    code = (
        "import gpusync\n"
        "print([n for n in gpusync.__all__ if n[0] != '_' and getattr(gpusync, n).__name__ != n])"
    )
    assert run_python(code, repository) == "[]"


def test_every_error_class_is_public() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.GpuSyncError)
    }
    assert defined <= set(gpusync.__all__)
    assert defined <= set(dir(gpusync))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        gpusync.no_such_name  # noqa: B018
