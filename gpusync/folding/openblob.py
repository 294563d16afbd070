"""A published blob, opened to be applied to its tensor piece by piece."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpusync import fsio
from gpusync.folding.scratch import scratch_errors
from gpusync.format.digest import Hasher, new_hasher
from gpusync.format.encodings import Layer, open_layer
from gpusync.format.frames import ReadBytes
from gpusync.published.blobs import BlobFile, BlobSource, hold_digest, locate_blob

Bytes = NDArray[np.uint8]


class _Feed:
    """A blob's compressed bytes in order, for a decoder; digested where the publisher's manifest gives their digest.

    The decoder keeps this object and nothing that leads back to the decoder: zstandard's reader takes no part in
    garbage collection, and a cycle through it is never freed.
    """

    def __init__(self, blob: BlobFile) -> None:
        self._blob = blob
        self._position = 0
        self._hasher: Hasher | None = None

    def begin(self) -> ReadBytes:
        """Begin at the blob's first byte, perhaps again, and return what reads on from there."""
        self._position = 0
        self._hasher = new_hasher("xxh3-128") if self._blob.stated else None
        return self._read

    def check(self) -> None:
        """Hold the digest of what was read against the manifest's."""
        if self._hasher is not None:
            hold_digest(self._blob, self._hasher)

    def _read(self, nbytes: int) -> bytes:
        """Return up to ``nbytes`` next bytes, none at the end."""
        piece = self._blob.read(self._position, min(nbytes, self._blob.nbytes - self._position))
        self._position += len(piece)
        if self._hasher is not None:
            self._hasher.update(piece)
        return piece


class OpenBlob:
    """A blob as a layer over its tensor (:class:`gpusync.format.encodings.Layer`).

    Parameters
    ----------
    nbytes
        Size of the tensor.
    max_window
        Largest window that the decoder may have.
    scratch_dir
        Where a sparse payload over its memory cap is put; None for the system's temporary folder.

    Raises
    ------
    CheckpointIOError
        There is no room for that.
    FrameFormatError, SourceNotReadyError, VersionConflictError
        The blob cannot be decoded or read: here, and in every method.
    """

    def __init__(
        self, source: BlobSource, nbytes: int, max_window: int, scratch_dir: Path | None
    ) -> None:
        blob = locate_blob(source)
        self._feed = _Feed(blob)
        with scratch_errors(scratch_dir):  # reading the blob has errors of its own
            self._layer: Layer = open_layer(
                blob.encoding,
                self._feed.begin,
                blob_nbytes=blob.nbytes,
                nbytes=nbytes,
                max_window=max_window,
                where=blob.where,
                spill=lambda: fsio.scratch_file(scratch_dir),
            )

    def start(self, piece: Bytes, offset: int) -> None:
        self._layer.start(piece, offset)

    def apply(self, piece: Bytes, offset: int) -> None:
        self._layer.apply(piece, offset)

    def finish(self) -> None:
        self._layer.finish()
        self._feed.check()

    def close(self) -> None:
        """Drop what is held, a spilled payload's descriptor among it: an error's traceback may keep this object."""
        del self._layer
