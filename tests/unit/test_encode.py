"""Encoders against numpy, zstandard and the published layouts."""

from __future__ import annotations

import io
import itertools
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import ChainError
from gpusync.format.encode import (
    build_seek_table,
    build_sparse_payload,
    check_overwrite_nbytes,
    compress_frames,
    compress_seekable,
    compress_single,
    encode_overwrite,
    encode_xor,
    encode_xor_sparse,
    find_changes,
)
from tests.support import apply_payload, decode_blob

FRAME = 64 << 10
SIZES = (1, 3, 15, 16, 17, 240, 241, 1023, 1024, 1025, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME + 5)


def _pair(nbytes: int, changed: float = 0.02) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(nbytes)
    old = rng.integers(0, 256, nbytes, np.uint8)
    mask = rng.random(nbytes) < changed
    return old, np.where(mask, old ^ rng.integers(1, 256, nbytes, np.uint8), old)


@pytest.mark.parametrize("nbytes", (0, *SIZES))
@pytest.mark.parametrize("changed", (0.0, 0.02, 1.0))
def test_every_payload_rebuilds_the_new_bytes(nbytes: int, changed: float) -> None:
    old, new = _pair(nbytes, changed)
    for encoding, payload in (
        ("xor", encode_xor(old, new).tobytes()),
        ("overwrite", bytes(encode_overwrite(old, new))),
        ("xor_sparse", bytes(encode_xor_sparse(old, new))),
    ):
        assert apply_payload(encoding, payload, old.tobytes()) == new.tobytes(), encoding


def test_payload_layouts_are_those_of_the_format() -> None:
    old = np.array([10, 20, 30, 40, 50], np.uint8)
    new = np.array([10, 21, 30, 40, 255], np.uint8)
    assert encode_xor(old, new).tobytes() == bytes([0, 1, 0, 0, 50 ^ 255])
    assert bytes(encode_overwrite(old, new)) == struct.pack("<III", 2, 1, 4) + bytes([21, 255])
    assert bytes(encode_xor_sparse(old, new)) == struct.pack("<QQQ", 2, 1, 4) + bytes([1, 50 ^ 255])


def test_no_change_is_a_payload_with_count_zero() -> None:
    same = np.arange(9, dtype=np.uint8)
    assert bytes(encode_overwrite(same, same)) == bytes(4)
    assert bytes(encode_xor_sparse(same, same)) == bytes(8)


@given(st.binary(max_size=300), st.lists(st.integers(1, 299), max_size=4), st.randoms())
def test_a_payload_built_from_pieces_is_the_whole_one(data: bytes, cuts: list[int], random) -> None:
    old = np.frombuffer(data, np.uint8)
    new = np.array([byte ^ (random.random() < 0.3) for byte in data], np.uint8)
    borders = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    for encoding, whole in (("overwrite", encode_overwrite), ("xor_sparse", encode_xor_sparse)):
        pieces = [
            find_changes(old[begin:end] ^ new[begin:end], new[begin:end], begin, encoding)
            for begin, end in itertools.pairwise(borders)
        ]
        assert build_sparse_payload(encoding, pieces) == whole(old, new)


def test_positions_past_4_gib_are_kept_whole_by_xor_sparse() -> None:
    piece = np.array([0, 7], np.uint8)
    payload = build_sparse_payload(
        "xor_sparse", [find_changes(piece, piece, 1 << 32, "xor_sparse")]
    )
    assert bytes(payload) == struct.pack("<QQ", 1, (1 << 32) + 1) + b"\7"


def test_overwrite_refuses_tensors_that_u32_positions_cannot_reach() -> None:
    check_overwrite_nbytes((1 << 32) - 1)
    with pytest.raises(ChainError) as caught:
        check_overwrite_nbytes(1 << 32, "big.weight")
    assert caught.value.tensor == "big.weight"
    assert caught.value.got == 1 << 32


@pytest.mark.parametrize("nbytes", (0, *SIZES))
def test_a_single_frame_has_content_size_and_nothing_optional(nbytes: int) -> None:
    old, new = _pair(nbytes)
    payload = encode_xor(old, new)
    blob = compress_single(payload.data)
    frame = zstandard.get_frame_parameters(blob)
    assert (frame.content_size, frame.dict_id, frame.has_checksum) == (nbytes, 0, False)
    assert zstandard.ZstdDecompressor().decompress(blob) == payload.tobytes()


@pytest.mark.parametrize("nbytes", (0, *SIZES))
def test_seekable_frames_are_independent_and_the_table_finds_them(nbytes: int) -> None:
    old, new = _pair(nbytes)
    payload = encode_xor(old, new).tobytes()
    blob = compress_seekable(payload, FRAME)

    count, descriptor, magic = struct.unpack("<IBI", blob[-9:])
    assert (count, descriptor, magic) == (max(1, -(-nbytes // FRAME)), 0, 0x8F92EAB1)
    table_nbytes = 8 * count + 9
    skippable, table_size = struct.unpack("<II", blob[-table_nbytes - 8 : -table_nbytes])
    assert (skippable, table_size) == (0x184D2A5E, table_nbytes)

    offset = done = 0
    for row in range(count):
        compressed, content = struct.unpack_from("<II", blob, len(blob) - table_nbytes + 8 * row)
        frame = blob[offset : offset + compressed]
        assert zstandard.get_frame_parameters(frame).content_size == content
        assert zstandard.ZstdDecompressor().decompress(frame) == payload[done : done + content]
        assert content == FRAME or row == count - 1
        offset += compressed
        done += content
    assert (done, offset) == (nbytes, len(blob) - table_nbytes - 8)


@pytest.mark.parametrize("nbytes", SIZES)
def test_readers_that_cross_frames_read_a_seekable_blob_as_one_stream(nbytes: int) -> None:
    old, new = _pair(nbytes)
    payload = encode_xor(old, new).tobytes()
    blob = compress_seekable(payload, FRAME)
    assert decode_blob(blob) == payload
    copied = io.BytesIO()
    zstandard.ZstdDecompressor().copy_stream(io.BytesIO(blob), copied)
    assert copied.getvalue() == payload


def test_frames_and_table_joined_are_the_seekable_blob() -> None:
    payload = np.zeros(5 * FRAME + 3, np.uint8)
    frames = compress_frames(payload, FRAME)
    table = build_seek_table(frames)
    assert b"".join([*(frame.data for frame in frames), table]) == compress_seekable(
        payload.data, FRAME
    )
