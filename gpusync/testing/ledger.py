"""What an emulated device has been asked to do, and where it is to fail."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["launch", "copy", "fill", "call", "synchronize"]
"""What a runtime is asked to do, and can be made to fail at. Any wait of the host is a synchronize."""


@dataclass
class _Fault:
    kind: Kind
    left: int
    error: Exception
    lasting: bool


class Ledger:
    """Counts operations, and raises planned errors instead of queueing them."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.stages: deque[tuple[str, ...]] = deque(maxlen=10_000)
        """Stages that were marked, as they began, each behind those that its thread was in."""
        self._open = threading.local()
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    def fail_at(self, kind: Kind, number: int, error: Exception, lasting: bool) -> None:
        """Plan an error for the ``number``-th operation of a kind from now, and with ``lasting`` for all after it."""
        with self._lock:
            self._faults.append(_Fault(kind, number, error, lasting))

    @contextmanager
    def marked(self, stage: str) -> Iterator[None]:
        """Note a stage; it ends with the block."""
        around: tuple[str, ...] = getattr(self._open, "stages", ())
        self._open.stages = (*around, stage)
        with self._lock:
            self.stages.append(self._open.stages)
        try:
            yield
        finally:
            self._open.stages = around

    def count(self, kind: Kind, kernel: str | None = None) -> None:
        """Count an operation, and the kernel that it launches; raise what has been planned for it."""
        with self._lock:
            self.operations.update([kind] if kernel is None else [kind, kernel])
            concerned = [fault for fault in self._faults if fault.kind == kind]
            for fault in concerned:
                fault.left -= 1
            for fault in concerned:
                if fault.left == 0 or (fault.left < 0 and fault.lasting):
                    raise fault.error
