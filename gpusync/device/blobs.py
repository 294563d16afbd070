"""A published blob: its bytes at any position, and the map of its frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpusync.errors import FrameFormatError, VersionConflictError
from gpusync.files import FileChangedError, FileStamp, OpenFiles
from gpusync.fold import BlobSource
from gpusync.layout import unreadable
from gpusync.types import Encoding
from gpusync.where import Where

Positions = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class BlobMap:
    """The frames of a blob that have content, in order.

    Parameters
    ----------
    offset, nbytes
        int64 (frames,): where each begins in the blob, and its compressed size. Skippable frames may lie between.
    content_offset, content_nbytes
        int64 (frames,): where its content begins in the payload, and its size, above 0. Without gaps.
    blob_nbytes
        Size of the blob.
    """

    offset: Positions
    nbytes: Positions
    content_offset: Positions
    content_nbytes: Positions
    blob_nbytes: int

    @property
    def count(self) -> int:
        """Number of frames."""
        return len(self.offset)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all content."""
        return self.content(0, self.count)[1]

    def covering(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first frame, and the one after the last, that hold payload bytes ``begin`` to ``end``."""
        if begin >= end:
            return 0, 0
        if self.count == 1:
            return 0, 1
        starts = self.content_offset
        return (
            int(starts.searchsorted(begin, "right")) - 1,
            int(starts.searchsorted(end, "left")),
        )

    def extent(self, first: int, end: int) -> tuple[int, int]:
        """Return where in the blob the frames from ``first`` to before ``end`` begin and end."""
        if first == end:
            return 0, 0
        return int(self.offset[first]), int(self.offset[end - 1] + self.nbytes[end - 1])

    def content(self, first: int, end: int) -> tuple[int, int]:
        """Return where in the payload their content begins and ends."""
        if first == end:
            return 0, 0
        last = end - 1
        return (
            int(self.content_offset[first]),
            int(self.content_offset[last] + self.content_nbytes[last]),
        )


@dataclass(frozen=True)
class BlobFile:
    """A blob's place in its shard.

    Parameters
    ----------
    begin, nbytes
        Where the blob begins in the file, and its size.
    stated
        xxh3-128 hex of the blob, where the publisher's manifest gives it.
    """

    files: OpenFiles
    path: Path
    stamp: FileStamp
    begin: int
    nbytes: int
    encoding: Encoding
    where: Where
    stated: str | None

    def where_at(self, offset: int) -> Where:
        """Return the place of the blob's byte ``offset``, for errors."""
        where = self.where
        return Where(where.version, where.file, where.tensor, self.begin + offset)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes into the blob.

        Raises
        ------
        VersionConflictError
            The shard is not the one that was validated.
        SourceNotReadyError, HeaderFormatError
            It cannot be read.
        """
        where = self.where
        try:
            self.files.read_into(self.path, buffer, self.begin + offset, self.stamp)
        except FileChangedError as err:
            raise VersionConflictError(
                "the shard was replaced while it was read; pull again",
                version=where.version,
                file=where.file,
                tensor=where.tensor,
            ) from err
        except OSError as err:
            raise unreadable(err, self.path, version=where.version) from err

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` from ``offset`` bytes into the blob; raises as :meth:`read_into`."""
        buffer = bytearray(nbytes)
        if nbytes:
            self.read_into(memoryview(buffer), offset)
        return bytes(buffer)


def locate_blob(source: BlobSource) -> BlobFile:
    """Return where a tensor's blob lies.

    Raises
    ------
    FrameFormatError
        The version is full and has no blobs.
    """
    delta = source.delta
    if delta.index is None:
        raise FrameFormatError("a full version has no blobs", version=delta.version)
    shard, entry = delta.blob(source.tensor)
    begin = shard.header.data_offset + entry.begin
    stated = delta.manifest.tensors.get(source.tensor) if delta.manifest is not None else None
    return BlobFile(
        files=source.files,
        path=shard.path,
        stamp=shard.stamp,
        begin=begin,
        nbytes=entry.nbytes,
        encoding=delta.index.encoding,
        where=Where(delta.version, shard.path.name, source.tensor, begin),
        stated=stated.blob_digest if stated is not None else None,
    )
