"""Blobs of many frames as layers over parts of their tensor: only the frames that hold those parts are read and decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpusync.format.decode_rows import xor_record
from gpusync.format.encodings import Layer
from gpusync.format.frames import BlobReader
from gpusync.format.rows import BAND_NBYTES, band_at, count_bands
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
        content_begin, content_end = self._frames.content(first, end)
        content_nbytes = content_end - content_begin
        if self._buffer.size < content_nbytes:
            self._buffer = np.empty(content_nbytes, np.uint8)
        content = self._buffer[:content_nbytes]
        reader = _read_frames(self._blob, self._frames, first, end, self._max_window)
        reader.readinto(content.data)
        reader.finish()
        return content[offset - content_begin :][:nbytes]


class SeekingRows:
    """An xor_rows blob with a frame for each record, as :class:`SeekingBlob`; pieces are whole bands."""

    def __init__(self, blob: BlobFile, frames: BlobMap, nbytes: int, max_window: int) -> None:
        self._blob = blob
        self._frames = frames
        self._nbytes = nbytes
        self._max_window = max_window

    def start(self, piece: Bytes, offset: int) -> None:
        """Fill ``piece`` with the delta from ``offset`` on."""
        piece.fill(0)
        self.apply(piece, offset)

    def apply(self, piece: Bytes, offset: int) -> None:
        """Change ``piece``, the tensor's bytes from ``offset`` on, in place."""
        first, end = offset // BAND_NBYTES, count_bands(offset + piece.size)
        reader = _read_frames(self._blob, self._frames, first, end, self._max_window)
        for number in range(first, end):
            band = band_at(self._nbytes, number * BAND_NBYTES)
            target = piece[band.begin - offset :][: band.nbytes]
            xor_record(reader, band, target, self._blob.where)
        reader.finish()

    def finish(self) -> None:
        """Nothing is held: each piece's records have ended where the map says."""


def open_seeking(
    sources: Sequence[BlobSource], nbytes: int, piece_nbytes: int, max_window: int
) -> list[Layer] | None:
    """Return a tensor's deltas as layers that may pass over pieces; None where they must be decoded from front to back.

    Parameters
    ----------
    nbytes, piece_nbytes
        Size of the tensor, and the most that a piece has: no frame may hold more, and no band be cut.

    Raises
    ------
    FrameFormatError, SourceNotReadyError, VersionConflictError, HeaderFormatError
        As :func:`gpusync.published.blobmaps.read_blob_map`.
    """
    layers: list[Layer] = []
    for source in sources:
        blob = locate_blob(source)
        if blob.encoding == "overwrite" or blob.encoding == "xor_sparse":
            return None
        in_rows = blob.encoding == "xor_rows"
        if in_rows and piece_nbytes % BAND_NBYTES and piece_nbytes < nbytes:
            return None
        found = read_blob_map(source, nbytes)
        if isinstance(found, str):
            return None
        if in_rows:
            layers.append(SeekingRows(blob, found, nbytes, max_window))
        elif int(found.content_nbytes.max(initial=0)) > piece_nbytes:
            return None
        else:
            layers.append(SeekingBlob(blob, found, max_window))
    return layers


def _read_frames(
    blob: BlobFile, frames: BlobMap, first: int, end: int, max_window: int
) -> BlobReader:
    """Return a reader of the content of some frames."""
    begin, behind = frames.extent(first, end)
    content_begin, content_end = frames.content(first, end)
    return BlobReader(
        _Part(blob, begin, behind).read,
        nbytes=behind - begin,
        content_nbytes=content_end - content_begin,
        max_window=max_window,
        where=blob.where_at(begin),
    )


class _Part:
    """Part of a blob, read in order."""

    def __init__(self, blob: BlobFile, begin: int, end: int) -> None:
        self._blob = blob
        self._position, self._end = begin, end

    def read(self, nbytes: int) -> bytes:
        data = self._blob.read(self._position, min(nbytes, self._end - self._position))
        self._position += len(data)
        return data
