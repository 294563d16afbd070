"""Payloads of all encodings, applied to a tensor piece by piece.

xor streams (decode_xor.py), and so does xor_rows, band by band (decode_rows.py). overwrite and xor_sparse name positions: the
whole payload is read and judged first, so nothing of the tensor changes under a payload that breaks a rule.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

from gpusync import fsio
from gpusync.errors import OutOfScratchError
from gpusync.format.decode_rows import RowsLayer
from gpusync.format.decode_xor import open_xor
from gpusync.format.frames import BlobReader, ReadBytes, Where
from gpusync.format.rows import most_payload_nbytes
from gpusync.types import Encoding

SPARSE_MEMORY_BYTES = 4 << 20
"""Most that one sparse layer keeps in memory; larger ones go to a temporary file."""

# Positions or values taken at a time: 1 MiB of keys.
_STEP = 1 << 17
_MAX_OVERWRITE_NBYTES = (1 << 32) - 1
_KEY_NBYTES = 8

Spill = Callable[[], IO[bytes]]
"""Returns a new, empty, unlinked temporary file, open for reading and writing, that is ours to close."""


class Layer(Protocol):
    """One delta of one tensor, ready to be applied to pieces that come in order, from 0 to the tensor's end."""

    def start(self, piece: NDArray[np.uint8], offset: int) -> None:
        """Fill ``piece`` with what the layer makes of zeros: the first of XOR layers that fold without their tensor."""

    def apply(self, piece: NDArray[np.uint8], offset: int) -> None:
        """Change ``piece``, the tensor's bytes from ``offset`` on, in place."""

    def finish(self) -> None:
        """Check that the blob ended with the tensor, and free what is held."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A sparse payload: a count, that many positions, that many bytes."""

    count_nbytes: int
    position_dtype: np.dtype[np.unsignedinteger]
    is_xor: bool

    def payload_nbytes(self, count: int) -> int:
        return self.count_nbytes + count * (self.position_dtype.itemsize + 1)


_OVERWRITE = _Form(4, np.dtype("<u4"), is_xor=False)
_XOR_SPARSE = _Form(8, np.dtype("<u8"), is_xor=True)


def open_layer(
    encoding: Encoding,
    begin_reading: Callable[[], ReadBytes],
    *,
    blob_nbytes: int,
    nbytes: int,
    max_window: int,
    where: Where,
    spill: Spill | None,
) -> Layer:
    """Return the layer that a blob holds.

    Parameters
    ----------
    encoding
        The version's.
    begin_reading
        Returns what gives the blob's next bytes, from its first on: at most as many as asked for, b"" at its end. Called
        again where another decoder takes over: what the one before read is read again.
    blob_nbytes, nbytes
        Size of the blob, and of the tensor.
    max_window
        Largest zstd window that may be allocated.
    where
        For errors.
    spill
        Makes a file for a sparse payload over ``SPARSE_MEMORY_BYTES``.

    Raises
    ------
    FrameFormatError
        The blob or the payload breaks a rule. A sparse payload has been judged in full when this returns; the frames
        of xor and the records of xor_rows are judged as they come, at the latest by ``finish``.
    OutOfScratchError
        A payload is over ``SPARSE_MEMORY_BYTES`` and ``spill`` is None.
    """
    if encoding == "xor":
        return open_xor(
            begin_reading,
            blob_nbytes=blob_nbytes,
            nbytes=nbytes,
            max_window=max_window,
            where=where,
        )
    read = begin_reading()
    if encoding == "xor_rows":
        rows = BlobReader(
            read,
            nbytes=blob_nbytes,
            content_nbytes=None,
            content_cap=most_payload_nbytes(nbytes),
            max_window=max_window,
            where=where,
        )
        return RowsLayer(rows, nbytes, where)
    form = _OVERWRITE if encoding == "overwrite" else _XOR_SPARSE
    if form is _OVERWRITE and nbytes > _MAX_OVERWRITE_NBYTES:
        raise where.refused(
            "overwrite cannot address a tensor of this size",
            expected=_MAX_OVERWRITE_NBYTES,
            got=nbytes,
        )
    reader = BlobReader(
        read,
        nbytes=blob_nbytes,
        content_nbytes=None,
        content_cap=form.payload_nbytes(nbytes),
        max_window=max_window,
        where=where,
    )
    return _SparseLayer(_read_keys(form, reader, nbytes, where, spill), form)


