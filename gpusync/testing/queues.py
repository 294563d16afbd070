"""The emulated device's queues of work: run at once, or late and as far out of order as their waits allow."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpusync.device.runtime import Wait
from gpusync.errors import KernelError
from gpusync.testing.ledger import Ledger


@dataclass(frozen=True)
class Order:
    """Run nothing when it is queued, and then one stream as far ahead of the others as its waits allow.

    Whenever the host waits, operations run one at a time until what it waits for has happened: always the next one
    of the stream of the highest priority that is not held by a wait of its own. Copies read their source, host memory
    too, when they run.

    Parameters
    ----------
    priorities
        Of the streams, by number: 0 is the engine's, the others follow as they were made. Streams beyond these have
        0. Of two equal ones the stream with the lower number goes first.
    """

    priorities: tuple[int, ...] = ()

    def priority(self, number: int) -> int:
        """Return the priority of a stream."""
        return self.priorities[number] if number < len(self.priorities) else 0


@dataclass
class _Point:
    """A place in a queue that an event stands for."""

    passed: bool = False
    at: float = field(default_factory=time.perf_counter)
    """When it was passed; before, when it was recorded."""


@dataclass
class _Queue:
    priority: int
    # A function to run, a point to pass, or a point of another queue to wait for.
    operations: deque[Callable[[], None] | _Point | _Hold] = field(default_factory=deque)


@dataclass(frozen=True)
class _Hold:
    point: _Point


class Queues:
    """All queues of one device, behind one lock.

    Parameters
    ----------
    order
        None: what is queued runs before the call returns.
    ignored
        The wait that is left out wherever it is asked for.
    ledger
        Where the host's waits are counted.
    """

    def __init__(self, order: Order | None, ignored: Wait | None, ledger: Ledger) -> None:
        self.lock = threading.RLock()
        self._ledger = ledger
        self._order = order
        self._ignored = ignored
        self._queues: list[_Queue] = []
        self._failure: Exception | None = None

    @property
    def late(self) -> bool:
        """Whether work waits in queues at all."""
        return self._order is not None

    @property
    def busy(self) -> bool:
        """Whether any work waits now."""
        return any(queue.operations for queue in self._queues)

    def add(self) -> int:
        """Return the number of a new queue."""
        if self._order is None:
            return 0
        with self.lock:
            self._queues.append(_Queue(self._order.priority(len(self._queues))))
            return len(self._queues) - 1

    def put(self, number: int, function: Callable[[], None]) -> None:
        """Queue a function; what it raises late comes out of the next wait of the host."""
        with self.lock:
            if self._order is None:
                function()
            else:
                self._queues[number].operations.append(function)

    def record(self, number: int) -> EmulatedEvent:
        """Return an event behind all that a queue holds now."""
        with self.lock:
            point = _Point(passed=self._order is None)
            if not point.passed:
                self._queues[number].operations.append(point)
            return EmulatedEvent(self, point)

    def hold(self, number: int, event: EmulatedEvent, why: Wait) -> None:
        """Have what a queue gets from now on wait for the event."""
        with self.lock:
            if why is not self._ignored and not event.point.passed:
                self._queues[number].operations.append(_Hold(event.point))

    def drain(self, number: int | None = None) -> None:
        """Run what must run until one queue, or every queue, is empty."""
        self._ledger.count("synchronize")
        with self.lock:
            queues = self._queues if number is None else self._queues[number : number + 1]
            self._run_until(lambda: not any(queue.operations for queue in queues))

    def pass_point(self, point: _Point, why: Wait) -> None:
        """Run what must run until a point has been passed."""
        if why is self._ignored:
            return
        self._ledger.count("synchronize")
        with self.lock:
            self._run_until(lambda: point.passed)

    def _run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._step()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _step(self) -> None:
        ready = [queue for queue in self._queues if queue.operations and not _held(queue)]
        if not ready:
            raise KernelError("a queue waits for an event of another device")
        operation = max(ready, key=lambda queue: queue.priority).operations.popleft()
        if isinstance(operation, _Point):
            operation.passed, operation.at = True, time.perf_counter()
        elif not isinstance(operation, _Hold):
            try:
                operation()
            except Exception as err:  # its caller has long gone on: the next wait reports it
                self._failure = self._failure or err


def _held(queue: _Queue) -> bool:
    head = queue.operations[0]
    return isinstance(head, _Hold) and not head.point.passed


@dataclass(frozen=True)
class EmulatedEvent:
    """A point in an emulated queue. Implements :class:`gpusync.device.runtime.Event`."""

    queues: Queues
    point: _Point

    def synchronize(self, why: Wait) -> None:
        """Run queued work until the point has been passed."""
        self.queues.pass_point(self.point, why)

    def seconds_since(self, earlier: EmulatedEvent) -> float:
        """Return the time between two points; both have been passed."""
        return self.point.at - earlier.point.at
