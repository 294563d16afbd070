"""The lock of a local checkpoint: flock on ``.weight_sync/lock``, with the holder's pid in it.

The kernel frees it when its holder dies, so there is no stale lock to break. The file itself stays: unlinking it
would let two processes hold "the" lock.

Some file systems have no flock, and on some it succeeds and keeps nobody out. A flock belongs to an open file, not to a
process: a second descriptor of the same process must not get it. That is tried each time, and a folder whose lock means
nothing is refused. A lease in its place (boot id, pid, start time of the holder) would need the clock and the pids of
whoever else uses the folder, on a file system that already breaks its word; other receivers know nothing of it, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from gpusync import fsio
from gpusync.errors import CheckpointError, CheckpointIOError, LockTimeoutError
from gpusync.folder.marker import STATE_DIR
from gpusync.types import Progress, ProgressCallback

if TYPE_CHECKING:
    from gpusync.published.hook import HookCall

_POLL_SECONDS = 0.05
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system without flock says (flock(2); Lustre without its mount option, NFS without a lock daemon)."""

_ADVICE = "keep the local checkpoint on a file system of this host, or mount this one with locks"


def excludes_others(path: Path) -> bool:
    """True where the flock that this process holds on a file keeps a second descriptor out, as it must.

    Raises
    ------
    OSError
        As the system says.
    """
    fd = fsio.open_lock_file(path)
    try:
        if not fsio.try_flock(fd):
            return True
        fsio.release_flock(fd)
        return False
    finally:
        fsio.close_read(fd)


def lock_problem(folder: Path) -> str | None:
    """Return why the flock of a folder's file system cannot be relied on; None where it can, or it cannot be tried.

    Tried on a file of its own, which is removed again.
    """
    path = folder / f".gpusync-lock-probe.{os.getpid()}"
    try:
        fd = fsio.open_lock_file(path)
    except OSError:
        return None
    try:
        held = fsio.try_flock(fd)
        return None if held and excludes_others(path) else "flock there keeps nobody out"
    except OSError as err:
        return f"flock fails there: {err.strerror}" if err.errno in NO_LOCKS else None
    finally:
        fsio.close_read(fd)
        fsio.unlink(path)


class FolderLock:
    """Exclusive lock of one local checkpoint among threads and processes of this host; a context manager.

    Parameters
    ----------
    folder
        The local checkpoint; its ``.weight_sync`` is made if it is not there.
    timeout_seconds
        How long to wait for another holder.
    progress
        Called while waiting; an exception from it ends the wait.
    """

    _fd = -1
    _process = 0

    def __init__(
        self,
        folder: Path,
        timeout_seconds: float,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._progress = progress
        self._path = folder / STATE_DIR / "lock"
        self._timeout_seconds = timeout_seconds
        self._process = os.getpid()
        self._hook: HookCall | None = None

    def hold_until_returned(self, hook: HookCall) -> None:
        """Keep the lock past its ``with`` block until a hook that outlasted its timeout has returned."""
        self._hook = hook

    def __enter__(self) -> FolderLock:
        start = time.monotonic()
        try:
            fsio.make_dir(self._path.parent)
            if stat.S_ISLNK(fsio.lstat(self._path.parent).st_mode):
                raise CheckpointError(
                    "the state folder is a link: what is kept in it belongs beside the weights",
                    file=str(self._path.parent),
                )
            self._fd = fsio.open_lock_file(self._path)
        except OSError as err:
            raise CheckpointIOError(
                f"lock file cannot be opened: {err.strerror}", file=str(self._path), errno=err.errno
            ) from err
        try:
            while not self._try():
                if time.monotonic() - start >= self._timeout_seconds:
                    self._raise_timeout()
                if self._progress is not None:
                    self._progress(Progress("lock", message="waiting for another process"))
                time.sleep(_POLL_SECONDS)
            if not excludes_others(self._path):
                raise CheckpointError(
                    f"flock succeeds here and keeps nobody out; {_ADVICE}", file=str(self._path)
                )
            fsio.truncate(self._fd, 0)
            fsio.pwrite(self._fd, memoryview(f"{os.getpid()}\n".encode()), 0)
        except OSError as err:
            self._close()
            raise CheckpointIOError(
                f"lock cannot be taken: {err.strerror}; {_ADVICE}",
                file=str(self._path),
                errno=err.errno,
            ) from err
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._hook is None:
            self._give_back()
        else:
            fd, self._fd = self._fd, -1
            self._hook.when_returned(lambda: _unlock(fd))

    def __del__(self) -> None:
        """A signal's exception may have come before either way out; a forked process has no say in its parent's lock."""
        if self._process == os.getpid():
            with contextlib.suppress(OSError):
                self._give_back()

    def _give_back(self) -> None:
        if self._fd < 0:
            return
        try:
            fsio.release_flock(self._fd)
        finally:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            fsio.close_read(fd)

    def _try(self) -> bool:
        return fsio.try_flock(self._fd)

    def _raise_timeout(self) -> None:
        buffer = bytearray(32)
        got = fsio.pread_into(self._fd, memoryview(buffer), 0)
        text = buffer[:got].decode("ascii", "replace").strip()
        pid = int(text) if text.isdecimal() else None
        raise LockTimeoutError(
            f"the folder's lock was not free within {self._timeout_seconds:g} s; "
            f"it is held by process {pid if pid is not None else 'unknown'}",
            file=str(self._path),
            pid=pid,
        )


def _unlock(fd: int) -> None:
    try:
        fsio.release_flock(fd)
    finally:
        fsio.close_read(fd)
