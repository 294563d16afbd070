"""The pipeline driven with strided regions: digests and live bytes are numpy's, and no more is read than is needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gpusync.device.batches import plan_batches
from gpusync.device.chunks import Capacities
from gpusync.device.cuda_runtime import cuda_runtime
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
from gpusync.device.nvcomp import Nvcomp
from gpusync.device.pipeline import Pipeline
from gpusync.device.runtime import Runtime
from gpusync.device.scratch import Scratch
from gpusync.device.segments import DeviceChanges, ListMemory
from gpusync.device.staging import Feeder, PinnedRing
from gpusync.folding.fold import Fold
from gpusync.host.changes import ListBudget
from gpusync.published.blobmaps import BlobMap, read_blob_map
from gpusync.published.blobs import BlobFile, BlobSource
from gpusync.testing import EmulatedRuntime
from tests import live, wire
from tests.device.published import open_blobs, write_delta
from tests.device.support import download, upload
from tests.reference import xor_rows
from tests.unit.strategies import compress, fixed, framed, seekable

KIB = 1 << 10
ON_EVERY_DEVICE = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
TIGHT = Capacities(128 * KIB, 256 * KIB, 384 * KIB, 12, 160)
"""One or two tiles of deltas a batch, so that most regions need several."""

ROOMY = Capacities(4096 * KIB, 2048 * KIB, 8192 * KIB, 256, 4096)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# ---- tensors, their versions, and regions of them --------------------------------------------------


@dataclass(frozen=True)
class ArrayOrigin:
    """A full version of a tensor, in memory."""

    array: Bytes

    def read_into(self, piece: Bytes, offset: int) -> None:
        np.copyto(piece, self.array[offset : offset + piece.size])


class History:
    """A tensor's bytes over some versions, and the layers that lead from the first to the last.

    Parameters
    ----------
    steps
        Of each version: "full", or a delta's encoding, and how its payload is framed.
    """

    def __init__(
        self, folder: Path, nbytes: int, steps: Sequence[str], seed: int, frame_nbytes: int = 4096
    ) -> None:
        rng = np.random.default_rng(seed)
        self.old: Bytes = rng.integers(0, 256, nbytes, np.uint8)
        self.new = self.old
        self.blobs: list[BlobSource] = []
        layers: list[LayerPlan] = []
        self.origin: ArrayOrigin | None = None
        for version, step in enumerate(steps, 1):
            before, self.new = self.new, self.new.copy()
            at = np.union1d(np.flatnonzero(rng.random(nbytes) < 0.03), [0, nbytes - 1])
            self.new[at] ^= rng.integers(1, 256, at.size, np.uint8)
            if step == "full":
                self.origin = ArrayOrigin(self.new)
                layers.append(RawLayer(self.origin))
                continue
            payload = wire.encode(step, before.tobytes(), self.new.tobytes())
            blob = seekable(payload, frame_nbytes) if version % 2 else compress(payload)
            if step == "xor_rows":
                blob = framed(xor_rows.encode((before ^ self.new).tobytes()))
            layers.append(self._publish(folder, version, step, blob, nbytes))
        self.layers = tuple(layers)

    def _publish(
        self, folder: Path, version: int, step: str, blob: bytes, nbytes: int
    ) -> FramesLayer | PayloadLayer | RecordsLayer:
        write_delta(folder, {"t": blob}, version=version, encoding=step)
        source = open_blobs(folder, version)["t"]
        self.blobs.append(source)
        found = read_blob_map(source, nbytes)
        assert isinstance(found, BlobMap), found
        if step == "xor":
            return FramesLayer(source, found)
        if step == "xor_rows":
            return RecordsLayer(source, found)
        return PayloadLayer(source, found, step)  # type: ignore[arg-type]

    def tensor(self, number: int, region: RegionMap, *, by_host: bool = False) -> DeviceTensor:
        layers = self.layers
        if by_host:
            deltas_alone = self.origin is None and all(blob.is_xor for blob in self.blobs)
            origin = None if deltas_alone else self.origin or ArrayOrigin(self.old)
            layers = (FoldedLayer(origin, tuple(self.blobs)),)
        return DeviceTensor(number, "t", self.old.size, region, layers)


@dataclass(frozen=True)
class Slice:
    """A region of a tensor: ``rows`` runs of ``run`` bytes, ``stride`` apart in it and ``live_stride`` live."""

    begin: int
    rows: int
    run: int
    stride: int
    live_stride: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.run

    @property
    def live_nbytes(self) -> int:
        return (self.rows - 1) * self.live_stride + self.run

    def _places(self, begin: int, stride: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        rows = np.arange(self.rows)[:, None] * stride
        return (begin + rows + np.arange(self.run)).reshape(-1)

    def of(self, tensor: Bytes) -> Bytes:
        return tensor[self._places(self.begin, self.stride)]

    def put(self, memory: Bytes, at: int, values: Bytes) -> None:
        memory[self._places(at, self.live_stride)] = values

    def map(self, address: int) -> RegionMap:
        if self.rows == 1:
            return replace(RegionMap.whole(address, self.run), tensor_begin=self.begin)
        return RegionMap(address, self.nbytes, self.run, self.live_stride, self.begin, self.stride)


def rows_of(begin: int, nbytes: int) -> Slice:
    """Whole rows: one run on both sides."""
    return Slice(begin, 1, nbytes, nbytes, nbytes)


# ---- running ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A region, and where it lies in the live memory."""

    history: History
    part: Slice
    at: int
    by_host: bool = False


