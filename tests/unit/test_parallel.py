"""Items shared out among threads."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from gpusync.folding import parallel
from gpusync.folding.parallel import run_parallel

_SMALL, _LARGE = 1 << 10, 1 << 20


def _same(nbytes: int) -> int:
    return nbytes


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("sizes", [[], [_SMALL], [_LARGE], [_SMALL, _LARGE, 0, 3 * _LARGE] * 9])
def test_every_item_is_worked_on_once(sizes: list[int], workers: int) -> None:
    numbered = list(enumerate(sizes))
    done = run_parallel(lambda item: item, numbered, workers, lambda item: item[1])
    assert sorted(done) == numbered
    assert sorted(run_parallel(lambda item: item, numbered, workers)) == numbered


def test_large_items_meet_on_several_threads_and_the_largest_are_begun_first() -> None:
    begun: list[int] = []
    meeting = threading.Barrier(2, timeout=60)

    def work(nbytes: int) -> int:
        begun.append(nbytes)
        meeting.wait()
        return threading.get_ident()

    sizes = [_LARGE, 4 * _LARGE, 2 * _LARGE, 3 * _LARGE]
    assert len(set(run_parallel(work, sizes, 2, _same))) == 2
    assert sorted(begun[:2]) == [3 * _LARGE, 4 * _LARGE]


def test_small_items_are_one_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_MOSTLY_WAITING", 1.0)  # for the processor is no waiting
    sizes = [_SMALL] * 40 + [_LARGE] * 3
    done = run_parallel(lambda nbytes: (nbytes, threading.get_ident()), sizes, 4, _same)
    assert len({thread for nbytes, thread in done if nbytes == _SMALL}) == 1


def test_small_items_that_wait_are_shared_out() -> None:
    meeting = threading.Barrier(3, timeout=60)
    begun = itertools.count()

    def work(nbytes: int) -> int:
        if next(begun) < 64:
            time.sleep(0.001)
        else:
            meeting.wait()  # one thread alone would wait for ever
        return threading.get_ident()

    assert len(set(run_parallel(work, [_SMALL] * 94, 3, _same))) == 3


def test_an_error_stops_the_small_items_too() -> None:
    failed = threading.Event()
    done: list[int] = []

    def work(number: int) -> None:
        if number == _LARGE:
            failed.set()
            raise ValueError("this one")
        assert failed.wait(60)
        time.sleep(0.001)  # the other thread has to come to its except clause meanwhile
        done.append(number)

    with pytest.raises(ValueError, match="this one"):
        run_parallel(work, [*range(1, 2000), _LARGE], 2, _same)
    assert len(done) < 1999
