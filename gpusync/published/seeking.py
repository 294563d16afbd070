"""Blobs of many frames as layers over parts of their tensor: only the frames that hold those parts are read and decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpusync.format.frames import BlobReader
from gpusync.published.blobmaps import BlobMap, read_blob_map
from gpusync.published.blobs import BlobFile, BlobSource, locate_blob

Bytes = NDArray[np.uint8]


class SeekingBlob:
    """An xor blob as a layer (:class:`gpusync.format.encodings.Layer`) that may pass over pieces of its tensor.

    The frames of one piece are decoded at a time. The blob's digest, where the manifest gives it, is that of bytes which are
    not all read here, and is not looked at; the tensor's own digest is what proves the result.
    """

    def __init__(self, blob: BlobFile, frames: BlobMap, max_window: int) -> None:
        self._blob = blob
        self._frames = frames
        self._max_window = max_window
        self._buffer: Bytes = np.empty(0, np.uint8)

    def start(self, piece: Bytes, offset: int) -> None:
        """Fill ``piece`` with the delta from ``offset`` on."""
        np.copyto(piece, self._decode(offset, piece.size))

    def apply(self, piece: Bytes, offset: int) -> None:
        """Change ``piece``, the tensor's bytes from ``offset`` on, in place."""
        np.bitwise_xor(piece, self._decode(offset, piece.size), out=piece)

    def finish(self) -> None:
        """Free what is held: each piece's frames have ended where the map says."""
        self._buffer = np.empty(0, np.uint8)

    def _decode(self, offset: int, nbytes: int) -> Bytes:
        first, end = self._frames.covering(offset, offset + nbytes)
        begin, behind = self._frames.extent(first, end)
        content_begin, content_end = self._frames.content(first, end)
        content_nbytes = content_end - content_begin
        if self._buffer.size < content_nbytes:
            self._buffer = np.empty(content_nbytes, np.uint8)
        content = self._buffer[:content_nbytes]
        reader = BlobReader(
            _Part(self._blob, begin, behind).read,
            nbytes=behind - begin,
            content_nbytes=content_nbytes,
            max_window=self._max_window,
            where=self._blob.where_at(begin),
        )
        reader.readinto(content.data)
        reader.finish()
        return content[offset - content_begin :][:nbytes]


def open_seeking(
    sources: Sequence[BlobSource], nbytes: int, piece_nbytes: int, max_window: int
) -> list[SeekingBlob] | None:
    """Return a tensor's deltas as layers that may pass over pieces; None where they must be decoded from front to back.

    Parameters
    ----------
    nbytes, piece_nbytes
        Size of the tensor, and the most that a piece has: no frame may hold more.

    Raises
    ------
    FrameFormatError, SourceNotReadyError, VersionConflictError, HeaderFormatError
        As :func:`gpusync.published.blobmaps.read_blob_map`.
    """
    layers: list[SeekingBlob] = []
    for source in sources:
        blob = locate_blob(source)
        found = read_blob_map(source, nbytes) if blob.encoding == "xor" else ""
        if isinstance(found, str) or int(found.content_nbytes.max(initial=0)) > piece_nbytes:
            return None
        layers.append(SeekingBlob(blob, found, max_window))
    return layers


class _Part:
    """Part of a blob, read in order."""

    def __init__(self, blob: BlobFile, begin: int, end: int) -> None:
        self._blob = blob
        self._position, self._end = begin, end

    def read(self, nbytes: int) -> bytes:
        data = self._blob.read(self._position, min(nbytes, self._end - self._position))
        self._position += len(data)
        return data
