"""Payloads of xor, as long as their tensor: old XOR new.

libzstd decodes any of them. Where most of a payload is zeros, as its blob's size tells, compiled loops are several times as fast:
they find the bytes that are not zero, and pass over the rest (zstd/nonzero.py). What they do not decode, or find wrong, libzstd
decodes from the start again, and judges.

The loops are loaded once a process has had so much to decode that they are likely to be worth it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import are_kept, compile_loops
from gpusync.format.frames import BlobReader, ReadBytes
from gpusync.format.where import Where
from gpusync.format.zstd.decode_nonzero import xor_nonzero
from gpusync.format.zstd.nonzero import NEARLY_EMPTY, LeftToLibzstdError, NonzeroReader

Bytes = NDArray[np.uint8]

# Decoded and XORed in at a time: a quarter of a common L2 cache.
_DELTA_NBYTES = 1 << 19
_log = logging.getLogger(__name__)
_local = threading.local()
# Content that is decoded before the loops are loaded from numba's cache, or compiled for it, which takes some tenths of a second
# and some ten seconds: about as much as they would have saved on it.
_LOADED_AFTER_NBYTES = 256 << 20
_COMPILED_AFTER_NBYTES = 16 << 30
_NEVER = 1 << 64


class _Loops:
    """Whether the compiled loops are there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked_nbytes = 0
        self._next_nbytes = _LOADED_AFTER_NBYTES
        self.loaded = False

    def ask(self, nbytes: int) -> None:
        """Count nearly empty content that is about to be decoded, and load the loops where it has become much.

        The thread that happens to ask loads them; the others decode as before meanwhile.
        """
        with self._lock:
            self._asked_nbytes += nbytes
            is_much = self._asked_nbytes > self._next_nbytes
            is_more = self._next_nbytes == _COMPILED_AFTER_NBYTES
            if is_much:
                self._next_nbytes = _NEVER if is_more else _COMPILED_AFTER_NBYTES
        if not is_much:
            return
        try:
            if is_more or self.are_kept():
                self.load()
        except Exception as err:  # whatever numba says: nobody waits for these loops
            self._next_nbytes = _NEVER
            _log.warning(
                "nearly empty blobs are decoded by libzstd, for loops cannot be compiled: %r", err
            )

    def are_kept(self) -> bool:
        """Return whether they were compiled on this machine."""
        return are_kept(xor_nonzero.__module__)

    def load(self) -> None:
        """Load the loops, and compile them where they never were on this machine."""
        compile_loops(xor_nonzero.__module__)
        self.loaded = True


loops = _Loops()
"""This process's."""


def open_xor(
    begin_reading: Callable[[], ReadBytes],
    *,
    blob_nbytes: int,
    nbytes: int,
    max_window: int,
    where: Where,
) -> DenseLayer | NonzeroLayer:
    """Return the layer that a blob holds; parameters and errors are those of :func:`gpusync.format.encodings.open_layer`."""

    def open_dense() -> DenseLayer:
        return DenseLayer(
            BlobReader(
                begin_reading(),
                nbytes=blob_nbytes,
                content_nbytes=nbytes,
                max_window=max_window,
                where=where,
            )
        )

    if blob_nbytes > nbytes * NEARLY_EMPTY:
        return open_dense()
    if not loops.loaded:
        loops.ask(nbytes)
    if not loops.loaded:
        return open_dense()
    reader = NonzeroReader(
        begin_reading(),
        nbytes=blob_nbytes,
        content_nbytes=nbytes,
        max_window=max_window,
        where=where,
    )
    return NonzeroLayer(reader, nbytes, open_dense)


class DenseLayer:
    """Decoded by libzstd; the layers of a thread take turns at one buffer, so that it stays in cache."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader

    def start(self, piece: Bytes, offset: int) -> None:
        self._reader.readinto(piece.data)

    def apply(self, piece: Bytes, offset: int) -> None:
        for begin in range(0, piece.size, _DELTA_NBYTES):
            part = piece[begin : begin + _DELTA_NBYTES]
            delta = _delta_buffer()[: part.size]
            self._reader.readinto(delta.data)
            np.bitwise_xor(part, delta, out=part)

    def pass_over(self, nbytes: int) -> None:
        """Decode so many bytes from the start, for nothing but to judge them."""
        for begin in range(0, nbytes, _DELTA_NBYTES):
            self._reader.readinto(_delta_buffer()[: nbytes - begin].data)

    def finish(self) -> None:
        self._reader.finish()


class NonzeroLayer:
    """Decoded by compiled loops, until they meet what they do not decode."""

    def __init__(
        self, reader: NonzeroReader, nbytes: int, open_dense: Callable[[], DenseLayer]
    ) -> None:
        self._reader = reader
        self._nbytes = nbytes
        self._open_dense = open_dense
        self._dense: DenseLayer | None = None

    def start(self, piece: Bytes, offset: int) -> None:
        piece.fill(0)
        self.apply(piece, offset)

    def apply(self, piece: Bytes, offset: int) -> None:
        if self._dense is None:
            try:
                self._reader.xor_into(piece)
                return
            except LeftToLibzstdError:
                self._dense = self._open_dense()
            self._dense.pass_over(offset)
        self._dense.apply(piece, offset)

    def finish(self) -> None:
        if self._dense is None:
            try:
                self._reader.finish()
                return
            except LeftToLibzstdError:
                self._dense = self._open_dense()
            self._dense.pass_over(self._nbytes)
        self._dense.finish()


def _delta_buffer() -> Bytes:
    """Return this thread's buffer for decoded bytes."""
    buffer: Bytes | None = getattr(_local, "delta", None)
    if buffer is None:
        buffer = _local.delta = np.empty(_DELTA_NBYTES, np.uint8)
    return buffer
