"""From a piece of old XOR new to records of xor_rows (rows.py), each a zstd frame of its own.

Every plane of a record ends a zstd block, so that each has a literal table of its own: counts, positions and values have
nothing in common that one table could use.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from gpusync.format.encode import Bytes, EncodedFrame
from gpusync.format.rows import BAND_NBYTES, FORM_ROWS, FORM_WORDS, ROW_WORDS, Band

# A small match table finds runs and passes over chance matches of few bytes, which cost more than they save here.
_HASH_LOG = 6
# Up to this share of changed words rows are always the smaller form, and nothing else is tried.
_SPARSE = 1 / 8

_local = threading.local()


def encode_rows(delta: Bytes) -> list[EncodedFrame]:
    """Return the records of a piece of old XOR new that begins where a band does, and ends with one or the tensor."""
    return [
        _encode_band(delta[begin : begin + BAND_NBYTES])
        for begin in range(0, delta.size, BAND_NBYTES)
    ]


def _encode_band(delta: Bytes) -> EncodedFrame:
    band = Band(0, delta.size)
    words = _words_of(delta, band)
    changed = np.flatnonzero(words != 0)
    if changed.size > band.most_changes:
        return _compress(_planes_of_words(delta))
    rows = _compress(_planes_of_rows(words, changed, band))
    if changed.size <= _SPARSE * band.words:
        return rows
    dense = _compress(_planes_of_words(delta))
    return min(rows, dense, key=lambda frame: len(frame.data))


def _words_of(delta: Bytes, band: Band) -> NDArray[np.uint16]:
    if delta.size % 2:
        padded = np.zeros(2 * band.words, np.uint8)
        padded[: delta.size] = delta
        delta = padded
    return delta.view("<u2")


def _planes_of_rows(
    words: NDArray[np.uint16], changed: NDArray[np.intp], band: Band
) -> list[bytes]:
    values = words[changed]
    counts = np.bincount(changed // ROW_WORDS, minlength=band.rows)
    return [
        bytes([FORM_ROWS]) + counts.astype(np.uint8).tobytes(),
        (changed % ROW_WORDS).astype(np.uint8).tobytes(),
        values.astype(np.uint8).tobytes(),
        (values >> 8).astype(np.uint8).tobytes(),
    ]


def _planes_of_words(delta: Bytes) -> list[bytes]:
    return [bytes([FORM_WORDS]) + delta[0::2].tobytes(), delta[1::2].tobytes()]


def _compress(planes: list[bytes]) -> EncodedFrame:
    """Return the planes as one frame with content size in which each begins a block."""
    filled = [plane for plane in planes if plane]
    content_nbytes = sum(map(len, filled))
    stream = _compressor().compressobj(size=content_nbytes)
    parts: list[bytes] = []
    for number, plane in enumerate(filled):
        parts.append(stream.compress(plane))
        if number < len(filled) - 1:
            parts.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    parts.append(stream.flush())
    return EncodedFrame(b"".join(parts), content_nbytes)


def _compressor() -> zstandard.ZstdCompressor:
    """Return this thread's compressor."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, hash_log=_HASH_LOG, write_content_size=True, write_checksum=False
        )
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
        _local.compressor = compressor
    return compressor
