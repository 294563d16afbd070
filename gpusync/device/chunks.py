"""What the device works on at a time: batches of chunks, with every chunk's places in the batch's buffers.

Pure data. A chunk is a range of one region with all its layers; the chunks of a batch are on the device together. The
struct that kernels read is described in kernels/common.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gpusync.device.layers import (
    DeviceTensor,
    FoldedLayer,
    FramesLayer,
    LayerPlan,
    PayloadLayer,
    RawLayer,
    RecordsLayer,
    RegionMap,
)
from gpusync.published.blobmaps import Positions

__all__ = [
    "ALIGNMENT",
    "GUARD_NBYTES",
    "ROUND_TABLES_NBYTES",
    "Batch",
    "Capacities",
    "Chunk",
    "ChunkLayer",
    "DeviceTensor",
    "FoldedLayer",
    "FramesLayer",
    "LayerPlan",
    "PayloadLayer",
    "RawLayer",
    "RecordsLayer",
    "RegionMap",
    "RoundFrames",
    "aligned",
    "output_room",
    "table_room",
]

ALIGNMENT = 256
"""What begins in a buffer of a batch begins at a multiple of this."""

GUARD_NBYTES = 256
"""Bytes behind each layer's output that nobody may write."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Capacities:
    """What one batch may hold.

    Parameters
    ----------
    delta_nbytes
        Packed deltas, each rounded up to ``ALIGNMENT``.
    input_nbytes
        What is copied to the device, for all layers together.
    output_nbytes
        What one round decodes: contents, guards and bitmaps.
    tiles
        Thread blocks; a chunk has at least one.
    frames
        Frames that one round decodes.
    tables_nbytes
        The tables of all rounds, as :func:`table_room` adds them up.
    """

    delta_nbytes: int
    input_nbytes: int
    output_nbytes: int
    tiles: int
    frames: int
    tables_nbytes: int = 1 << 20


@dataclass(frozen=True, eq=False, slots=True)
class ChunkLayer:
    """A layer's part in a chunk, with its places in the batch's buffers.

    Parameters
    ----------
    first_frame, end_frame
        The frames to decode, of the blob's map; equal where there are none.
    input_offset, input_nbytes
        Where its bytes lie in the batch's input buffer: the frames as in the blob, or packed bytes.
    output_offset, output_nbytes
        Where the frames' content goes in the round's output buffer, without gaps; nothing for packed bytes.
    bitmap_nbytes
        Room for the positions of an overwrite payload, else 0.
    """

    plan: LayerPlan
    first_frame: int
    end_frame: int
    input_offset: int
    input_nbytes: int
    output_offset: int
    output_nbytes: int
    bitmap_nbytes: int

    @property
    def is_packed(self) -> bool:
        """True where the input is the chunk's own bytes, in region order."""
        return isinstance(self.plan, RawLayer | FoldedLayer)

    @property
    def input_begin(self) -> int:
        """Blob byte at ``input_offset``."""
        if isinstance(self.plan, FramesLayer | RecordsLayer | PayloadLayer):
            return self.plan.map.extent(self.first_frame, self.end_frame)[0]
        return 0

    @property
    def content_begin(self) -> int:
        """Payload byte at ``output_offset``: for xor a tensor byte."""
        if isinstance(self.plan, FramesLayer | RecordsLayer | PayloadLayer):
            return self.plan.map.content(self.first_frame, self.end_frame)[0]
        return 0

    @property
    def guard_offset(self) -> int:
        """Where the ``GUARD_NBYTES`` behind the content begin in the output buffer."""
        return self.output_offset + aligned(self.output_nbytes)

    @property
    def bitmap_offset(self) -> int:
        """Where the bitmap begins in the output buffer."""
        return self.guard_offset + GUARD_NBYTES

    @property
    def output_room(self) -> int:
        """Bytes taken of the output buffer."""
        return output_room(self.output_nbytes, self.bitmap_nbytes)


def output_room(output_nbytes: int, bitmap_nbytes: int) -> int:
    """Return the output bytes that a layer takes: content, guard and bitmap; 0 without content."""
    if not output_nbytes:
        return 0
    return aligned(output_nbytes) + GUARD_NBYTES + aligned(bitmap_nbytes)


