"""Staging: what arrives in the input buffer decodes to the published bytes, or is refused; the ring is enough for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpusync.device.batches import plan_batches
from gpusync.device.chunks import Batch, Capacities
from gpusync.device.layers import (
    DeviceTensor,
    FoldedLayer,
    FramesLayer,
    LayerPlan,
    PayloadLayer,
    RawLayer,
    RegionMap,
)
from gpusync.device.readers import gather
from gpusync.device.runtime import Event, Runtime, Wait
from gpusync.device.staging import Feeder, NeedsHost, PinnedRing
from gpusync.errors import FrameFormatError, GpuSyncError, VersionConflictError
from gpusync.folding.fold import Fold
from gpusync.published.blobmaps import BlobMap, read_blob_map
from gpusync.published.blobs import BlobSource, locate_blob
from gpusync.testing import EmulatedRuntime, Order
from tests.device.published import digests_of, open_blobs, write_delta
from tests.device.support import download
from tests.unit.strategies import compress, fixed, flushed, seekable

KIB, MIB = 1 << 10, 1 << 20
ROOMY = Capacities(32 * MIB, 16 * MIB, 32 * MIB, 1024, 4096)
TIGHT = Capacities(256 * KIB, 128 * KIB, 640 * KIB, 64, 64)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def payload_of(nbytes: int, seed: int = 0) -> bytes:
    """A sparse xor payload that compresses about as real ones do."""
    rng = np.random.default_rng((nbytes, seed))
    return (rng.integers(1, 256, nbytes) * (rng.random(nbytes) < 0.02)).astype(np.uint8).tobytes()


def map_of(source: BlobSource, nbytes: int) -> BlobMap:
    found = read_blob_map(source, nbytes)
    assert isinstance(found, BlobMap), found
    return found


@dataclass(frozen=True)
class ArrayOrigin:
    """A tensor in memory."""

    array: Bytes

    def read_into(self, piece: Bytes, offset: int) -> None:
        np.copyto(piece, self.array[offset : offset + piece.size])


@dataclass
class Stage:
    """A device that batches are fed to, with what it takes to see what arrived."""

    runtime: Runtime
    slots: int = 2
    slot_nbytes: int = 64 * KIB
    workers: int = 2

    def __post_init__(self) -> None:
        self.ring = PinnedRing(self.runtime, self.slots, self.slot_nbytes)
        self.feeder = Feeder(self.ring, Fold(64 * KIB, self.workers))
        self.copy = self.runtime.stream()

    def run(self, tensors: Sequence[DeviceTensor], capacities: Capacities) -> dict[int, bytes]:
        """Return every region's bytes, by number: its XORed layers, or the packed ones."""
        found = {tensor.number: np.zeros(tensor.region.nbytes, np.uint8) for tensor in tensors}
        for batch in plan_batches(tensors, capacities):
            target = self.runtime.empty(max(batch.input_nbytes, 1))
            self.feeder.feed(batch, target, self.copy)
            given = download(self.runtime, target)
            for number in range(batch.rounds):
                apply_round(batch, number, given, found)
        return {number: region.tobytes() for number, region in found.items()}


def decode_round(batch: Batch, number: int, given: Bytes) -> Bytes:
    """Decode a round's frames as the device would: each on its own, from the table alone."""
    output = np.zeros(batch.output_nbytes(number), np.uint8)
    frames = batch.frames(number)
    for n in range(frames.count):
        begin, nbytes = int(frames.input_offset[n]), int(frames.input_nbytes[n])
        at, size = int(frames.output_offset[n]), int(frames.output_nbytes[n])
        content = zstandard.ZstdDecompressor().decompress(
            given[begin : begin + nbytes].tobytes(), max_output_size=size, allow_extra_data=False
        )
        assert len(content) == size
        output[at : at + size] = np.frombuffer(content, np.uint8)
    return output


def apply_round(batch: Batch, number: int, given: Bytes, found: Mapping[int, Bytes]) -> None:
    output = decode_round(batch, number, given)
    for chunk, layer in batch.in_round(number):
        region = chunk.tensor.region
        out = found[chunk.tensor.number][chunk.offset : chunk.offset + chunk.nbytes]
        if layer.is_packed:
            out ^= given[layer.input_offset : layer.input_offset + layer.input_nbytes]
        elif isinstance(layer.plan, FramesLayer):
            content = output[layer.output_offset : layer.output_offset + layer.output_nbytes]
            begin = region.tensor_span(chunk.offset, chunk.offset + chunk.nbytes)[0]
            part = np.empty_like(out)
            took = gather(region, content, layer.content_begin, chunk.offset, part)
            assert took == chunk.nbytes and begin >= layer.content_begin
            out ^= part