class Rig:
    """A device with live memory, in which regions lie between bytes that are nobody's."""

    def __init__(self, runtime: Runtime, placed: Sequence[Placed], capacities: Capacities) -> None:
        self.runtime = runtime
        self.placed = placed
        self.capacities = capacities
        end = max(place.at + place.part.live_nbytes for place in placed)
        self.before = np.random.default_rng(5).integers(0, 256, end + 64, np.uint8)
        self.after = self.before.copy()
        for place in placed:
            for memory, tensor in (
                (self.before, place.history.old),
                (self.after, place.history.new),
            ):
                place.part.put(memory, place.at, place.part.of(tensor))
        self.memory = upload(runtime, self.before)
        self.feeder = Feeder(PinnedRing(runtime, 2, 8 * KIB), Fold(8 * KIB, 2))

    def check(self) -> int:
        """Digest, list and store, and hold everything against numpy. Returns the number of batches."""
        tensors = [
            place.history.tensor(
                number, place.part.map(self.memory.data_ptr() + place.at), by_host=place.by_host
            )
            for number, place in enumerate(self.placed)
        ]
        batches = plan_batches(tensors, self.capacities)
        nvcomp = Nvcomp(self.runtime.nvcomp_library())
        scratch = Scratch(self.runtime, self.capacities, nvcomp, len(tensors))
        lists = ListMemory(self.runtime, ListBudget(1 << 30), ListBudget(1 << 30))
        pipeline = Pipeline(self.runtime, nvcomp, scratch, self.feeder, lists, lambda nbytes: None)
        verdict, segments = pipeline.run(batches)
        assert not (verdict.stopped or verdict.damaged or verdict.unlike or verdict.bad.any())
        for place, digest in zip(self.placed, verdict.digests, strict=True):
            new = place.part.of(place.history.new)
            assert digest == xxhash.xxh3_128_intdigest(new.tobytes())
        assert (download(self.runtime, self.memory) == self.before).all()
        words = sum(
            changed_words(place, self.memory.data_ptr() + place.at) for place in self.placed
        )
        assert sum(segment.count for segment in segments) == words
        changes = DeviceChanges(self.runtime, self.runtime.stream(), segments, lists)
        changes.check()
        changes.store()
        assert (download(self.runtime, self.memory) == self.after).all()
        changes.take_back()
        assert (download(self.runtime, self.memory) == self.before).all()
        return len(batches)


