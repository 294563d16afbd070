"""What this machine offers gpusync: versions, limits, file systems, and which device path will be used and why."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpusync
from gpusync import fsio
from gpusync.cli.abilities import Ability, Cuda, find_abilities
from gpusync.config import Settings
from gpusync.folder.lock import lock_problem
from gpusync.types import Report

_PACKAGES = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "numba": ("numba",),
    "zstandard": ("zstandard",),
    "xxhash": ("xxhash",),
    "safetensors": ("safetensors",),
    "blake3": ("blake3",),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "nvcomp": ("nvidia-libnvcomp-cu12", "nvidia-libnvcomp-cu13"),
    "prometheus-client": ("prometheus-client",),
    "starlette": ("starlette",),
    "uvicorn": ("uvicorn",),
}
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "glusterfs", "9p", "beegfs"}
)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_MOUNTS_FILE = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Folder:
    """A folder's file system. ``free_bytes`` is what this user can still write."""

    path: str
    file_system: str
    free_bytes: int


@dataclass(frozen=True)
class Diagnosis(Report):
    """What ``diagnose`` found.

    Parameters
    ----------
    packages
        Package to version, None where it is not installed.
    driver, gpus
        NVIDIA driver version and GPU names as torch sees them.
    memlock_bytes
        Limit on locked memory, None for no limit.
    device
        "cuda" where a model on a GPU can be updated in place, else "cpu". A model on the CPU is updated on the CPU.
    why_not_more
        What is missing for the paths that cannot be taken: "cuda", and "emulated" for tests.
    abilities
        What works, and for the rest what is missing and how to install it.
    warnings
        What will hurt: a network file system under a lock, a lock that keeps nobody out, a missing digest package.
    """

    gpusync: str
    python: str
    platform: str
    packages: dict[str, str | None]
    driver: str | None
    gpus: tuple[str, ...]
    memlock_bytes: int | None
    cores: int
    settings: dict[str, Any]
    folders: tuple[Folder, ...]
    device: str
    why_not_more: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    abilities: tuple[Ability, ...] = ()


def diagnose(folders: tuple[Path, ...]) -> Diagnosis:
    """Look at this process, this machine and the given folders; changes nothing.

    Locks are tried on a file that is removed again, where the folder can be written to.

    Raises
    ------
    OSError
        A folder is not there.
    """
    packages = {name: installed_version(names) for name, names in _PACKAGES.items()}
    gpus, gpu_problem = _gpus() if packages["torch"] is not None else ((), "torch is not installed")
    found = tuple(look_at_folder(folder) for folder in folders)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = None if limit == resource.RLIM_INFINITY else limit
    settings = Settings.from_env()
    missing = _why_not_cuda(gpu_problem, packages)
    return Diagnosis(
        gpusync=gpusync.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages,
        driver=_driver_version(),
        gpus=gpus,
        memlock_bytes=memlock,
        cores=len(os.sched_getaffinity(0)),
        settings=vars(settings).copy(),
        folders=found,
        device="cpu" if missing else "cuda",
        why_not_more=(*missing, *_why_not_emulated()),
        warnings=_warnings(packages, found, memlock if gpus else None, settings),
        abilities=find_abilities(packages, Cuda(_torch_major(), _driver_version(), gpu_problem)),
    )


def installed_version(distributions: tuple[str, ...]) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def look_at_folder(folder: Path) -> Folder:
    """Return the file system that a folder lies on."""
    real = Path(os.path.realpath(folder))
    free = fsio.free_bytes(real)
    try:
        mounts = _MOUNTS_FILE.read_text("utf-8", "replace")
    except OSError:
        mounts = ""
    return Folder(str(real), parse_file_system(mounts, real), free)


def parse_file_system(mountinfo: str, path: Path) -> str:
    """Return the type of the file system that ``path`` lies on, from the text of /proc/self/mountinfo (proc(5))."""
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after.split():
            continue
        point = Path(fields[4].replace("\\040", " "))
        # The last mount on a path hides the ones before it, so equal depth takes over.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind


def _gpus() -> tuple[tuple[str, ...], str | None]:
    """Return the GPUs that torch sees, or why it sees none."""
    try:
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():
            built = torch.version.cuda
            return (), (
                f"torch is a CUDA {built} build and finds no usable GPU"
                if built
                else "torch is a CPU build"
            )
        names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    except (ImportError, OSError, RuntimeError) as err:
        return (), f"torch cannot say: {err}"
    return names, None


def _torch_major() -> str | None:
    """Return the major version of the CUDA that torch was built for."""
    try:
        built = importlib.import_module("torch").version.cuda
    except (ImportError, OSError):
        return None
    return str(built).partition(".")[0] if built else None


def _driver_version() -> str | None:
    try:
        text = _DRIVER_FILE.read_text("utf-8", "replace")
    except OSError:
        return None
    words = text.partition("Kernel Module")[2].split()
    return next((word for word in words if word[0].isdigit()), None)


def _why_not_cuda(gpu_problem: str | None, packages: Mapping[str, str | None]) -> tuple[str, ...]:
    reasons = [] if gpu_problem is None else [f"cuda: {gpu_problem}"]
    for package in ("cupy", "nvcomp"):
        if packages[package] is None:
            reasons.append(
                f"cuda: {package} is not installed: pip install 'gpusync[cuda12]', or cuda13, as torch's CUDA is"
            )
    return tuple(reasons)


def _why_not_emulated() -> tuple[str, ...]:
    return () if shutil.which("g++") else ("emulated: g++ is not installed",)


def _warnings(
    packages: Mapping[str, str | None],
    folders: tuple[Folder, ...],
    memlock_bytes: int | None,
    settings: Settings,
) -> tuple[str, ...]:
    found = []
    if packages["blake3"] is None:
        found.append("blake3 is not installed: versions published with it cannot be checked")
    if memlock_bytes is not None and memlock_bytes < settings.ring_bytes:
        found.append(
            f"locked memory is limited to {memlock_bytes} bytes, and the pinned ring takes {settings.ring_bytes}: "
            "staging will be slower; raise the limit (ulimit -l)"
        )
    for folder in folders:
        if folder.file_system in _NETWORK_FILE_SYSTEMS:
            found.append(
                f"{folder.path} lies on {folder.file_system}: fine for a source, but a local checkpoint needs a "
                "local file system (its lock is one host's)"
            )
        problem = lock_problem(Path(folder.path))
        if problem is not None:
            found.append(f"{folder.path}: {problem}; no local checkpoint can be kept there")
    return tuple(found)
