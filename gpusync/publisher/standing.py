"""Where a source folder stands, for a publisher: its newest version, its run, and the digests a base must have."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpusync.config import Settings
from gpusync.errors import (
    BaseMismatchError,
    ChainError,
    CheckpointError,
    CheckpointIOError,
    GpuSyncError,
    SourceNotReadyError,
    VersionConflictError,
)
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import Layout, is_unchanged, read_layout
from gpusync.format.digest import new_hasher
from gpusync.published.source import Source, SourceVersion
from gpusync.publisher.diff import FileBytes
from gpusync.publisher.publication import io_errors, publish_lock, worker_threads
from gpusync.types import Algorithm, Digest

_PIECE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Base:
    """What a new delta stands on: its tensors, and the digests their bytes must have where those are known."""

    version: int
    fingerprint: str | None
    layout: Layout
    digests: Mapping[str, Digest] = field(default_factory=dict)


@contextmanager
def open_source(source_dir: str | os.PathLike[str]) -> Iterator[Source]:
    """Lock the source folder for publishing (it is made if absent) and open it.

    Raises
    ------
    VersionConflictError
        Another publisher holds the lock.
    CheckpointIOError
        Any OSError inside the block.
    """
    path = Path(os.path.abspath(source_dir))
    with (
        io_errors(),
        publish_lock(path),
        closing(Source(path, Settings.from_env())) as source,
    ):
        yield source


def open_newest(source: Source) -> SourceVersion | None:
    """Return the newest version of the folder, or None where there is none.

    Raises
    ------
    VersionConflictError
        It is not whole: another publisher is writing it, or died.
    CheckpointIOError
        It cannot be read.
    """
    versions = _visible_versions(source)
    return _open_version(source, max(versions)) if versions else None


def _open_version(source: Source, version: int) -> SourceVersion:
    try:
        return source.open_version(version)
    except SourceNotReadyError as err:
        raise reading_failed(err) or VersionConflictError(
            f"a published version is not whole: another publisher is writing it, or died. {err.message}",
            version=version,
        ) from err


def _visible_versions(source: Source) -> Collection[int]:
    try:
        return source.visible_versions()
    except SourceNotReadyError as err:
        raise reading_failed(err) or CheckpointError(err.message) from err


def reading_failed(err: GpuSyncError) -> CheckpointIOError | None:
    """Return the publisher's error for a file that is there and cannot be read; None where something is missing.

    A receiver waits for either. To a publisher only the second says something of what was published.
    """
    cause = err.__cause__
    if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
        return None
    return CheckpointIOError(f"publishing failed: {err.message}", file=err.file, errno=cause.errno)


def read_checkpoint(
    folder: Path, files: OpenFiles, settings: Settings, *, strict: bool = False
) -> Layout:
    """Return the layout of a checkpoint folder of the publisher's own side.

    Raises
    ------
    CheckpointError
        It is not there, or not whole.
    FormatError
        Something in it breaks the format.
    """
    try:
        return read_layout(folder, files, settings, strict=strict)
    except SourceNotReadyError as err:
        raise reading_failed(err) or CheckpointError(
            f"{folder} is not a whole checkpoint: {err.message}", file=err.file, got=err.got
        ) from err


def check_unchanged(layout: Layout) -> None:
    """Check that a checkpoint's shards are still those that were validated.

    Raises
    ------
    CheckpointError
        One was replaced or rewritten, or cannot be looked at.
    """
    for name, shard in layout.shards.items():
        try:
            unchanged = is_unchanged(shard)
        except SourceNotReadyError as err:
            raise reading_failed(err) or CheckpointError(err.message, file=name) from err
        if not unchanged:
            raise CheckpointError("a shard was rewritten while it was published", file=name)


def check_same_tensors(base: Layout, new: Layout) -> None:
    """Check that two checkpoints have the same names, dtypes and shapes.

    Raises
    ------
    ChainError
        They have not, so no delta leads from one to the other.
    """
    for name in sorted(base.file_of.keys() ^ new.file_of.keys()):
        side = "the base" if name in base else "the new checkpoint"
        raise ChainError(
            f"a tensor is only in {side}. Publish a full version (--full).", tensor=name
        )
    for name in base.file_of:
        old, now = base.entry(name), new.entry(name)
        if (old.dtype, old.shape) != (now.dtype, now.shape):
            raise ChainError(
                "a tensor changed its dtype or shape. Publish a full version (--full).",
                tensor=name,
                expected=f"{old.dtype} {list(old.shape)}",
                got=f"{now.dtype} {list(now.shape)}",
            )


def resolve_run(
    source: Source, newest: SourceVersion | None, asked: str | None, recorded: str | None
) -> str:
    """Return the run id of the next version: that of the published ones, or as asked, as recorded, or a new one.

    Raises
    ------
    VersionConflictError
        The folder holds another run than the one asked for.
    """
    if newest is None:
        return asked or uuid.uuid4().hex
    # Full versions carry no run id; the delta before them does.
    found: SourceVersion | None = newest
    while found is not None and found.kind == "full":
        before = found.version - 1
        found = _open_version(source, before) if before in _visible_versions(source) else None
    manifest = found.manifest if found is not None else None
    published = manifest.run_id if manifest is not None else recorded
    if asked is not None and published is not None and asked != published:
        raise VersionConflictError(
            "the source folder holds another run. Clear it, or publish elsewhere.",
            version=newest.version,
            expected=asked,
            got=published,
        )
    return asked or published or uuid.uuid4().hex


def published_digests(source: Source, newest: SourceVersion, base: Layout) -> Mapping[str, Digest]:
    """Return the digests that the newest published version gives to tensors of the base.

    An empty delta says nothing, so the one before it is asked. A full version carries no digests: its tensors are
    digested here.

    Raises
    ------
    BaseMismatchError
        The version has a tensor that the base lacks.
    """
    found = newest
    while found.index is not None and not found.digests:
        if found.index.base_version not in _visible_versions(source):
            return {}
        found = _open_version(source, found.index.base_version)
    digests = found.digests
    if found.layout is not None:
        digests = digest_tensors(source.files, found.layout, source.settings)
    for name in digests:
        if name not in base:
            raise BaseMismatchError(
                "the base lacks a tensor of the last published version",
                version=found.version,
                tensor=name,
            )
    return digests


def digest_tensors(
    files: OpenFiles,
    layout: Layout,
    settings: Settings,
    like: Mapping[str, Digest] | None = None,
) -> dict[str, Digest]:
    """Return the digest of every tensor of a layout: xxh3-128, or of the algorithm of its digest in ``like``."""

    def digest(name: str) -> Digest:
        algorithm = like[name].algorithm if like is not None else "xxh3-128"
        return _digest_tensor(files, layout, name, algorithm)

    with worker_threads(settings) as pool:
        return dict(zip(layout.file_of, pool.map(digest, layout.file_of), strict=True))


def _digest_tensor(files: OpenFiles, layout: Layout, name: str, algorithm: Algorithm) -> Digest:
    source = FileBytes(files, layout, name)
    nbytes = layout.entry(name).nbytes
    hasher = new_hasher(algorithm)
    scratch = np.empty(min(nbytes, _PIECE_NBYTES), np.uint8)
    for offset in range(0, nbytes, _PIECE_NBYTES):
        hasher.update(source.block(offset, scratch[: nbytes - offset]))
    return hasher.digest()
