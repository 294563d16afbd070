"""Regions, chunks and batches: every promise that the kernels and the pipeline rely on, for any set of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusync.device.batches import plan_batches
from gpusync.device.capacities import SLOTS, capacities_for, scratch_of
from gpusync.device.chunks import ALIGNMENT, GUARD_NBYTES, Batch, Capacities, Chunk, ChunkLayer
from gpusync.device.cuts import MIN_LAST_NBYTES, why_not_device
from gpusync.device.kernels import TILE_NBYTES
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
from gpusync.errors import OutOfScratchError
from gpusync.format.rows import BAND_NBYTES
from gpusync.published.blobmaps import BlobMap
from tests.unit.strategies import fixed

KIB, MIB = 1 << 10, 1 << 20
NOTHING = cast(Any, None)  # planning looks into no blob and no origin


def map_of(content_nbytes: Sequence[int], ratio: int = 20, gap: int = 0) -> BlobMap:
    """A map of frames that compress by ``ratio``, ``gap`` bytes apart."""
    content = np.array([size for size in content_nbytes if size], np.int64)
    nbytes = content // ratio + 9
    ends = np.cumsum(content)
    offset = np.cumsum(nbytes + gap) - nbytes
    return BlobMap(offset, nbytes, ends - content, content, int((nbytes + gap).sum()))


def frames_of(nbytes: int, frame_nbytes: int, **options: int) -> BlobMap:
    sizes = [min(frame_nbytes, nbytes - at) for at in range(0, nbytes, frame_nbytes)]
    return map_of(sizes, **options)


# ---- regions -----------------------------------------------------------------------------------------

REGIONS = [
    RegionMap.whole(1 << 20, 300),
    RegionMap.whole((1 << 20) + 1, 7),
    RegionMap(1 << 20, 60, 12, 100, 8, 40),
    RegionMap(1 << 20, 60, 12, 101, 8, 40),
    RegionMap(1 << 20, 55, 11, 100, 3, 40),
    RegionMap((1 << 20) + 1, 60, 12, 100, 0, 12),
    RegionMap(1 << 20, 30, 30, 30, 17, 0),
    RegionMap(1 << 20, 0, 0, 0, 5, 0),
]


@pytest.mark.parametrize("region", REGIONS)
def test_spans_and_units_are_those_of_the_single_bytes(region: RegionMap) -> None:
    runs = [divmod(q, region.run_nbytes or 1) for q in range(region.nbytes)]
    tensor = [region.tensor_begin + run * region.tensor_stride + column for run, column in runs]
    live = [region.address + run * region.run_stride + column for run, column in runs]
    for q0 in range(region.nbytes):
        assert region.tensor_position(q0) == tensor[q0]
        for q1 in range(q0 + 1, region.nbytes + 1, 7):
            assert region.tensor_span(q0, q1) == (tensor[q0], tensor[q1 - 1] + 1)
            spans = region.tensor_spans(np.array([q0]), np.array([q1]))
            assert (spans[0][0], spans[1][0]) == region.tensor_span(q0, q1)
    assert region.tensor_span(0, 0) == (region.tensor_begin, region.tensor_begin)
    # a word of two bytes lies at an even address, and so within one run
    words = range(0, region.nbytes - 1, 2)
    even = all(live[q] % 2 == 0 and live[q + 1] == live[q] + 1 for q in words)
    assert region.unit == (2 if even else 1) or (region.unit == 1 and region.address % 2)


# ---- planning, for any tensors -----------------------------------------------------------------------

SMALL = Capacities(
    delta_nbytes=MIB, input_nbytes=160 * KIB, output_nbytes=MIB + 8 * KIB, tiles=24, frames=40
)
REGION_SIZES = st.one_of(
    st.sampled_from([0, 1, 3, 17, 240, 241, TILE_NBYTES - 1]),
    st.builds(
        lambda tiles, rest: tiles * TILE_NBYTES + rest,
        st.integers(1, 40),
        st.sampled_from([0, 1, 2, 63, 64, 65, 241, 30_000]),
    ),
)


@st.composite
def regions(draw: st.DrawFn) -> tuple[RegionMap, int]:
    """A region and the size of its tensor."""
    nbytes = draw(REGION_SIZES)
    kind = draw(st.sampled_from(["whole", "rows", "columns"]))
    if kind == "whole" or not nbytes:
        return RegionMap.whole(1 << 20, nbytes), nbytes
    if kind == "rows":
        begin = draw(st.sampled_from([1, 48, 100_000]))
        return RegionMap(1 << 20, nbytes, nbytes, nbytes, begin, nbytes), begin + nbytes + 5
    run = draw(
        st.sampled_from([run for run in (1, 2, 100, 4096, 70_000) if nbytes % run == 0] or [1])
    )
    stride, column = run * draw(st.sampled_from([1, 2, 8])), draw(st.integers(0, run))
    runs = nbytes // run
    return RegionMap(1 << 20, nbytes, run, run + 3, column, stride), runs * stride + column


@st.composite
def layers(draw: st.DrawFn, tensor_nbytes: int) -> LayerPlan:
    kind = draw(st.sampled_from(["frames", "frames", "overwrite", "xor_sparse", "records"]))
    ratio, gap = draw(st.sampled_from([1, 20, 100])), draw(st.sampled_from([0, 0, 8]))
    if kind == "frames":
        frame_nbytes = draw(
            st.sampled_from([50_000, TILE_NBYTES, 4 * TILE_NBYTES, max(tensor_nbytes, 1)])
        )
        return FramesLayer(NOTHING, frames_of(tensor_nbytes, frame_nbytes, ratio=ratio, gap=gap))
    if kind == "records":
        share = draw(st.sampled_from([1, 3, 100]))
        bands = range(0, tensor_nbytes, BAND_NBYTES)
        sizes = [2 + min(BAND_NBYTES, tensor_nbytes - at) // share for at in bands]
        return RecordsLayer(NOTHING, map_of(sizes, ratio=ratio, gap=gap))
    payload_nbytes = draw(st.sampled_from([4, 1000, 100_000, 600_000]))
    return PayloadLayer(NOTHING, frames_of(payload_nbytes, 90_000, ratio=ratio), cast(Any, kind))


@st.composite
def tensors(draw: st.DrawFn) -> list[DeviceTensor]:
    """Up to 12 tensors, those that the device cannot take folded by the host."""
    found = []
    for number in range(draw(st.integers(0, 12))):
        region, nbytes = draw(regions())
        chain = draw(st.lists(layers(nbytes), min_size=1, max_size=3))
        if draw(st.integers(0, 3)) == 0:
            chain[0] = RawLayer(NOTHING)
        tensor = DeviceTensor(number, f"t{number}", nbytes, region, tuple(chain))
        reason = why_not_device(tensor, SMALL)
        if reason is not None:
            folded = (FoldedLayer(None, ()),)
            tensor = DeviceTensor(number, f"t{number}", nbytes, region, folded, reason)
            assert why_not_device(tensor, SMALL) is None
        found.append(tensor)
    return found


@given(tensors())
@settings(fixed, max_examples=120)
def test_batches_keep_every_promise(found: list[DeviceTensor]) -> None:
    batches = plan_batches(found, SMALL)
    check_regions(found, batches)
    for batch in batches:
        check_places(batch, SMALL)
        for chunk in batch.chunks:
            check_layers(chunk)
        for number in range(batch.rounds):
            check_round(batch, number, SMALL)


def check_regions(found: Sequence[DeviceTensor], batches: Sequence[Batch]) -> None:
    """Every region is covered once, in order, in consecutive batches, and cut where it may be."""
    chunks: dict[int, list[tuple[int, Chunk]]] = {tensor.number: [] for tensor in found}
    for number, batch in enumerate(batches):
        assert batch.chunks
        for chunk in batch.chunks:
            chunks[chunk.tensor.number].append((number, chunk))
    for tensor in found:
        at = 0
        numbers = [number for number, _ in chunks[tensor.number]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for _, chunk in chunks[tensor.number]:
            assert chunk.offset == at and chunk.offset % TILE_NBYTES == 0
            assert chunk.tiles == -(-chunk.nbytes // TILE_NBYTES)
            at += chunk.nbytes
            if chunk.ends_region:
                assert chunk.offset == 0 or chunk.nbytes >= MIN_LAST_NBYTES
            else:
                assert chunk.nbytes % TILE_NBYTES == 0 and chunk.nbytes > 0
        assert at == tensor.region.nbytes


def check_places(batch: Batch, capacities: Capacities) -> None:
    """Deltas, inputs and tiles lie side by side, within the capacities."""
    delta = tile = end = 0
    for chunk in batch.chunks:
        assert chunk.delta_offset >= delta and chunk.delta_offset % ALIGNMENT == 0
        delta = chunk.delta_offset + chunk.nbytes
        assert chunk.first_tile == tile
        tile += chunk.tiles
        for layer in chunk.layers:
            assert layer.input_offset >= end and layer.input_offset % ALIGNMENT == 0
            end = layer.input_offset + layer.input_nbytes
    assert delta <= batch.delta_nbytes <= capacities.delta_nbytes
    assert end <= batch.input_nbytes <= capacities.input_nbytes
    assert tile == batch.tiles <= capacities.tiles
    assert len(batch.chunks) <= capacities.tiles


def check_layers(chunk: Chunk) -> None:
    """Every layer names the frames that cover its span, and only those."""
    tensor = chunk.tensor
    begin, end = tensor.region.tensor_span(chunk.offset, chunk.offset + chunk.nbytes)
    assert [layer.plan for layer in chunk.layers] == list(tensor.layers)
    for layer in chunk.layers:
        plan = layer.plan
        if not isinstance(plan, FramesLayer | RecordsLayer | PayloadLayer):
            assert layer.is_packed
            assert (layer.input_nbytes, layer.output_nbytes) == (chunk.nbytes, 0)
            continue
        named = range(layer.first_frame, layer.end_frame)
        starts = plan.map.content_offset
        ends = starts + plan.map.content_nbytes
        if isinstance(plan, FramesLayer):
            needed = np.flatnonzero((starts < end) & (ends > begin)) if begin < end else []
            assert list(named) == list(needed)
            assert layer.bitmap_nbytes == 0
        elif isinstance(plan, RecordsLayer):
            bands = np.arange(plan.map.count) * BAND_NBYTES
            needed = np.flatnonzero((bands < end) & (bands + BAND_NBYTES > begin))
            assert list(named) == (list(needed) if begin < end else [])
            assert layer.bitmap_nbytes == 0
        else:
            assert list(named) == list(range(plan.map.count))
            bits = tensor.tensor_nbytes if plan.form == "overwrite" else 0
            assert layer.bitmap_nbytes * 8 >= bits and layer.bitmap_nbytes % 4 == 0
        assert layer.output_nbytes == plan.map.content_nbytes[named].sum()
        if named:
            assert layer.content_begin == starts[named[0]]
            assert layer.input_begin == plan.map.offset[named[0]]
            last = plan.map.offset[named[-1]] + plan.map.nbytes[named[-1]]
            assert layer.input_nbytes == last - layer.input_begin


def check_round(batch: Batch, number: int, capacities: Capacities) -> None:
    """Outputs, guards and bitmaps do not meet; the frames' tables say where the planned bytes are."""
    at = 0
    true: list[tuple[int, ...]] = []
    for chunk, layer in batch.in_round(number):
        assert chunk.layers[number] is layer
        if not layer.output_nbytes:
            assert layer.output_room == 0
            continue
        assert layer.output_offset >= at and layer.output_offset % ALIGNMENT == 0
        assert layer.guard_offset >= layer.output_offset + layer.output_nbytes
        assert layer.bitmap_offset == layer.guard_offset + GUARD_NBYTES
        at = layer.bitmap_offset + layer.bitmap_nbytes
        assert at <= layer.output_offset + layer.output_room
        true += frames_in(chunk, layer)
    assert at <= batch.output_nbytes(number) <= capacities.output_nbytes
    frames = batch.frames(number)
    assert frames.count == len(true) <= capacities.frames
    columns = (
        frames.input_offset,
        frames.input_nbytes,
        frames.output_offset,
        frames.output_nbytes,
        frames.number,
    )
    assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == sorted(true)
    assert (np.diff(frames.output_nbytes) <= 0).all()


