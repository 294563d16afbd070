"""Items shared out among threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Generic, TypeVar

# Work on a tensor of this size is Python, mostly: threads that share such ones out wait for each other's lock. Unless it is waiting
# for a mount or a device: then this share of a thread's time is not CPU time.
_SMALL_NBYTES = 64 << 10
_MOSTLY_WAITING = 3 / 4
_LOOKED_AT = 32  # items
_HELP_SECONDS = 0.02

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_parallel(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    nbytes_of: Callable[[Item], int] | None = None,
) -> list[Result]:
    """Run ``work`` over ``items`` in threads and return the results, in no order; the first error stops the rest.

    When this returns or raises, no thread is still at work: what the items share may be closed.

    Parameters
    ----------
    nbytes_of
        Size of an item, where they differ: then the largest are begun first, so that the last thread is not left alone
        with one of them, and the small ones are all one thread's, unless that turns out to be waiting most of the time.
    """
    small: list[Item] = []
    if nbytes_of is not None:
        small = [item for item in items if nbytes_of(item) <= _SMALL_NBYTES]
        large = [item for item in items if nbytes_of(item) > _SMALL_NBYTES]
        items = sorted(large, key=nbytes_of, reverse=True)
    threads = max(1, min(workers, len(items) + len(small)))
    shares = _Shares(work, items, small)
    pool = ThreadPoolExecutor(threads)
    futures: list[Future[None]] = []
    future: Future[None] | None
    try:
        # A task for each thread, not for each item: a future costs more than the work on a small tensor.
        futures.extend(pool.submit(shares.take, number) for number in range(threads))
        for future in as_completed(futures):
            future.result()
        return shares.results
    finally:
        shares.stopped.set()
        shut_down(pool)
        # An error's traceback holds this frame, and a future holds the error: let the cycle's memory go at once.
        futures.clear()
        future = None


class _Shares(Generic[Item, Result]):
    """What the threads of a run take from."""

    def __init__(
        self, work: Callable[[Item], Result], large: Sequence[Item], small: Sequence[Item]
    ) -> None:
        self._work = work
        self._large, self._small = iter(large), iter(small)  # what is taken goes to one thread
        self._small_taken, self._small_wait = threading.Event(), threading.Event()
        self.results: list[Result] = []
        self.stopped = threading.Event()

    def take(self, number: int) -> None:
        """Work as the thread of this number, as long as there is work for it."""
        try:
            if number == 0:
                self._take_small()
                self._run(self._large)
            else:
                self._run(self._large)
                self._help()
        except BaseException:
            self.stopped.set()
            raise

    def _take_small(self) -> None:
        """Run the small items, and see whether that is waiting."""
        taken = 1
        while taken:
            begin, cpu_begin = time.monotonic(), time.thread_time()
            taken = self._run(itertools.islice(self._small, _LOOKED_AT))
            seconds, cpu = time.monotonic() - begin, time.thread_time() - cpu_begin
            if seconds - cpu > _MOSTLY_WAITING * seconds:
                self._small_wait.set()
        self._small_taken.set()

    def _help(self) -> None:
        """Run small items as well, once they are known to be waiting, mostly."""
        while not self._small_taken.wait(_HELP_SECONDS) and not self.stopped.is_set():
            if self._small_wait.is_set():
                self._run(self._small)

    def _run(self, items: Iterator[Item]) -> int:
        count = 0
        for item in items:
            if self.stopped.is_set():
                return 0
            self.results.append(self._work(item))
            count += 1
        return count


def shut_down(pool: ThreadPoolExecutor) -> None:
    """Wait for the threads, also when a signal's exception arrives meanwhile; it is raised afterwards.

    Tasks that did not start are dropped.
    """
    interrupted: BaseException | None = None
    while True:
        try:
            pool.shutdown(wait=True, cancel_futures=True)
            break
        except BaseException as err:
            interrupted = err
    if interrupted is not None:
        raise interrupted
