"""xor_rows against an implementation written from docs/FORMAT.md alone, in both directions, and its sizes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpusync.errors import FrameFormatError
from gpusync.format.decode_rows import xor_record
from gpusync.format.encode import join_frames
from gpusync.format.encode_rows import encode_rows
from gpusync.format.encodings import Layer, open_layer
from gpusync.format.frames import BlobReader
from gpusync.format.framewalk import MAX_WINDOW
from gpusync.format.rows import (
    BAND_NBYTES,
    ROW_WORDS,
    Band,
    least_payload_nbytes,
    most_payload_nbytes,
)
from gpusync.format.where import Where
from tests.reference import xor_rows
from tests.unit.strategies import compress, fixed, reads

Bytes = NDArray[np.uint8]

WHERE = Where(version=7, file="m.safetensors", tensor="a", offset=1000)
MIB = 1 << 20
ROW = 2 * ROW_WORDS
SIZES = [1, 2, 3, 15, 16, 17, ROW - 1, ROW, ROW + 1, 5 * ROW + 2, 4095, 10_000]
BAND_EDGES = [BAND_NBYTES - 1, BAND_NBYTES, BAND_NBYTES + 1, 2 * BAND_NBYTES + 3]


def delta_of(nbytes: int, density: float, seed: int = 0) -> Bytes:
    """Old XOR new in which so many of the bytes change."""
    rng = np.random.default_rng([nbytes, seed])
    return (rng.integers(1, 256, nbytes) * (rng.random(nbytes) < density)).astype(np.uint8)


def one_step_of_bf16(nbytes: int, density: float) -> Bytes:
    """Old XOR new of bf16 weights of which so many move to a neighbouring value."""
    rng = np.random.default_rng(nbytes)
    old = (rng.standard_normal(nbytes // 2, np.float32) * 0.02).view(np.uint32) >> 16
    moved = rng.random(old.size) < density
    new = old + moved * rng.choice(np.array([1, 0xFFFF], np.uint32), old.size)
    return (old ^ new).astype("<u2").view(np.uint8)


def payload_in(blob: bytes) -> bytes:
    decompressor = zstandard.ZstdDecompressor()
    return decompressor.stream_reader(io.BytesIO(blob), read_across_frames=True).read()


def open_(blob: bytes, nbytes: int) -> Layer:
    return open_layer(
        "xor_rows",
        lambda: reads(blob, 1 << 30),
        blob_nbytes=len(blob),
        nbytes=nbytes,
        max_window=MAX_WINDOW,
        where=WHERE,
        spill=None,
    )


def apply_to(old: Bytes, blob: bytes, piece: int = 2 * MIB) -> Bytes:
    """Apply a blob piece by piece, also where a tensor begins at an odd address."""
    tensor = np.empty(old.size + 1, np.uint8)[1:]
    tensor[:] = old
    layer = open_(blob, tensor.size)
    for begin in range(0, tensor.size, piece):
        layer.apply(tensor[begin : begin + piece], begin)
    layer.finish()
    return tensor


def refusal_of(payload: bytes, nbytes: int) -> FrameFormatError:
    old = np.arange(nbytes).astype(np.uint8)
    with pytest.raises(FrameFormatError) as caught:
        apply_to(old, compress(payload, write_content_size=False))
    err = caught.value
    assert (err.version, err.file, err.tensor) == (7, "m.safetensors", "a")
    assert err.offset is not None
    return err


# ---- right bytes ------------------------------------------------------------------------------------


DENSITIES = [0.0, 0.01, 0.2, 0.6, 1.0]
CASES = [(nbytes, density) for nbytes in SIZES for density in DENSITIES]
CASES += [(nbytes, density) for nbytes in BAND_EDGES for density in (0.01, 0.6)]
CASES += [(BAND_NBYTES, 1.0)]  # the most words that a search may find, and a row more


@pytest.mark.parametrize(("nbytes", "density"), CASES)
def test_what_is_written_is_what_the_format_says(nbytes: int, density: float) -> None:
    delta = delta_of(nbytes, density)
    frames = encode_rows(delta)
    payload = payload_in(join_frames(frames))
    assert xor_rows.decode(payload, nbytes) == delta.tobytes()
    assert least_payload_nbytes(nbytes) <= len(payload) <= most_payload_nbytes(nbytes)
    assert len(frames) == -(-nbytes // BAND_NBYTES)
    sizes = [zstandard.get_frame_parameters(frame.data).content_size for frame in frames]
    assert sizes == [frame.content_nbytes for frame in frames]


def planes_of(delta: bytes, *, rows: bool) -> list[bytes]:
    """Planes of the record of a band, the form in front of the first."""
    record = xor_rows.encode_record(delta, rows=rows)
    words = -(-len(delta) // 2)
    head = 1 + (-(-words // ROW_WORDS) if record[0] == 0 else words)
    plane = (len(record) - head) // 3 if record[0] == 0 else len(delta) - words
    return [
        record[:head],
        *(record[at : at + plane] for at in range(head, len(record), plane or 1)),
    ]


def frame_of(planes: list[bytes]) -> bytes:
    """A frame in which every plane begins a block, by a match table of 64 entries."""
    level = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, write_content_size=True)
    stream = zstandard.ZstdCompressor(compression_params=level).compressobj(
        size=sum(map(len, planes))
    )
    blocks = [
        stream.compress(plane) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for plane in planes[:-1]
    ]
    return b"".join([*blocks, stream.compress(planes[-1]), stream.flush()])


@pytest.mark.parametrize("nbytes", [*SIZES, BAND_NBYTES, BAND_NBYTES - 1])
@pytest.mark.parametrize("density", [0.0, 0.0005, 0.01, 0.05, 0.1, 0.3, 0.6])
def test_frames_are_those_of_a_plain_writer(nbytes: int, density: float) -> None:
    delta = delta_of(nbytes, density)
    padded = np.append(delta, np.zeros(nbytes % 2, np.uint8)).view("<u2")
    rows, words = (frame_of(planes_of(delta.tobytes(), rows=rows)) for rows in (True, False))
    few = np.count_nonzero(padded) <= padded.size / 8
    expected = rows if few or len(rows) <= len(words) else words
    at_an_odd_address = np.append(np.uint8(9), delta)[1:]
    for piece in (delta, at_an_odd_address):
        assert [frame.data for frame in encode_rows(piece)] == [expected]


@pytest.mark.parametrize(("nbytes", "density"), CASES)
@pytest.mark.parametrize("rows", [True, False])
def test_what_the_format_allows_is_read(nbytes: int, density: float, rows: bool) -> None:
    delta, old = delta_of(nbytes, density), delta_of(nbytes, 1, seed=1)
    blob = compress(b"".join(xor_rows.encode(delta.tobytes(), rows=rows)))
    for piece in (2 * MIB, 4096 if nbytes > MIB // 2 else 17):
        np.testing.assert_array_equal(apply_to(old, blob, piece), old ^ delta)


@fixed
@given(
    st.integers(1, 3000),
    st.floats(0, 1),
    st.integers(1, 3000),
    st.integers(0, 1 << 30),
    st.booleans(),
)
def test_any_delta_there_and_back(
    nbytes: int, density: float, piece: int, seed: int, ours: bool
) -> None:
    delta, old = delta_of(nbytes, density, seed), delta_of(nbytes, 1, seed + 1)
    if ours:
        blob = join_frames(encode_rows(delta))
        assert xor_rows.decode(payload_in(blob), nbytes) == delta.tobytes()
    else:
        blob = compress(b"".join(xor_rows.encode(delta.tobytes())))
    np.testing.assert_array_equal(apply_to(old, blob, piece), old ^ delta)


def test_the_most_changes_that_rows_of_a_band_may_hold() -> None:
    delta = np.zeros(BAND_NBYTES, np.uint8)
    most = Band(0, BAND_NBYTES).most_changes
    delta[: 2 * most] = 5
    (record,) = xor_rows.encode(delta.tobytes(), rows=True)
    assert (record[0], len(record)) == (0, 1 + BAND_NBYTES)
    np.testing.assert_array_equal(apply_to(np.zeros_like(delta), compress(record)), delta)
    (words,) = xor_rows.encode(delta.tobytes(), rows=False)
    assert payload_in(join_frames(encode_rows(delta))) in (record, words)


def test_pieces_of_changing_size_and_a_start_from_zeros() -> None:
    delta = delta_of(2 * BAND_NBYTES + 77, 0.01)
    layer = open_(join_frames(encode_rows(delta)), delta.size)
    got = np.full(delta.size, 99, np.uint8)
    begin = 0
    for size in (0, 1, 5000, BAND_NBYTES, 3, 0, delta.size):
        piece = got[begin : begin + size]
        layer.start(piece, begin)
        begin += piece.size
    layer.finish()
    np.testing.assert_array_equal(got, delta)


def test_layers_that_take_turns_and_threads_do_not_meet() -> None:
    nbytes, piece = 2 * BAND_NBYTES + 77, 300_000
    deltas = [delta_of(nbytes, density, seed) for seed, density in enumerate((0.01, 0.2, 0.9))]
    blobs = [join_frames(encode_rows(delta)) for delta in deltas]
    expected = np.bitwise_xor.reduce(deltas)

    def fold(_: int) -> Bytes:
        tensor = np.zeros(nbytes, np.uint8)
        layers = [open_(blob, nbytes) for blob in blobs]
        for begin in range(0, nbytes, piece):
            for layer in layers:
                layer.apply(tensor[begin : begin + piece], begin)
        for layer in layers:
            layer.finish()
        return tensor

    with ThreadPoolExecutor(4) as pool:
        for tensor in pool.map(fold, range(8)):
            np.testing.assert_array_equal(tensor, expected)


def test_tensors_over_4_gib_in_bounded_memory() -> None:
    """4096 bands without a change, and one of 3 bytes with one."""
    bands = (1 << 32) // BAND_NBYTES
    idle = compress(bytes(1 + BAND_NBYTES // ROW))
    blob = idle * bands + compress(b"\1" + b"\1\3\2")
    nbytes = (1 << 32) + 3
    layer = open_(blob, nbytes)
    piece = np.zeros(64 * MIB, np.uint8)
    tracemalloc.start()
    for begin in range(0, 1 << 32, piece.size):
        layer.apply(piece, begin)
    assert not piece.any()
    tail = np.full(3, 8, np.uint8)
    layer.apply(tail, 1 << 32)
    layer.finish()
    assert tail.tolist() == [9, 10, 11]
    assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    tracemalloc.stop()


# ---- sizes ------------------------------------------------------------------------------------------


def test_one_percent_of_bf16_takes_three_quarters_of_a_percent_and_decodes_to_two() -> None:
    delta = one_step_of_bf16(16 * MIB, 0.01)
    blob = join_frames(encode_rows(delta))
    assert len(blob) <= 0.0075 * delta.size
    assert len(payload_in(blob)) <= 0.02 * delta.size
    np.testing.assert_array_equal(apply_to(np.zeros_like(delta), blob), delta)


@pytest.mark.parametrize("make", [one_step_of_bf16, delta_of])
@pytest.mark.parametrize("density", [0.001, 0.05, 0.2, 0.5, 0.8, 1.0])
def test_no_density_takes_much_more_than_xor(
    make: Callable[[int, float], Bytes], density: float
) -> None:
    delta = make(2 * MIB, density)
    blob = join_frames(encode_rows(delta))
    xor = sum(len(compress(delta[at : at + MIB].tobytes())) for at in range(0, delta.size, MIB))
    assert len(blob) <= 1.02 * xor + 200
    assert len(payload_in(blob)) <= delta.size + 2


@pytest.mark.parametrize("density", [0.01, 1.0])
def test_memory_is_that_of_a_band(density: float) -> None:
    delta = delta_of(24 * MIB, density)
    blob = join_frames(encode_rows(delta))
    piece = np.zeros(MIB // 2, np.uint8)
    layer = open_(blob, delta.size)
    tracemalloc.start()
    for begin in range(0, delta.size, piece.size):
        layer.apply(piece, begin)
    layer.finish()
    assert tracemalloc.get_traced_memory()[1] < 2.5 * MIB
    tracemalloc.stop()


# ---- payloads that break a rule -----------------------------------------------------------------------

NBYTES, GOOD, BROKEN, record = xor_rows.NBYTES, xor_rows.GOOD, xor_rows.BROKEN, xor_rows.record


def test_the_record_that_is_bent_below_is_good() -> None:
    assert xor_rows.decode(GOOD, NBYTES)[254:256] == b"\0\2"
    apply_to(np.zeros(NBYTES, np.uint8), compress(GOOD))
    most = record([128, 104, 0], [*range(128), *range(104)], [1] * 232, [0] * 232)
    apply_to(np.zeros(NBYTES, np.uint8), compress(most))


@pytest.mark.parametrize("name", BROKEN)
def test_a_record_that_breaks_a_rule_is_refused_before_its_band_changes(name: str) -> None:
    payload, match = BROKEN[name]
    with pytest.raises(xor_rows.Broken):
        xor_rows.decode(payload, NBYTES)
    assert any(part in refusal_of(payload, NBYTES).message for part in match.split("|"))
    if "longer" in match or "more than" in match:
        return  # seen at the tensor's end: its digest is not looked at before
    piece = np.zeros(NBYTES, np.uint8)
    with pytest.raises(FrameFormatError):
        open_(compress(payload), NBYTES).apply(piece, 0)
    assert not piece.any()


VALUES = {
    "a form of 2": ("0 or 1", 2),
    "a position of 128": (128, 128),
    "a position of 255": (128, 255),
    "a position behind the tensor": (350, 350),
    "positions that fall": ("over 5", 4),
    "a position twice": ("over 5", 5),
    "a row of 129": ("over 127", 127),
    "a value of 0": ("not 0", 0),
    "a count too few": (350, 383),
    "counts of 255": (232, 765),
    "one change more than rows may hold": (232, 233),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_refusal_has_the_values(name: str) -> None:
    err = refusal_of(BROKEN[name][0], NBYTES)
    assert (err.expected, err.got) == VALUES[name]


def test_of_several_broken_rules_the_first_is_named() -> None:
    err = refusal_of(record([4, 0, 0], [130, 9, 9, 200], [1, 1, 0, 1], [0] * 4), NBYTES)
    assert (err.expected, err.got) == (128, 200)
    err = refusal_of(record([4, 0, 1], [1, 9, 9, 7, 99], [0, 1, 1, 1, 1], [0] * 5), NBYTES)
    assert (err.expected, err.got) == ("over 9", 9)


def test_rows_that_begin_lower_than_the_row_before_ended() -> None:
    counts = [0, 2, 0, 0, 1, 3, 0, 0]
    good = record(counts, [7, 127, 0, 0, 1, 2], [1] * 6, [2] * 6)
    got = apply_to(np.zeros(8 * ROW, np.uint8), compress(good)).view("<u2")
    assert np.flatnonzero(got).tolist() == [135, 255, 512, 640, 641, 642]
    bent = record(counts, [7, 127, 0, 0, 2, 1], [1] * 6, [2] * 6)
    assert refusal_of(bent, 8 * ROW).expected == "over 2"


def test_a_target_of_another_size_than_its_band_is_an_error() -> None:
    reader = BlobReader(io.BytesIO(b"").read, nbytes=0, content_nbytes=0, where=WHERE)
    with pytest.raises(ValueError, match="a band of 3 bytes, and a target of 2"):
        xor_record(reader, Band(0, 3), np.zeros(2, np.uint8), WHERE)


def test_a_change_behind_the_last_byte_is_refused() -> None:
    bent = record([0, 1], [0], [1], [1])
    assert refusal_of(bent, ROW + 1).got == 1
    apply_to(np.zeros(ROW + 1, np.uint8), compress(bent[:-1] + b"\0"))


def test_a_refusal_names_the_band() -> None:
    delta = delta_of(2 * BAND_NBYTES, 0.001)
    first, second = xor_rows.encode(delta.tobytes())
    err = refusal_of(first + b"\7" + second[1:], delta.size)
    assert str(BAND_NBYTES) in err.message
    assert (err.expected, err.got) == ("0 or 1", 7)


def test_a_payload_cut_anywhere_is_refused() -> None:
    delta = delta_of(NBYTES, 0.1)
    payload = b"".join(xor_rows.encode(delta.tobytes()))
    for nbytes in range(len(payload)):
        refusal_of(payload[:nbytes], NBYTES)


@fixed
@given(st.data())
def test_any_bytes_are_read_as_the_format_says_or_refused(data: Any) -> None:
    nbytes = data.draw(st.integers(1, 700))
    payload = bytearray(
        b"".join(xor_rows.encode(delta_of(nbytes, data.draw(st.floats(0, 0.3))).tobytes()))
    )
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    grown = data.draw(st.integers(-3, 3))
    bent = bytes(payload[: len(payload) + min(grown, 0)]) + bytes(max(grown, 0))
    old = delta_of(nbytes, 1, seed=1)
    try:
        expected = bytes(
            a ^ b for a, b in zip(old.tobytes(), xor_rows.decode(bent, nbytes), strict=True)
        )
    except xor_rows.Broken:
        expected = None
    try:
        got = apply_to(old, compress(bent), piece=333).tobytes()
    except FrameFormatError:
        got = None
    assert got == expected


# ---- the compiled loops -------------------------------------------------------------------------------


def test_no_loop_reaches_out_of_its_arrays(repository: Path, tmp_path: Path) -> None:
    """The tests above once more, with every index checked."""
    chosen = "any_ or rule or lower or most or (1048576 and not plain)"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/unit/test_rows.py", "-k", chosen],
        cwd=repository,
        env=os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