def region_bytes(region: RegionMap, tensor: bytes) -> bytes:
    """A region's bytes, one at a time."""
    return bytes(tensor[region.tensor_position(q)] for q in range(region.nbytes))


def frames_tensor(
    source: BlobSource, nbytes: int, region: RegionMap | None = None, number: int = 0
) -> DeviceTensor:
    layer = FramesLayer(source, map_of(source, nbytes))
    region = region or RegionMap.whole(0, nbytes)
    return DeviceTensor(number, source.tensor, nbytes, region, (layer,))


@pytest.fixture
def stage(runtime: Runtime) -> Stage:
    return Stage(runtime)


# ---- what arrives ------------------------------------------------------------------------------------

WRITERS = {
    "single": compress,
    "single, no content size": lambda data: flushed(data, 9999),
    "seekable": lambda data: seekable(data, 64 * KIB),
    "seekable, odd": lambda data: seekable(data, 10_007),
}
NBYTES = 520_001


@pytest.mark.parametrize("capacities", [ROOMY, TIGHT])
@pytest.mark.parametrize("writer", WRITERS)
def test_frames_arrive_for_whole_tensors_rows_and_columns(
    tmp_path: Path, stage: Stage, writer: str, capacities: Capacities
) -> None:
    payload = payload_of(NBYTES)
    write_delta(tmp_path, {"before": b"x", "a": WRITERS[writer](payload)})
    source = open_blobs(tmp_path)["a"]
    regions = [
        RegionMap.whole(0, NBYTES),
        RegionMap(0, 200_000, 200_000, 200_000, 100_001, 0),
        RegionMap(0, 130_000, 1000, 1000, 3, 4000),
    ]
    tensors = [frames_tensor(source, NBYTES, region, n) for n, region in enumerate(regions)]
    found = stage.run(tensors, capacities)
    for number, region in enumerate(regions):
        assert found[number] == region_bytes(region, payload)


def test_a_chain_and_many_small_tensors_share_slots(tmp_path: Path, stage: Stage) -> None:
    sizes = [0, 1, 100, 3000, 70_000, 200_000] * 5
    expected = {}
    for version in (1, 2, 3):
        payloads = [payload_of(size, version * 100 + n) for n, size in enumerate(sizes)]
        blobs = {
            str(n): seekable(data, 30_000) if data else compress(data)
            for n, data in enumerate(payloads)
        }
        write_delta(tmp_path, blobs, version=version)
        for n, data in enumerate(payloads):
            old = np.frombuffer(expected.get(n, bytes(len(data))), np.uint8)
            expected[n] = (old ^ np.frombuffer(data, np.uint8)).tobytes()
    opened = [open_blobs(tmp_path, version) for version in (1, 2, 3)]
    tensors = []
    for n, size in enumerate(sizes):
        sources = [sources[str(n)] for sources in opened]
        chain = tuple(FramesLayer(source, map_of(source, size)) for source in sources)
        tensors.append(DeviceTensor(n, str(n), size, RegionMap.whole(0, size), chain))
    assert stage.run(tensors, TIGHT) == expected
    times = stage.feeder.times()
    assert set(times.bytes) == {"read", "copy"} and times.bytes["copy"] >= times.bytes["read"] > 0


REGIONS = [
    RegionMap.whole(0, NBYTES),
    RegionMap(0, 200_000, 200_000, 200_000, 100_001, 0),
    RegionMap(0, 130_000, 1000, 1000, 3, 4000),
    RegionMap(0, 5 * 66_000, 66_000, 66_000, 7, 100_000),
]


