"""Where a checkpoint folder keeps each tensor: index and shard headers of a full checkpoint, read and validated.

The same reader serves the local checkpoint, the base, and a published full version.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpusync import fsio
from gpusync.config import Settings
from gpusync.errors import (
    CheckpointIOError,
    FormatError,
    GpuSyncError,
    HeaderFormatError,
    IndexFormatError,
    SourceNotReadyError,
)
from gpusync.folder.files import FileChangedError, FileStamp, OpenFiles
from gpusync.format.header import parse_header, parse_header_nbytes
from gpusync.format.index import INDEX_NAME, parse_index
from gpusync.types import DeltaIndex, ShardHeader, TensorEntry


@dataclass(frozen=True)
class Shard:
    """A shard file as it was when its header was validated."""

    path: Path
    header: ShardHeader
    stamp: FileStamp


@dataclass(frozen=True)
class Layout:
    """The tensors of one full checkpoint folder.

    ``side_files`` are the top-level files that are neither weight shards of this layout nor its index.
    """

    folder: Path
    shards: Mapping[str, Shard]
    file_of: Mapping[str, str]
    index_raw: bytes | None
    side_files: tuple[str, ...]

    def entry(self, tensor: str) -> TensorEntry:
        return self.shards[self.file_of[tensor]].header.entries[tensor]

    def entries(self) -> dict[str, TensorEntry]:
        """Return every tensor's entry."""
        return {name: self.entry(name) for name in self.file_of}

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.file_of

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.entry(name).nbytes for name in self.file_of)


def read_shard(
    path: Path, files: OpenFiles, settings: Settings, *, version: int | None = None
) -> Shard:
    """Open a shard, read its header and validate it against the file's size.

    Raises
    ------
    SourceNotReadyError
        Absent, unreadable, or shorter than its own header demands.
    HeaderFormatError
        The header breaks the format, or the name is not a regular file.
    """
    name = path.name
    try:
        stamp = files.stamp(path)
        first = bytearray(min(8, stamp.nbytes))
        files.read_into(path, memoryview(first), 0, stamp)
        nbytes = parse_header_nbytes(
            bytes(first), file_nbytes=stamp.nbytes, file=name, max_bytes=settings.max_header_bytes
        )
        raw = bytearray(8 + nbytes)
        files.read_into(path, memoryview(raw), 0, stamp)
        header = parse_header(bytes(raw), file_nbytes=stamp.nbytes, file=name)
    except (FormatError, SourceNotReadyError) as err:
        files.forget(path)  # a later try must see a file that replaced this one
        raise err.located(version=version, file=name) from err.__cause__
    except OSError as err:
        raise unreadable(err, path, version=version) from err
    return Shard(path, header, stamp)


def is_unchanged(shard: Shard) -> bool:
    """True while the file under a shard's name is the one that was validated.

    Raises
    ------
    SourceNotReadyError, HeaderFormatError
        It is gone, or cannot be looked at: nothing says that it changed.
    """
    try:
        info = fsio.stat_path(shard.path)
    except OSError as err:
        raise unreadable(err, shard.path) from err
    return (info.st_ino, info.st_size, info.st_mtime_ns) == (
        shard.stamp.inode,
        shard.stamp.nbytes,
        shard.stamp.mtime_ns,
    )


def absolute_path(path: str | os.PathLike[str], error: type[GpuSyncError], what: str) -> Path:
    """Return a path given by a caller, made absolute.

    Raises
    ------
    GpuSyncError
        Of the class ``error``: no file system can have a path like that (a NUL, a lone surrogate).
    """
    folder = Path(os.path.abspath(path))
    try:
        possible = b"\0" not in os.fsencode(folder)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise error(f"{what} is not a path", got=repr(os.fspath(path)))
    return folder


def unreadable(
    err: OSError, path: Path, *, version: int | None = None
) -> SourceNotReadyError | FormatError:
    """Return the error for a file of a source or base folder that could not be read."""
    where = f"{path.parent.name}/{path.name}"
    if isinstance(err, FileNotFoundError | FileChangedError):
        return SourceNotReadyError(
            f"{where} is not there (yet), or changed while it was read: {err.strerror}",
            version=version,
            file=path.name,
        )
    if err.errno == errno.EFBIG:
        return IndexFormatError(
            f"{where} is too large: {err.strerror} (GPUSYNC_MAX_INDEX_BYTES)",
            version=version,
            file=path.name,
        )
    if err.errno in (errno.EINVAL, errno.ENXIO, errno.ELOOP):
        return HeaderFormatError(
            f"{where} is not a regular file: {err.strerror}", version=version, file=path.name
        )
    return SourceNotReadyError(
        f"{where} cannot be read: {err.strerror}", version=version, file=path.name
    )


