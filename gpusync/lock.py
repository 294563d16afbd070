"""The lock of a local checkpoint: flock on ``.weight_sync/lock``, with the holder's pid in it.

The kernel frees it when its holder dies, so there is no stale lock to break. The file itself stays: unlinking it
would let two processes hold "the" lock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from gpusync import fsio
from gpusync.errors import CheckpointIOError, LockTimeoutError
from gpusync.hook import HookCall
from gpusync.marker import STATE_DIR
from gpusync.types import Progress, ProgressCallback

_POLL_SECONDS = 0.05


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

    def __init__(
        self,
        folder: Path,
        timeout_seconds: float,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._progress = progress
        self._path = folder / STATE_DIR / "lock"
        self._timeout_seconds = timeout_seconds
        self._fd = -1
        self._hook: HookCall | None = None

    def hold_until_returned(self, hook: HookCall) -> None:
        """Keep the lock past its ``with`` block until a hook that outlasted its timeout has returned."""
        self._hook = hook

    def __enter__(self) -> FolderLock:
        start = time.monotonic()
        try:
            fsio.make_dir(self._path.parent)
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
            fsio.truncate(self._fd, 0)
            fsio.pwrite(self._fd, memoryview(f"{os.getpid()}\n".encode()), 0)
        except OSError as err:
            fsio.close_read(self._fd)
            raise CheckpointIOError(
                f"lock cannot be taken: {err.strerror}; the folder must be on a local file system",
                file=str(self._path),
                errno=err.errno,
            ) from err
        except BaseException:
            fsio.close_read(self._fd)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        fd = self._fd
        if self._hook is None:
            _unlock(fd)
        else:
            self._hook.when_returned(lambda: _unlock(fd))

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
