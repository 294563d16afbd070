"""What the tests of the engine's side share: updates on either applier, an interrupt at any line, what must be left."""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

import gpusync
from gpusync.folder.lock import FolderLock
from tests import live, wire
from tests.crash.figures import counted
from tests.crash.harness import OURS_AT_REST, open_descriptors, state_files
from tests.driver import check_at, open_chain

NAMES = ("a.weight", "s.scale", "d.weight", "b.lut", "c.weight", "o.byte")
PACKAGE = str(Path(gpusync.__file__).parent)


def prepare(
    stream: wire.Stream, model: nn.Module, target: int = 2, device: str = "cpu", **options: Any
) -> gpusync.Update:
    return gpusync.prepare(model, open_chain(stream, target), device=device, **options)


def check_next_updates(stream: wire.Stream, model: nn.Module, device: str) -> None:
    """Whatever happened before, the next updates end right, on both sides."""
    for target in (2, 3):
        gpusync.apply_to_model(model, open_chain(stream, target), device=device)
        assert live.bytes_of(model) == stream.states[target]
        assert gpusync.live_version(model) == target
    check_at(stream, 3)
    assert gpusync.verify(stream.local).ok


def check_nothing_is_left(stream: wire.Stream) -> None:
    """No staged file, and a lock that is free."""
    assert state_files(stream.local) <= OURS_AT_REST
    with FolderLock(stream.local, 0.0):
        pass


@contextmanager
def nothing_stays_open(leaks: list[str] | None = None) -> Iterator[None]:
    """The block leaves no thread and no descriptor; a pool that was dropped has a moment for its threads to end.

    ``leaks`` takes descriptors where some may be left: nobody can close a file between its opening and the next line.
    """
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    left = Counter(open_descriptors()) - Counter(descriptors)
    if leaks is not None:
        leaks.extend(left.elements())
    else:
        assert not left, left
    for thread in set(threading.enumerate()) - threads:
        thread.join(20.0)
        assert not thread.is_alive(), thread


class Interrupt:
    """Raises an ``error`` in this thread at the n-th line that it runs within gpusync, as a signal's handler would.

    Other threads run undisturbed. ``happened`` where so many lines were run; ``lines`` is how many were.
    """

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self._number = number
        self._error = error
        self.lines = 0
        self.where = "nowhere"

    @property
    def happened(self) -> bool:
        return self.lines > self._number

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or in_destructor(frame):
            return None
        before = frame.f_lineno

        def line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal before
            if event == "line":
                self.lines += 1
                leaves = frame.f_lineno < before and is_with(frame)
                before = frame.f_lineno
                if self.happened and not leaves:
                    self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                    counted["interrupts of a live update"] += 1
                    raise self._error  # a new one: it holds the frames that it comes through
            return line

        return line


def is_with(frame: FrameType) -> bool:
    """Where a block has been left, and its context manager not yet: no signal is handled there."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def in_destructor(frame: FrameType | None) -> bool:
    """Python passes over what is raised there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False
