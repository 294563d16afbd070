"""Writing a version: a delta's shards of blobs, manifest and index, or a copy of a whole checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpusync.errors import ChainError
from gpusync.format.digest import digest_of, fingerprint
from gpusync.format.header import build_header
from gpusync.format.index import INDEX_NAME, MANIFEST_NAME, build_manifest, parse_index
from gpusync.published.source import Source, SourceVersion
from gpusync.publisher.delta_options import DeltaOptions
from gpusync.publisher.diff import TensorDelta, TensorDiff, diff_tensors
from gpusync.publisher.publication import (
    PendingVersion,
    callers_errors,
    pending_version,
    worker_threads,
)
from gpusync.publisher.standing import Base, check_unchanged, read_checkpoint
from gpusync.publisher.state import StateWriter
from gpusync.types import (
    Manifest,
    ManifestEntry,
    Progress,
    ProgressCallback,
    Report,
    TensorEntry,
)

SHARD_NBYTES = 64 << 20
"""Blobs are held in memory until a shard has this many bytes."""


@dataclass(frozen=True)
class PublishReport(Report):
    """What was published.

    Parameters
    ----------
    kind
        "delta" or "full".
    base_version
        Version the delta stands on; None for a full version.
    encoding, checksum, framing
        As asked for; None for a full version. Sparse encodings always come as single frames.
    tensors, nbytes
        Tensors of the checkpoint, and their bytes.
    tensors_changed
        Tensors in the version.
    wire_bytes
        Bytes of the version's files.
    """

    kind: str
    version: int
    base_version: int | None
    path: str
    run_id: str
    tensors: int
    nbytes: int
    tensors_changed: int
    wire_bytes: int
    encoding: str | None = None
    checksum: str | None = None
    framing: str | None = None
    seconds: float = 0.0


class DeltaWriter:
    """Writes the shards, manifest and index of a delta into a pending version.

    Parameters
    ----------
    pending
        The version, still empty.
    options
        How the blobs were made.
    """

    def __init__(self, pending: PendingVersion, options: DeltaOptions) -> None:
        self._pending = pending
        self._options = options
        self._blobs: list[tuple[TensorDelta, bytes]] = []
        self._held_nbytes = 0
        self._shards: list[tuple[list[str], bytes]] = []
        self._manifest: dict[str, ManifestEntry] = {}

    @property
    def changed(self) -> int:
        """Tensors in the delta so far."""
        return len(self._manifest)

    def add(self, delta: TensorDelta, entry: TensorEntry) -> None:
        """Take one tensor's result; unchanged tensors are no part of a delta."""
        if delta.blob is None:
            return
        self._manifest[delta.name] = ManifestEntry(
            delta.blob_digest, entry.nbytes, entry.dtype, entry.shape, self._options.blob_framing
        )
        self._blobs.append((delta, delta.blob))
        self._held_nbytes += len(delta.blob)
        if self._held_nbytes >= SHARD_NBYTES:
            self._write_shard()

    def finish(self, *, base_version: int, base_fingerprint: str | None, run_id: str) -> str:
        """Write what is left, manifest and index; return the version's fingerprint."""
        if self._blobs:
            self._write_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        headers: dict[str, bytes] = {}
        for number, (names, header) in enumerate(self._shards):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._pending.rename_file(_unnumbered(number), file)
            weight_map.update(dict.fromkeys(names, file))
            headers[file] = header
        manifest = build_manifest(
            Manifest(self._pending.version, run_id, base_fingerprint, self._manifest)
        )
        self._pending.write_file(MANIFEST_NAME, [manifest])
        index = self._build_index(base_version, weight_map, digest_of("xxh3-128", manifest).hex)
        self._pending.write_file(INDEX_NAME, [index])
        return fingerprint(index, headers)

    def _write_shard(self) -> None:
        header = build_header(
            [(delta.name, "U8", (len(blob),), len(blob)) for delta, blob in self._blobs],
            {delta.name: delta.digest.hex for delta, _ in self._blobs},
        )
        blobs = [blob for _, blob in self._blobs]
        self._pending.write_file(_unnumbered(len(self._shards)), [header, *blobs])
        self._shards.append(([delta.name for delta, _ in self._blobs], header))
        self._blobs = []
        self._held_nbytes = 0

    def _build_index(
        self, base_version: int, weight_map: Mapping[str, str], manifest_digest: str
    ) -> bytes:
        metadata = {
            "version": f"{self._pending.version:06d}",
            "base_version": f"{base_version:06d}",
            "delta_encoding": self._options.encoding,
            "compression_format": "zstd",
            "checksum_format": self._options.algorithm,
            "gpusync_manifest": manifest_digest,
        }
        return json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}).encode()


