"""What this machine can do with gpusync, what each ability lacks, and the command that installs it. Pure but for metadata."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpusync.format.decode_xor import loops
from gpusync.types import Report


@dataclass(frozen=True)
class Ability(Report):
    """Something that gpusync can do.

    Parameters
    ----------
    missing
        What it lacks here; empty where it works.
    install
        The command that installs what is missing, None where there is nothing to install, or no use in it.
    """

    name: str
    missing: tuple[str, ...] = ()
    install: str | None = None


@dataclass(frozen=True)
class Cuda:
    """What is known of CUDA here: the major version that torch was built for, None for a CPU build."""

    torch_major: str | None
    driver: str | None
    problem: str | None


def find_abilities(packages: Mapping[str, str | None], cuda: Cuda) -> tuple[Ability, ...]:
    """Return what works and what does not, by what is installed.

    Parameters
    ----------
    packages
        Package to version, None where it is not installed.
    """
    return (
        Ability("checkpoints on disk, and models on the CPU"),
        _compiled(packages),
        _of_packages("versions with blake3 digests", "blake3", packages, ("blake3",)),
        _of_packages(
            "gpusync serve, and metrics",
            "server",
            packages,
            ("prometheus-client", "starlette", "uvicorn"),
        ),
        _on_cuda(packages, cuda),
        _emulated(),
    )


def pip_command(extra: str, requirements: Callable[[str], list[str] | None] | None = None) -> str:
    """Return the command that installs what an extra of gpusync stands for, by the names of its packages.

    Parameters
    ----------
    requirements
        Returns a distribution's requirements; by default those of what is installed.
    """
    try:
        found = (requirements or importlib.metadata.requires)("gpusync") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return f"pip install '.[{extra}]'    # in the checkout"
    wanted = [
        line.split(";")[0].strip()
        for line in found
        if re.search(rf"""extra == ['"]{extra}['"]""", line)
    ]
    return " ".join(["pip install", *map(shlex.quote, wanted)])


def _of_packages(
    name: str, extra: str, packages: Mapping[str, str | None], needed: tuple[str, ...]
) -> Ability:
    missing = tuple(package for package in needed if packages[package] is None)
    return Ability(name, missing, pip_command(extra) if missing else None)


def _compiled(packages: Mapping[str, str | None]) -> Ability:
    name = "both at full speed, by compiled loops"
    if packages["numba"] is None:
        return Ability(name, ("numba",), "pip install numba")
    try:
        if loops.are_kept():
            return Ability(name)
    except Exception as err:  # whatever numba says
        return Ability(name, (f"numba does not work here: {err!r}",))
    return Ability(
        name, ("they were not compiled on this machine yet",), "gpusync warmup --device cpu"
    )


def _on_cuda(packages: Mapping[str, str | None], cuda: Cuda) -> Ability:
    missing = [] if cuda.problem is None else [cuda.problem]
    absent = [package for package in ("cupy", "nvcomp") if packages[package] is None]
    missing += absent
    install = None
    if absent and cuda.torch_major is not None:
        install = pip_command(f"cuda{cuda.torch_major}")
    elif cuda.torch_major is None and cuda.driver is not None:
        missing.append("first of all a CUDA build of torch")
    elif cuda.driver is None:
        missing.append("no NVIDIA driver: nothing to install here")
    return Ability(
        "models on CUDA devices", tuple(missing) if absent or cuda.problem else (), install
    )


def _emulated() -> Ability:
    missing = [] if shutil.which("g++") else ["g++"]
    try:
        ctypes.CDLL("libzstd.so.1")
    except OSError:
        missing.append("libzstd1")
    install = f"apt-get install {' '.join(missing)}" if missing else None
    return Ability("the CUDA path without a GPU, for tests", tuple(missing), install)
