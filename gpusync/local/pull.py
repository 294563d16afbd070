"""The disk path: bring a host-local checkpoint to a published version, without a live model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpusync.config import Settings
from gpusync.errors import (
    ChainError,
    CheckpointError,
    CheckpointIOError,
    FormatError,
    GpuSyncError,
    SourceNotReadyError,
)
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import absolute_path
from gpusync.folder.lock import FolderLock
from gpusync.folder.marker import Marker, read_marker, write_marker
from gpusync.folding.fold import Fold
from gpusync.local.advance import Advance, Staged, finish_rolling, fsync_checkpoint
from gpusync.local.audit import Audit, Evidence, PublishedEvidence, TableEvidence, audit
from gpusync.local.checkpoint import FolderPaths, LocalState, local_errors, read_state
from gpusync.local.swap import Journal, Step, clean, reached, recover
from gpusync.observers import failures_told, tell
from gpusync.published.chain import Chain, resolve_base, wait_visible
from gpusync.published.hook import HookCall, PreReadHook
from gpusync.published.route import check_target
from gpusync.timing import StageClock
from gpusync.types import Progress, ProgressCallback, PullReport

log = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]


@failures_told("pull")
def pull(
    local_checkpoint_dir: PathLike,
    base_dir: PathLike | None,
    source_dir: PathLike,
    target_version: int,
    pre_read_hook: PreReadHook | None = None,
    *,
    durable: bool = True,
    visibility_timeout_seconds: float = 0.0,
    lock_timeout_seconds: float = 600.0,
    progress: ProgressCallback | None = None,
) -> PullReport:
    """Bring a local checkpoint to ``target_version``.

    A fresh folder is seeded from the newest full version up to the target, else from the base, with the deltas
    folded in on the way. A folder that stands at a version is patched from its own files. Files are never written
    in place: whoever has them open or mapped keeps what they had.

    Parameters
    ----------
    local_checkpoint_dir
        The folder; made if it is not there. On a local file system.
    base_dir
        The engine's base checkpoint, version 0. Latched when the folder is seeded: later pulls may pass the local
        folder itself.
    source_dir
        Folder of published versions.
    target_version
        0 resets to the base. A positive target at or below the applied version changes nothing.
    pre_read_hook
        See :func:`gpusync.open_chain`; called under the folder's lock, once for all processes of this host.
    durable
        fsync data before the new version counts. Without it a power cut costs a re-hash, and at worst a rebuild.
    visibility_timeout_seconds
        How long to wait for versions that are not visible yet.
    lock_timeout_seconds
        How long to wait for another process that works on the folder.
    progress
        Called with :class:`gpusync.Progress`; an exception from it stops the pull at a safe point.

    Raises
    ------
    SourceNotReadyError, FormatError, ChainError, DigestMismatchError
        The folder stands where it stood, byte for byte.
    CheckpointError
        The local disk failed, or the lock was not free in time.
    """
    settings = Settings.from_env()
    check_target(target_version)
    folder = absolute_path(local_checkpoint_dir, CheckpointError, "local_checkpoint_dir")
    resolve_base(folder, base_dir, read_marker(folder).marker, target_version)
    clock = StageClock()
    lock = FolderLock(folder, lock_timeout_seconds, progress)
    with local_errors("pull", folder), lock:
        opened = open_folder(folder, settings, progress)
        base = resolve_base(folder, base_dir, opened.state.found.marker, target_version)
        with Chain(
            source_dir, target_version, checkpoint=folder, base_dir=base, settings=settings
        ) as chain:
            update = FolderUpdate(chain, opened, durable=durable, progress=progress, clock=clock)
            done = update.nothing_to_do()
            if done is not None:
                return pull_ended(folder, done)
            if pre_read_hook is not None:
                with clock.stage("hook"):
                    hook = HookCall(pre_read_hook, os.fspath(source_dir), target_version)
                    lock.hold_until_returned(hook)
                    hook.run(settings.hook_timeout_seconds, progress)

            def stage() -> Staged:
                with clock.stage("open"):
                    update.validate()
                return update.stage()

            # Both: a mount may show headers before the bytes behind them.
            staged = wait_visible(stage, visibility_timeout_seconds, progress)
            return pull_ended(folder, update.commit(staged))


def pull_ended(folder: Path, report: PullReport) -> PullReport:
    """Write a pull's line into the log, tell the observers, and return the report."""
    log.info(
        "pull_done outcome=%s from_version=%s version=%d folder=%s seed=%s swap=%s durable=%s recovered=%s "
        "tensors_changed=%d tensors_healed=%d wire_bytes=%d written_bytes=%d seconds=%.3f stages=%s",
        report.outcome,
        report.from_version,
        report.to_version,
        folder,
        report.seed,
        report.swap,
        report.durable,
        report.recovered,
        report.tensors_changed,
        len(report.tensors_healed),
        report.wire_bytes,
        report.written_bytes,
        report.seconds,
        report.stages,
    )
    tell(lambda observer: observer.pulled(report))
    return report


