"""Publishing: full versions and deltas, from a trainer's tensors or from checkpoint folders.

Both ways write one version on top of the newest visible one, and only if that is the version whose bytes they hold:
`Publisher` keeps the last published tensors on disk, `publish_checkpoint` is given them and checks them against the
published digests. A version that failed half-way was never visible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpusync.errors import ChainError, VersionConflictError
from gpusync.folder.files import OpenFiles
from gpusync.format.index import MAX_RUN_ID_CHARS, is_run_id
from gpusync.placement.tensors import tensor_bytes
from gpusync.published.source import Source, SourceVersion
from gpusync.publisher.delta_options import DeltaOptions, checked_options
from gpusync.publisher.diff import ArrayBytes, FileBytes, TensorDiff
from gpusync.publisher.publication import callers_errors
from gpusync.publisher.recovery import recover_tensors
from gpusync.publisher.standing import (
    Base,
    check_same_tensors,
    open_newest,
    open_source,
    published_digests,
    read_checkpoint,
    resolve_run,
)
from gpusync.publisher.state import StateStore, StateWriter
from gpusync.publisher.version_writer import PublishReport, write_delta, write_full
from gpusync.types import ProgressCallback

__all__ = ["PublishReport", "Publisher", "publish_checkpoint"]

COPIED_NBYTES = 1 << 20
"""Tensors up to this size are copied, so that several can be in work at once; larger ones are read where they are."""


class Publisher:
    """Publishes a trainer's weights, step after step.

    Parameters
    ----------
    source_dir
        Shared folder that receivers read; made if it is not there.
    base_dir
        Checkpoint that is version 0.
    state_dir
        Where the last published tensors are kept, and those before, which the next are written over: two copies of
        the model. Default: ``SOURCE_DIR.publisher`` beside ``source_dir``; a local disk is faster where that one is
        shared storage. It must survive a restart of the trainer: without it the run goes on from a full version only.
        It is not fsynced: what a power cut took is rebuilt from ``base_dir`` and the published versions. Map none of its
        files: what a step keeps is written over two steps later.
    encoding, checksum, framing, frame_bytes
        See `publish_checkpoint`.
    run_id
        Name of this training run, in every manifest. Default: the run that ``source_dir`` holds, or a new random one.

    Raises
    ------
    ValueError
        An option is not one of its values.
    MissingDependencyError
        ``checksum`` is blake3 and its package is absent.

    Notes
    -----
    One Publisher publishes into a source folder at a time. With more than one trainer rank, one rank publishes.
    """

    def __init__(
        self,
        source_dir: str | os.PathLike[str],
        base_dir: str | os.PathLike[str],
        *,
        state_dir: str | os.PathLike[str] | None = None,
        encoding: str = "xor",
        checksum: str = "xxh3-128",
        framing: str = "seekable",
        frame_bytes: int = 262144,
        run_id: str | None = None,
    ) -> None:
        self._options = checked_options(encoding, checksum, framing, frame_bytes)
        self._source_dir = Path(os.path.abspath(source_dir))
        self._base_dir = Path(os.path.abspath(base_dir))
        default = self._source_dir.with_name(self._source_dir.name + ".publisher")
        self._states = StateStore(
            default if state_dir is None else Path(os.path.abspath(state_dir))
        )
        self._run_id = _checked_run_id(run_id)
        self._last_version: int | None = None
        self.report: PublishReport | None = None
        """Report of the last publish."""

    def publish(self, tensors: Iterable[tuple[str, Any]]) -> int:
        """Publish all tensors of the model as the next version, and return its number.

        Parameters
        ----------
        tensors
            (name, tensor) in any order, every tensor of the checkpoint once: torch tensors on any device, or numpy
            arrays (BF16 and F8 as unsigned words where numpy lacks them). The iterable may make each tensor as it is
            asked for, in memory that it uses again for the next one: a tensor is read before the next one is taken.

        Raises
        ------
        ChainError
            Names, dtypes or shapes are not the checkpoint's: publish a full version.
        VersionConflictError
            ``source_dir`` does not stand where this publisher left it.
        BaseMismatchError
            The kept tensors are no longer those that were published.
        CheckpointIOError
            Reading or writing failed. Publish again: the folders say whether this version was still published.
        """
        start = time.monotonic()
        with open_source(self._source_dir) as source:
            newest = self._check_standing(source)
            # Until this version is out, only the folders say where we stand.
            self._last_version = None
            base = self._find_base(source, newest)
            version = base.version + 1
            run_id = self._resolve_run(source, newest)
            options = self._options.of_checkpoint(base.layout.nbytes)
            state = self._states.begin(version, base.layout)
            try:
                self.report = write_delta(
                    source,
                    base,
                    options,
                    run_id,
                    self._diffs(tensors, base, options, source.files, state),
                    start,
                    state=state,
                )
            finally:
                state.close()
            self._settle(version)
        return version

    def publish_full(self, checkpoint_dir: str | os.PathLike[str]) -> int:
        """Publish a copy of a checkpoint folder as the next version, a full one, and return its number.

        Names, dtypes and shapes may differ from those before; later steps are deltas on this version.

        Raises
        ------
        VersionConflictError
            Another publisher is at work in ``source_dir``.
        CheckpointError, FormatError
            The folder is not a whole checkpoint, or reading or writing failed. Nothing was published.
        """
        start = time.monotonic()
        with open_source(self._source_dir) as source:
            newest = self._check_standing(source)
            run_id = self._resolve_run(source, newest)
            self.report = write_full(
                source, newest, Path(os.path.abspath(checkpoint_dir)), run_id, start
            )
            self._settle(self.report.version)
        return self.report.version

    def _check_standing(self, source: Source) -> SourceVersion | None:
        newest = open_newest(source)
        stands_at = newest.version if newest is not None else 0
        if self._last_version is not None and stands_at != self._last_version:
            raise VersionConflictError(
                "the source folder does not stand where this publisher left it: another one wrote to it, or it was "
                "cleared",
                expected=self._last_version,
                got=stands_at,
            )
        return newest

    def _find_base(self, source: Source, newest: SourceVersion | None) -> Base:
        if newest is None:
            return Base(0, None, read_checkpoint(self._base_dir, source.files, source.settings))
        if newest.layout is not None:
            return Base(newest.version, newest.fingerprint, newest.layout)
        state = self._states.find(newest.version, newest.fingerprint)
        if state is None:
            raise VersionConflictError(
                "the kept tensors are not those of the newest published version. Publish a full version to go on, "
                "or clear the source folder.",
                version=newest.version,
            )
        if state.is_of_this_boot:
            layout = read_checkpoint(state.folder, source.files, source.settings)
        else:
            layout = recover_tensors(self._states, state, source, self._base_dir)
        return Base(newest.version, newest.fingerprint, layout, state.digests)

    def _resolve_run(self, source: Source, newest: SourceVersion | None) -> str:
        recorded = self._states.run_id
        if newest is None and self._run_id is not None and self._run_id == recorded:
            raise VersionConflictError(
                "this run's published versions are gone. Check the mount, or start a run of another run_id.",
                got=recorded,
            )
        self._run_id = resolve_run(source, newest, self._run_id, recorded)
        return self._run_id

    def _settle(self, version: int) -> None:
        """The version is published: forget what led to it."""
        self._last_version = version
        self._states.retire_others(version)
        if self._run_id is not None:
            self._states.record_run(self._run_id)

    def _diffs(
        self,
        tensors: Iterable[tuple[str, Any]],
        base: Base,
        options: DeltaOptions,
        files: OpenFiles,
        state: StateWriter,
    ) -> Iterator[TensorDiff]:
        missing = set(base.layout.file_of)
        for name, tensor in _each(tensors):
            if name not in missing:
                problem = "comes twice" if name in base.layout else "is not in the checkpoint"
                raise ChainError(
                    f"a tensor {problem}. A changed set of tensors takes a full version.",
                    tensor=name,
                )
            missing.remove(name)
            data, borrowed = tensor_bytes(name, tensor, base.layout.entry(name))
            if borrowed and data.size <= COPIED_NBYTES:
                data, borrowed = data.copy(), False
            diff = TensorDiff(
                name,
                data.size,
                FileBytes(files, base.layout, name),
                ArrayBytes(data),
                options,
                borrowed=borrowed,
                old_digest=base.digests.get(name),
                keep=state.keep(name),
            )
            del tensor, data
            yield diff
            del diff  # nothing here keeps this tensor while the next one is made
        if missing:
            raise ChainError(
                f"{len(missing)} tensor(s) of the checkpoint were not given. A changed set takes a full version.",
                tensor=min(missing),
            )


def _each(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the caller's tensors, keeping none while the next one is made."""
    iterator = iter(tensors)
    while True:
        with callers_errors():
            pair = next(iterator, None)
        if pair is None:
            return
        yield pair
        del pair


