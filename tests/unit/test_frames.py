"""The frame walk and the blob reader: every rule, and libzstd as the oracle that they are never laxer than."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import FrameFormatError, GpuSyncError, SourceNotReadyError
from gpusync.format.frames import (
    MAX_WINDOW,
    BlobReader,
    FrameWalker,
    Where,
    WindowTooLargeError,
    check_seek_table,
    walk_frames,
)
from gpusync.types import Frame
from tests.unit.strategies import (
    COMPRESSED,
    MAGIC,
    RAW,
    RESERVED,
    RLE,
    SIZES,
    blobs,
    block,
    compress,
    fixed,
    flushed,
    frame,
    oracle_decode,
    reads,
    seekable,
    skippable,
)

WHERE = Where(version=7, file="m.safetensors", tensor="a", offset=1000)
KIB, MIB = 1 << 10, 1 << 20


def content_of(nbytes: int) -> bytes:
    """A sparse xor payload: mostly zeros."""
    rng = np.random.default_rng(nbytes)
    return (rng.integers(1, 256, nbytes) * (rng.random(nbytes) < 0.02)).astype(np.uint8).tobytes()


def decode(
    blob: bytes,
    nbytes: int,
    *,
    known: bool = True,
    step: int = 1 << 30,
    piece: int = 1 << 30,
    max_window: int = MAX_WINDOW,
) -> bytes:
    """Decode a whole blob in pieces, from a source that gives ``step`` bytes at a time."""
    reader = BlobReader(
        reads(blob, step),
        nbytes=len(blob),
        content_nbytes=nbytes if known else None,
        where=WHERE,
        max_window=max_window,
    )
    out = bytearray(nbytes)
    for begin in range(0, nbytes, piece):
        reader.readinto(memoryview(out)[begin : begin + piece])
    reader.finish()
    return bytes(out)


def refused(
    blob: bytes, nbytes: int, match: str | None, error: type[GpuSyncError] = FrameFormatError
) -> None:
    """The reader refuses, and says where."""
    with pytest.raises(error, match=match) as caught:
        decode(blob, nbytes)
    assert type(caught.value) is error
    err = caught.value
    assert (err.version, err.file, err.tensor) == (7, "m.safetensors", "a")
    assert err.offset is not None and err.offset >= 1000


def walk_refused(
    blob: bytes, nbytes: int, match: str, error: type[GpuSyncError] = FrameFormatError
) -> None:
    """The walk alone refuses, and so does the reader."""
    with pytest.raises(error, match=match) as caught:
        walk_frames(blob, content_nbytes=nbytes, where=WHERE)
    assert type(caught.value) is error
    refused(blob, min(nbytes, MIB), match, error)


# ---- what is taken ----------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "single": compress,
    "without content size": lambda data: compress(data, write_content_size=False),
    "frame checksum": lambda data: compress(data, write_checksum=True),
    "flushed blocks": lambda data: flushed(data, 251),
    "flushed blocks and checksum": lambda data: flushed(data, 1024, write_checksum=True),
    "seekable": lambda data: seekable(data, 240) if data else compress(data),
    "skippable before": lambda data: skippable(b"x" * 9) + compress(data),
    "skippable after": lambda data: compress(data) + skippable(b"", 15),
    "skippable between": lambda data: (
        compress(data[:7]) + skippable(b"abc", 3) + skippable() + compress(data[7:])
    ),
    "skippable before each frame": lambda data: b"".join(
        skippable(b"size") + compress(data[begin : begin + 100])
        for begin in range(0, max(1, len(data)), 100)
    ),
    "empty frame first": lambda data: compress(b"") + compress(data),
    "empty frame last": lambda data: compress(data) + compress(b"", write_content_size=False),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_legal_framing_decodes_to_its_content(writer: str, nbytes: int) -> None:
    content = content_of(nbytes)
    blob = WRITERS[writer](content)
    assert oracle_decode(blob) == content
    assert decode(blob, nbytes) == content
    assert decode(blob, nbytes, known=False) == content
    assert decode(blob, nbytes, step=1, piece=17) == content


@pytest.mark.parametrize("nbytes", [512 * KIB - 1, 512 * KIB, 512 * KIB + 1])
@pytest.mark.parametrize("writer", ["single", "seekable 64 KiB", "seekable 256 KiB"])
def test_pieces_around_their_border(writer: str, nbytes: int) -> None:
    content = content_of(nbytes)
    blob = {
        "single": compress,
        "seekable 64 KiB": lambda data: seekable(data, 64 * KIB),
        "seekable 256 KiB": lambda data: seekable(data, 256 * KIB, write_checksum=True),
    }[writer](content)
    for piece in (64 * KIB, 512 * KIB):
        assert decode(blob, nbytes, piece=piece) == content


def test_unchanged_tensor_of_32_000_to_1_is_taken() -> None:
    blob = compress(bytes(64 * MIB))
    assert 10_000 * len(blob) < 64 * MIB
    reader = BlobReader(reads(blob), nbytes=len(blob), content_nbytes=64 * MIB, where=WHERE)
    out = bytearray(MIB)
    for _ in range(64):
        reader.readinto(memoryview(out))
        assert out == bytes(MIB)
    reader.finish()


def test_walk_gives_each_frames_extent() -> None:
    first, gap = compress(b"a" * 300, write_checksum=True), skippable(b"xyz", 2)
    second = compress(b"b" * 70_000, write_content_size=False)
    frames = walk_frames(memoryview(first + gap + second), content_nbytes=70_300, where=WHERE)
    at = len(first)
    assert [(f.offset, f.nbytes) for f in frames] == [
        (0, at),
        (at, len(gap)),
        (at + len(gap), len(second)),
    ]
    assert [f.content_nbytes for f in frames] == [300, 0, None]
    assert [f.has_checksum for f in frames] == [True, False, False]
    assert [f.skippable for f in frames] == [False, True, False]
    for part, walked in ((first, frames[0]), (second, frames[2])):
        told = zstandard.get_frame_parameters(part)
        assert walked.window_nbytes == told.window_size
        assert walked.has_checksum == told.has_checksum


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 16, 1000])
def test_walk_is_the_same_however_the_bytes_arrive(step: int) -> None:
    content = content_of(5000)
    for writer in WRITERS.values():
        blob = writer(content)
        frames: list[Frame] = []
        walker = FrameWalker(content_nbytes=5000, where=WHERE, on_frame=frames.append)
        for begin in range(0, len(blob), step):
            walker.feed(blob[begin : begin + step])
        walker.finish()
        assert tuple(frames) == walk_frames(blob, content_nbytes=5000, where=WHERE)
        assert frames[-1].offset + frames[-1].nbytes == len(blob)


@pytest.mark.parametrize("content_size_nbytes", [1, 2, 4, 8])
@pytest.mark.parametrize("dictionary_nbytes", [0, 1, 2, 4])
def test_every_form_of_frame_header(content_size_nbytes: int, dictionary_nbytes: int) -> None:
    """All widths of content size and of a dictionary id that is 0 (RFC 8878 3.1.1.1)."""
    data = content_of(300 if content_size_nbytes == 2 else 200)
    size = len(data) - (256 if content_size_nbytes == 2 else 0)
    flags = {1: 0, 2: 1, 4: 2, 8: 3}[content_size_nbytes] << 6
    flags |= {0: 0, 1: 1, 2: 2, 4: 3}[dictionary_nbytes]
    fields = bytes(dictionary_nbytes) + size.to_bytes(content_size_nbytes, "little")
    single = frame([block(data)], descriptor=flags | 0x20, window=None, fields=fields)
    assert decode(single, len(data)) == oracle_decode(single) == data
    if content_size_nbytes > 1:
        windowed = frame([block(data)], descriptor=flags, fields=fields)
        assert decode(windowed, len(data)) == oracle_decode(windowed) == data


# ---- magic, truncation, junk ------------------------------------------------------------------------

GOOD = compress(content_of(1000), write_checksum=True)


def test_zstd_magic_wrong_is_refused() -> None:
    walk_refused(b"\x27" + GOOD[1:], 1000, "no zstd frame")
    walk_refused(b"\x27\xb5\x2f\xfd" + GOOD[4:], 1000, "no zstd frame")  # zstd 0.7
    walk_refused(b"\x1f\x8b\x08\x00" + bytes(100), 1000, "no zstd frame")  # gzip
    walk_refused(b"\x60\x2a\x4d\x18" + GOOD[4:], 1000, "no zstd frame")  # past the skippable range


@pytest.mark.parametrize("writer", WRITERS)
def test_blob_truncated_at_any_byte_is_refused(writer: str) -> None:
    content = content_of(241)
    blob = WRITERS[writer](content)
    borders = {0} | {
        f.offset + f.nbytes for f in walk_frames(blob, content_nbytes=241, where=WHERE)
    }
    for nbytes in range(len(blob)):
        if nbytes in borders and oracle_decode(blob[:nbytes]) == content:
            continue
        with pytest.raises(FrameFormatError):
            decode(blob[:nbytes], 241)


@pytest.mark.parametrize(
    "junk", [b"\0", b"x", b"\0" * 64, b"junk!", MAGIC, MAGIC[:3], b"\x50\x2a\x4d\x18"]
)
def test_junk_after_the_last_frame_is_refused(junk: bytes) -> None:
    for blob in (GOOD + junk, GOOD + skippable(b"x") + junk):
        walk_refused(blob, 1000, "no zstd frame|ends within a frame")


def test_blob_of_no_bytes_or_no_data_frame_is_refused() -> None:
    for nbytes in (0, 1000):
        walk_refused(b"", nbytes, "no zstd frame")
        walk_refused(skippable(b"x"), nbytes, "no zstd frame")


@pytest.mark.parametrize("nbytes", [1, 3, 4, 5, 15, 16, 17, 4096])
@pytest.mark.parametrize("step", [1, 1 << 30])
def test_blob_of_zeros_is_not_there_yet(nbytes: int, step: int) -> None:
    walk_refused(bytes(nbytes), 1000, "zeros where a blob should be", SourceNotReadyError)
    with pytest.raises(SourceNotReadyError):
        decode(bytes(nbytes), 1000, step=step)


def test_blob_that_only_starts_with_zeros_is_refused() -> None:
    for count in range(1, 16):
        walk_refused(bytes(count) + GOOD, 1000, "no zstd frame|ends within")
    walk_refused(bytes(5) + b"x", 1000, "ends within")


def test_source_that_ends_before_the_blob_is_refused() -> None:
    reader = BlobReader(reads(GOOD), nbytes=len(GOOD) + 5, content_nbytes=1000, where=WHERE)
    reader.readinto(memoryview(bytearray(1000)))
    with pytest.raises(FrameFormatError, match="blob ends too early"):
        reader.finish()


def test_reader_asks_for_no_byte_after_the_blob() -> None:
    source = io.BytesIO(GOOD + b"next tensor's blob")
    reader = BlobReader(source.read, nbytes=len(GOOD), content_nbytes=1000, where=WHERE)
    reader.readinto(memoryview(bytearray(1000)))
    reader.finish()
    assert source.tell() == len(GOOD)


def test_error_of_the_source_passes_through() -> None:
    def fail(nbytes: int) -> bytes:
        raise OSError(5, "I/O error")

    reader = BlobReader(fail, nbytes=100, content_nbytes=1000, where=WHERE)
    with pytest.raises(OSError, match="I/O error"):
        reader.readinto(memoryview(bytearray(1000)))


# ---- frame header -----------------------------------------------------------------------------------


def test_reserved_bit_is_refused() -> None:
    walk_refused(frame([block(b"abc")], descriptor=0x08), 3, "reserved bit")


@pytest.mark.parametrize("flag", [1, 2, 3])
def test_dictionary_id_is_refused(flag: int) -> None:
    width = (0, 1, 2, 4)[flag]
    blob = frame([block(b"abc")], descriptor=flag, fields=b"\0" * (width - 1) + b"\1")
    walk_refused(blob, 3, "needs a dictionary")


def test_frame_of_a_trained_dictionary_is_refused() -> None:
    samples = [b"tensor %d of layer %d" % (n, n * 7) * 4 for n in range(500)]
    dictionary = zstandard.train_dictionary(1024, samples)
    walk_refused(compress(samples[0], dict_data=dictionary), len(samples[0]), "needs a dictionary")


@pytest.mark.parametrize(
    ("window", "nbytes"), [(0x89, 144 * MIB), (21 << 3, 2 << 30), (0xFF, 15 << 38)]
)
def test_window_over_128_mib_is_refused_without_memory(window: int, nbytes: int) -> None:
    blob = frame([block(b"abc")], window=window)
    tracemalloc.start()
    walk_refused(blob, 3, "window is too large")
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


def test_single_segment_frame_over_128_mib_is_refused() -> None:
    fields = (MAX_WINDOW + 1).to_bytes(4, "little")
    blob = frame([block(b"abc")], descriptor=0xA0, window=None, fields=fields)
    with pytest.raises(FrameFormatError, match="window is too large"):
        walk_frames(blob, content_nbytes=MAX_WINDOW + 1, where=WHERE)


def test_window_over_the_callers_limit_is_told_apart() -> None:
    blob = frame([block(b"abc")], window=0x70)  # 16 MiB
    assert decode(blob, 3, max_window=16 * MIB) == b"abc"
    for walk in (
        lambda: decode(blob, 3, max_window=16 * MIB - 1),
        lambda: walk_frames(blob, content_nbytes=3, where=WHERE, max_window=8 * MIB),
    ):
        with pytest.raises(WindowTooLargeError) as caught:
            walk()
        assert caught.value.window_nbytes == caught.value.got == 16 * MIB
        assert isinstance(caught.value, FrameFormatError)


@pytest.mark.parametrize("max_window", [1, 1024, 1 << 20])
def test_smallest_window_limit_works(max_window: int) -> None:
    blob = frame([block(b"a")], descriptor=0x20, window=None, fields=b"\1")
    assert decode(blob, 1, max_window=max_window) == b"a"


# ---- content size -----------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [999, 1001, 1064, 1 << 20])
def test_content_size_that_the_blocks_belie_is_refused(declared: int) -> None:
    data = content_of(1000)
    blob = frame([block(data)], descriptor=0x80, fields=declared.to_bytes(4, "little"))
    refused(blob, declared, "content size|more than is left")
    refused(blob, 1000, "content size|more than is left|expected size|too early")


@pytest.mark.parametrize("declared", [1 << 63, (1 << 64) - 1])
def test_content_size_of_2_63_is_refused(declared: int) -> None:
    blob = frame([block(b"abc")], descriptor=0xC0, fields=declared.to_bytes(8, "little"))
    walk_refused(blob, 3, "content size is more than is left")
    with pytest.raises(FrameFormatError, match="cannot fill its content size"):
        walk_frames(blob, content_nbytes=None, where=WHERE)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("delta", [-64, -1, 1, 64])
def test_content_longer_or_shorter_than_the_tensor_is_refused(writer: str, delta: int) -> None:
    blob = WRITERS[writer](content_of(1000))
    refused(blob, 1000 + delta, None)


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1001, 1 << 20])
def test_walk_alone_refuses_frames_of_another_total(nbytes: int) -> None:
    for blob in (GOOD, compress(content_of(400)) + compress(content_of(600))):
        with pytest.raises(FrameFormatError, match=r"expected size|more than is left"):
            walk_frames(blob, content_nbytes=nbytes, where=WHERE)


def test_content_longer_is_refused_where_only_the_decoder_can_tell() -> None:
    blob = compress(b"\1" * 1064, write_content_size=False)
    walk_frames(blob, content_nbytes=1000, where=WHERE)
    refused(blob, 1000, "content is longer than expected")
    refused(blob, 1100, "content ends too early")


def test_content_cap_bounds_what_is_not_known_exactly() -> None:
    walker = FrameWalker(content_nbytes=None, content_cap=999, where=WHERE)
    with pytest.raises(FrameFormatError, match="more than is left"):
        walker.feed(compress(content_of(1000)))


def test_content_over_what_is_told_late_is_refused_at_once() -> None:
    for blob in (GOOD, seekable(content_of(1000), 300), frame([block(content_of(1000))])):
        reader = BlobReader(reads(blob), nbytes=len(blob), content_nbytes=None, where=WHERE)
        reader.readinto(memoryview(bytearray(4)))
        with pytest.raises(FrameFormatError, match="hold more than"):
            reader.expect(999)


def test_expected_content_can_be_told_late() -> None:
    for writer in WRITERS.values():
        blob = writer(content_of(1000))
        for expected, good in ((1000, True), (999, False), (1001, False), (3, False)):
            reader = BlobReader(reads(blob), nbytes=len(blob), content_nbytes=None, where=WHERE)
            reader.readinto(memoryview(bytearray(4)))
            try:
                reader.expect(expected)
                reader.readinto(memoryview(bytearray(max(0, expected - 4))))
                reader.finish()
            except FrameFormatError:
                assert not good
            else:
                assert good


# ---- blocks and bombs -------------------------------------------------------------------------------


def test_reserved_block_type_is_refused() -> None:
    walk_refused(frame([block(b"abc", kind=RESERVED)]), 3, "type is reserved")
    blob = frame([block(b"abc", last=False), block(b"abc", kind=RESERVED)])
    walk_refused(blob, 6, "type is reserved")


def test_block_over_128_kib_or_the_window_is_refused() -> None:
    largest = 128 * KIB
    good = frame([block(bytes(largest))])
    assert decode(good, largest) == oracle_decode(good)
    for kind, data in ((0, bytes(largest + 1)), (RLE, b"x"), (COMPRESSED, bytes(largest + 1))):
        blob = frame([block(data, kind=kind, nbytes=largest + 1)])
        walk_refused(blob, largest + 1, "block is too large")
    small = frame([block(bytes(1025))], window=0)
    walk_refused(small, 1025, "block is too large")
    single = frame([block(bytes(4))], descriptor=0x20, window=None, fields=b"\3")
    walk_refused(single, 3, "block is too large")


@pytest.mark.parametrize("nbytes", [0, 1])
def test_compressed_block_too_small_to_be_one_is_refused(nbytes: int) -> None:
    walk_refused(frame([block(bytes(nbytes), kind=COMPRESSED)]), 1, "compressed block is too small")


def test_bomb_of_four_byte_blocks_is_refused_at_the_tensors_size() -> None:
    blocks = block(b"\1", kind=RLE, nbytes=128 * KIB, last=False) * 100_000
    tracemalloc.start()
    walk_refused(frame([blocks]), 4096, "blocks decode to more than is left")
    assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    tracemalloc.stop()


def test_bomb_in_compressed_blocks_is_decoded_no_further_than_the_tensor() -> None:
    bomb = compress(bytes(512 * MIB), write_content_size=False)
    tracemalloc.start()
    # A cost that is not linear would run into the test's timeout.
    refused(bomb, 4096, "longer than expected|more than is left|than the content explains")
    assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    tracemalloc.stop()


def test_one_empty_block_ends_a_stream_and_a_second_is_refused() -> None:
    good = frame([block(b"abc", last=False), block()])
    assert decode(good, 3) == oracle_decode(good) == b"abc"
    for kind, data in ((RAW, b""), (RLE, b"x")):
        empty = block(data, kind=kind, nbytes=0, last=False)
        blob = frame([empty, block(b"abc", last=False), block()])
        walk_refused(blob, 3, "more than one empty block")


def test_frames_without_content_are_refused_beyond_one_per_frame_with_content() -> None:
    data = compress(content_of(1000))
    assert decode(skippable(b"x") * 64 + data, 1000) == content_of(1000)
    for idle in (skippable(b"x"), skippable(), compress(b""), frame([block()])):
        walk_refused(idle * 66 + data, 1000, "too many frames without content")
        walk_refused(data + idle * 66, 1000, "too many frames without content")


BOMBS = {
    "empty raw blocks": frame([block(last=False) * 1_000_000, block()]),
    "empty RLE blocks": frame([block(b"x", kind=RLE, nbytes=0, last=False) * 1_000_000, block()]),
    "one-byte blocks": frame([block(b"x", last=False) * 1_000_000, block()]),
    "empty frames": frame([block()]) * 1_000_000,
    "empty frames with content size": compress(b"") * 1_000_000,
    "empty skippable frames": skippable() * 1_000_000 + compress(b""),
}


@pytest.mark.parametrize("nbytes", [0, 4096, 64 * MIB])
@pytest.mark.parametrize("bomb", BOMBS)
def test_bomb_of_a_million_empty_parts_is_refused_early(bomb: str, nbytes: int) -> None:
    # A cost that is not linear would run into the test's timeout.
    with pytest.raises(FrameFormatError):
        walk_frames(BOMBS[bomb], content_nbytes=nbytes, where=WHERE)
    with pytest.raises(FrameFormatError):
        decode(BOMBS[bomb][: 4 * KIB] * 50, 4096)


RESIDENT = r"""
import resource
from gpusync.errors import FrameFormatError
from gpusync.format.frames import BlobReader, Where
from tests.unit.strategies import RLE, block, compress, frame, reads