def frames_in(chunk: Chunk, layer: ChunkLayer) -> list[tuple[int, ...]]:
    plan = layer.plan
    assert isinstance(plan, FramesLayer | RecordsLayer | PayloadLayer)
    rows = []
    for n in range(layer.first_frame, layer.end_frame):
        input_offset = layer.input_offset + plan.map.offset[n] - layer.input_begin
        output_offset = layer.output_offset + plan.map.content_offset[n] - layer.content_begin
        sizes = plan.map.nbytes[n], plan.map.content_nbytes[n]
        row = (input_offset, sizes[0], output_offset, sizes[1], chunk.tensor.number)
        rows.append(tuple(int(value) for value in row))
    return rows


# ---- planning, single facts --------------------------------------------------------------------------


def one(nbytes: int, *plans: LayerPlan, number: int = 0) -> DeviceTensor:
    return DeviceTensor(number, "t", nbytes, RegionMap.whole(0, nbytes), plans)


def test_chunks_end_where_frames_do_so_that_no_frame_is_decoded_twice() -> None:
    tensor = one(8 * MIB, FramesLayer(NOTHING, frames_of(8 * MIB, 256 * KIB)))
    # four frames and the guard are over the output: 15 tiles would fit, but end within a frame
    batches = plan_batches([tensor], replace(SMALL, output_nbytes=MIB))
    assert [batch.frames(0).count for batch in batches] == [3] * 10 + [2]


