"""Frames of runs against libzstd's decoders and command line, of content of every kind, and their sizes."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpusync.format.encode import compress_single
from gpusync.format.framewalk import FrameWalker
from gpusync.format.where import Where
from gpusync.format.zstd.encode_runs import compress_runs
from gpusync.format.zstd.nonzero import NonzeroReader
from tests.unit.strategies import fixed, reads

Bytes = NDArray[np.uint8]

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 128 * KIB
SIZES = [*range(1, 18), 63, 64, 65, 255, 256, 257, 300]
LARGE_SIZES = [
    *(middle + more for middle in (64 * KIB, BLOCK, 256 + 65536) for more in (-1, 0, 1)),
    3 * BLOCK + 2,
    MIB - 1,
    MIB,
]


def sparse(nbytes: int, density: float, values: int = 255, seed: int = 0) -> Bytes:
    """Content of which so many bytes are not 0, with so many different values."""
    rng = np.random.default_rng([nbytes, values, seed])
    return (rng.integers(1, values + 1, nbytes) * (rng.random(nbytes) < density)).astype(np.uint8)


def one_step_of_bf16(nbytes: int, density: float) -> Bytes:
    """Old XOR new of bf16 weights of which so many move to a neighbouring value."""
    rng = np.random.default_rng(nbytes)
    old = (rng.standard_normal(nbytes // 2, np.float32) * 0.02).view(np.uint32) >> 16
    moved = rng.random(old.size) < density
    new = old + moved * rng.choice(np.array([1, 0xFFFF], np.uint32), old.size)
    return (old ^ new).astype("<u2").view(np.uint8)


def runs(lengths: Iterable[int], values: Iterable[int], nbytes: int) -> Bytes:
    """Content of one value and a run of zeros by turns, with zeros behind them."""
    content = np.zeros(nbytes, np.uint8)
    at = 0
    for length, value in zip(lengths, values, strict=False):
        content[at] = value
        at += 1 + length
    return content


def one_frame(content: Bytes) -> bytes | None:
    (frame,) = compress_runs(content, content.size)
    return frame


def check(content: Bytes) -> bytes | None:
    """Return the frame, after every decoder has read the content in it."""
    frame = one_frame(content)
    if frame is None:
        return None
    expected = content.tobytes()
    found = zstandard.get_frame_parameters(frame)
    assert (found.content_size, found.dict_id, found.has_checksum) == (len(expected), 0, False)
    assert found.window_size <= max(len(expected), 1024)
    decompressor = zstandard.ZstdDecompressor()
    assert decompressor.decompress(frame) == expected
    with decompressor.stream_reader(io.BytesIO(frame), read_size=77) as reader:
        assert b"".join(iter(lambda: reader.read(1000), b"")) == expected
    stream = decompressor.decompressobj()
    assert b"".join(stream.decompress(bytes([byte])) for byte in frame) == expected
    assert stream.eof
    walker = FrameWalker(content_nbytes=len(expected), where=Where(version=1, file="f"))
    walker.feed(frame)
    walker.finish()
    return frame


def must(content: Bytes) -> bytes:
    frame = check(content)
    assert frame is not None
    return frame


def first_block(frame: bytes) -> bytes:
    header = zstandard.frame_header_size(frame)
    word = int.from_bytes(frame[header : header + 3], "little")
    assert word >> 1 & 3 == 2, "not a compressed block"
    return frame[header + 3 : header + 3 + (word >> 3)]


def literals_of(block: bytes) -> tuple[int, int, int, int]:
    """Return kind, size format and number of a block's literals, and where its sequences begin (RFC 8878, 3.1.1.3.1.1)."""
    word = int.from_bytes(block[:5], "little")
    kind, form = word & 3, word >> 2 & 3
    if kind < 2:
        form *= form & 1  # of an even one the second bit is the count's
        nbytes, shift, bits = {0: (1, 3, 5), 1: (2, 4, 12), 3: (3, 4, 20)}[form]
        count = word >> shift & ((1 << bits) - 1)
        return kind, form, count, nbytes + (count if kind == 0 else 1)
    bits = (10, 10, 14, 18)[form]
    stored = word >> (4 + bits) & ((1 << bits) - 1)
    return kind, form, word >> 4 & ((1 << bits) - 1), (4 + 2 * bits) // 8 + stored


