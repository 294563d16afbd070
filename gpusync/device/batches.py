"""Planning: regions are cut into chunks, and chunks packed into batches that fit the device's buffers. Pure.

A region that fits a batch is one chunk. A larger one goes through consecutive batches, at most one chunk in each, so
that the chain of its digest and its change list come in order. Cuts are at multiples of TILE_NBYTES.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpusync.device.chunks import Batch, Capacities, Chunk, ChunkLayer, aligned
from gpusync.device.cuts import Cut, Part, cut_region, region_steps, step_edge
from gpusync.device.kernels import TILE_NBYTES
from gpusync.device.layers import DeviceTensor, FramesLayer, RecordsLayer
from gpusync.errors import OutOfScratchError

# Batches that still take small tensors. One that is this full is left alone.
_MAX_OPEN = 8
_FULL = 15 / 16


def plan_batches(tensors: Iterable[DeviceTensor], capacities: Capacities) -> tuple[Batch, ...]:
    """Return the batches that bring every tensor's region through the device, in the order to run them.

    Raises
    ------
    OutOfScratchError
        A tensor's smallest chunk is over the capacities: ``why_not_device`` would have said so.
    """
    packer = _Packer(capacities)
    for tensor in sorted(tensors, key=lambda tensor: tensor.region.nbytes, reverse=True):
        packer.add(tensor)
    return tuple(batch.close() for batch in packer.batches)


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch that is being filled; ``outputs`` and ``frames`` are by round, ``claims`` tiles, one for an empty chunk."""

    capacities: Capacities
    chunks: list[Chunk] = field(default_factory=list)
    delta_nbytes: int = 0
    input_nbytes: int = 0
    tiles: int = 0
    claims: int = 0
    tables_nbytes: int = 0
    outputs: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)

    @property
    def fill(self) -> float:
        return self.delta_nbytes / self.capacities.delta_nbytes

    def fits(self, cut: Cut) -> bool:
        most = self.capacities
        if (
            self.delta_nbytes + aligned(cut.nbytes) > most.delta_nbytes
            or self.input_nbytes + cut.input_nbytes > most.input_nbytes
            or self.claims + (cut.tiles or 1) > most.tiles
            or self.tables_nbytes + cut.table_room > most.tables_nbytes
        ):
            return False
        for number, part in enumerate(cut.parts):
            output, frames = part.output_room, part.frames
            if number < len(self.outputs):
                output += self.outputs[number]
                frames += self.frames[number]
            if output > most.output_nbytes or frames > most.frames:
                return False
        return True

    def put(self, cut: Cut) -> None:
        layers = tuple(self._place(number, part) for number, part in enumerate(cut.parts))
        self.chunks.append(
            Chunk(
                tensor=cut.tensor,
                offset=cut.offset,
                nbytes=cut.nbytes,
                delta_offset=self.delta_nbytes,
                first_tile=self.tiles,
                tiles=cut.tiles,
                layers=layers,
            )
        )
        self.delta_nbytes += aligned(cut.nbytes)
        self.tiles += cut.tiles
        self.claims += cut.tiles or 1
        self.tables_nbytes += cut.table_room

    def close(self) -> Batch:
        return Batch(tuple(self.chunks), self.delta_nbytes, self.input_nbytes, self.tiles)

    def _place(self, number: int, part: Part) -> ChunkLayer:
        if number == len(self.outputs):
            self.outputs.append(0)
            self.frames.append(0)
        placed = ChunkLayer(
            plan=part.plan,
            first_frame=part.first_frame,
            end_frame=part.end_frame,
            input_offset=self.input_nbytes,
            input_nbytes=part.input_nbytes,
            output_offset=self.outputs[number],
            output_nbytes=part.output_nbytes,
            bitmap_nbytes=part.bitmap_nbytes,
        )
        self.input_nbytes += aligned(part.input_nbytes)
        self.outputs[number] += part.output_room
        self.frames[number] += part.frames
        return placed


class _Packer:
    """Fills batches; ``batches`` is in the order to run them."""

    def __init__(self, capacities: Capacities) -> None:
        self._capacities = capacities
        self._open: list[_Batch] = []
        self.batches: list[_Batch] = []

    def add(self, tensor: DeviceTensor) -> None:
        cut = cut_region(tensor, 0, tensor.region.nbytes)
        if not cut.fits_alone(self._capacities):
            self._add_in_chunks(tensor)
            return
        for batch in self._open:
            if batch.fits(cut):
                break
        else:
            batch = self._new()
        self._put(batch, cut)

    def _put(self, batch: _Batch, cut: Cut) -> None:
        batch.put(cut)
        if batch.fill > _FULL and batch in self._open:
            self._open.remove(batch)

    def _new(self) -> _Batch:
        batch = _Batch(self._capacities)
        self.batches.append(batch)
        self._open = [*self._open[1 - _MAX_OPEN :], batch]
        return batch

    def _add_in_chunks(self, tensor: DeviceTensor) -> None:
        """Begin in the newest batch where that is not yet half full, and go on in new ones."""
        at, nbytes = 0, tensor.region.nbytes
        if not self.batches or self.batches[-1].fill > 0.5:
            self._new()
        while at < nbytes:
            cut = self._largest(tensor, at, self.batches[-1])
            if cut is None:
                if not self.batches[-1].chunks:
                    raise _too_large(tensor, at, self._capacities)
                self._new()
                continue
            self._put(self.batches[-1], cut)
            at += cut.nbytes
            if at < nbytes:
                self._new()

    def _largest(self, tensor: DeviceTensor, at: int, batch: _Batch) -> Cut | None:
        """Return the largest chunk from ``at`` on that fits, ending where a frame does if that costs under half."""
        nbytes, begin = tensor.region.nbytes, at // TILE_NBYTES
        fits: Cut | None = None
        # More than the delta's room is not worth trying.
        room = (self._capacities.delta_nbytes - batch.delta_nbytes) // TILE_NBYTES
        low, high = begin, min(region_steps(nbytes), begin + room)
        while low < high:
            middle = (low + high + 1) // 2
            cut = cut_region(tensor, at, step_edge(nbytes, middle))
            if batch.fits(cut):
                fits, low = cut, middle
            else:
                high = middle - 1
        border = _frame_border(fits) if fits is not None else None
        return fits if border is None else cut_region(tensor, at, border)


def _frame_border(cut: Cut) -> int | None:
    """Return the last region byte up to which a shorter chunk would decode no frame in part; None if there is none.

    Frames that two chunks share are decoded twice.
    """
    region, part = cut.tensor.region, cut.parts[0]
    end = cut.offset + cut.nbytes
    if end == region.nbytes or not region.is_one_run:
        return None
    if not isinstance(part.plan, FramesLayer | RecordsLayer):
        return None
    border = part.plan.tensor_end(part.end_frame - 1) - region.tensor_begin
    if border % TILE_NBYTES or border < cut.offset + cut.nbytes // 2 or border <= cut.offset:
        return None
    complete = part.plan.tensor_end(part.end_frame) - region.tensor_begin
    return None if complete == end else border


def _too_large(tensor: DeviceTensor, at: int, capacities: Capacities) -> OutOfScratchError:
    cut = cut_region(tensor, at, step_edge(tensor.region.nbytes, at // TILE_NBYTES + 1))
    return OutOfScratchError(
        "the smallest chunk of a tensor is over the device's buffers; give it more scratch memory",
        tensor=tensor.name,
        offset=at,
        needed_bytes=max([cut.input_nbytes, *(part.output_room for part in cut.parts)]),
        budget_bytes=min(capacities.input_nbytes, capacities.output_nbytes),
    )
