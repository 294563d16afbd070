"""The faults that a run meets: what the system says, at which calls it can say it, and where."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.layer import OF_DESCRIPTORS, OF_PATHS, Real, SystemCall

EVERY_CALL = frozenset({*OF_PATHS, *OF_DESCRIPTORS, "tmpfile"})
# What the interpreter does not itself try again (PEP 475).
INTERRUPTIBLE = frozenset(
    {"stat", "lstat", "listdir", "unlink", "replace", "makedirs", "rmdir", "statvfs"}
)
TAKES_SPACE = frozenset(
    {"open", "pwrite", "write", "posix_fallocate", "fsync", "replace", "makedirs", "tmpfile"}
)
EVERYTHING = os.environ.get("GPUSYNC_TEST_FAULTS") == "all"
"""Every fault at every call of every run, and every power cut (README.md): minutes, so only by hand."""
RESUMED = ("short read", "short write", "EINTR")
"""Faults that no run may fail of: the operation goes on."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    ``act`` takes the place of the call. ``where`` is "any", "source" (the published versions and the base) or "local"
    (the checkpoint folder); ``writes`` limits it to calls that change something.
    """

    name: str
    act: Callable[[SystemCall, Real], Any]
    at: frozenset[str]
    where: str = "any"
    writes: bool = False

    def fits(self, call: SystemCall) -> bool:
        """True where the system could say this at the call; where on the disk that is, the run decides."""
        return call.name in self.at and (call.writes or not self.writes)


def _says(number: int) -> Callable[[SystemCall, Real], Any]:
    def act(call: SystemCall, real: Real) -> Any:
        if call.name == "close":
            real(*call.arguments)  # Linux lets the descriptor go, whatever it says
        raise OSError(number, os.strerror(number), str(call.path))

    return act


def _reads_less(call: SystemCall, real: Real) -> Any:
    fd, (buffer,), offset = call.arguments
    return real(fd, [buffer[: max(1, len(buffer) // 2)]], offset)


def _reads_nothing(call: SystemCall, real: Real) -> Any:
    return 0


def _writes_less(call: SystemCall, real: Real) -> Any:
    fd, buffer, *offset = call.arguments
    return real(fd, buffer[: max(1, len(buffer) // 2)], *offset)


FAULTS = (
    Fault("EIO", _says(errno.EIO), EVERY_CALL),
    Fault("ENOSPC", _says(errno.ENOSPC), TAKES_SPACE, "local", writes=True),
    Fault("EDQUOT", _says(errno.EDQUOT), TAKES_SPACE, "local", writes=True),
    Fault("EROFS", _says(errno.EROFS), EVERY_CALL - {"close"}, "local", writes=True),
    Fault("ESTALE", _says(errno.ESTALE), EVERY_CALL, "source"),
    Fault("EINTR", _says(errno.EINTR), INTERRUPTIBLE),
    Fault("short read", _reads_less, frozenset({"preadv"})),
    Fault("early end", _reads_nothing, frozenset({"preadv"})),
    Fault("short write", _writes_less, frozenset({"pwrite", "write"}), "local"),
)