@dataclass(frozen=True)
class OpenedFolder:
    """A locked, recovered local checkpoint."""

    paths: FolderPaths
    state: LocalState
    recovered: str


def open_folder(
    folder: Path, settings: Settings, progress: ProgressCallback | None
) -> OpenedFolder:
    """Recover a locked folder and read what stands in it (steps 1 and 2).

    Raises
    ------
    CheckpointIOError
        The local disk failed.
    """
    paths = FolderPaths(folder)
    reached(Step.LOCKED)
    recovery = recover(paths)
    outcome = recovery.outcome
    if recovery.rolling is not None and not _resume_rolling(
        paths, recovery.rolling, settings, progress
    ):
        outcome = "discarded"
    reached(Step.RECOVERED)
    with OpenFiles(settings.max_open_files, settings.source_retries) as files:
        state = read_state(paths, files, settings)
    return OpenedFolder(paths, state, outcome)


def _resume_rolling(
    paths: FolderPaths, journal: Journal, settings: Settings, progress: ProgressCallback | None
) -> bool:
    """Finish a rolling swap; False where spool or old files are damaged, and the folder has to be seeded afresh."""
    fold = Fold(settings.piece_bytes, settings.workers, paths.state)
    try:
        finish_rolling(paths, journal, settings, fold, progress)
    except CheckpointIOError:
        raise
    except GpuSyncError as err:
        log.warning("rolling_swap_abandoned reason=%s", err)
        with local_errors("abandoning a swap", paths.folder):
            clean(paths)
        return False
    return True