def _unnumbered(number: int) -> str:
    """Name of a shard until their count is known."""
    return f"shard-{number}"


def write_delta(
    source: Source,
    base: Base,
    options: DeltaOptions,
    run_id: str,
    diffs: Iterable[TensorDiff],
    start: float,
    *,
    state: StateWriter | None = None,
    progress: ProgressCallback | None = None,
) -> PublishReport:
    """Run the diffs and publish their results as the version after the base.

    Parameters
    ----------
    start
        ``time.monotonic()`` when the caller began.
    state
        Made durable before the version becomes visible, so that a crash between the two loses neither.
    """
    version = base.version + 1
    report = _reporter(progress, base.layout.nbytes)
    with pending_version(source.path, version) as pending, worker_threads(source.settings) as pool:
        writer = DeltaWriter(pending, options)
        for delta in diff_tensors(diffs, pool, source.settings.workers):
            writer.add(delta, base.layout.entry(delta.name))
            if state is not None:
                state.record(delta.name, delta.digest)
            report(delta.nbytes, delta.name)
        fingerprint = writer.finish(
            base_version=base.version, base_fingerprint=base.fingerprint, run_id=run_id
        )
        if state is not None:
            state.finish(version, fingerprint)
        pending.publish()
    return PublishReport(
        kind="delta",
        version=version,
        base_version=base.version,
        path=str(pending.path),
        run_id=run_id,
        tensors=len(base.layout.file_of),
        nbytes=base.layout.nbytes,
        tensors_changed=writer.changed,
        wire_bytes=pending.nbytes,
        encoding=options.encoding,
        checksum=options.algorithm,
        framing=options.blob_framing,
        seconds=time.monotonic() - start,
    )


def write_full(
    source: Source,
    newest: SourceVersion | None,
    checkpoint_dir: Path,
    run_id: str,
    start: float,
    progress: ProgressCallback | None = None,
) -> PublishReport:
    """Publish a copy of a checkpoint folder: shards, side files (config, tokenizer), then the index."""
    version = 1 if newest is None else newest.version + 1
    layout = read_checkpoint(checkpoint_dir, source.files, source.settings, strict=True)
    index = None if layout.index_raw is None else parse_index(layout.index_raw, file=INDEX_NAME)
    if index is not None and index.version not in (None, version):
        raise ChainError(
            "the checkpoint's index says that it is another version. Remove metadata.version from it.",
            expected=version,
            got=index.version,
        )
    side = [
        name
        for name in layout.side_files
        if not name.startswith(".") and not name.endswith(".safetensors") and name != MANIFEST_NAME
    ]
    report = _reporter(progress, sum(s.header.file_nbytes for s in layout.shards.values()))
    with pending_version(source.path, version) as pending:
        for name in layout.shards:
            pending.copy_file(checkpoint_dir / name, partial(report, name=name))
        check_unchanged(layout)
        for name in side:
            pending.copy_file(checkpoint_dir / name, lambda nbytes: None)
        if layout.index_raw is not None:
            pending.write_file(INDEX_NAME, [layout.index_raw])
        pending.publish()
    return PublishReport(
        kind="full",
        version=version,
        base_version=None,
        path=str(pending.path),
        run_id=run_id,
        tensors=len(layout.file_of),
        nbytes=layout.nbytes,
        tensors_changed=len(layout.file_of),
        wire_bytes=pending.nbytes,
        seconds=time.monotonic() - start,
    )


def _reporter(progress: ProgressCallback | None, total_bytes: int) -> Callable[..., None]:
    """Return a function that counts bytes up to the total and tells the caller's callback."""
    done_bytes = 0

    def report(nbytes: int, name: str) -> None:
        nonlocal done_bytes
        done_bytes += nbytes
        if progress is not None:
            with callers_errors():
                progress(Progress("publish", done_bytes, total_bytes, name))

    return report
