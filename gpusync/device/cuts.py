"""Cutting regions: where a chunk may end, and what a chunk needs of a batch. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpusync.device.chunks import (
    ALIGNMENT,
    GUARD_NBYTES,
    ROUND_TABLES_NBYTES,
    Capacities,
    aligned,
    output_room,
    table_room,
)
from gpusync.device.kernels import TILE_NBYTES
from gpusync.device.layers import DeviceTensor, FramesLayer, LayerPlan, PayloadLayer, RecordsLayer
from gpusync.format.rows import BAND_NBYTES
from gpusync.published.blobmaps import Positions

MIN_LAST_NBYTES = 64
"""The least that is cut off at a region's end: the last stripe of its digest comes from one chunk."""


@dataclass(slots=True)
class Part:
    """A layer's needs in a chunk that has no place yet."""

    plan: LayerPlan
    first_frame: int
    end_frame: int
    input_nbytes: int
    output_nbytes: int
    bitmap_nbytes: int

    @property
    def frames(self) -> int:
        return self.end_frame - self.first_frame

    @property
    def records(self) -> int:
        return self.frames if isinstance(self.plan, RecordsLayer) else 0

    @property
    def output_room(self) -> int:
        return output_room(self.output_nbytes, self.bitmap_nbytes)


@dataclass(slots=True)
class Cut:
    """A chunk that has no place yet."""

    tensor: DeviceTensor
    offset: int
    nbytes: int
    parts: list[Part]
    input_nbytes: int

    @property
    def tiles(self) -> int:
        return -(-self.nbytes // TILE_NBYTES)

    @property
    def table_room(self) -> int:
        """Bytes of the tables of all its rounds."""
        tiles = self.tiles
        return sum(
            table_room(part.frames, tiles, part.output_nbytes, part.records) + ROUND_TABLES_NBYTES
            for part in self.parts
        )

    def fits_alone(self, capacities: Capacities) -> bool:
        """Return whether an empty batch takes it."""
        return (
            aligned(self.nbytes) <= capacities.delta_nbytes
            and self.table_room <= capacities.tables_nbytes
            and self.input_nbytes <= capacities.input_nbytes
            and self.tiles <= capacities.tiles
            and all(
                part.output_room <= capacities.output_nbytes and part.frames <= capacities.frames
                for part in self.parts
            )
        )


def cut_region(tensor: DeviceTensor, q0: int, q1: int) -> Cut:
    """Return what region bytes ``q0`` to ``q1`` of a tensor need."""
    parts = [_part_of(layer, tensor, q0, q1) for layer in tensor.layers]
    return Cut(tensor, q0, q1 - q0, parts, sum(aligned(part.input_nbytes) for part in parts))


def _part_of(layer: LayerPlan, tensor: DeviceTensor, q0: int, q1: int) -> Part:
    if isinstance(layer, FramesLayer | RecordsLayer):
        first, end = layer.covering(*tensor.region.tensor_span(q0, q1))
        bitmap_nbytes = 0
    elif isinstance(layer, PayloadLayer):
        first, end = 0, layer.map.count
        bitmap_nbytes = -(-tensor.tensor_nbytes // 32) * 4 if layer.form == "overwrite" else 0
    else:
        return Part(layer, 0, 0, q1 - q0, 0, 0)
    begin, stop = layer.map.extent(first, end)
    content_begin, content_end = layer.map.content(first, end)
    return Part(layer, first, end, stop - begin, content_end - content_begin, bitmap_nbytes)


def region_steps(nbytes: int) -> int:
    """Return how many chunks a region can be cut into."""
    whole, rest = divmod(nbytes, TILE_NBYTES)
    return max(1, whole + (rest >= MIN_LAST_NBYTES))


def step_edge(nbytes: int, step: int) -> int:
    """Return the region byte before which ``step`` steps end."""
    return nbytes if step == region_steps(nbytes) else step * TILE_NBYTES


def why_not_device(tensor: DeviceTensor, capacities: Capacities) -> str | None:
    """Return why a tensor cannot be cut into chunks that fit a batch, so that the host must fold it; None if it can."""
    region = tensor.region
    if cut_region(tensor, 0, region.nbytes).fits_alone(capacities):
        return None
    q0 = np.arange(region_steps(region.nbytes), dtype=np.int64) * TILE_NBYTES
    q1 = np.append(q0[1:], region.nbytes)
    inputs = np.zeros_like(q0)
    tables = 0
    for layer in tensor.layers:
        need = _step_needs(layer, tensor, q0, q1)
        inputs += need.inputs
        most_frames = int(need.frames.max())
        records = most_frames if isinstance(layer, RecordsLayer) else 0
        tables += table_room(most_frames, 1, int(need.outputs.max()), records)
        tables += ROUND_TABLES_NBYTES
        for most, capacity, what in (
            (need.outputs.max(), capacities.output_nbytes, "bytes to decode"),
            (need.frames.max(), capacities.frames, "frames"),
        ):
            if most > capacity:
                return f"{most} {what} for {TILE_NBYTES} bytes: a batch takes {capacity}"
    if inputs.max() > capacities.input_nbytes:
        most = inputs.max()
        return f"{most} bytes to read for {TILE_NBYTES}: a batch takes {capacities.input_nbytes}"
    if tables > capacities.tables_nbytes:
        return f"{tables} bytes of tables for {len(tensor.layers)} layers: a batch takes {capacities.tables_nbytes}"
    return None


@dataclass(frozen=True, slots=True)
class _StepNeeds:
    """int64 (steps,): what one layer needs for each of a region's smallest chunks."""

    inputs: Positions
    outputs: Positions
    frames: Positions


def _step_needs(layer: LayerPlan, tensor: DeviceTensor, q0: Positions, q1: Positions) -> _StepNeeds:
    if isinstance(layer, FramesLayer | RecordsLayer) and layer.map.count:
        return _frames_needs(layer, *tensor.region.tensor_spans(q0, q1))
    part = _part_of(
        layer, tensor, 0, int((q1 - q0).max())
    )  # alike for all steps, but for the packed bytes
    same = np.ones_like(q0)
    return _StepNeeds(
        same * aligned(part.input_nbytes), same * part.output_room, same * part.frames
    )


def _frames_needs(
    layer: FramesLayer | RecordsLayer, begin: Positions, end: Positions
) -> _StepNeeds:
    map = layer.map
    if isinstance(layer, RecordsLayer):
        first, last = begin // BAND_NBYTES, (end - 1) // BAND_NBYTES
    else:
        first = map.content_offset.searchsorted(begin, "right") - 1
        last = map.content_offset.searchsorted(end, "left") - 1
    read = map.offset[last] + map.nbytes[last] - map.offset[first]
    decoded = map.content_offset[last] + map.content_nbytes[last] - map.content_offset[first]
    return _StepNeeds(
        read + ALIGNMENT - 1 & -ALIGNMENT,
        (decoded + ALIGNMENT - 1 & -ALIGNMENT) + GUARD_NBYTES,
        last - first + 1,
    )
