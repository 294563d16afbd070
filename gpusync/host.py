"""The CPU applier: every part of a change list is checked against live memory just before it is stored.

Checking everything first and storing afterwards would fetch each cache line from memory twice, and the pause is nothing
but those fetches. So a sample of every region is looked at before the first store, each part is checked in full right
before its own, and a part that does not fit has everything stored so far taken back from the words that were gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpusync.changes import RegionChanges
from gpusync.errors import DeviceError, ModelPoisonedError, PlacementError
from gpusync.fold import run_parallel

_RUNS_PER_WORKER = 4

_Run = list[tuple[int, range]]
"""Work for one thread: numbers of regions, and parts of each."""


def commit(changes: Sequence[RegionChanges], workers: int) -> None:
    """Apply every list, or none.

    Raises
    ------
    PlacementError
        The live words are not those of prepare: the model changed since. It is as it was before the call.
    DeviceError
        A store failed; every store was taken back.
    ModelPoisonedError
        Stores could not be taken back.
    """
    begun = [bytearray(len(region.seen)) for region in changes]

    def store(run: _Run) -> None:
        for number, parts in run:
            region = changes[number]
            for part in parts:
                places = region.places(part)
                if not region.gather(part, places):
                    raise _changed(region)
                begun[number][part] = 1
                region.store(part, places)

    try:
        for region in changes:
            if not region.sample_is_unchanged():
                raise _changed(region)
        run_parallel(store, _runs(changes, workers), workers)
    except BaseException as err:
        _take_back(changes, begun, err)
        if isinstance(err, PlacementError):
            raise
        raise DeviceError("committing failed and was taken back; prepare again") from err


def _runs(changes: Sequence[RegionChanges], workers: int) -> list[_Run]:
    """Split all parts into runs of neighbours, a few per worker."""
    count = sum(len(region.seen) for region in changes)
    size = -(-count // (workers * _RUNS_PER_WORKER)) or 1
    runs: list[_Run] = [[]]
    room = size
    for number, region in enumerate(changes):
        start = 0
        while start < len(region.seen):
            stop = min(len(region.seen), start + room)
            runs[-1].append((number, range(start, stop)))
            room -= stop - start
            start = stop
            if not room:
                runs.append([])
                room = size
    return runs


def _changed(region: RegionChanges) -> PlacementError:
    return PlacementError(
        "live weights changed since prepare; they are as they were, prepare again",
        tensor=region.tensor,
    )


def _take_back(
    changes: Sequence[RegionChanges], begun: Sequence[bytearray], cause: BaseException
) -> None:
    try:
        for region, flags in zip(changes, begun, strict=True):
            for part, flag in enumerate(flags):
                if flag:
                    region.take_back(part)
    except BaseException as err:
        raise ModelPoisonedError(
            f"committing failed ({cause!r}) and could not be taken back: replace the process"
        ) from err
