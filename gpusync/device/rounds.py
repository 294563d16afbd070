"""What one round of a batch does, as tables: frames to decode, then layers and payloads to make part of the deltas.

Round r is the r-th layer of every chunk that has so many. Pure: positions in, arrays out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpusync.device.chunks import Batch, Chunk, ChunkLayer
from gpusync.device.kernels import CHUNK, ITEM_ENTRIES, LAYER, PAYLOAD, RECORD
from gpusync.device.layers import FoldedLayer, PayloadLayer, RawLayer, RecordsLayer
from gpusync.device.nvcomp import DecodeArrays
from gpusync.format.rows import BAND_NBYTES

SET, XOR, FULL = 0, 1, 2
"""Modes of a layer: the oldest xor delta, a later one, and a tensor's new bytes."""

_Work = tuple[int, Chunk, ChunkLayer]
"""Number of a chunk in its batch, the chunk, and its layer in a round."""

_FORMS = {"overwrite": 1, "xor_sparse": 2}
_ALIGNMENT = 16


def rounded(nbytes: int) -> int:
    """Return what an array takes of a block."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class TableBlock:
    """Arrays that go to the device in one copy.

    ``add`` gives an array's place in the block; its address is that of the block's memory plus the place.
    """

    def __init__(self) -> None:
        self._arrays: list[tuple[int, NDArray[np.uint8]]] = []
        self.nbytes = 0

    def add(self, array: NDArray[np.generic]) -> int:
        """Put an array in, and return its place, a multiple of 16."""
        return self._put(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def reserve(self, nbytes: int) -> int:
        """Return the place of room that the device writes, a multiple of 16."""
        place = self.nbytes
        self.nbytes += rounded(nbytes)
        return place

    def write_to(self, memory: torch.Tensor) -> None:
        """Write the block into host memory, which must have room."""
        room = memory.numpy()
        for place, array in self._arrays:
            room[place : place + array.size] = array

    def _put(self, flat: NDArray[np.uint8]) -> int:
        place = self.reserve(flat.size)
        self._arrays.append((place, flat))
        return place


@dataclass(frozen=True)
class BatchBuffers:
    """Device addresses of a batch's buffers."""

    delta: int
    input: int
    output: int


@dataclass(frozen=True)
class RoundTables:
    """Places, in a block, of the tables of one round, and how many rows each has.

    ``frames`` begins a :class:`DecodeArrays`; ``frame_tensor`` u32 is the number of each frame's tensor. ``has_bitmaps`` says
    that some of the output buffer must be zeroed first. ``decoded_nbytes`` is the content of all frames.
    """

    nframes: int
    frames: int
    frame_tensor: int
    zones: int
    nzones: int
    layers: int
    tile_layer: int
    nlayer_tiles: int
    payloads: int
    item_payload: int
    nitems: int
    records: int
    nrecords: int
    has_bitmaps: bool
    decoded_nbytes: int


def chunk_rows(batch: Batch, buffers: BatchBuffers) -> NDArray[np.void]:
    """Return the ``CHUNK`` rows of a batch."""
    rows = np.zeros(len(batch.chunks), CHUNK)
    for row, chunk in zip(rows, batch.chunks, strict=True):
        region = chunk.tensor.region
        row["delta"] = buffers.delta + chunk.delta_offset
        row["live"] = region.address
        row["run_nbytes"] = region.run_nbytes
        row["run_stride"] = region.run_stride
        row["offset"] = chunk.offset
        row["nbytes"] = chunk.nbytes
        row["region_nbytes"] = region.nbytes
        row["region"] = chunk.tensor.number
        row["first_tile"] = chunk.first_tile
        row["unit"] = region.unit
        row["listed"] = chunk.tensor.listed
    return rows


def tile_rows(counts: list[int]) -> NDArray[np.uint32]:
    """Return the row that each tile (or item) belongs to, where row i has ``counts[i]`` of them."""
    return np.repeat(np.arange(len(counts), dtype=np.uint32), counts)