def test_chunks_end_where_bands_do() -> None:
    bands = map_of([30 * KIB] * 8)
    tensor = one(8 * MIB, RecordsLayer(NOTHING, bands))
    # 47 tiles of delta fit: 2.9 bands
    batches = plan_batches([tensor], replace(SMALL, delta_nbytes=47 * TILE_NBYTES, tiles=80))
    assert [batch.frames(0).count for batch in batches] == [2] * 4
    assert [batch.region_nbytes for batch in batches] == [2 * MIB] * 4


def test_a_frame_over_a_batch_sends_its_tensor_to_the_host() -> None:
    tensor = one(2 * MIB, FramesLayer(NOTHING, frames_of(2 * MIB, 2 * MIB)))
    reason = why_not_device(tensor, SMALL)
    assert reason is not None and str(2 * MIB + GUARD_NBYTES) in reason
    with pytest.raises(OutOfScratchError) as caught:
        plan_batches([tensor], SMALL)
    assert caught.value.needed_bytes == 2 * MIB + GUARD_NBYTES
    assert caught.value.tensor == "t"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (FramesLayer(NOTHING, frames_of(MIB, MIB, ratio=4)), "bytes to read"),
        (FramesLayer(NOTHING, frames_of(MIB, 1000)), "frames"),
        (PayloadLayer(NOTHING, frames_of(2 * MIB, MIB), "xor_sparse"), "bytes to decode"),
    ],
)
def test_each_capacity_has_its_reason(plan: LayerPlan, reason: str) -> None:
    found = why_not_device(one(MIB, plan), SMALL)
    assert found is not None and reason in found


