"""Records of xor_rows judged and applied by the kernels, against an implementation written from the format alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from gpusync.device.kernels import RECORD, TILE_NBYTES
from gpusync.device.runtime import Runtime
from tests.device.arrays import Bytes, Device, contiguous
from tests.device.test_layer_kernels import STRIDED, Chunks, Cut, whole
from tests.reference import xor_rows

REFUSED = 2
BAND = xor_rows.BAND


class Records:
    """Records on a device, of bands of ``tensor_nbytes`` bytes: checked, then applied. Row i is of chunk ``chunk[i]``."""

    def __init__(
        self,
        device: Device,
        chunks: Chunks,
        records: Sequence[bytes],
        tensor_nbytes: int,
        chunk: Sequence[int] | None = None,
        shift: int = 0,
    ) -> None:
        self._device = device
        self._chunks = chunks
        # Every byte behind a record belongs to nobody.
        self._data = [device.put(np.frombuffer(one, np.uint8), shift=shift) for one in records]
        rows = np.zeros(len(records), RECORD)
        for number, one in enumerate(records):
            of = number % -(-tensor_nbytes // BAND)
            row, at = rows[number], chunk[number] if chunk is not None else 0
            cut = chunks.cuts[at]
            row["data"], row["nbytes"] = self._data[number].address, len(one)
            row["band_begin"] = of * BAND
            row["band_nbytes"] = min(BAND, tensor_nbytes - of * BAND)
            row["tensor"], row["chunk"] = len(records) - 1 - number, at
            row["tensor_begin"], row["tensor_stride"] = cut.tensor_begin, cut.tensor_stride
        self._rows, self._count = device.put(rows), len(records)
        self.bad = device.full(4 * len(records), 0)
        self.gate = device.full(4, 0)

    def check(self) -> list[int]:
        """Return what is known to be bad, by record."""
        self._device.launch(
            "gs_record_check", self._count, self._rows, self._count, self.bad, self.gate
        )
        bad: list[int] = self.bad.read(np.uint32)[::-1].tolist()
        assert not any(bad) or self.gate.read(np.uint32)[0]
        return bad

    def apply(self) -> list[Bytes]:
        """Return the chunks' deltas."""
        rows = self._chunks.rows
        self._device.launch(
            "gs_record_apply", self._count, self._rows, self._count, rows, self.gate
        )
        return self._chunks.deltas()


def refusal(runtime: Runtime, record: bytes, nbytes: int) -> int:
    """What the check says of a record; where it refuses, nothing is applied."""
    device = Device(runtime)
    chunks = Chunks(device, [whole(contiguous(0, nbytes))])
    records = Records(device, chunks, [record], nbytes)
    (bad,) = records.check()
    if bad:
        np.testing.assert_array_equal(records.apply()[0], chunks.before[0])
    return bad