@pytest.mark.parametrize("capacities", [ROOMY, TIGHT])
def test_raw_and_folded_bytes_arrive_packed(
    tmp_path: Path, stage: Stage, capacities: Capacities
) -> None:
    payload, old = payload_of(NBYTES), np.random.default_rng(0).bytes(NBYTES)
    write_delta(tmp_path, {"a": compress(payload, write_checksum=True)})
    source = open_blobs(tmp_path)["a"]
    origin = ArrayOrigin(np.frombuffer(old, np.uint8))
    new = (np.frombuffer(old, np.uint8) ^ np.frombuffer(payload, np.uint8)).tobytes()
    cases: list[tuple[LayerPlan, bytes]] = [
        (RawLayer(origin), old),
        (FoldedLayer(None, (source,)), payload),
        (FoldedLayer(origin, (source,)), new),
    ]
    assert [plan.is_full for plan, _ in cases[1:]] == [False, True]  # type: ignore[union-attr]
    tensors, expected = [], {}
    for number, (region, (plan, data)) in enumerate(
        (region, case) for region in REGIONS for case in cases
    ):
        tensors.append(DeviceTensor(number, "a", NBYTES, region, (plan,)))
        expected[number] = region_bytes(region, data)
    assert stage.run(tensors, capacities) == expected


def test_sparse_payloads_arrive_whole_in_every_chunk(tmp_path: Path, stage: Stage) -> None:
    payload = np.random.default_rng(0).bytes(40_000)
    write_delta(tmp_path, {"a": seekable(payload, 7000)}, encoding="xor_sparse")
    source = open_blobs(tmp_path)["a"]
    plan = PayloadLayer(source, map_of(source, 600_000), "xor_sparse")
    tensor = DeviceTensor(0, "a", 600_000, RegionMap.whole(0, 600_000), (plan,))
    batches = plan_batches([tensor], TIGHT)
    assert len(batches) == 3
    for batch in batches:
        target = stage.runtime.empty(batch.input_nbytes)
        stage.feeder.feed(batch, target, stage.copy)
        assert decode_round(batch, 0, download(stage.runtime, target))[:40_000].tobytes() == payload


def test_a_fold_that_starts_over_goes_on_where_it_was(tmp_path: Path, stage: Stage) -> None:
    payload = payload_of(MIB) + bytes(9 * MIB) + payload_of(MIB, 1)
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    late = zstandard.ZstdCompressor(compression_params=wide).compress(payload[MIB:])
    write_delta(tmp_path, {"a": compress(payload[:MIB], write_content_size=False) + late})
    source = open_blobs(tmp_path)["a"]
    assert isinstance(read_blob_map(source, len(payload)), str)
    tensor = DeviceTensor(
        0, "a", len(payload), RegionMap.whole(0, len(payload)), (FoldedLayer(None, (source,)),)
    )
    capacities = Capacities(2 * MIB, MIB, MIB, 64, 64)
    assert stage.run([tensor], capacities) == {0: payload}
    assert stage.feeder.times().bytes["fold"] == len(payload)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[RegionMap, int, int, list[int]]:
    run, runs = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    region = RegionMap(
        0, run * runs, run, run, draw(st.integers(0, 5)), run + draw(st.integers(0, 7))
    )
    q0 = draw(st.integers(0, region.nbytes))
    q1 = draw(st.integers(q0, region.nbytes))
    return region, q0, q1, draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))


@given(pieces())
@fixed
def test_gather_takes_a_region_out_of_pieces_of_any_size(
    case: tuple[RegionMap, int, int, list[int]],
) -> None:
    region, q0, q1, sizes = case
    tensor = np.arange(200, dtype=np.uint8)
    out = np.zeros(q1 - q0, np.uint8)
    at = done = 0
    while done < out.size:
        piece = tensor[at : at + sizes[at % len(sizes)]]
        done += gather(region, piece, at, q0 + done, out[done:])
        at += piece.size
    assert out.tolist() == [region.tensor_position(q) for q in range(q0, q1)]


# ---- digests of blobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("capacities", [ROOMY, TIGHT])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_blob_is_held_against_the_manifest_however_it_is_read(
    tmp_path: Path, runtime: Runtime, writer: str, rows: bool, capacities: Capacities
) -> None:
    payload = payload_of(NBYTES)
    blob = WRITERS[writer](payload)
    region = RegionMap(0, 200_000, 200_000, 200_000, 100_001, 0) if rows else None
    for good in (True, False):
        folder = tmp_path / str(good)
        stated = digests_of({"a": blob if good else blob + b"x"})
        write_delta(folder, {"a": blob}, stated=stated)
        tensor = frames_tensor(open_blobs(folder)["a"], NBYTES, region)
        stage = Stage(runtime)
        if good:
            found = stage.run([tensor], capacities)[0]
            assert found == region_bytes(tensor.region, payload)
            continue
        # before anything of it is handed on: the first batch does not pass
        batch = plan_batches([tensor], capacities)[0]
        with pytest.raises(FrameFormatError, match="manifest") as caught:
            stage.feeder.feed(batch, runtime.empty(batch.input_nbytes), stage.copy)
        assert (caught.value.tensor, caught.value.expected) == ("a", stated["a"])
        check_ring_is_whole(stage.ring)


