"""The wheel, built without a network from the environment's own hatchling."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gpusync.device.kernels import UNITS

SAMPLE = Path(__file__).parent / "sample"

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


# ---- installed, as a user has it ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a fresh environment that has the wheel, and this one's packages for what it requires."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.stdout + done.stderr


def test_a_users_program_runs_on_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    where = run(installed, "-c", "import gpusync; print(gpusync.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parents[1])), "another gpusync would be tested"
    base, source, local = (tmp_path / name for name in ("base", "published", "local"))
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file({"a": torch.arange(600.0), "b": torch.ones(3)}, base / "model.safetensors")
    said = run(installed, SAMPLE / "program.py", base, source, local, cwd=tmp_path).splitlines()
    assert said == [
        "applied 0 base",
        "2 0",
        "applied 0 1 1",
        "applied 1 2 2",
        "try again: 9",
        "True 2 []",
    ]


def test_a_type_checker_takes_the_program_and_finds_each_mistake(
    installed: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed (extra dev)")
    for name in ("program.py", "mistakes.py"):
        shutil.copy(SAMPLE / name, tmp_path)
    options = ["--strict", "--python-executable", str(installed), "--cache-dir", ".cache"]
    said = run(sys.executable, "-m", "mypy", *options, "program.py", "mistakes.py", cwd=tmp_path)
    found = dict.fromkeys(re.findall(r"^(\w+\.py):(\d+): error", said, re.MULTILINE))
    lines = enumerate((SAMPLE / "mistakes.py").read_text().splitlines(), 1)
    wrong = {("mistakes.py", str(number)) for number, line in lines if line.endswith("# wrong")}
    assert set(found) == wrong, said
