"""Faults of the stand-in for nvCOMP (gpusync/testing/nvcomp_stand_in.c), on the last frame of every batch."""

from __future__ import annotations

import ctypes
import enum
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpusync.testing import build_nvcomp_stand_in


class Fault(enum.IntEnum):
    """What ``stand_in_fault`` may be set to."""

    AFTER_OUTPUT = 1
    BEFORE_OUTPUT = 2
    AFTER_TEMP = 3
    WRONG_BYTE = 4
    WRONG_SIZE = 5
    STATUS = 6
    CALL = 7


def own_stand_in(folder: Path) -> Path:
    """Return a stand-in whose faults, and whose self-test's verdict, are no other test's."""
    return Path(shutil.copy(build_nvcomp_stand_in(), folder))


@contextmanager
def faulty(library: Path, fault: Fault) -> Iterator[None]:
    """Have every decode of this library show a fault."""
    switch = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "stand_in_fault")
    switch.value = fault
    try:
        yield
    finally:
        switch.value = 0