def local_io_error(err: OSError, what: str, path: Path) -> CheckpointIOError:
    """Return the typed error for a failed operation on the local folder."""
    advice = {
        errno.ENOSPC: "free space on the local disk",
        errno.EDQUOT: "raise the quota of the local disk",
        errno.EROFS: "the local disk is mounted read-only",
        errno.EACCES: "this user may not write there",
        errno.EPERM: "this user may not write there",
    }.get(err.errno or 0, "check the local disk")
    return CheckpointIOError(
        f"{what} failed: {err.strerror or err}; {advice}", file=str(path), errno=err.errno
    )


def read_layout(
    folder: Path,
    files: OpenFiles,
    settings: Settings,
    *,
    version: int | None = None,
    strict: bool = False,
) -> Layout:
    """Read the layout of a full checkpoint folder.

    Parameters
    ----------
    strict
        The rules of a published version: without an index, only a lone ``model.safetensors`` is a checkpoint (shards
        without an index are a version that is not there yet), and the index names every tensor. A base or local
        folder may hold any safetensors files.

    Raises
    ------
    SourceNotReadyError, IndexFormatError, HeaderFormatError
        The folder is not (yet) a readable full checkpoint.
    """
    try:
        names = list(fsio.regular_files(folder))
    except OSError as err:
        raise SourceNotReadyError(
            f"{folder} cannot be listed: {err.strerror}", version=version
        ) from err
    index_raw, weight_map = _read_weight_map(folder, names, settings, version)
    if weight_map is not None:
        shard_names = sorted(set(weight_map.values()))
    else:
        shard_names = [name for name in names if name.endswith(".safetensors")]
        if (strict and shard_names != ["model.safetensors"]) or not shard_names:
            raise SourceNotReadyError(
                f"{folder} has no {INDEX_NAME}; without one only a lone model.safetensors is a checkpoint",
                version=version,
                file=INDEX_NAME,
                got=", ".join(shard_names[:5]) or "no safetensors files",
            )
    shards = {
        name: read_shard(folder / name, files, settings, version=version) for name in shard_names
    }
    file_of = _locate(shards, weight_map, version, strict)
    if not file_of:
        raise IndexFormatError(f"{folder} holds no tensor", version=version)
    known = {*shard_names, INDEX_NAME}
    side = tuple(name for name in names if name not in known)
    return Layout(folder, shards, file_of, index_raw, side)


def _read_weight_map(
    folder: Path, names: list[str], settings: Settings, version: int | None
) -> tuple[bytes | None, Mapping[str, str] | None]:
    if INDEX_NAME not in names:
        return None, None
    try:
        raw = fsio.read_file(folder / INDEX_NAME, settings.max_index_bytes)
    except OSError as err:
        raise unreadable(err, folder / INDEX_NAME, version=version) from err
    index = parse_index(raw, file=INDEX_NAME)
    if isinstance(index, DeltaIndex):
        raise IndexFormatError(
            f"{folder} holds a delta version, not a full checkpoint",
            version=version,
            file=INDEX_NAME,
        )
    return raw, index.weight_map


def _locate(
    shards: Mapping[str, Shard],
    weight_map: Mapping[str, str] | None,
    version: int | None,
    strict: bool,
) -> dict[str, str]:
    """Map every tensor to its shard, from the index where there is one, and check the two against each other.

    A tensor that the index leaves out is an error in a published version; elsewhere it is copied along, unmanaged.
    """
    file_of: dict[str, str] = {}
    for file, shard in shards.items():
        for name in shard.header.entries:
            mapped = file if weight_map is None else weight_map.get(name)
            twice = weight_map is None and name in file_of
            if twice or (mapped is None and strict):
                problem = "stands in two shards" if twice else "is not in weight_map"
                raise HeaderFormatError(
                    f"a tensor of this shard {problem}", version=version, file=file, tensor=name
                )
            if mapped == file:
                file_of[name] = file
    for name, file in (weight_map or {}).items():
        if name not in file_of:
            raise IndexFormatError(
                "weight_map names a tensor that its shard does not hold",
                version=version,
                file=file,
                tensor=name,
            )
    return file_of