zeros = block(b"\0", kind=RLE, nbytes=1 << 17, last=False) * 20_000
bombs = [
    frame([zeros, block()]),
    frame([zeros, block()], descriptor=0x80, fields=(4096).to_bytes(4, "little")),
    frame([zeros, block()], window=0x88),
    frame([block(b"abc")], window=0xA8),
    frame([block(last=False) * 1_000_000]),
    compress(bytes(1 << 26), write_content_size=False),
]


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


before = peak()
for bomb in bombs:
    reader = BlobReader(
        reads(bomb), nbytes=len(bomb), content_nbytes=4096, where=Where(), max_window=8 << 20
    )
    try:
        reader.readinto(memoryview(bytearray(4096)))
        reader.finish()
    except FrameFormatError:
        continue
    raise SystemExit("a bomb was taken")
print(peak() - before)
"""


def test_bombs_take_no_memory_of_the_decoder_either(repository: Path) -> None:
    """tracemalloc cannot see libzstd: a process of its own shows its peak."""
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT], cwd=repository, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 16 * KIB  # KiB


def test_frame_nested_in_a_frame_is_content() -> None:
    inner = compress(b"inner" * 100)
    outer = compress(inner)
    assert decode(outer, len(inner)) == inner
    refused(outer, 500, "expected size|more than is left|too early")


def test_million_bytes_in_the_smallest_sensible_frames_are_taken() -> None:
    content = content_of(MIB)
    blob = seekable(content, KIB)
    assert decode(blob, MIB, piece=64 * KIB) == content


# ---- what only libzstd sees -------------------------------------------------------------------------


def test_wrong_frame_checksum_is_refused() -> None:
    content = content_of(1000)
    blob = compress(content, write_checksum=True)
    for bad in (blob[:-1] + bytes([blob[-1] ^ 1]), blob[:-4] + bytes(4)):
        walk_frames(bad, content_nbytes=1000, where=WHERE)
        refused(bad, 1000, "libzstd refuses the blob")
        refused(bad + compress(b""), 1000, "libzstd refuses the blob")


def test_wrong_checksum_of_a_frame_in_the_middle_is_refused() -> None:
    first = compress(b"a" * 100, write_checksum=True)
    blob = first[:-1] + bytes([first[-1] ^ 1]) + compress(b"b" * 100)
    refused(blob, 200, "libzstd refuses the blob")


def test_every_bit_flip_is_refused_or_changes_no_rule() -> None:
    """A flip in entropy-coded content may decode to other bytes (the digest's to find), never to another length."""
    content = content_of(241)
    blob = compress(content)
    checked = compress(content, write_checksum=True)
    for bit in range(len(blob) * 8):
        bad = bytearray(blob)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            got = decode(bytes(bad), 241)
        except (FrameFormatError, SourceNotReadyError):
            continue
        assert got == oracle_decode(bytes(bad))
    for bit in range(len(checked) * 8):
        bad = bytearray(checked)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            got = decode(bytes(bad), 241)
        except (FrameFormatError, SourceNotReadyError):
            continue
        # The descriptor's unused bit, or the checksum flag's with a truncation that is refused.
        assert got == content


# ---- the fast path against the steps -----------------------------------------------------------------


def walked(
    blob: bytes, steps: list[int], told: int | None, *, late: int | None = None, **options: Any
) -> tuple[list[Frame], object]:
    """Feed a blob in pieces of ``steps``, over and over; return its frames, and what it was refused for.

    ``late`` is what the walk is told to expect once half of the blob was fed.
    """
    frames: list[Frame] = []
    walker = FrameWalker(content_nbytes=told, where=WHERE, on_frame=frames.append, **options)
    try:
        for half in (blob[: len(blob) // 2], blob[len(blob) // 2 :]):
            at, turn = 0, 0
            while at < len(half):
                walker.feed(half[at : at + steps[turn % len(steps)]])
                at += steps[turn % len(steps)]
                turn += 1
            if late is not None:
                walker.expect(late)
        walker.finish()
    except GpuSyncError as err:
        return frames, (type(err), str(err), err.offset, err.expected, err.got)
    return frames, None


def assert_steps_agree(blob: bytes, steps: list[int], told: int | None, **options: Any) -> object:
    """Single bytes never take the fast path: pieces must give the same frames and the same refusal."""
    whole = walked(blob, [1 << 30], told, **options)
    assert whole == walked(blob, [1], told, **options)
    assert whole == walked(memoryview(blob), steps, told, **options)  # type: ignore[arg-type]
    return whole[1]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_fast_path_agrees_on_every_legal_framing(writer: str, nbytes: int) -> None:
    blob = WRITERS[writer](content_of(nbytes))
    assert assert_steps_agree(blob, [13, 64], nbytes) is None
    assert assert_steps_agree(blob, [13, 64], None) is None
    for told in (nbytes + 1, max(0, nbytes - 1)):
        assert_steps_agree(blob, [100], told)
        assert_steps_agree(blob, [100], None, late=told)
        assert_steps_agree(blob, [100], None, content_cap=told)


def test_fast_path_agrees_on_many_blocks_and_frames() -> None:
    content = content_of(600 * KIB)
    for blob in (compress(content), seekable(content, 256 * KIB, write_checksum=True)):
        assert assert_steps_agree(blob, [997, 1, 4096], len(content)) is None
        assert assert_steps_agree(blob, [997], len(content), max_window=128 * KIB) is not None


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("told", [0, 300, None])
def test_fast_path_agrees_on_bombs(bomb: str, told: int | None) -> None:
    assert_steps_agree(BOMBS[bomb][: 16 * KIB], [50, 7], told)


@pytest.mark.parametrize("blocks", [1022, 1023, 1024])
def test_fast_path_counts_frames_and_blocks_to_the_same_limit(blocks: int) -> None:
    """200 bytes of content allow 1024 frames and blocks; 1023 blocks leave none for a second frame."""
    small = block(b"xx", kind=COMPRESSED, last=False) * (blocks - 1) + block(b"a")
    first = frame([small], descriptor=0x80, fields=(199).to_bytes(4, "little"))
    last = frame([block(b"a" * 9)], descriptor=0x20, window=None, fields=b"\1")
    assert (assert_steps_agree(first, [300], 199) is None) == (blocks < 1024)
    assert assert_steps_agree(first + last, [300], 200) is not None


def test_fast_path_leaves_frames_without_content_and_too_small_blocks_to_the_steps() -> None:
    idle = frame([block(b"xx", kind=COMPRESSED)], descriptor=0x80, fields=bytes(4))
    assert assert_steps_agree(idle * 64, [300], 0) is None
    assert assert_steps_agree(idle * 66, [300], 0) is not None
    for nbytes in (0, 1):
        small = block(b"x" * nbytes, kind=COMPRESSED)
        bad = frame([small], descriptor=0x80, fields=(9).to_bytes(4, "little")) + bytes(60)
        assert "too small" in str(assert_steps_agree(bad, [300], 9))


@st.composite
def handmade(draw: st.DrawFn) -> bytes:
    """Frames whose headers and blocks say what they like."""
    blob = b""
    for _ in range(draw(st.integers(1, 4))):
        blocks = []
        for last in (*[False] * draw(st.integers(0, 3)), True):
            kind = draw(st.sampled_from((RAW, RAW, RLE, COMPRESSED, COMPRESSED, RESERVED)))
            nbytes = draw(st.sampled_from((0, 1, 2, 5, 100, 1024, 1025, 1 << 17, (1 << 17) + 1)))
            stored = 1 if kind == RLE else min(nbytes, 1100)
            blocks.append(block(b"x" * stored, last=last, kind=kind, nbytes=nbytes))
        descriptor = draw(st.sampled_from((0x20, 0x40, 0x60, 0x80, 0xA0, 0xA4, 0xC0, 0xE0, 0, 4)))
        descriptor ^= draw(st.sampled_from((0, 0, 0, 0x01, 0x08, 0x10)))
        window = (
            None if descriptor & 0x20 else draw(st.sampled_from((0, 1, 0x3F, 0x50, 0x8F, 0x90)))
        )
        width = (1 if descriptor & 0x20 else 0, 2, 4, 8)[descriptor >> 6]
        content = draw(st.sampled_from((0, 1, 5, 100, 1024, 1025, 3000, 1 << 17, 1 << 20, 1 << 28)))
        size = (content % (1 << 8 * width)).to_bytes(width, "little")
        blob += frame(blocks, descriptor=descriptor, window=window, fields=size)
        blob += b"sums" if descriptor & 4 else b""
    return blob


@fixed
@given(handmade(), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 3000))
def test_fast_path_agrees_on_handmade_frames(blob: bytes, steps: list[int], told: int) -> None:
    for expected in (told, None, 1 << 30):
        assert_steps_agree(blob, steps, expected)
        assert_steps_agree(blob, steps, expected, max_window=1024, late=told)


@fixed
@given(
    blobs(),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_fast_path_agrees_on_damaged_blobs(
    pair: tuple[bytes, bytes], flips: list[tuple[int, int]], steps: list[int]
) -> None:
    content, blob = pair
    bad = bytearray(blob)
    for position, value in flips:
        bad[position % len(bad)] = value
    for told in (len(content), None):
        assert_steps_agree(bytes(bad), steps, told)


# ---- seek table -------------------------------------------------------------------------------------


def table_of(blob: bytes, nbytes: int) -> bool:
    return check_seek_table(
        blob, walk_frames(blob, content_nbytes=nbytes, where=WHERE), where=WHERE
    )


def test_seek_table_that_agrees() -> None:
    content = content_of(5000)
    assert table_of(seekable(content, 1000), 5000)
    assert table_of(seekable(content, 999), 5000)
    with_sums = b"".join(
        struct.pack("<III", len(compress(part)), len(part), 0)
        for part in (content[:2500], content[2500:])
    ) + struct.pack("<IBI", 2, 0x80, 0x8F92EAB1)
    blob = compress(content[:2500]) + compress(content[2500:]) + skippable(with_sums, 14)
    assert table_of(blob, 5000)


def test_blob_without_seek_table() -> None:
    content = content_of(5000)
    assert not table_of(compress(content), 5000)
    assert not table_of(compress(content) + skippable(b"x" * 30), 5000)
    assert not check_seek_table(b"", (), where=WHERE)


def bent_table(blob: bytes, at: int, value: int, nbytes: int = 1) -> bytes:
    return blob[:at] + value.to_bytes(nbytes, "little") + blob[at + nbytes :]


def test_seek_table_that_lies_is_refused() -> None:
    blob = seekable(content_of(5000), 1000)
    table = len(blob) - 8 - 5 * 8 - 9
    lies = {
        "compressed size": bent_table(blob, table + 8, blob[table + 8] ^ 1),
        "content size": bent_table(blob, table + 12, 999, 4),
        "number of frames": bent_table(blob, len(blob) - 9, 4, 4),
        "huge number of frames": bent_table(blob, len(blob) - 9, 0xFFFFFFFF, 4),
        "descriptor": bent_table(blob, len(blob) - 5, 0x04),
        "checksum flag": bent_table(blob, len(blob) - 5, 0x80),
        "footer magic": bent_table(blob, len(blob) - 1, 0),
        "short": blob[:table] + skippable(b"x" * 3, 14),
        "a frame more": compress(b"") + blob,
    }
    for bad in lies.values():
        with pytest.raises(FrameFormatError, match="seek table"):
            table_of(bad, 5000)


# ---- hypothesis -------------------------------------------------------------------------------------


@fixed
@given(blobs(), st.integers(1, 50), st.integers(1, 5000))
def test_legal_blobs_decode_as_libzstd_decodes_them(
    pair: tuple[bytes, bytes], step: int, piece: int
) -> None:
    content, blob = pair
    assert decode(blob, len(content), step=step, piece=piece) == content == oracle_decode(blob)


@fixed
@given(
    blobs(),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3),
    st.integers(0, 30),
    st.booleans(),
)
def test_damaged_blobs_are_never_taken_laxer_than_libzstd(
    pair: tuple[bytes, bytes], flips: list[tuple[int, int]], cut: int, known: bool
) -> None:
    content, blob = pair
    bad = bytearray(blob[: len(blob) - cut] or blob)
    for position, value in flips:
        bad[position % len(bad)] = value
    try:
        got = decode(bytes(bad), len(content), known=known)
    except (FrameFormatError, SourceNotReadyError):
        return
    assert got == oracle_decode(bytes(bad))


@fixed
@given(st.binary(max_size=60), st.integers(0, 40))
def test_any_bytes_behind_a_magic_give_content_or_a_typed_error(tail: bytes, nbytes: int) -> None:
    for blob in (tail, MAGIC + tail):
        try:
            got = decode(blob, nbytes)
        except (FrameFormatError, SourceNotReadyError):
            continue
        assert got == oracle_decode(blob)
