"""Shared libraries built from shipped sources at first use, and kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from gpusync.device.kernels import kernel_source
from gpusync.errors import KernelError, MissingDependencyError

KERNEL = re.compile(
    r'^extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(', re.MULTILINE
)
"""How a kernel's definition begins in the sources."""

# CUDA lets a pointer be read as another type; C++ would be free to assume that nobody does.
_COMMON = ("-O2", "-shared", "-fPIC", "-pthread", "-fno-strict-aliasing")
_CPLUSPLUS = ("-x", "c++", "-std=c++20", "-ftls-model=initial-exec")
_C = ("-x", "c", "-std=gnu17")


def build(text: str, name: str, *, flags: Sequence[str] = (), c: bool = False) -> Path:
    """Return the path of a shared library built by g++ from ``text``, at once where it has been built before.

    Processes that build the same at once do not disturb each other: each builds under a name of its own and renames.

    Parameters
    ----------
    text
        One translation unit.
    name
        What the library's file name begins with.
    flags
        Further flags of the compiler, such as those of :func:`sanitizer_flags`.
    c
        The text is C, not C++20.

    Raises
    ------
    KernelError
        It does not compile: the message holds the compiler's text. Or the cache folder cannot be written.
    MissingDependencyError
        There is no g++.
    """
    command = [_compiler(), *_COMMON, *(_C if c else _CPLUSPLUS), *flags]
    digest = hashlib.sha256("\0".join([compiler_version(), *command, text]).encode()).hexdigest()
    library = cache_folder() / digest[:32] / f"{name}.so"
    if library.is_file():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            _compile([*command, "-o", str(built), "-", "-ldl"], text, name)
            os.replace(built, library)
    except OSError as err:
        raise KernelError(
            "cannot keep what was built: set XDG_CACHE_HOME to a folder that can be written",
            file=str(library),
            got=str(err),
        ) from err
    return library


def build_kernels(*, flags: Sequence[str] = ()) -> Path:
    """Return the path of the library of all kernels: ``gs_launch_NAME`` for each (launch.h)."""
    source = kernel_source()
    launchers = "".join(f"GS_LAUNCHER({name})\n" for name in KERNEL.findall(source))
    shim, launch = (
        f'#line 1 "{unit}"\n{_shipped(unit).read_text()}' for unit in ("shim.h", "launch.h")
    )
    return build("\n".join([shim, source, launch, launchers]), "kernels", flags=flags)


def build_nvcomp_stand_in(*, flags: Sequence[str] = ()) -> Path:
    """Return the path of the stand-in for nvCOMP's batched zstd API, which decodes by the system's libzstd."""
    return build(_shipped("nvcomp_stand_in.c").read_text(), "nvcomp_stand_in", flags=flags, c=True)


def cache_folder() -> Path:
    """Return the folder that built libraries are kept in; each lies in a folder named after all that made it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpusync" / "emulated"


def sanitizer_flags() -> tuple[str, ...]:
    """Return the flags of a build whose every access is checked, where this process can load one; else none.

    It can where it was started with AddressSanitizer's runtime preloaded (:func:`sanitizer_environment`).
    """
    if not hasattr(ctypes.CDLL(None), "__asan_init"):
        return ()
    return ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def sanitizer_environment() -> dict[str, str]:
    """Return the environment variables of a child process in which the kernels' accesses are checked.

    Raises
    ------
    MissingDependencyError
        The compiler has no AddressSanitizer.
    """
    command = [_compiler(), "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        raise MissingDependencyError("AddressSanitizer's runtime is missing: install libasan")
    # Python and torch keep memory until the process ends: that is not what is looked for.
    return {"LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}


@cache
def compiler_version() -> str:
    """Return the first line of what the compiler says about itself."""
    done = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def _compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        raise MissingDependencyError(
            "the emulated device needs a C++ compiler: install g++ (Debian and Ubuntu: apt install g++)"
        )
    return path


def _compile(command: Sequence[str], text: str, name: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"g++ refuses {name}:\n{done.stderr.strip()}")


def _shipped(name: str) -> Path:
    path = Path(str(files("gpusync.testing"))) / name
    if not path.is_file():
        raise MissingDependencyError("a source of the emulated device is missing", file=name)
    return path
