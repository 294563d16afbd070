"""The wheel, built without a network from the environment's own hatchling."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpusync.device.kernels import UNITS

pytestmark = pytest.mark.skipif(
    find_spec("build") is None or find_spec("hatchling") is None,
    reason="the packages build and hatchling are not installed",
)


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("gpusync-*.whl")
    return built


def test_wheel_holds_the_package_its_sources_and_its_type_marker(
    wheel: Path, repository: Path
) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(repository)) for path in repository.glob("gpusync/**/*.py")}
    assert modules <= names
    assert "gpusync/py.typed" in names
    kernels = {f"gpusync/_kernels/{path.name}" for path in (repository / "kernels").iterdir()}
    assert kernels <= names
    assert {f"gpusync/_kernels/{unit}" for unit in UNITS} <= names
    emulator = {
        str(path.relative_to(repository))
        for path in (repository / "gpusync" / "testing").iterdir()
        if path.suffix in (".c", ".h")
    }
    assert emulator and emulator <= names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "kernels/"))]


def test_wheel_carries_licence_command_and_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    folder = info.rsplit("/", 1)[0]
    metadata = archive.read(info).decode()
    for extra in ("cuda12", "cuda13", "server", "blake3", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert "gpusync = gpusync.cli:main" in archive.read(f"{folder}/entry_points.txt").decode()
    assert b"Apache License" in archive.read(f"{folder}/licenses/LICENSE")


def test_dev_extra_equals_dev_group(repository: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["dev"] == project["dependency-groups"]["dev"]