def publish_checkpoint(
    base_dir: str | os.PathLike[str],
    new_dir: str | os.PathLike[str],
    source_dir: str | os.PathLike[str],
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    framing: str = "seekable",
    frame_bytes: int = 262144,
    full: bool = False,
    run_id: str | None = None,
    progress: ProgressCallback | None = None,
) -> PublishReport:
    """Publish the difference of two checkpoint folders, or the whole new one, as the next version.

    Parameters
    ----------
    base_dir
        Checkpoint of the newest published version (of version 0 where none is published); its bytes are checked
        against the published digests. Not read with ``full``.
    new_dir
        Checkpoint to publish.
    source_dir
        Shared folder that receivers read; made if it is not there.
    encoding
        "xor", "overwrite", "xor_sparse" or "xor_rows": the densest where few elements change; only gpusync reads it.
    checksum
        "xxh3-128", "blake3" or "adler32".
    framing
        "seekable": xor payloads in independent frames of ``frame_bytes`` with a seek table; "single": one frame, for
        receivers that stop after the first. overwrite and xor_sparse are always one frame, xor_rows one per 1 MiB of
        a tensor.
    frame_bytes
        Tensor bytes per frame, 64 KiB to 1 MiB.
    full
        Copy ``new_dir`` as a full version.
    run_id
        Name of the training run. Default: the run that ``source_dir`` holds, or a new random one.
    progress
        Called from the calling thread; if it raises, nothing is published.

    Raises
    ------
    ChainError
        Names, dtypes or shapes differ: publish with ``full``.
    BaseMismatchError
        ``base_dir`` is not the newest published version.
    VersionConflictError
        Another publisher is at work, or an unfinished version stands in the folder.
    CheckpointError, FormatError
        A folder is not a whole checkpoint, or reading or writing failed. Nothing was published.
    ValueError
        An option is not one of its values.
    """
    start = time.monotonic()
    options = checked_options(encoding, checksum, framing, frame_bytes)
    run_id = _checked_run_id(run_id)
    with open_source(Path(os.path.abspath(source_dir))) as source:
        newest = open_newest(source)
        resolved = resolve_run(source, newest, run_id, None)
        if full:
            return write_full(
                source, newest, Path(os.path.abspath(new_dir)), resolved, start, progress
            )
        layout = read_checkpoint(Path(os.path.abspath(base_dir)), source.files, source.settings)
        new = read_checkpoint(Path(os.path.abspath(new_dir)), source.files, source.settings)
        check_same_tensors(layout, new)
        options = options.of_checkpoint(layout.nbytes)
        base = Base(0, None, layout)
        if newest is not None:
            digests = published_digests(source, newest, layout)
            base = Base(newest.version, newest.fingerprint, layout, digests)
        diffs = (
            TensorDiff(
                name,
                layout.entry(name).nbytes,
                FileBytes(source.files, layout, name),
                FileBytes(source.files, new, name),
                options,
                old_digest=base.digests.get(name),
            )
            for name in new.file_of
        )
        return write_delta(source, base, options, resolved, diffs, start, progress=progress)


def _checked_run_id(run_id: str | None) -> str | None:
    """Return a run id as given, after checking that receivers take it."""
    if run_id is not None and not is_run_id(run_id):
        raise ValueError(f"run_id is not printable text of 1 to {MAX_RUN_ID_CHARS} characters")
    return run_id
