"""Deltas made of decoded layers and sparse payloads by the kernels, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpusync.device.kernels import ITEM_ENTRIES, LAYER, PAYLOAD, TILE_NBYTES
from gpusync.device.runtime import Runtime
from tests.device.arrays import (
    EDGES,
    Bytes,
    Device,
    Memory,
    Region,
    chunk_row,
    contiguous,
    cut_tiles,
    side_by_side,
)

SET, XOR, FULL = 0, 1, 2
OVERWRITE, XOR_SPARSE = 1, 2
REFUSED = 2


@dataclass(frozen=True)
class Cut:
    """A chunk, and the tensor bytes that it is: those of region position q are at
    ``tensor_begin + q // run_nbytes * tensor_stride + q % run_nbytes``."""

    region: Region
    offset: int
    nbytes: int
    tensor_begin: int = 0
    tensor_stride: int = 0

    @property
    def tensor_places(self) -> NDArray[np.intp]:
        run, column = np.divmod(
            np.arange(self.offset, self.offset + self.nbytes), self.region.run_nbytes
        )
        return self.tensor_begin + run * self.tensor_stride + column

    @property
    def live_places(self) -> NDArray[np.intp]:
        return self.region.places[self.offset :][: self.nbytes]


def whole(region: Region) -> Cut:
    return Cut(region, 0, region.nbytes)


# Columns and rows of a tensor: as they lie in live memory, and as they lie in the tensor.
STRIDED = {
    "columns, contiguous live": Cut(Region(0, 91 * 1000, 91, 91), 0, 91000, 13, 300),
    "columns, even, aligned": Cut(Region(0, 64 * 2000, 64, 64), TILE_NBYTES, 62464, 128, 256),
    "columns of one byte": Cut(Region(3, 70000, 1, 2), TILE_NBYTES, 4464, 5, 3),
    "columns into columns": Cut(Region(7, 30 * 2500, 30, 77), 0, TILE_NBYTES, 60, 90),
    "whole into columns": Cut(Region(16, 48 * 2000, 48, 80), 0, 96000, 0, 48),
    "whole into odd columns": Cut(Region(1, 25 * 4000, 25, 27), TILE_NBYTES, 34464, 8, 25),
    "rows": Cut(contiguous(32, 150000), TILE_NBYTES, 84464, 4096, 150000),
    "rows, no stride given": Cut(contiguous(32, 150000), 0, 150000, 17, 0),
}


class Chunks:
    """Chunks whose deltas hold random bytes, in memory of their own."""

    def __init__(self, device: Device, cuts: Sequence[Cut]) -> None:
        rng = np.random.default_rng(len(cuts))
        self.cuts = cuts
        size = max(int(cut.region.places[-1]) + 1 for cut in cuts)
        self.live = rng.integers(0, 256, size, np.uint8)
        self._live = device.put(self.live)
        self.before = [rng.integers(0, 256, cut.nbytes, np.uint8) for cut in cuts]
        self._deltas = [device.put(before) for before in self.before]
        rows = [
            chunk_row(cut.region, self._live.address, delta.address, cut.offset, cut.nbytes)
            for cut, delta in zip(cuts, self._deltas, strict=True)
        ]
        self.rows = device.put(np.concatenate(rows))

    def deltas(self) -> list[Bytes]:
        """What they hold now; live memory has not changed."""
        np.testing.assert_array_equal(self._live.read(), self.live)
        return [delta.read() for delta in self._deltas]


