"""What is mutated: tiny published streams of every kind, and local folders as pulls that were cut off leave them."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest

import gpusync
from gpusync.folder import marker
from gpusync.folder.marker import sealed
from gpusync.local import advance, swap
from gpusync.local import pull as disk
from tests import wire

LAYOUT = (
    wire.Row(wire.FIRST, "a.weight", "BF16", (12, 16), 384),
    wire.Row(wire.FIRST, "s.scale", "F32", (), 4),
    wire.Row(wire.SECOND, "b.lut", "U8", (1025,), 1025),
    wire.Row(wire.SECOND, "c.weight", "F8_E4M3", (16, 9), 144),
    wire.Row(wire.SECOND, "e.g_idx", "I32", (0,), 0),
)
CHANGED = ("a.weight", "s.scale", "b.lut")


class Tree:
    """The bytes of a folder, to put back; links, FIFOs and folders that came since go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        }
        self.folders = [
            path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_dir()
        ]

    def restore(self) -> None:
        """Make the folder what it was."""
        if self.folder.is_symlink() or self.folder.is_file():
            self.folder.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for path in self.folders:
            (self.folder / path).mkdir()
        for path, data in self.files.items():
            (self.folder / path).write_bytes(data)


@dataclass
class Scene:
    """A stream and a local folder that are both as they should be; ``applied`` is None for a fresh host."""

    name: str
    stream: wire.Stream
    applied: int | None
    target: int
    published: Tree
    local: Tree | None

    @property
    def old(self) -> wire.State:
        return self.stream.states[self.applied or 0]

    @property
    def new(self) -> wire.State:
        return self.stream.states[self.target]

    def restore_local(self) -> None:
        if self.local is not None:
            self.local.restore()
        else:
            shutil.rmtree(self.stream.local, ignore_errors=True)


def _by_publisher(stream: wire.Stream, **options: str) -> None:
    """Publish two versions with gpusync's own publisher: seekable frames, a manifest, one shard per base file."""
    publisher = gpusync.Publisher(stream.source, stream.base, **options)
    for version in (1, 2):
        new = stream.changed(CHANGED, stream.states[version - 1])
        arrays = []
        for row in stream.layout:
            words = np.frombuffer(
                new[row.name], {"F32": "<f4", "I32": "<i4", "BF16": "<u2"}.get(row.dtype, "u1")
            )
            arrays.append((row.name, words.reshape(row.shape)))
        publisher.publish(arrays)
        stream.states[version] = new
        stream.last = version


def _deltas(**options: str) -> Callable[[wire.Stream], None]:
    def publish(stream: wire.Stream) -> None:
        stream.delta(CHANGED, **options)  # type: ignore[arg-type]
        stream.delta((*CHANGED, "c.weight"), **options)  # type: ignore[arg-type]

    return publish


def _full(*, single: bool) -> Callable[[wire.Stream], None]:
    def publish(stream: wire.Stream) -> None:
        stream.delta(CHANGED)
        stream.full(single=single)

    return publish


def _aggregate(stream: wire.Stream) -> None:
    _deltas()(stream)
    stream.aggregate(2)


PUBLISHED: dict[str, tuple[Callable[[wire.Stream], None], int | None]] = {
    "xor": (_deltas(), 1),
    "overwrite": (_deltas(encoding="overwrite", checksum="adler32"), 1),
    "sparse": (_deltas(encoding="xor_sparse", checksum="blake3"), 1),
    "rows": (_deltas(encoding="xor_rows"), 1),
    "publisher": (_by_publisher, 1),
    "seed": (_by_publisher, None),
    "full": (_full(single=False), 1),
    "single full": (_full(single=True), None),
    "aggregate": (_aggregate, None),
}


def published_scene(name: str, root: Path) -> Scene:
    """Return a stream of one kind, and the local folder that is to follow it."""
    publish, applied = PUBLISHED[name]
    stream = wire.Stream(root / name, LAYOUT, seed=len(name))
    with _fixed_ids(name):
        publish(stream)
        if applied is not None:
            gpusync.pull(stream.local, stream.base, stream.source, applied, durable=False)
    local = None
    if applied is not None:
        local = Tree(stream.local)
    return Scene(name, stream, applied, 2, Tree(stream.source), local)


# ---- local folders, cut off -------------------------------------------------------------------------


class _CutOff(BaseException):
    """Ends a pull where a kill would: nothing is cleaned up."""


def _cut_off_at(stream: wire.Stream, step: swap.Step, mode: str) -> None:
    """Pull to version 2 and stop at a step, as if the process had been killed there."""
    copied = stream.root / "cut"

    def reached(now: swap.Step) -> None:
        if now == step and not copied.exists():
            shutil.copytree(stream.local, copied)
            raise _CutOff

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUSYNC_SWAP", mode)
        for module in (swap, advance, disk):
            patch.setattr(module, "reached", reached)
        try:
            gpusync.pull(stream.local, stream.base, stream.source, 2)
        except _CutOff:
            pass
    shutil.rmtree(stream.local)
    os.rename(copied, stream.local)


LOCAL: dict[str, tuple[swap.Step | None, str]] = {
    "at rest": (None, "auto"),
    "journal written": (swap.Step.JOURNALED, "staged"),
    "marker removed": (swap.Step.MARKER_REMOVED, "staged"),
    "renamed": (swap.Step.RENAMED, "staged"),
    "table placed": (swap.Step.TABLE_PLACED, "staged"),
    "marked": (swap.Step.MARKED, "staged"),
    "rolling, marker removed": (swap.Step.MARKER_REMOVED, "rolling"),
    "rolling, renamed": (swap.Step.RENAMED, "rolling"),
}


def _settled(local: Path) -> None:
    """Make a cut-off folder the same in every run: inodes in it are of files that were there before."""
    journal, rolled = (
        local / ".weight_sync" / "journal.json",
        local / ".weight_sync" / "rolled.jsonl",
    )
    if journal.exists():
        document = json.loads(journal.read_bytes())
        del document["seal"]
        for stamp in document["stamps"].values():
            stamp.update(inode=1, mtime_ns=1)
        journal.write_text(json.dumps(sealed(document), indent=1))
    if rolled.exists():
        lines = [json.loads(line) for line in rolled.read_text().splitlines()]
        settled = ([file, 1, nbytes, 1] for file, _, nbytes, _ in lines)
        rolled.write_text("".join(json.dumps(line) + "\n" for line in settled))


@contextmanager
def _fixed_ids(name: str) -> Iterator[None]:
    """Draw marker and run ids from a fixed seed, so that a mutant's number stands for the same bytes in every run."""
    random = Random(name)

    def draw() -> uuid.UUID:
        return uuid.UUID(int=random.getrandbits(128))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uuid, "uuid4", draw)
        patch.setattr(marker, "uuid4", draw)
        yield


def local_scene(name: str, root: Path) -> Scene:
    """Return a good stream, and a local folder as a pull from 1 to 2 left it at a step."""
    step, mode = LOCAL[name]
    stream = wire.Stream(root / name, LAYOUT, seed=len(name))
    with _fixed_ids(name):
        _by_publisher(stream)
        gpusync.pull(stream.local, stream.base, stream.source, 1)
        if step is not None:
            _cut_off_at(stream, step, mode)
    _settled(stream.local)
    return Scene(name, stream, 1, 2, Tree(stream.source), Tree(stream.local))
