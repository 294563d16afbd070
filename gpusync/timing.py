"""One context manager that fills the stage times of a report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpusync.types import StageTimes


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

    @property
    def total_seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._start

    def times(self) -> StageTimes:
        return StageTimes(dict(self._seconds), dict(self._bytes))