def changed_words(place: Placed, address: int) -> int:
    """Return how many words change of a region at an address. They are of two bytes if none lies at an odd address or
    in two runs; an odd last byte is one."""
    part = place.part
    odd = address % 2 or (part.rows > 1 and (part.run % 2 or part.live_stride % 2))
    old, new = (part.of(tensor) for tensor in (place.history.old, place.history.new))
    return np.unique(np.flatnonzero(old != new) // (1 if odd else 2)).size


@contextmanager
def on(device: str) -> Iterator[Runtime]:
    """Give a device, outside of whose memory nothing may be written."""
    live.need(device)
    if device == "cuda":
        yield cuda_runtime(torch.device("cuda", 0))
        return
    runtime = EmulatedRuntime()
    yield runtime
    assert runtime.damage == ()


# ---- what is tried ---------------------------------------------------------------------------------

CHAINS: Mapping[str, tuple[str, ...]] = {
    "xor": ("xor",),
    "overwrite": ("overwrite",),
    "xor_sparse": ("xor_sparse",),
    "xor_rows": ("xor_rows",),
    "full": ("full",),
    "xor, xor": ("xor", "xor", "xor"),
    "all": ("xor", "overwrite", "xor_sparse", "xor_rows", "xor"),
    "full, then all": ("full", "xor", "overwrite", "xor_rows", "xor_sparse"),
}

ROW_NBYTES, ROWS = 1030, 200
TENSOR_NBYTES = ROW_NBYTES * ROWS
SLICES: Mapping[str, Slice] = {
    "whole": rows_of(0, TENSOR_NBYTES),
    "rows": rows_of(50 * ROW_NBYTES, 77 * ROW_NBYTES),
    "rows from an odd byte": rows_of(12_345, 150_001),
    "columns": Slice(200, ROWS, 400, ROW_NBYTES, 400),
    "columns into wider rows": Slice(0, ROWS, 514, ROW_NBYTES, 600),
    "odd columns": Slice(3, ROWS, 515, ROW_NBYTES, 777),
    "one column": Slice(7, ROWS, 1, ROW_NBYTES, 3),
    "rows into wider rows": Slice(ROW_NBYTES, 150, ROW_NBYTES, ROW_NBYTES, 1301),
    "some columns of some rows": Slice(31 * ROW_NBYTES + 16, 9, 32, ROW_NBYTES, 48),
    "less than 240 bytes": Slice(5, 3, 17, ROW_NBYTES, 20),
}


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@pytest.mark.parametrize("steps", CHAINS)
@pytest.mark.parametrize("region", SLICES)
def test_a_region_becomes_what_numpy_makes_of_it(
    device: str, region: str, steps: str, tmp_path: Path
) -> None:
    history = History(tmp_path, TENSOR_NBYTES, CHAINS[steps], 1)
    part = SLICES[region]
    with on(device) as runtime:
        for at, capacities in ((16, TIGHT), (17, ROOMY)):
            batches = Rig(runtime, [Placed(history, part, at)], capacities).check()
            assert (batches > 1) == (capacities is TIGHT and part.nbytes > capacities.delta_nbytes)


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@pytest.mark.parametrize("steps", CHAINS)
@pytest.mark.parametrize("capacities", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_several_regions_of_one_tensor(
    device: str, capacities: Capacities, steps: str, tmp_path: Path
) -> None:
    """Slices side by side without a byte between them, one of them twice, and the host's own fold of another."""
    history = History(tmp_path, TENSOR_NBYTES, CHAINS[steps], 2)
    placed: list[Placed] = []
    at = 1
    for name in SLICES:
        part = SLICES[name]
        placed.append(Placed(history, part, at, by_host=name in ("columns", "odd columns")))
        at += part.live_nbytes
    placed.append(Placed(history, SLICES["odd columns"], at))
    with on(device) as runtime:
        Rig(runtime, placed, capacities).check()


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
def test_columns_of_two_tensors_that_take_turns_in_memory(device: str, tmp_path: Path) -> None:
    """A fused parameter: odd runs of one tensor between odd runs of the other, so that words are shared."""
    histories = [
        History(tmp_path / str(seed), 301 * 99, ("xor", "overwrite"), seed) for seed in (3, 4)
    ]
    part = Slice(0, 99, 301, 301, 602)
    placed = [Placed(history, part, 5 + 301 * at) for at, history in enumerate(histories)]
    with on(device) as runtime:
        Rig(runtime, placed, TIGHT).check()


@st.composite
def slices(draw: st.DrawFn, nbytes: int) -> Slice:
    """Any rows, columns or both of a tensor of that size."""
    stride = draw(st.sampled_from((2, 7, 16, 64, 255, 1024, 5000, nbytes)))
    begin = draw(st.integers(0, nbytes - 1))
    run = draw(st.integers(1, min(stride, nbytes - begin)))
    rows = draw(st.integers(1, 1 + (nbytes - begin - run) // stride))
    gap = draw(st.sampled_from((0, 0, 1, 2, 13)))
    return Slice(begin, rows, run, stride, run + gap)


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@fixed
@given(data=st.data())
def test_any_slices_of_any_tensor(device: str, data: st.DataObject) -> None:
    nbytes = data.draw(st.sampled_from((1, 5, 64, 241, 5000, 70_001, 140_000)), label="nbytes")
    steps = data.draw(st.sampled_from(sorted(CHAINS)), label="steps")
    parts = data.draw(st.lists(slices(nbytes), min_size=1, max_size=4), label="parts")
    at = data.draw(st.integers(0, 16), label="at")
    with tempfile.TemporaryDirectory() as folder, on(device) as runtime:
        history = History(Path(folder), nbytes, CHAINS[steps], nbytes, 1000)
        placed: list[Placed] = []
        for part in parts:
            placed.append(Placed(history, part, at, by_host=data.draw(st.booleans())))
            at += part.live_nbytes + data.draw(st.integers(0, 2))
        Rig(runtime, placed, data.draw(st.sampled_from((TIGHT, ROOMY)))).check()


# ---- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@pytest.mark.parametrize("capacities", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize("part", [rows_of(20_000, 130_000), rows_of(99_999, 1)], ids=str)
def test_only_the_frames_that_cover_a_row_slice_are_read(
    device: str,
    part: Slice,
    capacities: Capacities,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = History(tmp_path, TENSOR_NBYTES, ("xor",), 6)
    found = history.layers[0].map
    first, end = part.begin // 4096, -(-(part.begin + part.nbytes) // 4096)
    begin, stop = int(found.offset[first]), int(found.offset[end - 1] + found.nbytes[end - 1])
    read: list[tuple[int, int]] = []
    real = BlobFile.read_into

    def read_into(self: BlobFile, buffer: memoryview, offset: int) -> None:
        read.append((offset, offset + len(buffer)))
        real(self, buffer, offset)

    monkeypatch.setattr(BlobFile, "read_into", read_into)
    with on(device) as runtime:
        rig = Rig(runtime, [Placed(history, part, 16)], capacities)
        batches = rig.check()
        assert min(begin for begin, _ in read) == begin
        assert max(end for _, end in read) == stop
        nbytes = sum(end - begin for begin, end in read)
        # a frame at the border of two chunks is read for both
        assert stop - begin <= nbytes <= stop - begin + (batches - 1) * int(found.nbytes.max())
        assert rig.feeder.times().bytes["read"] == nbytes
