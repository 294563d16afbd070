"""From a piece of old XOR new to records of xor_rows (rows.py), each a zstd frame of its own.

Every plane of a record ends a zstd block, so that each has a literal table of its own: counts, positions and values have
nothing in common that one table could use.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from gpusync.compiled import compiled
from gpusync.format.encode import Bytes, EncodedFrame
from gpusync.format.rows import (
    BAND_NBYTES,
    FORM_ROWS,
    FORM_WORDS,
    ROW_NBYTES,
    ROW_WORDS,
    Band,
)

# A small match table finds runs and passes over chance matches of few bytes, which cost more than they save here.
_HASH_LOG = 6
# Up to this share of changed words rows are always the smaller form, and nothing else is tried.
_SPARSE = 1 / 8

_U64 = np.uint64
_GROUP, _GROUPS = _U64(2), _U64(ROW_WORDS // 8)  # of 8 words, as 2 numbers of 8 bytes
_WORDS, _WORD_BITS, _WORD = _U64(4), _U64(16), _U64(0xFFFF)
_BYTE_BITS = _U64(8)


class _PerThread(threading.local):
    """A thread's compressor, and room for the planes of a record in rows: it is as long as its band at most."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, hash_log=_HASH_LOG, write_content_size=True, write_checksum=False
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        largest = Band(0, BAND_NBYTES)
        self.head: Bytes = np.empty(1 + largest.rows, np.uint8)
        # A search stops at the end of the row with which it found too much.
        self.planes: Bytes = np.empty((3, largest.most_changes + ROW_WORDS), np.uint8)


_local = _PerThread()


def encode_rows(delta: Bytes) -> list[EncodedFrame]:
    """Return the records of a piece of old XOR new that begins where a band does, and ends with one or the tensor."""
    return [
        _encode_band(delta[begin : begin + BAND_NBYTES])
        for begin in range(0, delta.size, BAND_NBYTES)
    ]


def _encode_band(delta: Bytes) -> EncodedFrame:
    band = Band(0, delta.size)
    padded = _in_whole_rows(delta, band)
    head, planes = _local.head[: 1 + band.rows], _local.planes
    changes = int(_find_changes(padded.view("<u8"), band.most_changes, head[1:], planes))
    if changes > band.most_changes:
        return _compress(_planes_of_words(padded, band))
    head[0] = FORM_ROWS
    rows = _compress([head, *planes[:, :changes]])
    if changes <= _SPARSE * band.words:
        return rows
    dense = _compress(_planes_of_words(padded, band))
    return min(rows, dense, key=lambda frame: len(frame.data))


def _in_whole_rows(delta: Bytes, band: Band) -> Bytes:
    """Return old XOR new with zeros behind it up to the end of its last row."""
    nbytes = band.rows * ROW_NBYTES
    if nbytes == delta.size:
        return delta
    padded = np.zeros(nbytes, np.uint8)
    padded[: delta.size] = delta
    return padded


@compiled(
    "uint64(Array(uint64, 1, 'C', readonly=True, aligned=False), uint64, uint8[::1], uint8[:, ::1])"
)
def _find_changes(delta: NDArray[np.uint64], most: int, counts: Bytes, planes: Bytes) -> np.uint64:
    """Find the changed words of whole rows of old XOR new, until they are more than ``most``.

    Parameters
    ----------
    delta
        8 bytes a number.
    counts
        Takes the changed words of each row.
    planes
        Take the positions, first and second bytes of the changed words; have room for ``most`` and those of one row more.

    Returns
    -------
    uint64
        The changed words; if over ``most``, then not all of them.
    """
    positions, low, high = planes[0], planes[1], planes[2]
    found = _U64(0)
    for row in range(_U64(counts.size)):
        before = found
        for group in range(_GROUPS):
            begin = (row * _GROUPS + group) * _GROUP
            # A branch that cannot be foreseen costs more than the words of a group do: there is one for each group.
            if delta[begin] | delta[begin + _U64(1)] == _U64(0):
                continue
            for number in range(_GROUP):
                words = delta[begin + number]
                position = (group * _GROUP + number) * _WORDS
                for _ in range(_WORDS):
                    positions[found] = position
                    low[found] = words
                    high[found] = words >> _BYTE_BITS
                    found += _U64(words & _WORD != _U64(0))
                    words >>= _WORD_BITS
                    position += _U64(1)
        counts[row] = found - before
        if found > most:
            break
    return found


def _planes_of_words(padded: Bytes, band: Band) -> list[Bytes]:
    words = padded.view("<u2")[: band.words]
    low = np.empty(1 + band.words, np.uint8)
    low[0] = FORM_WORDS
    np.copyto(low[1:], words, casting="unsafe")
    high = np.empty(band.nbytes // 2, np.uint8)
    np.right_shift(words[: high.size], 8, out=high, casting="unsafe")
    return [low, high]


def _compress(planes: list[Bytes]) -> EncodedFrame:
    """Return the planes as one frame with content size in which each begins a block."""
    filled = [plane for plane in planes if plane.size]
    content_nbytes = sum(plane.size for plane in filled)
    stream = _local.compressor.compressobj(size=content_nbytes)
    parts: list[bytes] = []
    for number, plane in enumerate(filled):
        parts.append(stream.compress(plane.data))
        if number < len(filled) - 1:
            parts.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    parts.append(stream.flush())
    return EncodedFrame(b"".join(parts), content_nbytes)
