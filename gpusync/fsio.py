"""Every file operation of gpusync, one thin function each, and nothing else.

Callers use ``fsio.name(...)`` and never ``os`` or ``open``, so that a test can put an error, a short read or a
kill at each operation by replacing the functions listed in ``OPERATIONS``. Functions raise OSError as the system
gives it; callers turn it into the error their caller can act on. What a signal cuts short is tried again, by the
interpreter (PEP 475) or here; short reads and writes are resumed here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

Result = TypeVar("Result")

READ_OPERATIONS = ("open_regular", "pread_into", "fstat", "lstat", "stat_path", "list_dir")
WRITE_OPERATIONS = (
    "create",
    "open_for_writing",
    "allocate",
    "pwrite",
    "append",
    "fsync",
    "fsync_dir",
    "rename",
    "unlink",
    "make_dir",
    "remove_dir",
    "scratch_file",
)
OPERATIONS = READ_OPERATIONS + WRITE_OPERATIONS


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor, owned by the caller.

    Links are followed (callers that must not, look first). A FIFO or device never blocks and is refused.

    Raises
    ------
    OSError
        As the system says; EINVAL where the path is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        close_read(fd)
        raise
    return fd


def pread_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from file position ``offset``; return the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def fstat(fd: int) -> os.stat_result:
    return os.fstat(fd)


def lstat(path: Path) -> os.stat_result:
    return _uninterrupted(lambda: os.lstat(path))


def stat_path(path: Path) -> os.stat_result:
    """Like ``lstat``, of the file that a link leads to."""
    return _uninterrupted(lambda: os.stat(path))


def list_dir(path: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(_uninterrupted(lambda: os.listdir(path)))


def create(path: Path, mode: int = 0o644) -> int:
    """Create a new file for reading and writing; an old one of that name is unlinked first, never written through."""
    unlink(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, mode)
    except BaseException:
        close_read(fd)
        raise
    return fd


def open_for_writing(path: Path) -> int:
    """Open a file of ours that is still under construction."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def allocate(fd: int, nbytes: int) -> None:
    """Reserve ``nbytes`` of disk for the file and set its size, so that later writes cannot meet ENOSPC."""
    if nbytes:
        os.posix_fallocate(fd, 0, nbytes)


