"""Who wants to know how updates and pulls of this process end: metrics, or a caller's own.

Kept apart from the work: an observer sees reports and errors only, and nothing that it raises reaches an update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, Protocol

from gpusync.types import PullReport, UpdateReport

log = logging.getLogger(__name__)

Operation = Literal["pull", "prepare", "commit", "finish"]


class Observer(Protocol):
    """Told of ends. May be called from any thread, several at once; never within the pause of a commit that succeeds."""

    def pulled(self, report: PullReport) -> None:
        """Take in a pull that ended well; a live update's write-back is one."""

    def updated(self, report: UpdateReport) -> None:
        """Take in an update that ended well, after its ``finish``."""

    def failed(self, operation: Operation, error: Exception) -> None:
        """Take in an operation that raised; an interrupt is none of its failures."""


_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Tell ``observer`` of everything that ends in this process from now on.

    Returns
    -------
    Callable
        Ends it.
    """
    _observers.append(observer)

    def stop() -> None:
        if observer in _observers:
            _observers.remove(observer)

    return stop


def tell(call: Callable[[Observer], None]) -> None:
    """Call every observer; what one raises is logged, for by then the work is done."""
    for observer in tuple(_observers):
        try:
            call(observer)
        except Exception:
            log.exception("observer_failed observer=%s", type(observer).__name__)


@contextmanager
def failures_told(operation: Operation) -> Iterator[None]:
    """Tell the observers of what leaves the block as an exception, and let it go on."""
    try:
        yield
    except Exception as err:
        tell(partial(_failed, operation, err))
        raise


def _failed(operation: Operation, error: Exception, observer: Observer) -> None:
    observer.failed(operation, error)
