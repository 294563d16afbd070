"""From two versions of a tensor's bytes to a delta payload, and from a payload to a zstd blob.

Pure: arrays and bytes in, arrays and bytes out. Three payload layouts are those of the published format (the fourth,
xor_rows, is encode_rows.py's):

========== ==================================================================================
xor        as long as the tensor: old XOR new
overwrite  u32 count, count u32 byte positions, count new bytes
xor_sparse u64 count, count u64 byte positions, strictly increasing, count bytes of old XOR new
========== ==================================================================================

Numbers are little endian. A long tensor may be searched piece by piece (`find_changes`) and its payload built from
the pieces; the one-call functions are the same with one piece.
"""

from __future__ import annotations

import functools
import logging
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from gpusync.compiled import compile_loops
from gpusync.errors import ChainError
from gpusync.format.zstd.encode_runs import compress_runs
from gpusync.types import Encoding

Bytes = NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview

MAX_OVERWRITE_NBYTES = 1 << 32
MIN_FRAME_BYTES = 64 << 10
MAX_FRAME_BYTES = 1 << 20
SEEK_TABLE_MAGIC = 0x184D2A5E
SEEKABLE_MAGIC = 0x8F92EAB1

_log = logging.getLogger(__name__)
_local = threading.local()


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed bytes of one piece of a tensor.

    ``positions`` are byte positions in the tensor, increasing, as wide as the encoding stores them; ``values`` are
    the bytes that it stores for them (new bytes, or old XOR new).
    """

    positions: NDArray[np.unsignedinteger[Any]]
    values: Bytes


def find_changes(delta: Bytes, new: Bytes, offset: int, encoding: Encoding) -> Changes:
    """Return where a piece of old XOR new is not zero, with the values that ``encoding`` stores.

    Parameters
    ----------
    delta, new
        One piece of old XOR new, and the same piece of the new tensor.
    offset
        Byte position of the piece in the tensor.
    """
    # numpy searches a bool array five times as fast as one of bytes.
    where = np.flatnonzero(delta != 0)
    values = new[where] if encoding == "overwrite" else delta[where]
    return Changes((where + offset).astype(f"<u{_position_nbytes(encoding)}"), values)


def _position_nbytes(encoding: Encoding) -> int:
    return 4 if encoding == "overwrite" else 8


def build_sparse_payload(encoding: Encoding, pieces: Sequence[Changes]) -> bytearray:
    """Return the overwrite or xor_sparse payload of a tensor from its pieces, which come in order of position."""
    count = sum(piece.positions.size for piece in pieces)
    width = _position_nbytes(encoding)
    payload = bytearray(width + count * (width + 1))
    payload[:width] = count.to_bytes(width, "little")
    positions = np.frombuffer(payload, f"<u{width}", count, width)
    values = np.frombuffer(payload, np.uint8, count, width + count * width)
    done = 0
    for piece in pieces:
        upto = done + piece.positions.size
        positions[done:upto] = piece.positions
        values[done:upto] = piece.values
        done = upto
    return payload


def encode_xor(old: Bytes, new: Bytes) -> Bytes:
    """Return old XOR new, a new array."""
    return np.bitwise_xor(old, new)


def encode_overwrite(old: Bytes, new: Bytes) -> bytearray:
    """Return the overwrite payload.

    Raises
    ------
    ChainError
        The tensor is longer than u32 positions reach.
    """
    check_overwrite_nbytes(new.size)
    return build_sparse_payload(
        "overwrite", [find_changes(encode_xor(old, new), new, 0, "overwrite")]
    )


def encode_xor_sparse(old: Bytes, new: Bytes) -> bytearray:
    """Return the xor_sparse payload."""
    return build_sparse_payload(
        "xor_sparse", [find_changes(encode_xor(old, new), new, 0, "xor_sparse")]
    )


def check_overwrite_nbytes(nbytes: int, tensor: str | None = None) -> None:
    """Refuse a tensor whose bytes the u32 positions of ``overwrite`` cannot all reach.

    Raises
    ------
    ChainError
        ``nbytes`` is 2**32 or more.
    """
    if nbytes >= MAX_OVERWRITE_NBYTES:
        raise ChainError(
            "overwrite cannot address this tensor. Publish with encoding xor or xor_sparse.",
            tensor=tensor,
            expected=f"under {MAX_OVERWRITE_NBYTES} bytes",
            got=nbytes,
        )


def new_compressor() -> zstandard.ZstdCompressor:
    """Return this thread's compressor: level 1, content size in the header, no frame checksum, no dictionary."""
    found = _local.__dict__.get("compressor")
    if found is None:
        found = _local.compressor = zstandard.ZstdCompressor(
            level=1, write_content_size=True, write_checksum=False
        )
    return cast(zstandard.ZstdCompressor, found)


def compress_single(payload: Buffer) -> bytes:
    """Return the payload as one zstd frame."""
    # A copy: zstandard's result keeps the memory of the largest frame that the payload could have made.
    return memoryview(new_compressor().compress(payload)).tobytes()


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A zstd frame, and the size of its content."""

    data: bytes
    content_nbytes: int


def compress_frames(
    payload: Bytes, frame_bytes: int, *, by_runs: bool = True
) -> list[EncodedFrame]:
    """Return the payload as independent frames of ``frame_bytes`` each, the last one shorter.

    Parameters
    ----------
    by_runs
        Have those that are nearly empty made by :func:`gpusync.format.zstd.encode_runs.compress_runs`.
    """
    pieces = [
        payload[begin : begin + frame_bytes]
        for begin in range(0, max(payload.size, 1), frame_bytes)
    ]
    made = compress_runs(payload, frame_bytes) if by_runs and payload.size else [None] * len(pieces)
    return [
        EncodedFrame(frame or compress_single(piece.data), piece.size)
        for frame, piece in zip(made, pieces, strict=True)
    ]


@functools.cache
def can_make_runs() -> bool:
    """Return whether the encoder of runs is there; it is compiled now where it never was. What it lacks is in the log."""
    try:
        compile_loops(compress_runs.__module__)
    except Exception as err:  # whatever numba says: libzstd does as well
        _log.warning("deltas are compressed by libzstd, for loops cannot be compiled: %r", err)
        return False
    return True


def build_seek_table(frames: Sequence[EncodedFrame]) -> bytes:
    """Return the skippable frame that closes a blob in the Zstandard Seekable Format.

    Entries are (compressed size, content size) as u32, without checksums; the footer is the count, a descriptor
    byte of 0, and the magic (facebook/zstd, contrib/seekable_format).
    """
    sizes = np.array([(len(frame.data), frame.content_nbytes) for frame in frames], "<u4")
    footer = struct.pack("<IBI", len(frames), 0, SEEKABLE_MAGIC)
    return (
        struct.pack("<II", SEEK_TABLE_MAGIC, sizes.nbytes + len(footer)) + sizes.tobytes() + footer
    )


def join_frames(frames: Sequence[EncodedFrame]) -> bytes:
    """Return a blob of frames and their seek table."""
    return b"".join([*(frame.data for frame in frames), build_seek_table(frames)])


def compress_seekable(payload: Buffer, frame_bytes: int) -> bytes:
    """Return the payload as independent zstd frames and a seek table.

    Readers that cross frames decode it as one stream; others stop after the first frame.
    """
    return join_frames(compress_frames(np.frombuffer(payload, np.uint8), frame_bytes))