def test_many_small_tensors_share_batches_and_large_ones_come_first() -> None:
    sizes = [300] * 50 + [100_000] * 20 + [700_000]
    found = [
        one(nbytes, FramesLayer(NOTHING, frames_of(nbytes, MIB)), number=number)
        for number, nbytes in enumerate(sizes)
    ]
    batches = plan_batches(found, SMALL)
    assert batches[0].chunks[0].tensor.region.nbytes == 700_000
    assert len(batches) <= 6
    assert plan_batches([], SMALL) == ()


# ---- capacities --------------------------------------------------------------------------------------


def nvcomp_temp(nframes: int, max_nbytes: int, total_nbytes: int) -> int:
    """What nvCOMP 5.3 and 6.0 were found to ask for."""
    assert max_nbytes < 1 << 31
    return 3 * total_nbytes + 3468 * max(2 * nframes, total_nbytes // 65536)


@pytest.mark.parametrize("scratch_nbytes", [16 * MIB, 64 * MIB, 1 << 30, 40 << 30])
def test_all_buffers_together_stay_within_the_scratch_and_use_it(scratch_nbytes: int) -> None:
    found = capacities_for(scratch_nbytes, nvcomp_temp)
    used = scratch_of(found, nvcomp_temp)
    assert used <= scratch_nbytes
    assert used >= 0.95 * min(scratch_nbytes, 28 << 30)  # a batch has fewer than 2^32 entries
    temp = nvcomp_temp(found.frames, MIB, found.output_nbytes)
    tables = found.tiles * (64 * 64 + 1024)  # block sums and counts alone
    rest = found.delta_nbytes + found.input_nbytes + tables
    assert SLOTS * rest + found.output_nbytes + temp <= used
    assert found.delta_nbytes % TILE_NBYTES == 0 and found.delta_nbytes > min(
        scratch_nbytes // 9, 3 << 30
    )
    assert found.delta_nbytes < 1 << 32


def test_too_little_scratch_is_refused_with_what_it_takes() -> None:
    with pytest.raises(OutOfScratchError) as caught:
        capacities_for(4 * MIB, nvcomp_temp)
    needed = caught.value.needed_bytes
    assert needed is not None and needed > 4 * MIB == caught.value.budget_bytes
    assert capacities_for(needed, nvcomp_temp).delta_nbytes == MIB