def plan_round(batch: Batch, number: int, buffers: BatchBuffers, block: TableBlock) -> RoundTables:
    """Put the tables of one round into a block."""
    dense: list[_Work] = []
    sparse: list[_Work] = []
    in_rows: list[_Work] = []
    for index, chunk in enumerate(batch.chunks):
        if number < len(chunk.layers):
            layer = chunk.layers[number]
            kind = in_rows if isinstance(layer.plan, RecordsLayer) else dense
            kind = sparse if isinstance(layer.plan, PayloadLayer) else kind
            kind.append((index, chunk, layer))
    records = _record_rows(in_rows, buffers)
    frames = batch.frames(number)
    columns = (
        frames.input_offset + buffers.input,
        frames.input_nbytes,
        frames.output_nbytes,
        frames.output_offset + buffers.output,
    )
    place = block.add(np.concatenate(columns).astype(np.uint64))
    block.reserve(
        (DecodeArrays.NBYTES_PER_FRAME - DecodeArrays.INPUT_NBYTES_PER_FRAME) * frames.count
    )
    zones = [
        buffers.output + layer.guard_offset
        for _, layer in batch.in_round(number)
        if layer.output_nbytes
    ]
    items = [-(-_entries(layer) // ITEM_ENTRIES) or 1 for _, _, layer in sparse]
    return RoundTables(
        nframes=frames.count,
        frames=place,
        frame_tensor=block.add(frames.number.astype(np.uint32)),
        zones=block.add(np.array(zones, np.uint64)),
        nzones=len(zones),
        layers=block.add(_layer_rows(dense, number, buffers)),
        tile_layer=block.add(tile_rows([chunk.tiles for _, chunk, _ in dense])),
        nlayer_tiles=sum(chunk.tiles for _, chunk, _ in dense),
        payloads=block.add(_payload_rows(sparse, items, buffers)),
        item_payload=block.add(tile_rows(items)),
        nitems=sum(items),
        records=block.add(records),
        nrecords=len(records),
        has_bitmaps=any(layer.bitmap_nbytes for _, _, layer in sparse),
        decoded_nbytes=int(frames.output_nbytes.sum()),
    )


def _layer_rows(dense: list[_Work], number: int, buffers: BatchBuffers) -> NDArray[np.void]:
    rows = np.zeros(len(dense), LAYER)
    first_tile = 0
    for row, (index, chunk, layer) in zip(rows, dense, strict=True):
        region = chunk.tensor.region
        if layer.is_packed:  # its bytes are the chunk's own, in region order
            row["source"] = buffers.input + layer.input_offset
            row["source_begin"] = chunk.offset
            row["tensor_begin"], row["tensor_stride"] = 0, region.run_nbytes
        else:
            row["source"] = buffers.output + layer.output_offset
            row["source_begin"] = layer.content_begin
            row["tensor_begin"], row["tensor_stride"] = region.tensor_begin, region.tensor_stride
        row["chunk"] = index
        row["mode"] = _mode(layer, number)
        row["first_tile"] = first_tile
        first_tile += chunk.tiles
    return rows


def _payload_rows(sparse: list[_Work], items: list[int], buffers: BatchBuffers) -> NDArray[np.void]:
    rows = np.zeros(len(sparse), PAYLOAD)
    first_item = 0
    for row, count, (index, chunk, layer) in zip(rows, items, sparse, strict=True):
        region = chunk.tensor.region
        row["data"] = buffers.output + layer.output_offset
        row["nbytes"] = layer.output_nbytes
        row["form"] = _FORMS[_form(layer)]
        row["tensor_nbytes"] = chunk.tensor.tensor_nbytes
        row["bitmap"] = buffers.output + layer.bitmap_offset
        row["tensor"] = chunk.tensor.number
        row["chunk"] = index
        row["tensor_begin"], row["tensor_stride"] = region.tensor_begin, region.tensor_stride
        row["first_item"] = first_item
        first_item += count
    return rows


def _record_rows(in_rows: list[_Work], buffers: BatchBuffers) -> NDArray[np.void]:
    parts = [np.zeros(layer.end_frame - layer.first_frame, RECORD) for _, _, layer in in_rows]
    for rows, (index, chunk, layer) in zip(parts, in_rows, strict=True):
        if not isinstance(layer.plan, RecordsLayer):
            continue
        frames, region = slice(layer.first_frame, layer.end_frame), chunk.tensor.region
        begin = np.arange(layer.first_frame, layer.end_frame, dtype=np.int64) * BAND_NBYTES
        offset = layer.plan.map.content_offset[frames] - layer.content_begin
        rows["data"] = buffers.output + layer.output_offset + offset
        rows["nbytes"] = layer.plan.map.content_nbytes[frames]
        rows["band_begin"] = begin
        rows["band_nbytes"] = np.minimum(BAND_NBYTES, chunk.tensor.tensor_nbytes - begin)
        rows["tensor"] = chunk.tensor.number
        rows["chunk"] = index
        rows["tensor_begin"], rows["tensor_stride"] = region.tensor_begin, region.tensor_stride
    return np.concatenate(parts) if parts else np.zeros(0, RECORD)


def _mode(layer: ChunkLayer, number: int) -> int:
    plan = layer.plan
    if isinstance(plan, RawLayer) or (isinstance(plan, FoldedLayer) and plan.is_full):
        return FULL
    return XOR if number else SET


def _form(layer: ChunkLayer) -> str:
    return layer.plan.form if isinstance(layer.plan, PayloadLayer) else ""


def _entries(layer: ChunkLayer) -> int:
    """Return how many entries a payload of this size may hold."""
    width = {"overwrite": 5, "xor_sparse": 9}[_form(layer)]
    return layer.output_nbytes // width
