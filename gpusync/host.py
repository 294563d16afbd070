"""The CPU applier: change lists are checked against live memory before the first store, and undone on failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpusync.changes import ChangePart, Live
from gpusync.errors import DeviceError, ModelPoisonedError, PlacementError
from gpusync.fold import run_parallel

_RUNS_PER_WORKER = 4


def commit(parts: Sequence[ChangePart], workers: int) -> None:
    """Apply every list, or none.

    Raises
    ------
    PlacementError
        The live words are not those of prepare: the model changed since. Nothing was stored.
    DeviceError
        A store failed; every store was taken back.
    ModelPoisonedError
        A store failed and could not be taken back.
    """
    runs = _runs(len(parts), workers)
    gathered: dict[int, Live] = {}

    def gather(run: range) -> None:
        for number in run:
            words = parts[number].gather()
            if words is None:
                raise PlacementError(
                    "live weights changed since prepare; nothing was stored, prepare again"
                )
            gathered[number] = words

    def store(run: range) -> None:
        for number in reversed(run):
            parts[number].store(gathered[number])

    run_parallel(gather, runs, workers)
    try:
        # Backwards: what was gathered last may still be cached.
        run_parallel(store, runs[::-1], workers)
    except BaseException as err:
        _take_back(parts, gathered, err)
        raise DeviceError("committing failed and was taken back; prepare again") from err


def _runs(count: int, workers: int) -> list[range]:
    """Split ``count`` parts into runs of neighbours, a few per worker."""
    size = -(-count // (workers * _RUNS_PER_WORKER)) or 1
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _take_back(
    parts: Sequence[ChangePart], gathered: Mapping[int, Live], cause: BaseException
) -> None:
    try:
        for number, part in enumerate(parts):
            part.take_back(gathered[number])
    except BaseException as err:
        raise ModelPoisonedError(
            f"committing failed ({cause!r}) and could not be taken back: replace the process"
        ) from err