class FolderUpdate:
    """The work of one pull on an opened folder, once the lock is held."""

    def __init__(
        self,
        chain: Chain,
        opened: OpenedFolder,
        *,
        durable: bool,
        progress: ProgressCallback | None,
        clock: StageClock,
    ) -> None:
        self._chain = chain
        self._opened = opened
        self._state = opened.state
        self._durable = durable
        self._progress = progress
        self._clock = clock
        self._notes: list[str] = []

    def nothing_to_do(self) -> PullReport | None:
        """Return the report where the folder stands at or above the target, after checking that it is the same run's.

        Raises
        ------
        VersionConflictError
            The applied version's number now holds other bytes.
        """
        marker = self._state.marker
        target = self._chain.target_version
        if marker is None or target > marker.version or (target == 0 and marker.version > 0):
            return None
        if target == marker.version and (self._state.needs_audit or self._base_changed(marker)):
            return None
        self._chain.check_identity(marker)
        if self._durable and not marker.durable and not self._state.needs_audit:
            with local_errors("fsync", self._opened.paths.folder):
                fsync_checkpoint(self._opened.paths)
                write_marker(self._opened.paths.folder, replace(marker, durable=True))
        return PullReport(
            outcome="unchanged" if target == marker.version else "stale",
            from_version=marker.version,
            to_version=marker.version,
            target_version=target,
            durable=marker.durable or self._durable,
            recovered=self._opened.recovered,
            seconds=self._clock.total_seconds,
            stages=self._clock.times(),
        )

    def validate(self) -> None:
        """Validate every version that is needed.

        Raises
        ------
        SourceNotReadyError, FormatError, ChainError
            Nothing was changed.
        """
        claimed = self._state.found.marker
        marker = self._state.marker
        if marker is not None and self._chain.target_version > 0:
            self._chain.check_identity(marker)
        try:
            route = self._chain.route(marker.version if marker is not None else None)
        except SourceNotReadyError as err:
            damaged = marker is None and claimed is not None and err.version is not None
            if damaged and err.version <= claimed.version:  # type: ignore[operator,union-attr]
                raise ChainError(
                    "the local checkpoint is damaged, and what could rebuild it is gone: "
                    + err.message,
                    version=err.version,
                ) from err
            raise
        if marker is not None:
            self._chain.check_base_identity(route, marker)
        if route.start in ("base", "aggregate"):
            self._chain.base_layout()

    def stage(self, found: Audit | None = None) -> Staged:
        """Audit the local bytes if they need it and were not (``found``), and stage the next state."""
        if found is None and self._state.needs_audit:
            with self._clock.stage("audit"):
                found = self._audit()
        return Advance(
            self._opened.paths,
            self._chain,
            self._state,
            found=found,
            durable=self._durable,
            progress=self._progress,
            clock=self._clock,
        ).stage()

    def commit(self, staged: Staged) -> PullReport:
        """Swap in what was staged, and report."""
        with self._clock.stage("swap"):
            if self._progress is not None:
                self._progress(Progress("swap", message=f"version {staged.route.target}"))
            staged.commit()
        route, outcome = staged.route, staged.outcome
        before = self._state.found.marker
        seeded = route.start != "applied"
        return PullReport(
            outcome="reset" if route.target == 0 and before is not None else "applied",
            from_version=before.version if before is not None else None,
            to_version=route.target,
            target_version=route.target,
            seed="local" if not seeded else route.start,
            seed_version=route.start_version if seeded else None,
            versions=tuple(delta.version for delta in route.deltas),
            swap=staged.journal.mode,
            durable=self._durable,
            recovered=self._opened.recovered,
            tensors_changed=outcome.changed,
            tensors_copied=outcome.copied,
            tensors_healed=tuple(sorted(outcome.healed)),
            unverified_source=(route.full.version,) if route.full is not None else (),
            wire_bytes=route.wire_nbytes,
            written_bytes=outcome.written_bytes,
            seconds=self._clock.total_seconds,
            stages=self._clock.times(),
            notes=(*self._notes, *route.notes()),
        )

    def _audit(self) -> Audit | None:
        """Digest the local bytes against whatever evidence there is."""
        state = self._state
        if state.marker is None or state.layout is None:
            return None
        fold = Fold(self._chain.settings.piece_bytes, self._chain.settings.workers)
        with find_evidence(self._chain, state, fold) as evidence:
            found = audit(state.layout, self._chain.source.files, fold, evidence, self._progress)
        if evidence is None:
            self._note(
                f"version {state.marker.version} was taken over as it stands: "
                "its versions are gone, nothing proves its bytes"
            )
        if found.bad:
            self._note(f"{len(found.bad)} damaged tensor(s) are rebuilt from the seed")
        return found

    def _note(self, text: str) -> None:
        if text not in self._notes:  # staged again, after a wait for the source
            self._notes.append(text)

    def _base_changed(self, marker: Marker) -> bool:
        """True where the folder stands at version 0 of another base than the one given."""
        if self._chain.target_version > 0 or self._chain.base_dir is None:
            return False
        return self._chain.base_fingerprint() != marker.fingerprint


@contextmanager
def find_evidence(chain: Chain, state: LocalState, fold: Fold) -> Iterator[Evidence | None]:
    """Give what a folder's bytes can be held against: its table, else what is still published, else None."""
    if state.table is not None or state.marker is None:
        yield TableEvidence(state.table) if state.table is not None else None
        return
    at_marker = Chain(
        chain.source.path,
        state.marker.version,
        checkpoint=chain.checkpoint,
        base_dir=chain.base_dir,
        settings=chain.settings,
    )
    with at_marker:
        published: Evidence | None = None
        try:
            published = PublishedEvidence(at_marker, fold)
        except (SourceNotReadyError, FormatError, ChainError) as err:
            log.info("no_evidence version=%s reason=%s", state.marker.version, err)
        yield published
