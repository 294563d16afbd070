"""The swap: staged files become the checkpoint, in numbered steps that survive a kill or a power cut at any of them.

========================  ==========================================================================
 1 LOCKED                 the folder's lock is held
 2 RECOVERED              what an earlier process left is finished or undone
 3 VALIDATED              the whole chain is validated
 4 MATERIALIZED           new files are written to staging and verified (rolling: proven by a dry pass, deltas
                          spooled, space reserved)
 5 SYNCED                 staged files (rolling: the spool) are fsynced, then their folder
 6 JOURNALED              the journal is durable
 7 CONFIG_ASIDE           config.json is held aside: a folder without it cannot be loaded
 8 MARKER_REMOVED         no marker; from here on the swap is always finished, never undone
 9 RENAMED                every staged file is renamed into place (rolling: built, fsynced, renamed, one by one)
10 PRUNED                 files that the new version does not have are removed
11 FOLDER_SYNCED          the folder is fsynced
12 TABLE_PLACED           the digest table is the new one
13 CONFIG_BACK            config.json is back
14 MARKED                 the new marker is durable
15 CLEANED                journal, staging and spool are removed
========================  ==========================================================================

Each step is idempotent, so that recovery runs the same code from step 7 on.
"""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from gpusync import fsio
from gpusync.folder.files import FileStamp
from gpusync.folder.layout import local_io_error
from gpusync.folder.marker import (
    MARKER_NAME,
    Marker,
    current_boot_id,
    is_sealed,
    parse_marker,
    read_marker,
    sealed,
    write_marker,
)
from gpusync.format.digest import digest_of
from gpusync.local.checkpoint import FolderPaths, holds_tabled_bytes, is_absence, read_bound_table

log = logging.getLogger(__name__)

_MAX_JOURNAL_BYTES = 256 << 20
_NO_BOOT = "unproven"
"""In a marker's place of a boot id: no boot vouches for the bytes."""


class Step(IntEnum):
    """Steps of a pull, in order; see the module's table."""

    LOCKED = 1
    RECOVERED = 2
    VALIDATED = 3
    MATERIALIZED = 4
    SYNCED = 5
    JOURNALED = 6
    CONFIG_ASIDE = 7
    MARKER_REMOVED = 8
    RENAMED = 9
    PRUNED = 10
    FOLDER_SYNCED = 11
    TABLE_PLACED = 12
    CONFIG_BACK = 13
    MARKED = 14
    CLEANED = 15


def reached(step: Step) -> None:
    """Note that a step is complete. Crash tests kill the process here."""
    log.debug("swap_step number=%d name=%s", step, step.name)


@dataclass(frozen=True)
class Journal:
    """A swap in progress.

    Parameters
    ----------
    before
        xxh3-128 of the old marker's bytes; None where there was no marker.
    after
        The new marker.
    renames
        Staged files to rename into the folder, in order (config.json not among them).
    removes
        Files of the folder that the new version does not have.
    new_config
        The new version brings its own config.json, staged.
    mode
        "rolling": each file of ``renames`` is built from the local one and the spool just before its rename.
    from_version
        Version of the old files, for rolling.
    stamps
        Every file that the new version consists of and that is complete already, staged or in the folder. Another receiver
        that finds no marker seeds the folder in place, and may die of it as we may: then these files are not ours.
    """

    before: str | None
    after: Marker
    renames: tuple[str, ...]
    removes: tuple[str, ...] = ()
    new_config: bool = False
    mode: Literal["staged", "rolling"] = "staged"
    from_version: int | None = None
    boot_id: str = field(default_factory=current_boot_id)
    stamps: Mapping[str, FileStamp] = field(default_factory=dict)

    def write(self, paths: FolderPaths) -> None:
        """Make the journal durable."""
        document = {**asdict(self), "after": self.after.to_json()}
        fsio.write_json(paths.journal, sealed(document), durable=True)


BuildShard = Callable[[str], None]


def marker_token(folder: Path) -> str | None:
    """Return the digest of the marker's bytes as they stand, None where there is no marker."""
    try:
        raw = fsio.read_file(FolderPaths(folder).state / MARKER_NAME, _MAX_JOURNAL_BYTES)
    except FileNotFoundError:
        return None
    return digest_of("xxh3-128", raw).hex


