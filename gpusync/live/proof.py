"""The proof by bytes: live regions and slices held against a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpusync.config import Settings
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import Layout
from gpusync.folding.fold import Bytes, Fold
from gpusync.folding.parallel import run_parallel
from gpusync.folding.plan import NOTHING_TO_FOLD, plan_tensor
from gpusync.placement.regions import Placement, Region, reading, wait_for_writes
from gpusync.placement.slices import Slice

DIFFER = "live bytes differ from"
"""How the reason begins of a tensor whose live bytes are not the checkpoint's."""


def prove(
    placement: Placement, layout: Layout, files: OpenFiles, settings: Settings
) -> dict[str, str]:
    """Compare every placed region with the checkpoint's bytes; return the tensors that differ, with where."""
    fold = Fold(settings.piece_bytes, settings.workers)

    def one(name: str) -> tuple[str, int | None]:
        plan = plan_tensor(name, layout, NOTHING_TO_FOLD, files, known={}, from_local=False)
        region = placement.regions.get(name)
        parts = placement.slices.get(name, ())
        sink = _CompareSink(region) if region is not None else _CompareSlices(parts)
        with reading(region.device if region is not None else parts[0].device):
            fold.run(plan.nbytes, plan.origin, (), sink, ())
        return name, sink.first_difference

    wait_for_writes(placement)
    names = list(placement.regions.keys() | placement.slices.keys())
    found = dict(run_parallel(one, names, settings.workers, lambda name: layout.entry(name).nbytes))
    return {
        name: f"{DIFFER} {layout.folder} at byte {offset} of the tensor"
        for name, offset in found.items()
        if offset is not None
    }


class _CompareSink:
    """Notes the first byte at which a tensor differs from live memory."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.first_difference: int | None = None

    def write(self, piece: Bytes, offset: int) -> None:
        if self.first_difference is not None:
            return
        live = self._region.read(offset, piece.size)
        if not np.array_equal(piece, live):
            self.first_difference = offset + int(np.flatnonzero(piece != live)[0])


class _CompareSlices:
    """Notes the first byte at which a tensor differs from a slice of it."""

    def __init__(self, parts: Sequence[Slice]) -> None:
        self._parts = parts
        self.first_difference: int | None = None

    def write(self, piece: Bytes, offset: int) -> None:
        if self.first_difference is not None:
            return
        for part in self._parts:
            range_ = part.part_of(offset, piece.size)
            if range_[0] < range_[1] and not np.array_equal(
                part.from_tensor(piece, offset, range_), part.from_live(range_)
            ):
                self.first_difference = offset
                return