def test_the_blob_of_an_empty_tensor_is_held_against_the_manifest(
    tmp_path: Path, stage: Stage
) -> None:
    write_delta(tmp_path, {"a": compress(b"")}, stated=digests_of({"a": b"other"}))
    with pytest.raises(FrameFormatError, match="manifest"):
        stage.run([frames_tensor(open_blobs(tmp_path)["a"], 0)], ROOMY)


# ---- what is refused ---------------------------------------------------------------------------------


def check_ring_is_whole(ring: PinnedRing) -> None:
    """All slots were given back."""
    slots = [ring.lend() for _ in range(ring.slots)]
    for slot in slots:
        ring.give_back(slot, None)


def test_frames_that_are_not_the_maps_go_to_the_host(tmp_path: Path, runtime: Runtime) -> None:
    content = payload_of(4000)
    parts = [content[at : at + 1000] for at in range(0, 4000, 1000)]
    good = [compress(part) for part in parts]
    table = seekable(content, 1000)[sum(map(len, good)) :]
    checked = [*good[:2], compress(parts[2], write_checksum=True)]
    unsized = [*good[:2], compress(parts[2], write_content_size=False)]
    other = [*good[:2], compress(parts[2] + b"x"), compress(parts[3][:-1])]
    junk = b"".join([*good[:2], b"junk" + good[2][4:], good[3]])
    cases = {
        "checksum": table_over([*checked, good[3]], 1000),
        "without content size": table_over([*unsized, good[3]], 1000),
        "seek table": table_over(other, 1000),
        "no zstd frame": junk + table,
        "promises": table_over([good[0] + good[1][:3], good[1][3:], *good[2:]], 1000),
        "ends within": compress(content)[:-1],
        "header promises": compress(content) + compress(b""),
    }
    for number, (reason, blob) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        write_delta(folder, {"a": blob})
        tensor = frames_tensor(open_blobs(folder)["a"], 4000)
        stage = Stage(runtime)
        with pytest.raises(NeedsHost, match=reason) as caught:
            stage.run([tensor], ROOMY)
        assert caught.value.name == "a" and reason in caught.value.reason
        check_ring_is_whole(stage.ring)


def table_over(frames: list[bytes], content_nbytes: int) -> bytes:
    """Frames with a seek table that says they hold ``content_nbytes`` each."""
    entries = b"".join(
        len(frame).to_bytes(4, "little") + content_nbytes.to_bytes(4, "little") for frame in frames
    )
    footer = len(frames).to_bytes(4, "little") + b"\0" + (0x8F92EAB1).to_bytes(4, "little")
    head = (0x184D2A5E).to_bytes(4, "little") + (len(entries) + 9).to_bytes(4, "little")
    return b"".join(frames) + head + entries + footer


def test_what_the_host_folds_is_judged_there(tmp_path: Path, stage: Stage) -> None:
    content = payload_of(4000)
    write_delta(tmp_path, {"a": compress(content)[:-1], "b": compress(content)})
    sources = open_blobs(tmp_path)
    whole = RegionMap.whole(0, 4000)
    tensors = [
        DeviceTensor(n, name, 4000, whole, (FoldedLayer(None, (sources[name],)),), "told so")
        for n, name in enumerate(sources)
    ]
    with pytest.raises(FrameFormatError):
        stage.run(tensors, ROOMY)
    check_ring_is_whole(stage.ring)
    assert Stage(stage.runtime).run(tensors[1:], ROOMY) == {1: content}


def test_a_blob_is_judged_to_its_end_also_where_a_region_needs_only_its_begin(
    tmp_path: Path, stage: Stage
) -> None:
    content = payload_of(200_000)
    write_delta(tmp_path, {"a": flushed(content, 999)[:-3]})
    source = open_blobs(tmp_path)["a"]
    region = RegionMap(0, 100, 100, 100, 0, 0)
    tensor = DeviceTensor(0, "a", 200_000, region, (FoldedLayer(None, (source,)),))
    with pytest.raises(FrameFormatError):
        stage.run([tensor], ROOMY)


