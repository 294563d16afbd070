"""A published blob: where it lies, its bytes at any position, and the digest that its publisher states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpusync.errors import FrameFormatError, VersionConflictError
from gpusync.folder.files import FileChangedError, FileCutError, FileStamp, OpenFiles
from gpusync.folder.layout import unreadable
from gpusync.format.digest import Hasher
from gpusync.format.where import Where
from gpusync.published.source import SourceVersion
from gpusync.types import Encoding

_PIECE_NBYTES = 1 << 20


@dataclass(frozen=True)
class BlobSource:
    """One tensor's blob in a published delta."""

    files: OpenFiles
    delta: SourceVersion
    tensor: str

    @property
    def is_xor(self) -> bool:
        """True where the payload is XORed in, so that deltas fold without the tensor."""
        return self.delta.index is not None and self.delta.index.encoding != "overwrite"


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
        except FileCutError as err:
            raise unreadable(err, self.path, version=where.version) from err
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


def hash_blob(blob: BlobFile, hasher: Hasher, begin: int, end: int) -> None:
    """Hash blob bytes ``begin`` to ``end``."""
    if begin == end:
        return
    buffer = memoryview(bytearray(min(end - begin, _PIECE_NBYTES)))
    for offset in range(begin, end, _PIECE_NBYTES):
        piece = buffer[: min(_PIECE_NBYTES, end - offset)]
        blob.read_into(piece, offset)
        hasher.update(piece)


def hold_digest(blob: BlobFile, hasher: Hasher) -> None:
    """Hold the digest of a whole blob against the manifest's.

    Raises
    ------
    FrameFormatError
        They differ.
    """
    got = hasher.digest().hex
    if got != blob.stated:
        raise FrameFormatError(
            "the blob is not the one that the manifest describes",
            version=blob.where.version,
            file=blob.where.file,
            tensor=blob.where.tensor,
            expected=blob.stated,
            got=got,
        )
