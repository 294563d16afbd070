"""The local checkpoint folder: what stands in it, and the digest table of its tensors.

Beside the checkpoint's own files there is ``.weight_sync/``:

======================  =========================================================================
state.json              the marker (:mod:`gpusync.folder.marker`)
lock                    flock, holder's pid
digests.json            xxh3-128 of every tensor, bound to the marker's id
journal.json            a swap in progress (:mod:`gpusync.local.swap`)
staging/                new files and digest table, complete before the swap begins
rolled.jsonl            which files of a rolling swap are in place, by stamp
spool/                  published deltas copied here, for a swap without room for a second copy
config.json             the checkpoint's config.json, held aside while files are swapped
======================  =========================================================================
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpusync import fsio
from gpusync.config import Settings
from gpusync.errors import FormatError, SourceNotReadyError
from gpusync.folder.files import FileChangedError, OpenFiles
from gpusync.folder.layout import Layout, local_io_error, read_layout, read_shard
from gpusync.folder.marker import (
    STATE_DIR,
    Marker,
    MarkerState,
    current_boot_id,
    is_sealed,
    read_marker,
    sealed,
)
from gpusync.format.digest import new_hasher

_MAX_TABLE_BYTES = 1 << 30


@dataclass(frozen=True)
class FolderPaths:
    """Paths in and under a local checkpoint."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / STATE_DIR

    @property
    def table(self) -> Path:
        return self.state / "digests.json"

    @property
    def journal(self) -> Path:
        return self.state / "journal.json"

    @property
    def staging(self) -> Path:
        return self.state / "staging"

    @property
    def new_files(self) -> Path:
        """The staged checkpoint files, apart from what is ours: a checkpoint may hold files of any name."""
        return self.staging / "files"

    @property
    def spool(self) -> Path:
        return self.state / "spool"

    @property
    def rolled(self) -> Path:
        return self.state / "rolled.jsonl"

    @property
    def reserve(self) -> Path:
        return self.state / "reserve"

    @property
    def config(self) -> Path:
        return self.folder / "config.json"

    @property
    def held_config(self) -> Path:
        return self.state / "config.json"


@dataclass(frozen=True)
class LocalState:
    """What stands in a local checkpoint.

    Parameters
    ----------
    found
        The marker and what it is worth.
    layout
        Its tensors; None where there is nothing readable.
    table
        xxh3-128 hex by tensor as recorded when the bytes were written; None where there is no table of this marker.
    """

    found: MarkerState
    layout: Layout | None
    table: Mapping[str, str] | None

    @property
    def marker(self) -> Marker | None:
        """The marker where the folder's bytes can be built on, else None."""
        usable = self.found.state in ("ours", "foreign") and self.layout is not None
        return self.found.marker if usable else None

    @property
    def needs_audit(self) -> bool:
        """True where the bytes must be digested before anything is built on them.

        Another receiver's folder has no table of ours; one written without fsync may have lost its bytes with the
        boot that wrote it.
        """
        if self.marker is None:
            return False
        lost = not self.marker.durable and self.marker.boot_id != current_boot_id()
        return self.found.state == "foreign" or self.table is None or lost


def read_state(paths: FolderPaths, files: OpenFiles, settings: Settings) -> LocalState:
    """Read marker, layout and table of a local checkpoint. The caller holds the lock.

    Raises
    ------
    CheckpointIOError
        The folder cannot be read.
    """
    found = read_marker(paths.folder)
    if found.marker is None:
        return LocalState(found, None, None)
    try:
        layout = read_layout(paths.folder, files, settings)
    except (FormatError, SourceNotReadyError) as err:
        if isinstance(err.__cause__, OSError) and not is_absence(err.__cause__):
            raise local_io_error(
                err.__cause__, "reading the local checkpoint", paths.folder
            ) from err
        layout = None  # damaged or incomplete: rebuilt from the seed
    return LocalState(found, layout, read_bound_table(paths.table, found.marker.id))


def write_table(path: Path, marker_id: str, table: Mapping[str, str], *, durable: bool) -> None:
    """Write a digest table bound to a marker id, sealed: a digest that is damaged itself must convict no tensor."""
    document = sealed({"id": marker_id, "tensors": dict(table)})
    fsio.write_json(path, document, durable=durable)


def read_bound_table(path: Path, marker_id: str) -> Mapping[str, str] | None:
    """Return xxh3-128 hex by tensor; None where the table is absent, damaged, or of another marker.

    Raises
    ------
    CheckpointIOError
        It is there and cannot be read.
    """
    try:
        document = json.loads(fsio.read_file(path, _MAX_TABLE_BYTES))
        bound = bool(marker_id) and document["id"] == marker_id and is_sealed(document)
        table = dict(document["tensors"]) if bound else None
    except OSError as err:
        if is_absence(err):
            return None
        raise local_io_error(err, "reading the digest table", path) from err
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if table is None or not all(isinstance(text, str) for text in table.values()):
        return None
    return table


def holds_tabled_bytes(path: Path, table: Mapping[str, str]) -> bool:
    """True where every tensor of a shard has the digest that a table records; False for what is no shard."""
    settings = Settings.from_env()
    buffer = memoryview(bytearray(settings.piece_bytes))
    with OpenFiles(settings.max_open_files, settings.source_retries) as files:
        try:
            shard = read_shard(path, files, settings)
        except (FormatError, SourceNotReadyError):
            return False
        for name, entry in shard.header.entries.items():
            hasher = new_hasher("xxh3-128")
            begin, end = (shard.header.data_offset + place for place in (entry.begin, entry.end))
            for offset in range(begin, end, len(buffer)):
                piece = buffer[: end - offset]
                files.read_into(path, piece, offset, shard.stamp)
                hasher.update(piece)
            if hasher.digest().hex != table.get(name):
                return False
    return True


def is_absence(err: OSError) -> bool:
    """True where a file is gone, cut short or not a file: damage to rebuild, not a disk for the operator to mend."""
    kinds = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileChangedError)
    return isinstance(err, kinds) or err.errno in (
        errno.EINVAL,
        errno.ENXIO,
        errno.ELOOP,
        errno.EFBIG,
    )


@contextmanager
def local_errors(what: str, path: Path) -> Iterator[None]:
    """Turn the system's errors on the local folder into CheckpointIOError."""
    try:
        yield
    except OSError as err:
        raise local_io_error(err, what, path) from err
