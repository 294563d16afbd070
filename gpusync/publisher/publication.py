"""Putting one version into ``source_dir``: built in a hidden folder beside, fsynced, renamed into place.

A receiver that lists the folder sees the whole version or nothing; within it the index was written last all the same,
for stores that copy file by file. Steps, in this order:

1. lock, and what a killed publisher of this host left behind removed; where the file system has no locks, or they
   do not reach across hosts, the rename in 6 decides;
2. hidden folder of a name of its own;
3. shards, then the manifest, each fsynced;
4. the index, fsynced;
5. the hidden folder fsynced;
6. rename to ``weight_vNNNNNN``, refused by the system where that is there and not empty;
7. ``source_dir`` fsynced.
"""

from __future__ import annotations

import errno
import logging
import platform
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gpusync import fsio
from gpusync.config import Settings
from gpusync.errors import CheckpointIOError, VersionConflictError
from gpusync.folder.lock import NO_LOCKS, excludes_others
from gpusync.folding.parallel import shut_down
from gpusync.format.index import version_dir_name

log = logging.getLogger(__name__)

_LOCK_NAME = ".gpusync-publish.lock"
_COPY_NBYTES = 4 << 20


class _CallersError(Exception):
    """An OSError that the caller's own code raised, on its way out through `io_errors`."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error


@contextmanager
def io_errors() -> Iterator[None]:
    """Turn an OSError of the publisher's own reading and writing into CheckpointIOError."""
    try:
        yield
    except _CallersError as err:
        raise err.error from err.error.__cause__
    except OSError as err:
        raise CheckpointIOError(
            f"publishing failed: {err.strerror or err}",
            file=str(err.filename) if err.filename else None,
            errno=err.errno,
        ) from err


@contextmanager
def callers_errors() -> Iterator[None]:
    """Let an OSError of the caller's code in the block (an iterable, a callback) through `io_errors` as it is."""
    try:
        yield
    except OSError as err:
        raise _CallersError(err) from err


@contextmanager
def publish_lock(source_dir: Path) -> Iterator[None]:
    """Hold the publisher's lock of a source folder, which is made if it is not there.

    Raises
    ------
    VersionConflictError
        Another publisher of this host holds it.
    """
    fsio.make_durable_dir(source_dir)
    fd = fsio.open_lock_file(source_dir / _LOCK_NAME)
    try:
        if _try_lock(fd, source_dir):
            for name in fsio.list_dir(source_dir):
                if name.startswith(_hidden_prefix()):
                    fsio.remove_tree(source_dir / name)
        yield
    finally:
        fsio.close_read(fd)


def _try_lock(fd: int, source_dir: Path) -> bool:
    """Return True where the lock is held, False where the file system has none, or one that keeps nobody out."""
    try:
        held = fsio.try_flock(fd)
        if held and not excludes_others(source_dir / _LOCK_NAME):
            raise OSError(errno.ENOLCK, "flock keeps nobody out")
    except OSError as err:
        if err.errno not in NO_LOCKS:
            raise
        log.warning("publish_lock_unsupported source_dir=%s errno=%s", source_dir, err.errno)
        return False
    if not held:
        raise VersionConflictError(
            f"another publisher is at work in {source_dir}. Wait for it, or stop it."
        )
    return True


def _hidden_prefix() -> str:
    """Start of the hidden folders' names of this host: the lock keeps others of this host out, not other hosts."""
    return f".gpusync-publish.{platform.node() or 'host'}."


@contextmanager
def worker_threads(settings: Settings) -> Iterator[Executor]:
    """Threads that start tasks in the order given; on an error, tasks that did not start are dropped."""
    pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="gpusync-publish")
    try:
        yield pool
    finally:
        # None may write to a file that is closed next: another one may have its number then.
        shut_down(pool)


@contextmanager
def pending_version(source_dir: Path, version: int) -> Iterator[PendingVersion]:
    """Build a version in the block; what was not published at its end is removed."""
    pending = PendingVersion(source_dir, version)
    try:
        yield pending
    finally:
        pending.discard()


class PendingVersion:
    """A version that is being built; nobody sees it before `publish`.

    Parameters
    ----------
    source_dir
        Where it will stand; the caller holds its `publish_lock`.
    """

    def __init__(self, source_dir: Path, version: int) -> None:
        self.version = version
        self.path = source_dir / version_dir_name(version)
        self.nbytes = 0
        self._folder = source_dir / f"{_hidden_prefix()}{uuid.uuid4().hex}.tmp"
        fsio.make_dir(self._folder)

    def write_file(self, name: str, pieces: Sequence[bytes]) -> None:
        """Write and fsync one file of the version."""
        fd = fsio.create(self._folder / name)
        try:
            offset = 0
            for piece in pieces:
                fsio.pwrite(fd, memoryview(piece), offset)
                offset += len(piece)
            fsio.fsync(fd)
        finally:
            fsio.close(fd)
        self.nbytes += offset

    def copy_file(self, source: Path, report: Callable[[int], None]) -> None:
        """Copy and fsync one file under its own name.

        Parameters
        ----------
        report
            Called with the bytes of each piece; if it raises, the copy ends.

        Raises
        ------
        OSError
            Reading or writing failed, or the file ended early or was rewritten meanwhile: no digest would tell.
        """
        origin = fsio.open_regular(source)
        try:
            before = fsio.fstat(origin)
            fd = fsio.create(self._folder / source.name)
            try:
                self._copy(origin, fd, before.st_size, report)
                fsio.fsync(fd)
            finally:
                fsio.close(fd)
            after = fsio.fstat(origin)
            if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise OSError(errno.ESTALE, "rewritten while it was copied", str(source))
        finally:
            fsio.close_read(origin)
        self.nbytes += before.st_size

    def _copy(self, origin: int, fd: int, nbytes: int, report: Callable[[int], None]) -> None:
        buffer = memoryview(bytearray(min(_COPY_NBYTES, nbytes)))
        done = 0
        while done < nbytes:
            piece = buffer[: nbytes - done]
            fsio.pread_all(origin, piece, done)
            fsio.pwrite(fd, piece, done)
            done += len(piece)
            report(len(piece))

    def rename_file(self, old: str, new: str) -> None:
        fsio.rename(self._folder / old, self._folder / new)

    def publish(self) -> None:
        """Make the version visible and durable.

        Raises
        ------
        VersionConflictError
            The version was published by someone else meanwhile.
        """
        fsio.fsync_dir(self._folder)
        conflict = fsio.exists(self.path)
        if not conflict:
            try:
                fsio.rename(self._folder, self.path)
            except OSError as err:
                if err.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                conflict = True
        if conflict:
            raise VersionConflictError(
                f"{self.path.name} is there already: another publisher wrote it. Only one may publish.",
                version=self.version,
            )
        fsio.fsync_dir(self.path.parent)

    def discard(self) -> None:
        """Remove what was built."""
        fsio.remove_tree(self._folder)
