"""The CPU applier: every part of a change list is checked against live memory just before it is stored.

Checking everything first and storing afterwards would fetch each cache line from memory twice, and the pause is nothing
but those fetches. So a sample of every region is looked at before the first store, each part is checked in full right
before its own, and a part that does not fit has everything stored so far taken back from the words that were gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpusync.changes import Live, RegionChanges
from gpusync.errors import DeviceError, ModelPoisonedError, PlacementError
from gpusync.fold import run_parallel

_RUNS_PER_WORKER = 4

_Part = tuple[int, int]
"""Number of the region's list, number of the part in it."""


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
    gathered: dict[_Part, Live] = {}

    def store(run: Sequence[_Part]) -> None:
        for number, part in run:
            region = changes[number]
            places = region.places(part)
            words = region.gather(part, places)
            if words is None:
                raise _changed(region)
            gathered[number, part] = words
            region.store(part, places, words)

    try:
        for region in changes:
            if not region.sample_is_unchanged():
                raise _changed(region)
        run_parallel(store, _runs(changes, workers), workers)
    except BaseException as err:
        _take_back(changes, gathered, err)
        if isinstance(err, PlacementError):
            raise
        raise DeviceError("committing failed and was taken back; prepare again") from err


def _runs(changes: Sequence[RegionChanges], workers: int) -> list[Sequence[_Part]]:
    """Split all parts into runs of neighbours, a few per worker."""
    parts = [
        (number, part) for number, region in enumerate(changes) for part in range(len(region.seen))
    ]
    size = -(-len(parts) // (workers * _RUNS_PER_WORKER)) or 1
    return [parts[start : start + size] for start in range(0, len(parts), size)]


def _changed(region: RegionChanges) -> PlacementError:
    return PlacementError(
        "live weights changed since prepare; they are as they were, prepare again",
        tensor=region.tensor,
    )


def _take_back(
    changes: Sequence[RegionChanges], gathered: Mapping[_Part, Live], cause: BaseException
) -> None:
    try:
        for (number, part), words in gathered.items():
            changes[number].take_back(part, words)
    except BaseException as err:
        raise ModelPoisonedError(
            f"committing failed ({cause!r}) and could not be taken back: replace the process"
        ) from err
