"""A bounded set of open files for positional reads by many threads.

A version can have hundreds of shards and a chain dozens of versions; descriptors are opened on demand and the
least recently used idle one is closed when more than ``max_open`` are held.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gpusync import fsio

_LARGE_NBYTES = 64 << 20
_RETRIED = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one file from another that took its name, or from itself rewritten.

    Of a source it is compared within one operation only: remounts change it. Of a local file a swap in progress keeps it;
    where it changed, the bytes decide.
    """

    inode: int
    nbytes: int
    mtime_ns: int


class FileChangedError(OSError):
    """The file under a name is no longer the one that was validated."""


class FileCutError(FileChangedError):
    """The file ended before the bytes that it had when it was validated."""


@dataclass(slots=True)
class _Open:
    """An open file; ``retired`` once its name stands for another one, and closed when its last reader is done."""

    fd: int
    stamp: FileStamp
    users: int = 0
    retired: bool = False


class OpenFiles:
    """Open files by path, shared by threads; use as a context manager.

    Parameters
    ----------
    max_open
        Idle descriptors kept. Those in use at one moment may exceed it by the number of threads.
    retries
        How often a read that ended early, or failed with EIO, ESTALE or ETIMEDOUT, is repeated on a fresh descriptor.
    """

    def __init__(self, max_open: int, retries: int) -> None:
        self._max_open = max_open
        self._retries = retries
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, _Open] = OrderedDict()

    def read_into(
        self, path: Path, buffer: memoryview, offset: int, stamp: FileStamp | None = None
    ) -> None:
        """Fill ``buffer`` from ``offset`` bytes into the file.

        Raises
        ------
        FileChangedError
            The file is not the one of ``stamp``; FileCutError where it ended early.
        OSError
            As the system says, after the retries.
        """
        for attempt in range(self._retries + 1):
            try:
                entry = self._acquire(path, stamp)
                try:
                    got = fsio.pread_into(entry.fd, buffer, offset)
                finally:
                    self._release(entry)
                if got != len(buffer):
                    raise FileCutError(
                        errno.ESTALE,
                        f"ended {len(buffer) - got} bytes early at {offset + got}",
                        str(path),
                    )
                return
            except OSError as err:
                self.forget(path)
                changed = isinstance(err, FileChangedError) and not isinstance(err, FileCutError)
                if changed or err.errno not in _RETRIED or attempt == self._retries:
                    raise

    def stamp(self, path: Path) -> FileStamp:
        """Open the file that has the name now, whatever was open under it, and return its stamp."""
        self.forget(path)
        entry = self._acquire(path, None)
        try:
            return entry.stamp
        finally:
            self._release(entry)

    def forget(self, path: Path) -> None:
        """Have the next read open the file afresh; whoever reads the old one finishes first."""
        with self._lock:
            self._retire(path)

    def close(self) -> None:
        """Close every file. Nobody may be reading.

        Large files that were replaced meanwhile are closed by a thread: the last close frees their blocks, which takes
        0.2 s per GB on a file system that discards, and nobody has to wait for it.
        """
        with self._lock:
            fds = [entry.fd for entry in self._files.values()]
            self._files.clear()
        large = [fd for fd in fds if _is_large_and_unlinked(fd)]
        for fd in set(fds).difference(large):
            fsio.close_read(fd)
        if large:
            threading.Thread(target=_close_all, args=(large,), name="gpusync-close").start()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _acquire(self, path: Path, stamp: FileStamp | None) -> _Open:
        with self._lock:
            entry = self._files.get(path)
            if entry is not None and stamp not in (None, entry.stamp):
                self._retire(path)
                entry = None
            if entry is None:
                entry = self._open(path, stamp)
            self._files.move_to_end(path)
            entry.users += 1
            return entry

    def _open(self, path: Path, stamp: FileStamp | None) -> _Open:
        fd = -1
        try:
            fd = fsio.open_regular(path)
            found = _stamp_of(fd)
            if stamp not in (None, found):
                raise FileChangedError(errno.ESTALE, "replaced since it was validated", str(path))
            entry = self._files[path] = _Open(fd, found)
        except BaseException:  # also an interrupt's
            if fd >= 0:
                fsio.close_read(fd)
            raise
        return entry

    def _release(self, entry: _Open) -> None:
        with self._lock:
            entry.users -= 1
            if entry.retired and entry.users == 0:
                fsio.close_read(entry.fd)
            self._close_idle()

    def _retire(self, path: Path) -> None:
        entry = self._files.pop(path, None)
        if entry is None:
            return
        entry.retired = True
        if entry.users == 0:
            fsio.close_read(entry.fd)

    def _close_idle(self) -> None:
        if len(self._files) <= self._max_open:
            return
        for path, entry in list(self._files.items()):
            if entry.users == 0:
                del self._files[path]
                fsio.close_read(entry.fd)
            if len(self._files) <= self._max_open:
                return


def _is_large_and_unlinked(fd: int) -> bool:
    try:
        info = fsio.fstat(fd)
    except OSError:
        return False
    return info.st_nlink == 0 and info.st_size >= _LARGE_NBYTES


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        fsio.close_read(fd)


def _stamp_of(fd: int) -> FileStamp:
    info = fsio.fstat(fd)
    return FileStamp(info.st_ino, info.st_size, info.st_mtime_ns)
