"""The CPU applier: tensors whose live bytes are host memory.

Change lists are checked against live memory step by step, each step just before it is stored. Checking everything first
and storing afterwards would fetch each cache line from memory twice, and the pause is nothing but those fetches. So a
sample of every region is looked at before the first store, and a step that does not fit has everything stored so far
taken back to what prepare had seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import compile_loops
from gpusync.errors import DeviceError, ModelPoisonedError, PlacementError
from gpusync.folding.fold import Fold
from gpusync.folding.parallel import run_parallel
from gpusync.folding.plan import TensorPlan, mismatch
from gpusync.host.changes import ENTRIES_PER_STEP, ListBudget, RegionChanges
from gpusync.host.loops import store_words
from gpusync.host.parts import LiveWork, PreparedPart
from gpusync.host.sinks import ChangeList, LiveSink, SliceSink
from gpusync.timing import Meter, StageClock
from gpusync.types import Algorithm, Digest

_SHARES_PER_WORKER = 4


def prepare_host(work: LiveWork, fold: Fold, budget: ListBudget, meter: Meter) -> PreparedPart:
    """Fold every tensor, digest the result against what was published, and build its change list.

    Live memory is read, never written.

    Raises
    ------
    DigestMismatchError
        A result is not the published tensor.
    OutOfScratchError
        The lists exceed their cap.
    """

    def one(tensor: TensorPlan) -> tuple[str, Digest | None, list[RegionChanges]]:
        if tensor.name in work.slices:
            return tensor.name, None, _list_slices(tensor, work, fold, budget, meter)
        names = work.names_beside(tensor.name)
        live = work.regions[tensor.name].array
        algorithms: set[Algorithm] = {"xxh3-128"} if len(names) > 1 else set()
        if tensor.expected is not None:
            algorithms.add(tensor.expected.algorithm)
        changes = ChangeList(tensor.name, live, budget) if tensor.name == names[0] else None
        alone = tensor.origin_is_live and all(blob.is_xor for blob in tensor.blobs)
        sink = LiveSink(live, algorithms, changes, holds_delta=alone)
        origin = None if alone else tensor.origin
        fold.run(tensor.nbytes, origin, tensor.blobs, sink, (), meter.add)
        digests = sink.digests()
        if tensor.expected is not None and digests[tensor.expected.algorithm] != tensor.expected:
            raise mismatch(tensor, digests[tensor.expected.algorithm])
        return tensor.name, digests.get("xxh3-128"), sink.finish()

    changes: list[RegionChanges] = []
    ours: dict[str, Digest] = {}
    clock = StageClock()
    with clock.stage("decode", work.nbytes):
        for name, digest, made in run_parallel(
            one, work.tensors, fold.workers, lambda tensor: tensor.nbytes
        ):
            if digest is not None:
                ours[name] = digest
            changes.extend(made)
    return PreparedPart(
        "cpu",
        HostChanges(changes, fold.workers),
        ours,
        {"cpu": len(work.tensors)},
        {"cpu": "these parameters are on the CPU"},
        clock.times(),
    )


def _list_slices(
    tensor: TensorPlan, work: LiveWork, fold: Fold, budget: ListBudget, meter: Meter
) -> list[RegionChanges]:
    """Fold a tensor of which the model holds slices, and list what changes in those.

    The whole is held against the published digest here, unless the ranks do that together.
    """
    shares = work.share_writers(tensor.name)
    algorithms = (tensor.expected.algorithm,) if tensor.expected is not None and not shares else ()
    sink = SliceSink(tensor.name, work.slices[tensor.name], budget, shares)
    wanted = sink.wants if shares else None
    digests = fold.run(
        tensor.nbytes, tensor.origin, tensor.blobs, sink, algorithms, meter.add, wanted
    )
    if algorithms and digests[algorithms[0]] != tensor.expected:
        raise mismatch(tensor, digests[algorithms[0]])
    return sink.finish()


@dataclass(frozen=True)
class _Run:
    """Entries of one region's list for one thread; ``begun[0]`` is the end of those that may have been stored."""

    region: RegionChanges
    begin: int
    end: int
    begun: NDArray[np.uint64]


class HostChanges:
    """Change lists over host memory; see :class:`gpusync.host.parts.LiveChanges`."""

    def __init__(self, changes: Sequence[RegionChanges], workers: int) -> None:
        self._changes = changes
        self._workers = workers
        self._runs = list(_runs(changes, workers))
        compile_loops(store_words.__module__)  # not in the pause

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self._changes)

    @property
    def changed_bytes(self) -> int:
        return sum(region.value.nbytes for region in self._changes)

    def await_engine(self) -> None:
        pass

    def check(self) -> None:
        for region in self._changes:
            if not region.sample_is_unchanged():
                raise _changed(region)

    def store(self) -> None:
        def store_all(runs: list[_Run]) -> None:
            for run in runs:
                if not run.region.store(run.begin, run.end, run.begun):
                    raise _changed(run.region)

        try:
            run_parallel(store_all, self._runs, self._workers)
        except BaseException as err:
            self._take_back(err)
            if isinstance(err, PlacementError):
                raise
            raise DeviceError("committing failed and was taken back; prepare again") from err

    def take_back(self) -> None:
        self._take_back(None)

    def _take_back(self, cause: BaseException | None) -> None:
        try:
            for runs in self._runs:
                for run in runs:
                    run.region.take_back(run.begin, int(run.begun[0]))
                    run.begun[0] = run.begin  # what changes from now on is no longer ours
        except BaseException as err:
            raise ModelPoisonedError(
                f"committing failed ({cause!r}) and could not be taken back: replace the process"
            ) from err


def _runs(changes: Sequence[RegionChanges], workers: int) -> Iterator[list[_Run]]:
    """Share all entries out, a few times as many shares as workers, each of neighbours and in whole steps."""
    count = sum(region.index.size for region in changes)
    size = max(1, -(-count // (workers * _SHARES_PER_WORKER * ENTRIES_PER_STEP))) * ENTRIES_PER_STEP
    runs: list[_Run] = []
    room = size
    for region in changes:
        begin = 0
        while begin < region.index.size:
            end = min(region.index.size, begin + room)
            runs.append(_Run(region, begin, end, np.array([begin], np.uint64)))
            room -= end - begin
            begin = end
            if not room:
                yield runs
                runs, room = [], size
    yield runs


def _changed(region: RegionChanges) -> PlacementError:
    return PlacementError(
        "live weights changed since prepare; they are as they were, prepare again",
        tensor=region.tensor,
    )
