"""Items shared out among threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

# Work on a tensor of this size is Python, mostly: threads that share such ones out wait for each other's lock.
_SMALL_NBYTES = 64 << 10

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
        with one of them, and the small ones are all one thread's.
    """
    small: list[Item] = []
    if nbytes_of is not None:
        small = [item for item in items if nbytes_of(item) <= _SMALL_NBYTES]
        large = [item for item in items if nbytes_of(item) > _SMALL_NBYTES]
        items = sorted(large, key=nbytes_of, reverse=True)
    threads = max(1, min(workers, len(items) + bool(small)))
    waiting = iter(items)
    results: list[Result] = []
    stopped = threading.Event()

    def take(own: Sequence[Item]) -> None:
        try:
            for item in itertools.chain(own, waiting):  # each that waits goes to one thread
                if stopped.is_set():
                    return
                results.append(work(item))
        except BaseException:
            stopped.set()
            raise

    pool = ThreadPoolExecutor(threads)
    futures: list[Future[None]] = []
    future: Future[None] | None
    try:
        # A task for each thread, not for each item: a future costs more than the work on a small tensor.
        futures.extend(pool.submit(take, small if not number else ()) for number in range(threads))
        for future in as_completed(futures):
            future.result()
        return results
    finally:
        stopped.set()
        shut_down(pool)
        # An error's traceback holds this frame, and a future holds the error: let the cycle's memory go at once.
        futures.clear()
        future = None


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