def layer_deltas(
    device: Device, cuts: Sequence[Cut], mode: int, shift: int, *, gate: int = 0
) -> None:
    """Apply a layer to each chunk in one launch, and compare with numpy."""
    chunks = Chunks(device, cuts)
    rng = np.random.default_rng(mode)
    rows, expected, sources = np.zeros(len(cuts), LAYER), [], []
    for number, (cut, before) in enumerate(zip(cuts, chunks.before, strict=True)):
        places = cut.tensor_places
        tensor = rng.integers(0, 256, int(places.max()) + 1, np.uint8)
        begin = int(places.min())
        sources.append(device.put(tensor[begin:], shift=shift))
        rows[number]["source"], rows[number]["source_begin"] = sources[-1].address, begin
        rows[number]["chunk"], rows[number]["mode"] = number, mode
        rows[number]["tensor_begin"] = cut.tensor_begin
        rows[number]["tensor_stride"] = cut.tensor_stride
        other = {SET: np.zeros_like(before), XOR: before, FULL: chunks.live[cut.live_places]}
        expected.append(before if gate else tensor[places] ^ other[mode])
    rows["first_tile"], tile_layer = cut_tiles((cut.nbytes for cut in cuts), TILE_NBYTES)
    device.launch(
        "gs_layers",
        tile_layer.size,
        device.put(rows),
        device.put(tile_layer),
        tile_layer.size,
        chunks.rows,
        device.put(np.array([gate], np.uint32)),
    )
    for got, want in zip(chunks.deltas(), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", [SET, XOR, FULL])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8, 15])
@pytest.mark.parametrize("begin", [0, 1])
def test_layers_of_every_size(runtime: Runtime, mode: int, shift: int, begin: int) -> None:
    cuts = [whole(region) for region in side_by_side(EDGES, begin, gap=0)]
    layer_deltas(Device(runtime), cuts, mode, shift)


@pytest.mark.parametrize("mode", [SET, XOR, FULL])
@pytest.mark.parametrize("name", STRIDED)
def test_layers_of_slices(runtime: Runtime, name: str, mode: int) -> None:
    device = Device(runtime)
    layer_deltas(device, [STRIDED[name]], mode, shift=0)
    layer_deltas(device, [STRIDED[name]], mode, shift=3)


@pytest.mark.parametrize("mode", [SET, XOR, FULL])
def test_layers_of_many_chunks_in_one_launch(runtime: Runtime, mode: int) -> None:
    layer_deltas(Device(runtime), list(STRIDED.values()), mode, shift=0)


def test_a_shut_gate_stops_layers(runtime: Runtime) -> None:
    layer_deltas(Device(runtime), [whole(contiguous(0, 70000))], SET, shift=0, gate=1)


def payload_of(
    form: int, positions: NDArray[Any], values: Bytes, *, count: int | None = None
) -> Bytes:
    """A payload as the format has it; ``count`` is what it says it holds."""
    number = np.uint32 if form == OVERWRITE else np.uint64
    said = np.array([positions.size if count is None else count], number)
    parts = (said, positions.astype(number), values)
    return np.concatenate([part.view(np.uint8) for part in parts])


@dataclass(frozen=True)
class Sparse:
    """A payload for chunk ``chunk``, of a tensor of ``tensor_nbytes``."""

    form: int
    data: Bytes
    tensor_nbytes: int
    chunk: int = 0


class Payloads:
    """Payloads on a device: checked, then applied."""

    def __init__(self, device: Device, chunks: Chunks, given: Sequence[Sparse]) -> None:
        self._device = device
        self._chunks = chunks
        # Every byte behind a payload, and every bit behind a bitmap's last word, belongs to nobody.
        self._data = [device.put(sparse.data) for sparse in given]
        self._bitmaps = [device.full(-(-sparse.tensor_nbytes // 32) * 4, 0) for sparse in given]
        rows = np.zeros(len(given), PAYLOAD)
        for number, sparse in enumerate(given):
            row, cut = rows[number], chunks.cuts[sparse.chunk]
            row["data"], row["nbytes"] = self._data[number].address, sparse.data.size
            row["form"], row["tensor_nbytes"] = sparse.form, sparse.tensor_nbytes
            row["bitmap"] = self._bitmaps[number].address if sparse.form == OVERWRITE else 0
            row["tensor"], row["chunk"] = len(given) - 1 - number, sparse.chunk
            row["tensor_begin"], row["tensor_stride"] = cut.tensor_begin, cut.tensor_stride
        room = [
            max(1, (sparse.data.size - 4) // (5 if sparse.form == OVERWRITE else 9))
            for sparse in given
        ]
        rows["first_item"], item_payload = cut_tiles(room, ITEM_ENTRIES)
        self._nitems = item_payload.size
        self._tables = (device.put(rows), device.put(item_payload))
        self.bad = device.full(4 * len(given), 0)
        self.gate = device.full(4, 0)

    def check(self) -> list[int]:
        """Return what is known to be bad, by payload."""
        self._launch("gs_payload_check", self.bad)
        bad: list[int] = self.bad.read(np.uint32)[::-1].tolist()
        assert not any(bad) or self.gate.read(np.uint32)[0]
        return bad

    def apply(self) -> list[Bytes]:
        """Return the chunks' deltas."""
        self._launch("gs_payload_apply", self._chunks.rows)
        return self._chunks.deltas()

    def _launch(self, kernel: str, target: Memory) -> None:
        rows, item_payload = self._tables
        self._device.launch(
            kernel, self._nitems, rows, item_payload, self._nitems, target, self.gate
        )


def refusal(runtime: Runtime, form: int, data: Bytes, tensor_nbytes: int) -> int:
    """What the check says of a payload; where it refuses, nothing is applied."""
    device = Device(runtime)
    chunks = Chunks(device, [whole(contiguous(0, tensor_nbytes))])
    payloads = Payloads(device, chunks, [Sparse(form, data, tensor_nbytes)])
    (bad,) = payloads.check()
    if bad:
        np.testing.assert_array_equal(payloads.apply()[0], chunks.before[0])
    return bad


@pytest.mark.parametrize("form", [OVERWRITE, XOR_SPARSE])
@pytest.mark.parametrize("said", [-1, +1, None])
@pytest.mark.parametrize("entries", [0, 1, 4095, 4096, 4097, 9000])
def test_count_and_size_must_agree(
    runtime: Runtime, form: int, said: int | None, entries: int
) -> None:
    count = entries if said is None else (entries + said) % (1 << 32)
    data = payload_of(form, np.arange(entries), np.ones(entries, np.uint8), count=count)
    assert refusal(runtime, form, data, 9000) == (0 if said is None else REFUSED)


@pytest.mark.parametrize("form", [OVERWRITE, XOR_SPARSE])
@pytest.mark.parametrize("entries", [0, 1, 5000])
def test_no_byte_may_be_missing_or_left_over(runtime: Runtime, form: int, entries: int) -> None:
    data = payload_of(form, np.arange(entries), np.ones(entries, np.uint8))
    for size in {0, 1, 3, 4, 7, 8, data.size - 1} & set(range(data.size)):
        assert refusal(runtime, form, data[:size], 9000) == REFUSED
    for more in (1, 4, 5, 8, 9):
        longer = np.append(data, np.zeros(more, np.uint8))
        assert refusal(runtime, form, longer, 9000) == REFUSED


@pytest.mark.parametrize("form", [OVERWRITE, XOR_SPARSE])
@pytest.mark.parametrize("entry", [0, 1, 4095, 4096, 8192])
def test_positions_lie_in_the_tensor(runtime: Runtime, form: int, entry: int) -> None:
    for position in (8193, 2**32 - 1, *((2**63, 2**64 - 1) if form == XOR_SPARSE else ())):
        positions = np.arange(8193, dtype=np.uint64)
        positions[entry] = position
        data = payload_of(form, positions, np.ones(positions.size, np.uint8))
        assert refusal(runtime, form, data, 8193) == REFUSED


@pytest.mark.parametrize("first", [0, 1, 255, 256, 4095, 4096])
def test_xor_sparse_positions_increase(runtime: Runtime, first: int) -> None:
    for second in (first + 1, first + 300):
        positions = np.arange(5000)
        positions[[first, second]] = positions[[second, first]]
        data = payload_of(XOR_SPARSE, positions, np.ones(5000, np.uint8))
        assert refusal(runtime, XOR_SPARSE, data, 5000) == REFUSED


@pytest.mark.parametrize("form", [OVERWRITE, XOR_SPARSE])
def test_no_position_comes_twice(runtime: Runtime, form: int) -> None:
    for first, second in ((0, 1), (31, 32), (0, 4999), (4095, 4096), (5, 300)):
        positions = np.arange(5000)
        positions[second] = positions[first]
        data = payload_of(form, positions, np.ones(5000, np.uint8))
        assert refusal(runtime, form, data, 5000) == REFUSED


def test_a_refusal_names_its_tensor(runtime: Runtime) -> None:
    device = Device(runtime)
    good = payload_of(OVERWRITE, np.array([7, 3, 5]), np.ones(3, np.uint8))
    chunks = Chunks(device, [whole(contiguous(0, 8)) for _ in range(3)])
    given = [Sparse(OVERWRITE, good, 8, 0), Sparse(OVERWRITE, good, 7, 1), Sparse(1, good, 8, 2)]
    assert Payloads(device, chunks, given).check() == [0, REFUSED, 0]


def test_a_shut_gate_stops_payloads(runtime: Runtime) -> None:
    device = Device(runtime)
    chunks = Chunks(device, [whole(contiguous(0, 8))])
    data = payload_of(OVERWRITE, np.array([9]), np.ones(1, np.uint8))
    payloads = Payloads(device, chunks, [Sparse(OVERWRITE, data, 8)])
    payloads.gate.write(np.array([1], np.uint32))
    assert payloads.check() == [0]
    np.testing.assert_array_equal(payloads.apply()[0], chunks.before[0])


@pytest.mark.parametrize("form", [OVERWRITE, XOR_SPARSE])
@pytest.mark.parametrize("density", [0, 0.05, 1])
def test_payloads_applied(runtime: Runtime, form: int, density: float) -> None:
    """Every kind of slice, and a tensor in three chunks of which each gets the whole payload, in one launch."""
    rng = np.random.default_rng(form)
    region = contiguous(1, 2 * TILE_NBYTES + 35)
    parts = [(0, TILE_NBYTES), (TILE_NBYTES, TILE_NBYTES), (2 * TILE_NBYTES, 35)]
    cuts = [*STRIDED.values(), *(Cut(region, *part, tensor_begin=9) for part in parts)]
    device = Device(runtime)
    chunks = Chunks(device, cuts)
    given, expected = [], []
    for number, cut in enumerate(cuts):
        # The tensor has bytes before, between and behind those of the chunk.
        places = cut.tensor_places
        tensor_nbytes = int(places.max()) + 100
        positions = np.flatnonzero(rng.random(tensor_nbytes) < density)
        if form == OVERWRITE:
            rng.shuffle(positions)
        values = rng.integers(0, 256, positions.size, np.uint8)
        data = payload_of(form, positions, values)
        given.append(Sparse(form, data, tensor_nbytes, number))
        named, byte = np.zeros(tensor_nbytes, bool), np.zeros(tensor_nbytes, np.uint8)
        named[positions], byte[positions] = True, values
        before = chunks.before[number]
        other = chunks.live[cut.live_places] if form == OVERWRITE else before
        expected.append(np.where(named[places], byte[places] ^ other, before))
    payloads = Payloads(device, chunks, given)
    assert not any(payloads.check())
    assert not payloads.gate.read().any()
    for got, want in zip(payloads.apply(), expected, strict=True):
        np.testing.assert_array_equal(got, want)
