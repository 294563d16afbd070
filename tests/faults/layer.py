"""A layer between ``gpusync.fsio`` and the system: every system call of gpusync's file operations, scriptable.

``fsio`` reaches the system through ``os``, ``fcntl`` and ``tempfile``. While a :class:`System` is in place they are
stand-ins that name each call, its path and its descriptor, and hand it to a script, which does the call, does part of
it, or raises in its place. So a fault can fall *within* an operation, too: between making a file and setting its mode,
say. Calls of other modules, and of the tests themselves, go straight through.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from gpusync import fsio

OF_PATHS = ("open", "stat", "lstat", "listdir", "unlink", "replace", "makedirs", "rmdir", "statvfs")
OF_DESCRIPTORS = (
    "fstat",
    "preadv",
    "pwrite",
    "write",
    "fsync",
    "fchmod",
    "ftruncate",
    "posix_fallocate",
    "close",
)
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class SystemCall:
    """One system call: name, the path it is about (of a rename: the old one, and ``to``), and its arguments."""

    name: str
    path: Path
    arguments: tuple[Any, ...]
    to: Path | None = None

    @property
    def writes(self) -> bool:
        """True where the call changes the file system."""
        if self.name == "open":
            return bool(self.arguments[1] & WRITING_FLAGS)
        return self.name not in READING

    def within(self, *folders: Path) -> bool:
        return any(self.path.is_relative_to(folder) for folder in folders)

    def __str__(self) -> str:
        return f"{self.name} of {self.path.name}"


READING = ("stat", "lstat", "listdir", "statvfs", "fstat", "preadv", "flock", "close")

Real = Callable[..., Any]
Script = Callable[[SystemCall, Real], Any]
"""Gets a call and the function that does it (with the call's own arguments, or with others); returns the result."""


def pass_through(call: SystemCall, real: Real) -> Any:
    return real(*call.arguments)


class System:
    """Puts a script between ``fsio`` and the system, until the patch is undone."""

    def __init__(self, patch: pytest.MonkeyPatch, script: Script = pass_through) -> None:
        self.script = script
        self._paths: dict[int, Path] = {}
        self._lock = threading.RLock()
        patch.setattr(fsio, "os", _StandIn(os, self._functions_of_os()))
        patch.setattr(
            fsio, "fcntl", _StandIn(fcntl, {"flock": self._of_descriptor("flock", fcntl.flock)})
        )
        patch.setattr(fsio, "tempfile", _StandIn(tempfile, {"TemporaryFile": self._temporary_file}))

    def path_of(self, fd: int) -> Path:
        """Return the path that a descriptor was opened by."""
        with self._lock:
            if fd not in self._paths:
                self._paths[fd] = Path(os.readlink(f"/proc/self/fd/{fd}"))
            return self._paths[fd]

    def _functions_of_os(self) -> dict[str, Callable[..., Any]]:
        made: dict[str, Callable[..., Any]] = {}
        for name in OF_PATHS:
            made[name] = self._of_path(name, getattr(os, name))
        for name in OF_DESCRIPTORS:
            made[name] = self._of_descriptor(name, getattr(os, name))
        return made

    def _of_path(self, name: str, real: Real) -> Callable[..., Any]:
        def stand_in(path: Any, *more: Any, **options: Any) -> Any:
            def do(*arguments: Any) -> Any:
                return real(*arguments, **options)

            to = Path(more[0]) if name == "replace" else None
            result = self.script(SystemCall(name, Path(path), (path, *more), to), do)
            if name == "open":
                with self._lock:
                    self._paths[result] = Path(path)
            return result

        return stand_in

    def _of_descriptor(self, name: str, real: Real) -> Callable[..., Any]:
        def stand_in(fd: int, *more: Any) -> Any:
            call = SystemCall(name, self.path_of(fd), (fd, *more))
            if name == "close":
                with self._lock:
                    self._paths.pop(fd, None)
            return self.script(call, real)

        return stand_in

    def _temporary_file(self, dir: Path | None = None) -> IO[bytes]:
        def do(folder: Path | None) -> IO[bytes]:
            return tempfile.TemporaryFile(dir=folder)

        folder = Path(dir or tempfile.gettempdir())
        file: IO[bytes] = self.script(SystemCall("tmpfile", folder / "(scratch)", (dir,)), do)
        with self._lock:
            self._paths[file.fileno()] = folder / "(scratch)"
        return file


class _StandIn:
    """A module with some of its functions replaced."""

    def __init__(self, module: object, functions: dict[str, Callable[..., Any]]) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