class _SparseLayer:
    """Sorted keys, ``position << 8 | value``: a slice of them is what falls into a piece."""

    def __init__(self, keys: NDArray[np.uint64], form: _Form) -> None:
        self._keys = keys
        self._is_xor = form.is_xor
        self._used = 0

    def start(self, piece: NDArray[np.uint8], offset: int) -> None:
        piece.fill(0)
        self.apply(piece, offset)

    def apply(self, piece: NDArray[np.uint8], offset: int) -> None:
        end = int(np.searchsorted(self._keys, np.uint64((offset + piece.size) << 8)))
        keys = self._keys[self._used : end]
        self._used = end
        positions = (keys >> 8).astype(np.intp) - offset
        values = keys.astype(np.uint8)
        if self._is_xor:
            # Positions are unique, so the gather and the scatter do not meet.
            values ^= piece[positions]
        piece[positions] = values

    def finish(self) -> None:
        self._keys = np.empty(0, np.uint64)


def _read_keys(
    form: _Form, reader: BlobReader, nbytes: int, where: Where, spill: Spill | None
) -> NDArray[np.uint64]:
    """Read and judge a whole sparse payload; return its keys, sorted."""
    word = bytearray(form.count_nbytes)
    reader.readinto(memoryview(word))
    count = int.from_bytes(word, "little")
    if count > nbytes:
        raise where.refused(
            "a sparse payload has more positions than the tensor has bytes",
            expected=nbytes,
            got=count,
        )
    reader.expect(form.payload_nbytes(count))
    keys = _new_keys(count, spill)
    buffer = np.empty(min(_STEP, count) * form.position_dtype.itemsize, np.uint8)
    ordered = _read_positions(form, reader, keys, buffer, nbytes, where)
    for begin in range(0, count, _STEP):
        part = keys[begin : begin + _STEP]
        values = buffer[: part.size]
        reader.readinto(values.data)
        part |= values
    reader.finish()
    if not ordered:
        keys.sort()
        _check_unique(keys, where)
    return keys


def _read_positions(
    form: _Form,
    reader: BlobReader,
    keys: NDArray[np.uint64],
    buffer: NDArray[np.uint8],
    nbytes: int,
    where: Where,
) -> bool:
    """Read positions into ``keys``, each within the tensor; return whether they increase strictly."""
    previous, ordered = -1, True
    for begin in range(0, keys.size, _STEP):
        part = keys[begin : begin + _STEP]
        raw = buffer[: part.size * form.position_dtype.itemsize]
        reader.readinto(raw.data)
        positions = raw.view(form.position_dtype)
        largest = int(positions.max())
        if largest >= nbytes:
            raise where.refused("a position is outside of the tensor", expected=nbytes, got=largest)
        if ordered:
            increasing = bool((positions[1:] > positions[:-1]).all())
            ordered = increasing and int(positions[0]) > previous
        if form.is_xor and not ordered:
            raise where.refused("positions do not increase strictly")
        previous = int(positions[-1])
        np.left_shift(positions, np.uint64(8), out=part, dtype=np.uint64)
    return ordered


def _check_unique(keys: NDArray[np.uint64], where: Where) -> None:
    for begin in range(0, keys.size - 1, _STEP):
        positions = keys[begin : begin + _STEP + 1] >> np.uint64(8)
        same = np.flatnonzero(positions[1:] == positions[:-1])
        if same.size:
            raise where.refused("a position is given twice", got=int(positions[same[0]]))


def _new_keys(count: int, spill: Spill | None) -> NDArray[np.uint64]:
    """Return room for ``count`` keys: in memory, or, where that is over the cap, in pages of a temporary file."""
    nbytes = count * _KEY_NBYTES
    if nbytes <= SPARSE_MEMORY_BYTES:
        return np.empty(count, np.uint64)
    if spill is None:
        raise OutOfScratchError(
            "a sparse payload is over the memory cap and there is no folder to spill it to",
            needed_bytes=nbytes,
            budget_bytes=SPARSE_MEMORY_BYTES,
        )
    with spill() as file:
        # Reserved before it is mapped: a full disk is an OSError here, and would be SIGBUS at the first store.
        fsio.allocate(file.fileno(), nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint64)