def test_a_shard_that_was_replaced_is_a_conflict(tmp_path: Path, stage: Stage) -> None:
    write_delta(tmp_path, {"a": compress(payload_of(4000))})
    source = open_blobs(tmp_path)["a"]
    tensor = frames_tensor(source, 4000)
    path = locate_blob(source).path
    raw = path.read_bytes()
    source.files.forget(path)
    path.unlink()
    path.write_bytes(raw + b"more")
    with pytest.raises(VersionConflictError, match="replaced"):
        stage.run([tensor], ROOMY)
    check_ring_is_whole(stage.ring)


# ---- the ring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "slot_nbytes", "pinned", "noted"),
    [
        (None, 4 * MIB, 32 * MIB, False),
        (32 * MIB, 4 * MIB, 32 * MIB, False),
        (32 * MIB - 1, 2 * MIB, 16 * MIB, True),
        (8 * MIB, MIB, 8 * MIB, True),
        (8 * MIB - 1, 4 * MIB, 0, True),
    ],
)
def test_the_ring_makes_do_with_what_may_be_pinned_and_says_so(
    limit: int | None, slot_nbytes: int, pinned: int, noted: bool
) -> None:
    runtime = EmulatedRuntime(pinned_limit_nbytes=limit)
    ring = PinnedRing(runtime)
    assert (ring.slot_nbytes, ring.nbytes) == (slot_nbytes, 8 * slot_nbytes)
    assert runtime.pinned_nbytes == pinned and ring.is_pinned == (pinned > 0)
    assert (ring.note is not None) == noted
    slots = [ring.lend() for _ in range(ring.slots)]
    starts = {slot.memory.data_ptr() for slot in slots}
    assert len(starts) == 8 and max(starts) - min(starts) == 7 * slot_nbytes
    assert all(slot.array.size == slot_nbytes for slot in slots)


def test_batches_go_through_pageable_memory_too(tmp_path: Path) -> None:
    payload = payload_of(NBYTES)
    write_delta(tmp_path, {"a": seekable(payload, 64 * KIB)})
    stage = Stage(EmulatedRuntime(pinned_limit_nbytes=0), slot_nbytes=4096)
    assert not stage.ring.is_pinned
    found = stage.run([frames_tensor(open_blobs(tmp_path)["a"], NBYTES)], ROOMY)
    assert found == {0: payload}


def test_a_slot_is_lent_again_only_when_it_is_given_back() -> None:
    ring = PinnedRing(EmulatedRuntime(), 1, 4096)
    slot = ring.lend()
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(ring.lend()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    ring.give_back(slot, None)
    thread.join(5)
    assert got == [slot]


def test_a_slot_whose_copy_cannot_be_waited_for_is_not_lost() -> None:
    class Lost:
        def synchronize(self, why: Wait) -> None:
            assert why is Wait.HOST_FOR_COPY
            raise GpuSyncError("lost")

    ring = PinnedRing(EmulatedRuntime(), 1, 4096)
    ring.give_back(ring.lend(), cast(Event, Lost()))
    for _ in range(2):
        with pytest.raises(GpuSyncError, match="lost"):
            ring.lend()


@pytest.mark.parametrize("ignored", [None, Wait.HOST_FOR_COPY])
def test_a_slot_is_filled_only_after_the_copy_out_of_it(
    tmp_path: Path, ignored: Wait | None
) -> None:
    payload = np.random.default_rng(0).bytes(NBYTES)
    write_delta(tmp_path, {"a": seekable(payload, 64 * KIB)})
    stage = Stage(EmulatedRuntime(Order(), ignored=ignored), workers=1)
    tensor = frames_tensor(open_blobs(tmp_path)["a"], NBYTES)
    if ignored is None:
        assert stage.run([tensor], ROOMY) == {0: payload}
        return
    with pytest.raises(zstandard.ZstdError):
        stage.run([tensor], ROOMY)


def test_a_failed_copy_gives_its_slot_back(tmp_path: Path) -> None:
    write_delta(tmp_path, {"a": compress(payload_of(4000))})
    runtime = EmulatedRuntime()
    stage = Stage(runtime)
    runtime.fail_at("copy", 1, GpuSyncError("no copy"))
    with pytest.raises(GpuSyncError, match="no copy"):
        stage.run([frames_tensor(open_blobs(tmp_path)["a"], 4000)], ROOMY)
    check_ring_is_whole(stage.ring)