def pwrite(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of ``buffer`` at file position ``offset``."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(fd, buffer[done:], offset + done)


def append(path: Path, line: bytes) -> None:
    """Append a line to a file (made if it is not there), durably."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        left = memoryview(line)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        close_read(fd)


def fsync(fd: int) -> None:
    os.fsync(fd)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        close_read(fd)


def rename(old: Path, new: Path) -> None:
    """Rename within one file system, replacing ``new``."""
    interrupted = False
    while True:
        try:
            return os.replace(old, new)
        except InterruptedError:
            interrupted = True
        except FileNotFoundError:
            if not interrupted:
                raise
            return None  # the try that was cut short had done it


def unlink(path: Path) -> None:
    """Remove a name; one that is already gone is fine."""
    try:
        _uninterrupted(lambda: os.unlink(path))
    except FileNotFoundError:
        pass


def make_dir(path: Path) -> None:
    """Create a folder and its parents; one that is already there is fine."""
    _uninterrupted(lambda: os.makedirs(path, exist_ok=True))


def remove_dir(path: Path) -> None:
    """Remove an empty folder; one that is already gone is fine."""
    try:
        _uninterrupted(lambda: os.rmdir(path))
    except FileNotFoundError:
        pass


def scratch_file(folder: Path | None) -> IO[bytes]:
    """Return a new unlinked file, gone when it is closed or the process ends."""
    return tempfile.TemporaryFile(dir=folder)


def close(fd: int) -> None:
    """Close a file that was written: some file systems say only now that bytes were lost."""
    os.close(fd)


def close_read(fd: int) -> None:
    """Close a file that was only read, or fsynced: the descriptor is gone whatever the system says, and that is all."""
    try:
        os.close(fd)
    except OSError:
        pass


def free_bytes(path: Path) -> int:
    """Return the bytes that this user can still allocate on the folder's file system."""
    info = _uninterrupted(lambda: os.statvfs(path))
    return info.f_bavail * info.f_frsize


def try_flock(fd: int) -> bool:
    """Take an exclusive flock without waiting; False where another holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release_flock(fd: int) -> None:
    """Give a flock back; closing alone would leave it with a process forked meanwhile."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def open_lock_file(path: Path) -> int:
    """Open (or create) a lock file for reading and writing; its content is kept until the lock is held."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def truncate(fd: int, nbytes: int) -> None:
    os.ftruncate(fd, nbytes)


def _uninterrupted(call: Callable[[], Result]) -> Result:
    """Call again while a signal cuts it short: the interpreter does not for every function."""
    while True:
        try:
            return call()
        except InterruptedError:
            continue


# ---- composed of the operations above ---------------------------------------------------------------


def pread_all(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill all of ``buffer`` from file position ``offset``.

    Raises
    ------
    OSError
        EIO where the file ended before: half of the bytes are not the bytes.
    """
    got = pread_into(fd, buffer, offset)
    if got != len(buffer):
        raise OSError(errno.EIO, f"ended {len(buffer) - got} bytes early at {offset + got}")


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return a regular file's bytes.

    Raises
    ------
    OSError
        EFBIG where it holds more than ``max_bytes``; nothing of that size is allocated. EIO where it ended before its
        size: half of a file is not the file.
    """
    fd = open_regular(path)
    try:
        nbytes = fstat(fd).st_size
        if nbytes > max_bytes:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, over the cap of {max_bytes}", str(path))
        buffer = bytearray(nbytes)
        pread_all(fd, memoryview(buffer), 0)
        return bytes(buffer)
    finally:
        close_read(fd)


def fsync_file(path: Path) -> None:
    """Make a closed file's data durable."""
    fd = open_regular(path)
    try:
        fsync(fd)
    finally:
        close_read(fd)


def write_file(path: Path, data: bytes, *, durable: bool, mode: int = 0o644) -> None:
    """Replace a small file by a new one: written beside it, fsynced, renamed over it, folder fsynced."""
    temporary = path.with_name(path.name + ".tmp")
    fd = create(temporary, mode)
    try:
        pwrite(fd, memoryview(data), 0)
        if durable:
            fsync(fd)
    finally:
        close(fd)
    rename(temporary, path)
    if durable:
        fsync_dir(path.parent)


def write_json(path: Path, value: Any, *, durable: bool) -> None:
    """``write_file`` of a JSON document."""
    write_file(path, json.dumps(value, indent=1).encode() + b"\n", durable=durable)


def exists(path: Path) -> bool:
    """True where the name is there, whatever it is (a dangling link is there)."""
    try:
        lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_durable_dir(path: Path) -> None:
    """Make a folder and its parents; the names of those that are new are durable."""
    new: list[Path] = []
    folder = path
    while not exists(folder):
        new.append(folder)
        folder = folder.parent
    make_dir(path)
    for folder in reversed(new):
        fsync_dir(folder.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder of ours with everything in it. Links, its own name among them, are removed, never followed."""
    if not exists(path):
        return
    if not stat.S_ISDIR(lstat(path).st_mode):
        unlink(path)
        return
    for name in list_dir(path):
        child = path / name
        if stat.S_ISDIR(lstat(child).st_mode):
            remove_tree(child)
        else:
            unlink(child)
    remove_dir(path)


def regular_files(path: Path) -> Iterator[str]:
    """Yield the names of a folder's top-level files (links to files included; folders are not)."""
    for name in list_dir(path):
        mode = lstat(path / name).st_mode
        if stat.S_ISLNK(mode):
            try:
                mode = stat_path(path / name).st_mode
            except OSError:
                continue
        if stat.S_ISREG(mode):
            yield name
