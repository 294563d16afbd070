"""Stage times for reports, and progress from worker threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpusync.types import Progress, ProgressCallback, StageTimes


class StageClock:
    """Adds up seconds and bytes by stage name. Not for use by several threads at once."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time a block as one stage that handles ``nbytes``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start
            if nbytes:
                self._bytes[name] = self._bytes.get(name, 0) + nbytes

    def add(self, times: StageTimes) -> None:
        """Add stages that were timed elsewhere."""
        for name, seconds in times.seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        for name, nbytes in times.bytes.items():
            self._bytes[name] = self._bytes.get(name, 0) + nbytes

    @property
    def total_seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._start

    def times(self) -> StageTimes:
        return StageTimes(dict(self._seconds), dict(self._bytes))


def one_at_a_time(progress: ProgressCallback) -> ProgressCallback:
    """Return a callback for several threads that lets one call through at a time."""
    lock = threading.Lock()

    def report(event: Progress) -> None:
        with lock:
            progress(event)

    return report


class Meter:
    """Counts bytes done in worker threads and reports them, one call at a time.

    An exception from the callback reaches the thread that called ``add``, and so stops the work.
    """

    def __init__(self, stage: str, total_bytes: int, progress: ProgressCallback | None) -> None:
        self._stage = stage
        self._total_bytes = total_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self._done_bytes = 0

    def add(self, nbytes: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done_bytes = min(self._total_bytes, self._done_bytes + nbytes)
            self._progress(Progress(self._stage, self._done_bytes, self._total_bytes))