def delta_of(nbytes: int, density: float, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng([nbytes, seed])
    return (rng.integers(1, 256, nbytes) * (rng.random(nbytes) < density)).astype(np.uint8)


@pytest.mark.parametrize("name", [name for name, (record, _) in xor_rows.BROKEN.items() if record])
def test_a_record_that_breaks_a_rule_is_refused(runtime: Runtime, name: str) -> None:
    assert refusal(runtime, xor_rows.BROKEN[name][0], xor_rows.NBYTES) == REFUSED
    assert refusal(runtime, xor_rows.GOOD, xor_rows.NBYTES) == 0


def test_a_record_cut_anywhere_is_refused(runtime: Runtime) -> None:
    (record,) = xor_rows.encode(delta_of(xor_rows.NBYTES, 0.1).tobytes())
    for nbytes in range(1, len(record)):
        assert refusal(runtime, record[:nbytes], xor_rows.NBYTES) == REFUSED


def test_a_change_behind_the_last_byte_is_refused(runtime: Runtime) -> None:
    record = xor_rows.record([0, 1], [0], [1], [1])
    assert refusal(runtime, record, 257) == REFUSED
    assert refusal(runtime, record, 258) == 0


@pytest.mark.parametrize("seed", range(12))
def test_bent_records_are_refused_where_the_format_refuses_them(
    runtime: Runtime, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    nbytes = int(rng.integers(1, 40_000))
    (record,) = xor_rows.encode(delta_of(nbytes, 0.02, seed).tobytes(), rows=True)
    for _ in range(8):
        bent = bytearray(record)
        bent[int(rng.integers(len(bent)))] = int(rng.integers(256))
        try:
            xor_rows.decode(bytes(bent), nbytes)
            expected = 0
        except xor_rows.Broken:
            expected = REFUSED
        assert refusal(runtime, bytes(bent), nbytes) == expected


@pytest.mark.parametrize("row", [0, 15, 16, 255, 256, 4095])
def test_a_rule_is_held_in_every_row_of_a_band(runtime: Runtime, row: int) -> None:
    delta = delta_of(BAND, 0.002)
    delta[256 * row : 256 * row + 4] = 1, 0, 2, 0
    (record,) = xor_rows.encode(delta.tobytes())
    assert refusal(runtime, record, BAND) == 0
    entry = 1 + 4096 + sum(record[1 : 1 + row])
    swapped = bytearray(record)
    swapped[entry], swapped[entry + 1] = swapped[entry + 1], swapped[entry]
    assert refusal(runtime, bytes(swapped), BAND) == REFUSED


def test_a_refusal_names_its_tensor_and_a_shut_gate_stops_all(runtime: Runtime) -> None:
    device = Device(runtime)
    chunks = Chunks(device, [whole(contiguous(0, xor_rows.NBYTES))])
    given = [xor_rows.GOOD, b"\2" + xor_rows.GOOD[1:], xor_rows.GOOD]
    records = Records(device, chunks, given, xor_rows.NBYTES)
    # One refusal may hide others, but it hides none that came before.
    assert records.check() == [0, REFUSED, 0]
    np.testing.assert_array_equal(records.apply()[0], chunks.before[0])
    records = Records(device, chunks, given, xor_rows.NBYTES)
    records.gate.write(np.array([1], np.uint32))
    assert records.check() == [0, 0, 0]
    np.testing.assert_array_equal(records.apply()[0], chunks.before[0])


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("density", [0, 0.05, 0.4, 1])
def test_records_applied_to_every_kind_of_slice(
    runtime: Runtime, rows: bool, density: float
) -> None:
    region = contiguous(1, 2 * TILE_NBYTES + 35)
    parts = [(0, TILE_NBYTES), (TILE_NBYTES, TILE_NBYTES), (2 * TILE_NBYTES, 35)]
    for cut in [*STRIDED.values(), *(Cut(region, *part, tensor_begin=9) for part in parts)]:
        # The tensor has bytes before, between and behind those of the chunk.
        tensor_nbytes = int(cut.tensor_places.max()) + 100
        delta = delta_of(tensor_nbytes, density)
        device = Device(runtime)
        chunks = Chunks(device, [cut])
        given = xor_rows.encode(delta.tobytes(), rows=rows)
        records = Records(device, chunks, given, tensor_nbytes, shift=int(density * 10))
        assert not any(records.check())
        np.testing.assert_array_equal(
            records.apply()[0], chunks.before[0] ^ delta[cut.tensor_places]
        )


@pytest.mark.parametrize("nbytes", [1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 70_001])
def test_records_of_every_size(runtime: Runtime, nbytes: int) -> None:
    for density in (0.01, 1):
        for rows in (True, False):
            delta = delta_of(nbytes, density)
            device = Device(runtime)
            chunks = Chunks(device, [whole(contiguous(1, nbytes))])
            given = xor_rows.encode(delta.tobytes(), rows=rows)
            records = Records(device, chunks, given, nbytes)
            assert records.check() == [0]
            np.testing.assert_array_equal(records.apply()[0], chunks.before[0] ^ delta)


def test_records_of_two_bands_in_chunks_that_cut_them(runtime: Runtime) -> None:
    """Each chunk gets the records that it needs; the second begins in the middle of the first band."""
    nbytes = BAND + 3 * TILE_NBYTES + 77
    delta = delta_of(nbytes, 0.002)
    region = contiguous(3, nbytes)
    edge = 9 * TILE_NBYTES
    device = Device(runtime)
    chunks = Chunks(device, [Cut(region, 0, edge), Cut(region, edge, nbytes - edge)])
    first, second = xor_rows.encode(delta.tobytes())
    records = Records(device, chunks, [first, second, first, second], nbytes, chunk=[0, 0, 1, 1])
    assert records.check() == [0] * 4
    got = np.concatenate(records.apply())
    np.testing.assert_array_equal(got, np.concatenate(chunks.before) ^ delta)