def table_room(frames: int, tiles: int, payload_nbytes: int, records: int = 0) -> int:
    """Return what a layer's rows in a round's tables take at most, alignment of the tables apart.

    48 bytes for a frame and 64 for a record, 88 for the layer and its guard, 4 for each tile and for each 4096 entries
    of a payload.
    """
    return 48 * frames + 64 * records + 88 + 4 * tiles + payload_nbytes // 5120 + 4


ROUND_TABLES_NBYTES = 256
"""What aligning the tables of a round takes at most."""


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """A range of one region in one batch.

    Parameters
    ----------
    offset, nbytes
        The range of the region. ``offset`` is a multiple of TILE_NBYTES.
    delta_offset
        Where its packed delta begins in the batch's delta buffer.
    first_tile, tiles
        Its thread blocks among the batch's.
    layers
        One for each layer of the tensor, in the same order; layer r is the work of round r.
    """

    tensor: DeviceTensor
    offset: int
    nbytes: int
    delta_offset: int
    first_tile: int
    tiles: int
    layers: tuple[ChunkLayer, ...]

    @property
    def ends_region(self) -> bool:
        """True for the last chunk of its region."""
        return self.offset + self.nbytes == self.tensor.region.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class RoundFrames:
    """The frames of one round, largest content first.

    All int64 (frames,): ``input_offset`` in the batch's input buffer, ``output_offset`` in the output buffer, the
    sizes there, and the ``number`` of the tensor.
    """

    input_offset: Positions
    input_nbytes: Positions
    output_offset: Positions
    output_nbytes: Positions
    number: Positions

    @property
    def count(self) -> int:
        """Number of frames."""
        return len(self.number)


@dataclass(frozen=True, eq=False)
class Batch:
    """Chunks that are on the device together, and how much of each buffer they take."""

    chunks: tuple[Chunk, ...]
    delta_nbytes: int
    input_nbytes: int
    tiles: int

    @property
    def region_nbytes(self) -> int:
        """Bytes of regions that the chunks are."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @cached_property
    def rounds(self) -> int:
        """Layers of the chunk with the most."""
        return max((len(chunk.layers) for chunk in self.chunks), default=0)

    def in_round(self, number: int) -> list[tuple[Chunk, ChunkLayer]]:
        """Return the chunks that have a layer in a round, with that layer."""
        return [
            (chunk, chunk.layers[number]) for chunk in self.chunks if number < len(chunk.layers)
        ]

    def output_nbytes(self, number: int) -> int:
        """Return the output bytes that a round takes."""
        return sum(layer.output_room for _, layer in self.in_round(number))

    def frames(self, number: int) -> RoundFrames:
        """Return the frames to decode in a round."""
        parts = [
            (chunk.tensor.number, layer, layer.plan.map)
            for chunk, layer in self.in_round(number)
            if isinstance(layer.plan, FramesLayer | RecordsLayer | PayloadLayer)
            and layer.output_nbytes
        ]
        counts = [layer.end_frame - layer.first_frame for _, layer, _ in parts]

        def column(name: str) -> Positions:
            return _joined(
                [getattr(map, name)[part.first_frame : part.end_frame] for _, part, map in parts]
            )

        def shifts(values: Sequence[int]) -> Positions:
            return np.repeat(np.array(values, np.int64), counts)

        content_nbytes = column("content_nbytes")
        order = np.argsort(-content_nbytes, kind="stable")
        to_input = shifts([part.input_offset - part.input_begin for _, part, _ in parts])
        to_output = shifts([part.output_offset - part.content_begin for _, part, _ in parts])
        return RoundFrames(
            (column("offset") + to_input)[order],
            column("nbytes")[order],
            (column("content_offset") + to_output)[order],
            content_nbytes[order],
            shifts([number for number, _, _ in parts])[order],
        )


def _joined(columns: Sequence[NDArray[np.int64]]) -> Positions:
    return np.concatenate(columns) if columns else np.empty(0, np.int64)