def read_journal(paths: FolderPaths) -> Journal | None:
    """Return the journal, None where there is none or it is damaged (then the marker alone decides).

    Raises
    ------
    OSError
        It is there and cannot be read: a swap that can be resumed is not thrown away for that.
    """
    try:
        raw = fsio.read_file(paths.journal, _MAX_JOURNAL_BYTES)
    except OSError as err:
        if is_absence(err):
            return None
        raise
    try:
        document: dict[str, Any] = json.loads(raw)
        if not is_sealed(document):
            return None
        del document["seal"]
        after = parse_marker(json.dumps(document.pop("after")).encode())
        if after.state != "ours" or after.marker is None:
            return None
        document["renames"] = tuple(document["renames"])
        document["removes"] = tuple(document["removes"])
        if not all(map(_is_file_name, (*document["renames"], *document["removes"]))):
            return None
        stamps = document["stamps"].items()
        document["stamps"] = {name: FileStamp(**stamp) for name, stamp in stamps}
        return Journal(after=after.marker, **document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _is_file_name(name: object) -> bool:
    """True for one path component: a swap touches no file outside of its folder."""
    plain = isinstance(name, str) and name not in ("", ".", "..")
    return plain and "/" not in name and "\0" not in name  # type: ignore[operator]


def swap(paths: FolderPaths, journal: Journal, build: BuildShard | None = None) -> None:
    """Run steps 7 to 15. The journal is durable, and so is everything that it needs.

    Parameters
    ----------
    build
        For a rolling swap: builds one staged file, verified and fsynced.

    Raises
    ------
    CheckpointIOError
        The local disk failed. The next pull resumes from the journal.
    """
    try:
        _hold_config(paths, journal)
        reached(Step.CONFIG_ASIDE)
        fsio.unlink(paths.state / MARKER_NAME)
        fsio.fsync_dir(paths.state)
        reached(Step.MARKER_REMOVED)
        _rename_all(paths, journal, build)
        reached(Step.RENAMED)
        for name in journal.removes:
            fsio.unlink(paths.folder / name)
        reached(Step.PRUNED)
        fsio.fsync_dir(paths.folder)
        reached(Step.FOLDER_SYNCED)
        _move(paths.staging / paths.table.name, paths.table)
        fsio.fsync_dir(paths.state)
        reached(Step.TABLE_PLACED)
        _return_config(paths, journal)
        reached(Step.CONFIG_BACK)
        write_marker(paths.folder, journal.after)
        reached(Step.MARKED)
        clean(paths)
        reached(Step.CLEANED)
    except OSError as err:
        raise local_io_error(err, "swapping files in", paths.folder) from err


def clean(paths: FolderPaths) -> None:
    """Remove journal, staging, spool and everything else that only a swap needs."""
    fsio.unlink(paths.journal)
    fsio.fsync_dir(paths.state)
    fsio.unlink(paths.rolled)
    clear_staging(paths)
    for name in fsio.list_dir(paths.state):
        if name.endswith(".tmp"):
            fsio.unlink(paths.state / name)


def clear_staging(paths: FolderPaths) -> None:
    """Remove staging and spool, which are garbage while no journal refers to them."""
    fsio.remove_tree(paths.new_files)  # the name of whose it is goes last: it can be tried again
    fsio.remove_tree(paths.staging)
    fsio.remove_tree(paths.spool)
    fsio.unlink(paths.reserve)


@dataclass(frozen=True)
class Recovery:
    """What recovery found: "none", "discarded" (undone), "resumed" (finished), or a rolling swap to ``resume``."""

    outcome: Literal["none", "discarded", "resumed"]
    rolling: Journal | None = None


def recover(paths: FolderPaths) -> Recovery:
    """Finish or undo what an earlier process left. The caller holds the lock.

    By the marker: the journal's new one: the swap is finished. The old one: nothing was swapped, undo. None: resume.
    Any other: another receiver took the folder over, and the journal is void.

    Raises
    ------
    CheckpointIOError
        The local disk failed.
    """
    try:
        journal = read_journal(paths)
        token = marker_token(paths.folder)
        if journal is None:
            left = fsio.exists(paths.staging) or fsio.exists(paths.journal)
            if token is not None:
                _put_back_config(paths)
            clean(paths)
            return Recovery("discarded" if left else "none")
        found = read_marker(paths.folder)
        if found.marker is not None and found.marker.id == journal.after.id:
            fsio.unlink(paths.held_config)
            clean(paths)
            return Recovery("resumed")
        if token is None and _resumable(paths, journal):
            journal = _with_proof(paths, journal)
            if journal.mode == "rolling":
                return Recovery("resumed", journal)
            swap(paths, journal)
            return Recovery("resumed")
        if token is not None:
            _put_back_config(paths)
        clean(paths)
        return Recovery("discarded")
    except OSError as err:
        raise local_io_error(err, "recovering the folder", paths.folder) from err


def _resumable(paths: FolderPaths, journal: Journal) -> bool:
    """True where everything that the rest of the swap needs is still there."""
    if not journal.after.durable and journal.boot_id != current_boot_id():
        return False  # staged without fsync, and the machine went down: the bytes may be anything
    if journal.mode == "rolling":
        return fsio.exists(paths.spool)
    if journal.new_config and not (
        fsio.exists(paths.new_files / paths.config.name) or fsio.exists(paths.config)
    ):
        return False
    return all(_is_at_hand(paths, journal, name) for name in journal.renames)


def _is_at_hand(paths: FolderPaths, journal: Journal, name: str) -> bool:
    """True where a staged file is in staging still, or was renamed: an old file in its place is not taken for it."""
    staged, target = paths.new_files / name, paths.folder / name
    if fsio.exists(staged):
        return stat.S_ISREG(fsio.lstat(staged).st_mode)
    if not fsio.exists(target):
        return False
    if fsio.lstat(target).st_ino == journal.stamps[name].inode:
        return True
    # The folder was copied to another disk meanwhile, or the file system numbers its files anew: the bytes tell.
    tables = (paths.staging / paths.table.name, paths.table)
    found = [read_bound_table(table, journal.after.id) for table in tables]
    return any(holds_tabled_bytes(target, table) for table in found if table is not None)


def _with_proof(paths: FolderPaths, journal: Journal) -> Journal:
    """Return the journal; where a file is not as it was left, with a marker that has every byte digested before use."""
    for name, stamp in journal.stamps.items():
        staged = paths.new_files / name
        path = staged if fsio.exists(staged) else paths.folder / name
        if not fsio.exists(path) or stamp_of(path) != stamp:
            log.warning("swap_resumed_unproven folder=%s file=%s", paths.folder, name)
            return replace(journal, after=replace(journal.after, durable=False, boot_id=_NO_BOOT))
    return journal


def stamp_of(path: Path) -> FileStamp:
    """Return what tells the file under a name from another one, or from itself rewritten."""
    info = fsio.lstat(path)
    return FileStamp(info.st_ino, info.st_size, info.st_mtime_ns)


def _rename_all(paths: FolderPaths, journal: Journal, build: BuildShard | None) -> None:
    done = _read_rolled(paths) if build is not None else {}
    for name in journal.renames:
        staged, target = paths.new_files / name, paths.folder / name
        if build is not None:
            if name in done and fsio.exists(target) and stamp_of(target) == done[name]:
                continue
            build(name)
            _note_rolled(paths, name, stamp_of(staged))
        _move(staged, target)
        if build is not None:
            fsio.fsync_dir(paths.folder)


def _note_rolled(paths: FolderPaths, name: str, stamp: FileStamp) -> None:
    """Note, durably and before its rename, which file is the new one: recovery knows it by this."""
    fsio.append(paths.rolled, json.dumps([name, *astuple(stamp)]).encode() + b"\n")


def _read_rolled(paths: FolderPaths) -> dict[str, FileStamp]:
    """Return the noted stamps by file; a line that a power cut tore is left out."""
    if not fsio.exists(paths.rolled):
        return {}
    done = {}
    for line in fsio.read_file(paths.rolled, _MAX_JOURNAL_BYTES).splitlines():
        try:
            name, inode, nbytes, mtime_ns = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        done[name] = FileStamp(inode, nbytes, mtime_ns)
    return done


def _move(staged: Path, target: Path) -> None:
    """Rename, where it has not been done before."""
    if fsio.exists(staged):
        fsio.rename(staged, target)


def _hold_config(paths: FolderPaths, journal: Journal) -> None:
    if journal.new_config and not fsio.exists(paths.new_files / paths.config.name):
        return  # resumed after step 13: the config.json in place is the new one
    if fsio.exists(paths.config) and not fsio.exists(paths.held_config):
        fsio.rename(paths.config, paths.held_config)
        fsio.fsync_dir(paths.state)  # the new name first: a power cut must not lose both
        fsio.fsync_dir(paths.folder)


def _return_config(paths: FolderPaths, journal: Journal) -> None:
    if journal.new_config:
        _move(paths.new_files / paths.config.name, paths.config)
        fsio.unlink(paths.held_config)
    elif fsio.exists(paths.held_config):
        fsio.rename(paths.held_config, paths.config)
    fsio.fsync_dir(paths.folder)


def _put_back_config(paths: FolderPaths) -> None:
    """Undo of step 7."""
    if not fsio.exists(paths.held_config):
        return
    if fsio.exists(paths.config):
        fsio.unlink(paths.held_config)
    else:
        fsio.rename(paths.held_config, paths.config)
        fsio.fsync_dir(paths.folder)
