"""What a source folder holds: ``gpusync inspect``. Reads everything, changes nothing.

A version that cannot be opened is a row with its problem, not an error: the survey is for finding out what is wrong.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from gpusync import fsio
from gpusync.config import Settings
from gpusync.errors import (
    CheckpointError,
    FormatError,
    FrameFormatError,
    GpuSyncError,
    SourceNotReadyError,
)
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import Layout, read_layout
from gpusync.folder.marker import STATE_DIR, read_marker
from gpusync.format.digest import new_hasher
from gpusync.format.frames import FrameWalker, Where
from gpusync.published.source import Source, SourceVersion
from gpusync.types import Frame, Progress, ProgressCallback, Report, TensorEntry

_STEP_BYTES = 1 << 20


@dataclass(frozen=True)
class VersionRow:
    """One published version.

    Parameters
    ----------
    kind
        "delta", "full", or None where it could not be opened.
    wire_bytes, target_bytes
        Bytes of the shard files, and of the tensors that they rebuild; the latter are known for full versions, with
        a checkpoint, or from the publisher's manifest. ``ratio`` is the one by the other.
    frames, max_frames_per_blob
        zstd frames of all blobs (skippable frames are not counted), and of the blob that has the most.
    state
        "applied", "behind" (below the applied version), "ready" (reachable from the applied version, the base or a
        full version), "seed" (the newest full version), "gap" (a version before it is missing), "broken".
    problem
        Why it is broken, or what it lacks.
    """

    version: int
    kind: str | None = None
    encoding: str | None = None
    checksum: str | None = None
    base_version: int | None = None
    tensors: int = 0
    wire_bytes: int = 0
    target_bytes: int | None = None
    ratio: float | None = None
    frames: int = 0
    max_frames_per_blob: int = 0
    fingerprint: str | None = None
    run_id: str | None = None
    state: str = "broken"
    problem: str | None = None


@dataclass(frozen=True)
class Survey(Report):
    """What ``survey`` found.

    Parameters
    ----------
    newest_ready
        The newest version that a pull could reach now.
    aggregate
        The one delta from version 0 that stands for several, where the folder has a whole one.
    model_bytes
        Of all tensors of the checkpoint, where one was given.
    checkpoint_problem
        Why the local checkpoint cannot be read now: its first pull, or a swap of it, was cut off, or it is damaged.
    """

    source_dir: str
    versions: tuple[VersionRow, ...]
    applied_version: int | None
    marker: str | None
    seed_version: int | None
    newest_ready: int | None
    gaps: tuple[int, ...]
    aggregate: VersionRow | None = None
    model_bytes: int | None = None
    checkpoint_problem: str | None = None


def survey(
    source_dir: str | Path,
    *,
    checkpoint: str | Path | None = None,
    progress: ProgressCallback | None = None,
) -> Survey:
    """Open every visible version, walk every blob's frames, and say how the versions hang together.

    Blobs are held against the manifest's digests, where there is one; nothing is decompressed.

    Parameters
    ----------
    source_dir
        Folder of version folders.
    checkpoint
        A local or base checkpoint: gives the applied version and the sizes of the tensors.
    progress
        Called with the bytes read; may raise to stop.

    Raises
    ------
    SourceNotReadyError
        The source folder cannot be listed.
    CheckpointError, FormatError
        The checkpoint cannot be read, and no pull has begun in that folder.
    """
    settings = Settings.from_env()
    layout = None
    marker = None
    problem = None
    if checkpoint is not None:
        marker = read_marker(Path(checkpoint))
        layout, problem = _read_checkpoint(Path(checkpoint), settings)
    with closing(Source(source_dir, settings)) as source:
        rows = [
            _survey_version(source, version, layout, progress)
            for version in sorted(source.visible_versions())
        ]
        found = source.open_aggregate()
        aggregate = _describe(VersionRow(found.version), found, layout) if found else None
    applied = marker.marker.version if marker is not None and marker.marker is not None else None
    placed = _place(rows, applied)
    ready = [row.version for row in placed if row.state in ("applied", "ready", "seed")]
    return Survey(
        source_dir=str(source.path),
        versions=tuple(placed),
        applied_version=applied,
        marker=marker.state if marker is not None else None,
        seed_version=_newest_full(rows),
        newest_ready=max(ready, default=applied),
        gaps=_missing(rows),
        aggregate=replace(aggregate, state="ready") if aggregate is not None else None,
        model_bytes=layout.nbytes if layout is not None else None,
        checkpoint_problem=problem,
    )


def _read_checkpoint(folder: Path, settings: Settings) -> tuple[Layout | None, str | None]:
    """Return the layout, or what is wrong with a folder that a pull has begun in."""
    try:
        with OpenFiles(settings.max_open_files, settings.source_retries) as files:
            return read_layout(folder, files, settings), None
    except (SourceNotReadyError, FormatError) as err:
        if fsio.exists(folder / STATE_DIR):
            return None, f"the checkpoint cannot be read: {err}"
        if isinstance(err, FormatError):
            raise
        raise CheckpointError(
            f"the checkpoint cannot be read: {err.message}", file=str(folder)
        ) from err


def _survey_version(
    source: Source, version: int, layout: Layout | None, progress: ProgressCallback | None
) -> VersionRow:
    row = VersionRow(version)
    try:
        found = source.open_version(version)
        row = _describe(row, found, layout)
        if found.index is None:
            return replace(row, state="ready")
        tell = _Teller(progress, version, row.wire_bytes)
        counts = [
            _count_frames(source, found, name, layout, tell) for name in found.index.weight_map
        ]
    except GpuSyncError as err:
        return replace(row, problem=f"{type(err).__name__}: {err}")
    return replace(
        row, state="ready", frames=sum(counts), max_frames_per_blob=max(counts, default=0)
    )


def _describe(row: VersionRow, found: SourceVersion, layout: Layout | None) -> VersionRow:
    """Fill in what the index, the headers and the manifest say."""
    index = found.index
    nbytes = _target_nbytes(found, layout)
    return replace(
        row,
        kind=found.kind,
        encoding=index.encoding if index is not None else None,
        checksum=index.algorithm if index is not None else None,
        base_version=index.base_version if index is not None else None,
        tensors=len(index.weight_map) if index is not None else len(_entries(found)),
        wire_bytes=found.wire_nbytes,
        target_bytes=nbytes,
        ratio=found.wire_nbytes / nbytes if nbytes else None,
        fingerprint=found.fingerprint,
        run_id=found.manifest.run_id if found.manifest is not None else None,
    )


def _target_nbytes(found: SourceVersion, layout: Layout | None) -> int | None:
    if found.index is None:
        return sum(entry.nbytes for entry in _entries(found))
    sizes = [_tensor_nbytes(found, name, layout) for name in found.index.weight_map]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _tensor_nbytes(found: SourceVersion, name: str, layout: Layout | None) -> int | None:
    """Return the size of the tensor that a blob rebuilds, where the checkpoint or the manifest tells it."""
    if layout is not None and name in layout:
        return layout.entry(name).nbytes
    stated = found.manifest.tensors.get(name) if found.manifest is not None else None
    return stated.nbytes if stated is not None else None


def _entries(found: SourceVersion) -> list[TensorEntry]:
    return [entry for shard in found.shards.values() for entry in shard.header.entries.values()]


@dataclass
class _Teller:
    """Adds up the bytes read of one version and passes them on."""

    progress: ProgressCallback | None
    version: int
    total_bytes: int
    done_bytes: int = 0

    def read(self, nbytes: int) -> None:
        self.done_bytes += nbytes
        if self.progress is not None:
            message = f"version {self.version}"
            self.progress(Progress("verify", self.done_bytes, self.total_bytes, message))


def _count_frames(
    source: Source, found: SourceVersion, name: str, layout: Layout | None, tell: _Teller
) -> int:
    """Walk one blob in bounded steps, and check its digest; return its number of content frames."""
    shard, entry = found.blob(name)
    file = shard.path.name
    begin = shard.header.data_offset + entry.begin
    dense = found.index is not None and found.index.encoding == "xor"
    stated = found.manifest.tensors.get(name) if found.manifest is not None else None
    hasher = new_hasher("xxh3-128")
    frames: list[int] = []

    def count(frame: Frame) -> None:
        if not frame.skippable:
            frames.append(frame.offset)

    walker = FrameWalker(
        content_nbytes=_tensor_nbytes(found, name, layout) if dense else None,
        where=Where(found.version, file, name, begin),
        on_frame=count,
    )
    buffer = memoryview(bytearray(min(_STEP_BYTES, entry.nbytes)))
    for offset in range(0, entry.nbytes, _STEP_BYTES):
        piece = buffer[: min(_STEP_BYTES, entry.nbytes - offset)]
        _read(source, found, shard.path, piece, begin + offset)
        walker.feed(piece)
        hasher.update(piece)
        tell.read(len(piece))
    walker.finish()
    got = hasher.digest().hex
    if stated is not None and got != stated.blob_digest:
        raise FrameFormatError(
            "the blob is not the one that the manifest describes",
            version=found.version,
            file=file,
            tensor=name,
            expected=stated.blob_digest,
            got=got,
        )
    return len(frames)


def _read(source: Source, found: SourceVersion, path: Path, piece: memoryview, offset: int) -> None:
    try:
        source.files.read_into(path, piece, offset)
    except OSError as err:
        raise SourceNotReadyError(
            f"a blob cannot be read: {err.strerror}", version=found.version, file=path.name
        ) from err


# ---- how the versions hang together --------------------------------------------------------------------


def _place(rows: list[VersionRow], applied: int | None) -> list[VersionRow]:
    """Give every row that could be opened its state in the chain."""
    seed = _newest_full(rows)
    reached = {0, applied if applied is not None else 0}
    placed = []
    for row in rows:
        if row.problem is not None:
            placed.append(row)
            continue
        fits = row.kind == "full" or (
            row.base_version == row.version - 1 and row.base_version in reached
        )
        if fits or row.version == applied:
            reached.add(row.version)
        placed.append(_with_state(row, fits=fits, seed=seed, applied=applied))
    return placed


def _newest_full(rows: list[VersionRow]) -> int | None:
    good = (row.version for row in rows if row.kind == "full" and row.problem is None)
    return max(good, default=None)


def _with_state(
    row: VersionRow, *, fits: bool, seed: int | None, applied: int | None
) -> VersionRow:
    if row.version == applied:
        return replace(row, state="applied")
    if row.version == seed:
        return replace(row, state="seed")
    if applied is not None and row.version < applied:
        return replace(row, state="behind")
    if fits:
        return replace(row, state="ready")
    return replace(row, state="gap", problem=f"needs version {row.base_version} before it")


def _missing(rows: list[VersionRow]) -> tuple[int, ...]:
    """Return the version numbers between the lowest and the highest that are not there, at most 1000 of them."""
    numbers = [row.version for row in rows]
    missing: list[int] = []
    for before, after in pairwise(numbers):
        room = 1000 - len(missing)
        missing.extend(range(before + 1, min(after, before + 1 + room)))
    return tuple(missing)
