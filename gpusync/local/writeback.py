"""Write-back: the local checkpoint follows the live model.

Staged while the model serves (:class:`WriteBack`), or pulled by one worker per folder in the background.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from gpusync import fsio
from gpusync.errors import CheckpointError, LockTimeoutError
from gpusync.folder.lock import FolderLock
from gpusync.folder.marker import read_marker
from gpusync.local.advance import Staged
from gpusync.local.checkpoint import FolderPaths, local_errors
from gpusync.local.pull import FolderUpdate, open_folder, pull, pull_ended
from gpusync.local.swap import clear_staging
from gpusync.published.chain import Chain
from gpusync.timing import StageClock
from gpusync.types import Progress, ProgressCallback, PullReport

log = logging.getLogger(__name__)

_LOCK_TIMEOUT_SECONDS = 600.0


class WriteBack:
    """The disk side of one update: staged during prepare, swapped in at finish.

    The folder's lock is not held in between, across the engine's pause. If another process moved the folder
    meanwhile, finish pulls instead. What was staged is removed when this is collected, or the process ends, without
    either verb.
    """

    def __init__(
        self, chain: Chain, folder: Path, *, durable: bool, progress: ProgressCallback | None
    ) -> None:
        self._chain = chain
        self._folder = folder
        self._durable = durable
        self._progress = _Stoppable(progress)
        self._staged: tuple[FolderUpdate, Staged] | None = None
        self._done: PullReport | None = None

    def stage(self) -> None:
        """Stage the folder's next state; what the folder holds is not changed.

        Raises
        ------
        GpuSyncError
            As for :func:`gpusync.pull`.
        """
        clock = StageClock()
        with FolderLock(self._folder, _LOCK_TIMEOUT_SECONDS, self._progress):
            opened = open_folder(self._folder, self._chain.settings, self._progress)
            update = FolderUpdate(
                self._chain, opened, durable=self._durable, progress=self._progress, clock=clock
            )
            self._done = update.nothing_to_do()
            if self._done is None:
                update.validate()
                staged = update.stage()
                self._staged = update, staged
                weakref.finalize(self, _remove_staged, staged.paths, staged.owner, os.getpid())

    def finish(self) -> PullReport:
        """Swap in what was staged.

        Raises
        ------
        GpuSyncError
            The folder stands at its old version, or (CheckpointIOError within the swap) the next pull resumes.
        """
        if self._done is not None and self._stands_at(self._done.to_version):
            return pull_ended(self._folder, self._done)
        if self._staged is not None:
            update, staged = self._staged
            with FolderLock(self._folder, _LOCK_TIMEOUT_SECONDS):
                if staged.is_current():
                    return pull_ended(self._folder, update.commit(staged))
        return pull_for(self._chain, self._folder, durable=self._durable, progress=self._progress)

    def stop(self) -> None:
        """Make a stage() that runs in another thread end at its next piece."""
        self._progress.stopped = True

    def discard(self) -> None:
        """Remove what was staged. Never waits: whoever holds the lock now clears staging, or has done so.

        Raises
        ------
        CheckpointIOError
            The local disk failed. What is left is cleared by the next pull.
        """
        if self._staged is None:
            return
        staged, self._staged = self._staged[1], None
        try:
            with FolderLock(self._folder, 0.0), local_errors("discard", self._folder):
                staged.discard()
        except LockTimeoutError:
            log.info("discard_left_to_lock_holder folder=%s", self._folder)

    def _stands_at(self, version: int) -> bool:
        found = read_marker(self._folder).marker
        return found is not None and found.version == version


class _Stoppable:
    """A progress callback that can be told to stop the work that reports to it."""

    def __init__(self, progress: ProgressCallback | None) -> None:
        self._progress = progress
        self.stopped = False

    def __call__(self, event: Progress) -> None:
        if self.stopped:
            raise CheckpointError("staging was stopped; the folder is as it was")
        if self._progress is not None:
            self._progress(event)


def _remove_staged(paths: FolderPaths, owner: Path, process: int) -> None:
    """Remove what an update that nobody has any more had staged; it may be gone, or another's, or being swapped in.

    A forked process has a copy of the update, but the folder is its parent's.
    """
    try:
        if os.getpid() != process or not fsio.exists(owner):
            return
        with FolderLock(paths.folder, 0.0), local_errors("removing what was staged", paths.folder):
            if fsio.exists(owner) and not fsio.exists(paths.journal):
                clear_staging(paths)
    except (CheckpointError, OSError) as err:
        log.info("staging_left folder=%s reason=%s", paths.folder, err)


def pull_for(
    chain: Chain, folder: Path, *, durable: bool, progress: ProgressCallback | None
) -> PullReport:
    """Pull a chain's target into its folder."""
    return pull(
        folder,
        chain.base_dir,
        chain.source.path,
        chain.target_version,
        durable=durable,
        progress=progress,
    )


class _Worker:
    """One folder's background thread; a newer request replaces the one that waits."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: tuple[int, Callable[[], PullReport]] | None = None
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        while True:
            with self.lock:
                request, self.waiting = self.waiting, None
                if request is None:
                    self.thread = None
                    return
            try:
                request[1]()
                self.error = None
            except Exception as err:  # told by take_error, and the next update catches up
                log.exception("write_back_failed")
                self.error = err


_workers: dict[Path, _Worker] = {}
_workers_lock = threading.Lock()


def submit(chain: Chain, folder: Path, *, durable: bool, progress: ProgressCallback | None) -> None:
    """Have the folder follow in the background.

    A request that still waits is replaced by one for a later version, or for a reset: that one covers it.
    """
    target = chain.target_version
    with _workers_lock:
        worker = _workers.setdefault(folder, _Worker())
    with worker.lock:
        if worker.waiting is not None and 0 < target < worker.waiting[0]:
            return
        worker.waiting = (
            target,
            lambda: pull_for(chain, folder, durable=durable, progress=progress),
        )
        if worker.thread is None:
            worker.thread = threading.Thread(target=worker.run, name="gpusync-write-back")
            worker.thread.start()


def take_error(folder: Path) -> Exception | None:
    """Return why the folder's last background write-back failed, once; None where it did not."""
    with _workers_lock:
        worker = _workers.get(folder)
    if worker is None:
        return None
    error, worker.error = worker.error, None
    return error
