"""The tensors of the last published version, kept by a publisher between its steps.

``state_dir`` holds one folder per version, ``version_NNNNNN/model.safetensors`` (raw tensors) and ``state.json``, and
``run.json``. A folder without a valid ``state.json``, which is written last, is not a state; the state that counts is
the one whose version and fingerprint are those of the newest published version. So a crash before the version was
renamed into place leaves the old state in force, and a crash after it the new one.

``state.json`` is fsynced, the tensors are not: a copy of the model on the disk at every step would take longer than
all the rest. The state names the boot whose page cache holds them and the digest of each. After a power cut they are
proven by these, or rebuilt (`recover_tensors`) into ``rebuilt_NNNNNN``, a local checkpoint with the same ``state.json``.

The tensors before those in force are not freed but written over by the next state: memory of that size is slow to get
and to give back. Steps, in this order:

1. their ``state.json`` is removed: the folder is no state any more;
2. the folder is renamed to ``spare``, in place of an older one;
3. it is renamed to the next version's;
4. the next version's tensors are written over the file;
5. ``state.json`` is written anew.

None of 1 to 4 is fsynced. A kill leaves them done in this order. A power cut may bring an old ``state.json`` back beside
tensors that were written over, but as the state of another boot, whose tensors must be proven. The state in force has
no part in this.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpusync import fsio
from gpusync.errors import FormatError, HeaderFormatError, IndexFormatError
from gpusync.folder.layout import Layout
from gpusync.folder.marker import current_boot_id
from gpusync.format.digest import parse_digest
from gpusync.format.encode import Bytes
from gpusync.format.header import build_header
from gpusync.format.index import parse_json_object
from gpusync.types import Digest

_FOLDER = re.compile(r"(version|rebuilt)_([0-9]{6,18})")
_SPARE_NAME = "spare"
_STATE_NAME = "state.json"
_RUN_NAME = "run.json"
_DATA_NAME = "model.safetensors"
_MAX_JSON_BYTES = 1 << 30


@dataclass(frozen=True)
class PublisherState:
    """A state that is in force: its folder, and the digest of every tensor in it.

    ``is_of_this_boot``: the tensors are as they were written; else a power cut may have taken some.
    """

    version: int
    fingerprint: str
    folder: Path
    digests: Mapping[str, Digest]
    is_of_this_boot: bool


class StateWriter:
    """Writes the state of a version that is about to be published.

    Parameters
    ----------
    folder
        Its folder. A file of the right size in it is written over; a folder without one is made anew.
    layout
        The version before, for names, dtypes and shapes.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._digests: dict[str, Digest] = {}
        entries = [layout.entry(name) for name in layout.file_of]
        header = build_header(
            [(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in entries], None
        )
        self._offsets: dict[str, int] = {}
        offset = len(header)
        for entry in entries:
            self._offsets[entry.name] = offset
            offset += entry.nbytes
        data = folder / _DATA_NAME
        if _is_spare(data, offset):
            self._fd = fsio.open_for_writing(data)
        else:
            fsio.remove_tree(folder)
            fsio.make_dir(folder)
            self._fd = fsio.create(data)
        try:
            fsio.allocate(self._fd, offset)
            fsio.pwrite(self._fd, memoryview(header), 0)
        except BaseException:
            self.close()
            raise

    def keep(self, tensor: str) -> Callable[[Bytes, int], None]:
        """Return the function that stores blocks of a tensor; threads may call it at once."""
        start = self._offsets[tensor]
        return lambda block, offset: fsio.pwrite(self._fd, block.data, start + offset)

    def record(self, tensor: str, digest: Digest) -> None:
        """Note the digest of a tensor whose blocks are all stored."""
        self._digests[tensor] = digest

    def finish(self, version: int, fingerprint: str) -> None:
        """Make the state durable, to come into force when the version of this fingerprint is published."""
        _write_state(self._folder, version, fingerprint, self._digests)

    def close(self) -> None:
        fsio.close_read(self._fd)  # fsynced, or dropped


class StateStore:
    """The states under one ``state_dir``."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir

    @property
    def run_id(self) -> str | None:
        """Run id of the publisher that used this folder last."""
        run_id = _read_json(self._path / _RUN_NAME).get("run_id")
        return run_id if isinstance(run_id, str) and run_id else None

    def record_run(self, run_id: str) -> None:
        """Make the run id durable."""
        if self.run_id != run_id:
            fsio.make_durable_dir(self._path)
            fsio.write_json(self._path / _RUN_NAME, {"run_id": run_id}, durable=True)

    def find(self, version: int, fingerprint: str) -> PublisherState | None:
        """Return the state of a published version, or None where there is none that is whole."""
        folders = (self._folder(version), self._rebuilt(version))
        found = [_read_state(folder, version, fingerprint) for folder in folders]
        states = [state for state in found if state is not None]
        states.sort(key=lambda state: not state.is_of_this_boot)
        return states[0] if states else None

    def begin(self, version: int, layout: Layout) -> StateWriter:
        """Start the state of the next version, over spare tensors where there are some.

        What stood under its name goes, and what a killed publisher did not come to: states before the last version's.
        """
        fsio.make_durable_dir(self._path)
        for number, folder in self._folders():
            if number == version or number < version - 1:
                self._retire(folder)
        folder = self._folder(version)
        if fsio.exists(self._path / _SPARE_NAME):
            fsio.rename(self._path / _SPARE_NAME, folder)
        return StateWriter(folder, layout)

    def begin_rebuilding(self, version: int) -> Path:
        """Return the folder for the tensors of a version that are lost; whatever stood under its name goes."""
        folder = self._rebuilt(version)
        fsio.remove_tree(folder)
        return folder

    def finish_rebuilding(self, state: PublisherState) -> None:
        """The tensors are there again: have the state say so. The next publish retires what is left of the lost ones."""
        _write_state(self._rebuilt(state.version), state.version, state.fingerprint, state.digests)

    def retire_others(self, version: int) -> None:
        """End the states of all other versions; the file of one stays as spare."""
        for _, folder in self._folders():
            if folder != self._folder(version):
                self._retire(folder)

    def _folders(self) -> list[tuple[int, Path]]:
        """Return the folders of states, whole ones or not, with their versions."""
        names = fsio.list_dir(self._path) if fsio.exists(self._path) else []
        matches = [match for match in map(_FOLDER.fullmatch, names) if match is not None]
        return [(int(match[2]), self._path / match[0]) for match in matches]

    def _retire(self, folder: Path) -> None:
        """Make a state's file the spare one; a folder that holds anything else goes."""
        is_plain = fsio.exists(folder / _DATA_NAME) and stat.S_ISDIR(fsio.lstat(folder).st_mode)
        if not is_plain or folder.name.startswith("rebuilt"):
            fsio.remove_tree(folder)
            return
        fsio.unlink(folder / _STATE_NAME)
        fsio.remove_tree(self._path / _SPARE_NAME)
        fsio.rename(folder, self._path / _SPARE_NAME)

    def _folder(self, version: int) -> Path:
        return self._path / f"version_{version:06d}"

    def _rebuilt(self, version: int) -> Path:
        return self._path / f"rebuilt_{version:06d}"


def _is_spare(data: Path, nbytes: int) -> bool:
    """True where a file of that size is there to be written over, and is nothing else besides."""
    try:
        info = fsio.lstat(data)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_size == nbytes


def _write_state(
    folder: Path, version: int, fingerprint: str, digests: Mapping[str, Digest]
) -> None:
    state = {
        "version": version,
        "fingerprint": fingerprint,
        "boot_id": current_boot_id(),
        "digests": {name: [digest.algorithm, digest.hex] for name, digest in digests.items()},
    }
    fsio.write_json(folder / _STATE_NAME, state, durable=True)
    fsio.fsync_dir(folder.parent)


def _read_state(folder: Path, version: int, fingerprint: str) -> PublisherState | None:
    value = _read_json(folder / _STATE_NAME)
    digests, boot_id = value.get("digests"), value.get("boot_id")
    if value.get("fingerprint") != fingerprint or not isinstance(digests, dict):
        return None
    try:
        return PublisherState(
            version,
            fingerprint,
            folder,
            {name: _parse_pair(name, pair) for name, pair in digests.items()},
            is_of_this_boot=bool(boot_id) and boot_id == current_boot_id(),
        )
    except HeaderFormatError:
        return None


def _read_json(path: Path) -> dict[str, object]:
    """Return one of our JSON files; an empty object where it is absent or damaged."""
    try:
        data = fsio.read_file(path, _MAX_JSON_BYTES)
        return parse_json_object(data, file=path.name, error=IndexFormatError, what="the state")
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return {}


def _parse_pair(tensor: str, pair: object) -> Digest:
    if not isinstance(pair, list) or len(pair) != 2:
        raise HeaderFormatError("a digest is not an algorithm and hex digits", tensor=tensor)
    return parse_digest(str(pair[0]), pair[1], tensor=tensor)
