"""What is copied to the device, read in order: frames as they are published, raw bytes, bytes that the host folded.

Frames are walked and held against the map that the batch was planned by, and against the manifest's digest where there
is one. What does not agree is no error yet: the host may find the blob in order, and says so properly if not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpusync.device.chunks import Chunk, ChunkLayer
from gpusync.device.layers import FoldedLayer, RegionMap
from gpusync.errors import FormatError, SourceNotReadyError
from gpusync.folding.fold import Fold, Origin
from gpusync.format.digest import Hasher, new_hasher
from gpusync.format.frames import FrameWalker
from gpusync.published.blobmaps import BlobMap
from gpusync.published.blobs import BlobFile, hash_blob, hold_digest
from gpusync.types import Frame

Bytes = NDArray[np.uint8]

_PIECE_NBYTES = 1 << 20


class NeedsHost(Exception):
    """Tensor ``name``, which the device was to decode, must be folded by the host; ``reason`` says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class Reader(Protocol):
    """Gives the input bytes of one layer of one chunk, in order."""

    def fill(self, out: Bytes) -> None:
        """Fill ``out`` with the next bytes."""

    def finish(self) -> None:
        """Check what can be checked once all bytes were taken."""


class FramesReader:
    """The compressed frames of a chunk's layer.

    Parameters
    ----------
    hashed
        The digest of the blob is checked on the way; only where the layer takes all of its frames.

    Raises
    ------
    NeedsHost
        By ``fill`` and ``finish``: the frames are not those of the map, or break the format, or carry a checksum.
    FrameFormatError
        By ``finish``: the blob is not the one that the manifest describes.
    VersionConflictError, SourceNotReadyError, HeaderFormatError
        By ``fill`` and ``finish``: the shard was replaced, or cannot be read.
    """

    def __init__(self, blob: BlobFile, map: BlobMap, layer: ChunkLayer, *, hashed: bool) -> None:
        first, end = layer.first_frame, layer.end_frame
        begin, self._end = map.extent(first, end)
        content_begin, content_end = map.content(first, end)
        self._blob = blob
        self._position = begin
        self._may_omit_content = map.count == 1
        self._expected = zip(
            (map.offset[first:end] - begin).tolist(),
            map.nbytes[first:end].tolist(),
            map.content_nbytes[first:end].tolist(),
            strict=True,
        )
        self._walker = FrameWalker(
            content_nbytes=content_end - content_begin,
            where=blob.where_at(begin),
            on_frame=self._check,
        )
        self._hasher: Hasher | None = None
        if hashed:
            self._hasher = new_hasher("xxh3-128")
            hash_blob(blob, self._hasher, 0, begin)

    def fill(self, out: Bytes) -> None:
        self._blob.read_into(out.data, self._position)
        self._position += out.size
        try:
            self._walker.feed(out.data)
        except (FormatError, SourceNotReadyError) as err:
            raise self._refused(str(err)) from err
        if self._hasher is not None:
            self._hasher.update(out.data)

    def finish(self) -> None:
        try:
            self._walker.finish()
        except (FormatError, SourceNotReadyError) as err:
            raise self._refused(str(err)) from err
        if next(self._expected, None) is not None:
            raise self._refused("the blob holds fewer frames than its seek table lists")
        if self._hasher is not None:
            hash_blob(self._blob, self._hasher, self._end, self._blob.nbytes)
            hold_digest(self._blob, self._hasher)

    def _check(self, frame: Frame) -> None:
        if frame.skippable or frame.content_nbytes == 0:
            return
        expected = next(self._expected, None)
        if expected is None or (frame.offset, frame.nbytes) != expected[:2]:
            raise self._refused("the frames are not those that the seek table or header promises")
        if frame.has_checksum:
            raise self._refused("a frame with a checksum, which only the host verifies")
        if frame.content_nbytes is None:
            if not self._may_omit_content:
                raise self._refused("a frame without content size, in a blob of several")
        elif frame.content_nbytes != expected[2]:
            raise self._refused("a frame's content is not of the size that the seek table lists")

    def _refused(self, reason: str) -> NeedsHost:
        return NeedsHost(self._blob.where.tensor or "", reason)


class RawReader:
    """Region bytes of a chunk from input byte ``at`` on, read from an origin; they come packed."""

    def __init__(self, origin: Origin, chunk: Chunk, at: int) -> None:
        self._origin = origin
        self._region = chunk.tensor.region
        self._position = chunk.offset + at
        self._buffer = np.empty(0, np.uint8)

    def fill(self, out: Bytes) -> None:
        region = self._region
        if region.is_one_run:
            self._origin.read_into(out, region.tensor_position(self._position))
            self._position += out.size
            return
        if not self._buffer.size:
            self._buffer = np.empty(_PIECE_NBYTES, np.uint8)
        done = 0
        while done < out.size:
            at = self._position + done
            begin, end = region.tensor_span(at, at + out.size - done)
            nbytes = min(end - begin, self._buffer.size)
            if (
                region.tensor_stride >= self._buffer.size
            ):  # what lies between runs is not worth reading
                nbytes = min(nbytes, region.run_nbytes - at % region.run_nbytes)
            piece = self._buffer[:nbytes]
            self._origin.read_into(piece, begin)
            done += gather(region, piece, begin, at, out[done:])
        self._position += done

    def finish(self) -> None:
        pass


class FoldReader:
    """Region bytes of a tensor that the host folds, packed; one reader serves all chunks of a region, in order."""

    def __init__(
        self, fold: Fold, layer: FoldedLayer, tensor_nbytes: int, region: RegionMap
    ) -> None:
        self._pieces: Iterator[tuple[int, Bytes]] = fold.pieces(
            tensor_nbytes, layer.origin, layer.blobs
        )
        self._region = region
        self._position = 0
        self._begin, self._piece = 0, np.empty(0, np.uint8)

    def fill(self, out: Bytes) -> None:
        done = 0
        while True:
            done += gather(
                self._region, self._piece, self._begin, self._position + done, out[done:]
            )
            if done == out.size:
                break
            # Pieces that start over bring bytes again that were delivered: gather passes over them.
            self._begin, self._piece = next(self._pieces)
        self._position += done

    def finish(self) -> None:
        """After a region's last chunk: fold to the tensor's end, where the blobs are judged as wholes."""
        if self._position == self._region.nbytes:
            for _ in self._pieces:
                pass


def gather(region: RegionMap, piece: Bytes, begin: int, q: int, out: Bytes) -> int:
    """Copy region bytes from ``q`` on into ``out``, as far as it and ``piece`` reach.

    ``piece`` holds tensor bytes from ``begin`` on; they must not begin behind those of ``q``.

    Returns
    -------
    int
        Bytes copied: 0 where the piece ends before.
    """
    run, stride, done = region.run_nbytes, region.tensor_stride, 0
    while done < out.size:
        column = (q + done) % run
        at = region.tensor_position(q + done) - begin
        if at >= piece.size:
            break
        rows = 0
        if not column and piece.size - at >= run:
            rows = min((out.size - done) // run, (piece.size - at - run) // max(stride, 1) + 1)
        if rows:
            source = np.lib.stride_tricks.as_strided(piece[at:], (rows, run), (stride, 1))
            out[done : done + rows * run].reshape(rows, run)[:] = source
            done += rows * run
        else:
            count = min(run - column, out.size - done, piece.size - at)
            out[done : done + count] = piece[at : at + count]
            done += count
    return done