# ---- every kind of content ----------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
def test_short_content_of_any_density(nbytes: int) -> None:
    for density in (0, 0.02, 0.1, 0.2, 0.5, 1):
        for values in (1, 3, 255):
            check(sparse(nbytes, density, values))


@pytest.mark.parametrize("nbytes", LARGE_SIZES)
@pytest.mark.parametrize("density", [0, 0.0001, 0.01, 0.2])
def test_long_content_up_to_a_fifth_full(nbytes: int, density: float) -> None:
    must(sparse(nbytes, density))


@pytest.mark.parametrize("density", [0.4, 0.5, 1])
def test_full_content_is_left_to_libzstd(density: float) -> None:
    assert one_frame(sparse(256 * KIB, density)) is None


@fixed
@given(
    nbytes=st.integers(1, 300) | st.integers(1000, 3 * BLOCK),
    density=st.sampled_from([0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.3]),
    values=st.sampled_from([1, 2, 3, 7, 40, 127, 128, 129, 255]),
    seed=st.integers(0, 1000),
)
def test_any_sparse_content_is_read_by_every_decoder(
    nbytes: int, density: float, values: int, seed: int
) -> None:
    check(sparse(nbytes, density, values, seed))


@fixed
@given(
    lengths=st.lists(st.integers(0, 20) | st.integers(0, 70_000), min_size=1, max_size=300),
    values=st.lists(st.integers(1, 255), min_size=1, max_size=20),
    repeats=st.integers(1, 50),
    nbytes=st.integers(1, 2 * BLOCK + 5),
)
def test_any_runs_are_read_by_every_decoder(
    lengths: list[int], values: list[int], repeats: int, nbytes: int
) -> None:
    used = np.cumsum([1 + length for length in lengths * repeats])
    upto = int(np.searchsorted(used, nbytes))
    every = (values * (upto // len(values) + 1))[:upto]
    check(runs((lengths * repeats)[:upto], every, nbytes))


@fixed
@given(st.binary(min_size=1, max_size=2000), st.integers(0, 4000))
def test_any_bytes_behind_zeros_are_read_by_every_decoder(data: bytes, before: int) -> None:
    check(np.frombuffer(bytes(before) + data, np.uint8))


@pytest.mark.parametrize("nbytes", [64, 4 * KIB, BLOCK, BLOCK + 1, 2 * BLOCK + 3, MIB])
def test_one_changed_byte_anywhere(nbytes: int) -> None:
    for place in {0, 1, nbytes // 2, nbytes - 5, nbytes - 4, nbytes - 2, nbytes - 1}:
        content = np.zeros(nbytes, np.uint8)
        content[place] = 200
        must(content)


@pytest.mark.parametrize("nbytes", [64, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 70, MIB])
def test_nothing_but_zeros_takes_no_more_than_libzstd_makes_of_it(nbytes: int) -> None:
    content = np.zeros(nbytes, np.uint8)
    assert len(must(content)) <= len(compress_single(content.data)) + 1


def test_runs_of_every_length() -> None:
    must(runs([*range(1, 21)] * 20, [1, 2, 3, 200] * 100, 64 * KIB))
    for length in (65_537, 65_538, 65_539, 100_000, BLOCK - 1):
        must(runs([length], [9], 2 * BLOCK))


@pytest.mark.parametrize("period", [5, 6, 8, 16, 100, 4096])
def test_periodic_content_has_lengths_of_one_code_each(period: int) -> None:
    content = np.zeros(2 * BLOCK, np.uint8)
    content[::period] = 1
    must(content)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 1000, 20_000])
def test_literals_without_a_run_between(count: int) -> None:
    content = np.zeros(BLOCK + 1000, np.uint8)
    content[70 : 70 + count] = sparse(count, 1, 5)
    content[BLOCK : BLOCK + min(count, 1000)] = 7
    must(content)


def test_blocks_without_sequences_between_others() -> None:
    zeros = np.zeros(BLOCK, np.uint8)
    short_runs = zeros.copy()
    short_runs[::4] = sparse(BLOCK // 4, 1, 3)
    few = sparse(BLOCK, 0.001)
    many = sparse(BLOCK, 0.1)
    for blocks in (
        [short_runs],
        [short_runs, few, short_runs],
        [zeros, short_runs, zeros, many],
        [few, zeros, zeros, many],
        [many, zeros, few[:1000]],
        [few, few, np.array([1], np.uint8)],
        [zeros, np.array([0, 0, 3], np.uint8)],
    ):
        must(np.concatenate(blocks))


@pytest.mark.parametrize("values", [1, 2, 3, 126, 127, 128, 129, 130, 255])
def test_any_number_of_different_literals(values: int) -> None:
    content = np.zeros(64 * KIB, np.uint8)
    for repeats in (1, 2, 9):
        used = np.tile(np.arange(256 - values, 256), repeats)
        content[: 20 * used.size : 20] = used
        must(content)


def test_codes_of_very_rare_literals_are_no_longer_than_11_bits() -> None:
    counts = [1, 1]
    while len(counts) < 22:
        counts.append(counts[-1] + counts[-2])
    values = np.repeat(np.arange(1, len(counts) + 1), counts).astype(np.uint8)
    content = np.zeros(MIB, np.uint8)
    places = np.random.default_rng(3).permutation(MIB // 8)[: values.size] * 8
    content[places] = values
    must(content)


# ---- what the format says at its borders --------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "form"),
    [(30, 0), (31, 0), (32, 1), (255, 1), (256, 1), (4095, 1), (4096, 3), (4097, 3)],
)
def test_raw_literals_at_each_border(count: int, form: int) -> None:
    rng = np.random.default_rng(count)
    content = np.zeros(64 * KIB, np.uint8)
    content[: count - 1] = np.concatenate(
        [rng.permutation(np.arange(1, 256)) for _ in range(count // 255 + 1)]
    )[: count - 1]
    assert literals_of(first_block(must(content)))[:3] == (0, form, count)


@pytest.mark.parametrize(
    ("count", "form"),
    [(255, 0), (256, 0), (1022, 0), (1023, 0), (1024, 2), (1025, 2), (16_383, 2), (16_384, 3), (16_385, 3)],
)  # fmt: skip
def test_coded_literals_at_each_border(count: int, form: int) -> None:
    content = np.zeros(BLOCK, np.uint8)
    content[: count - 1] = sparse(count - 1, 1, 3)
    assert literals_of(first_block(must(content)))[:3] == (2, form, count)


@pytest.mark.parametrize("count", [1, 2, 126, 127, 128, 129, 255, 256, 10_000, 26_214])
def test_number_of_sequences_at_each_border(count: int) -> None:
    content = np.zeros(BLOCK, np.uint8)
    content[: 5 * count : 5] = 1 + np.arange(count) % 3
    content[5 * count :] = np.resize([0, 0, 0, 1], BLOCK - 5 * count)
    block = first_block(must(content))
    at = literals_of(block)[3]
    got = block[at] if block[at] < 128 else (block[at] - 128) << 8 | block[at + 1]
    assert got == count


# ---- what it is for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [64 * KIB, 256 * KIB, MIB])
@pytest.mark.parametrize("density", [0.0002, 0.0005, 0.002, 0.01, 0.03, 0.05, 0.1, 0.2, 0.5])
def test_a_step_takes_less_than_with_libzstd(nbytes: int, density: float) -> None:
    whole = one_step_of_bf16(2 * MIB, density)
    ours = theirs = 0
    for begin in range(0, whole.size, nbytes):
        content = whole[begin : begin + nbytes]
        frame = one_frame(content)
        assert frame is not None
        ours += len(frame)
        theirs += len(compress_single(content.data))
    assert ours < theirs


def test_a_frame_depends_on_its_content_alone() -> None:
    contents = [sparse(256 * KIB - 64 * n, 0.003 * n, 8 * n) for n in range(1, 17)]
    alone = [one_frame(content) for content in contents]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one_frame, contents[::-1] * 4)) == alone[::-1] * 4
    assert None not in alone


def test_content_may_be_read_only_and_at_any_address() -> None:
    content = sparse(64 * KIB, 0.01)
    moved = np.zeros(content.size + 1, np.uint8)[1:]
    moved[:] = content
    moved.flags.writeable = False
    assert one_frame(moved) == one_frame(content) is not None


def test_nothing_and_too_much_are_left_to_libzstd() -> None:
    assert compress_runs(np.zeros(0, np.uint8), MIB) == []
    assert compress_runs(np.zeros(MIB + 1, np.uint8), MIB + 1) == [None]


@fixed
@given(
    nbytes=st.integers(1, 1000) | st.integers(64 * KIB, 9 * BLOCK),
    frame_nbytes=st.sampled_from([64 * KIB, 64 * KIB + 1, 100_000, BLOCK + 64, 256 * KIB, MIB]),
    densities=st.lists(st.sampled_from([0, 0.0001, 0.01, 0.2, 1]), min_size=1, max_size=5),
)
def test_frames_made_together_are_those_made_alone(
    nbytes: int, frame_nbytes: int, densities: list[float]
) -> None:
    """Some of them left to libzstd, at the end and in the middle, and of lengths that are no whole lines."""
    payload = np.zeros(nbytes, np.uint8)
    begins = range(0, nbytes, frame_nbytes)
    pieces = [payload[begin : begin + frame_nbytes] for begin in begins]
    for number, piece in enumerate(pieces):
        piece[:] = sparse(piece.size, densities[number % len(densities)])
    assert compress_runs(payload, frame_nbytes) == [one_frame(piece) for piece in pieces]


@pytest.mark.parametrize("frame_nbytes", [64, 128, 192, 4096])
def test_many_small_frames_keep_to_their_room(frame_nbytes: int) -> None:
    """Their headers are more of them than of large ones; NUMBA_BOUNDSCHECK=1 looks as well."""
    frames = MIB // frame_nbytes
    payload = np.tile(sparse(frame_nbytes, 0.3, seed=3), frames)
    alone = one_frame(payload[:frame_nbytes])
    assert compress_runs(payload, frame_nbytes) == [alone] * frames


def test_room_for_large_frames_and_for_many_small_ones_is_not_room_for_many_large_ones() -> None:
    content = sparse(MIB, 0.01)
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(1) as pool:  # a thread that has no room yet
            list(pool.map(compress_runs, [content] * 3, [MIB, 64, MIB]))
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("density", [0, 0.0001, 0.001, 0.01, 0.05])
def test_the_decoder_of_nearly_empty_blobs_leaves_none_to_libzstd(density: float) -> None:
    for nbytes in (300, 64 * KIB, BLOCK + 1, MIB):
        for values in (1, 3, 255):
            content = sparse(nbytes, density, values)
            frame = must(content)
            reader = NonzeroReader(
                reads(frame), nbytes=len(frame), content_nbytes=nbytes, where=Where(file="f")
            )
            got = np.zeros(nbytes, np.uint8)
            reader.xor_into(got)
            reader.finish()
            assert np.array_equal(got, content)


def test_the_command_line_reads_them(tmp_path: Path) -> None:
    command = shutil.which("zstd")
    if command is None:
        pytest.skip("the command zstd is missing")
    contents = [
        *(sparse(nbytes, density) for nbytes in LARGE_SIZES for density in (0, 0.0003, 0.01, 0.2)),
        *(one_step_of_bf16(MIB, density) for density in (0.0005, 0.01, 0.3)),
    ]
    blob = tmp_path / "frames.zst"
    blob.write_bytes(b"".join(must(content) for content in contents))
    done = subprocess.run([command, "-dc", blob], capture_output=True, check=True)
    assert done.stdout == b"".join(content.tobytes() for content in contents)


# ---- the compiled loop --------------------------------------------------------------------------------


@pytest.mark.timeout(400)
@pytest.mark.skipif("NUMBA_BOUNDSCHECK" in os.environ, reason="this is that run")
def test_no_loop_reaches_out_of_its_arrays(repository: Path, tmp_path: Path) -> None:
    """The tests above once more, with every index checked."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/unit/test_encode_runs.py"],
        cwd=repository,
        env=os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
