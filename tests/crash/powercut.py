"""What a disk may hold after a power cut: a run's file operations, recorded, and every legal state cut out of them.

Legal is what fsync promised and nothing more. Data of a file that was not fsynced may be absent, zeros, or torn at any
page. A directory's entries that were not fsynced may be as before: in one model ("journaled") a directory's operations
reach the disk in order, and a rename reaches both of its directories at once; in the other ("any order") whatever
subset of them respects the fsyncs, and a rename into another folder may leave both names.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from gpusync.folder.marker import sealed
from gpusync.local import advance, swap
from gpusync.local import pull as disk
from gpusync.local.swap import Step
from tests.faults.layer import Real, System, SystemCall

PAGE = 4096
Model = Literal["journaled", "any order"]


@dataclass(frozen=True)
class Entry:
    """A directory operation: ``node`` leaves ``source`` (None: it is new) for ``target`` (None: it is gone)."""

    node: int
    source: tuple[int, str] | None
    target: tuple[int, str] | None

    @property
    def folders(self) -> set[int]:
        return {place[0] for place in (self.source, self.target) if place is not None}

    @property
    def crosses(self) -> bool:
        return len(self.folders) == 2


@dataclass(frozen=True)
class Write:
    """Bytes of a file; ``data`` None: its size becomes ``offset``, or at least that where it was allocated."""

    node: int
    offset: int
    data: bytes | None
    at_least: bool = False


@dataclass(frozen=True)
class Sync:
    """An fsync of a file or a directory."""

    node: int


Event = Entry | Write | Sync


class Recorder:
    """Records what a run does below a folder: the tree before, every operation in order, and when steps were reached."""

    ROOT = 0

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.steps: dict[Step, int] = {}
        self.start: list[Entry] = []
        self.content: dict[int, bytes] = {}
        self.folders = {self.ROOT}
        self.inodes: dict[int, int] = {}
        self._nodes: dict[Path, int] = {folder: self.ROOT}
        self._fds: dict[int, int] = {}
        self._read_tree(folder)
        System(patch, self._script)
        for user in (swap, advance, disk):
            patch.setattr(user, "reached", self._step)

    def _read_tree(self, folder: Path) -> None:
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            node = self._new(path)
            self.start.append(Entry(node, None, self._place(path)))
            if path.is_dir():
                self.folders.add(node)
                self._read_tree(path)
            else:
                self.content[node] = path.read_bytes()

    def _new(self, path: Path) -> int:
        self._nodes[path] = node = len(self.inodes) + 1
        self.inodes[node] = os.lstat(path).st_ino
        return node

    def _place(self, path: Path) -> tuple[int, str]:
        return self._nodes[path.parent], path.name

    def _step(self, step: Step) -> None:
        self.steps[step] = len(self.events)

    def _script(self, call: SystemCall, real: Real) -> Any:
        if not call.within(self.folder):
            return real(*call.arguments)
        there = os.path.lexists(call.path)
        missing = [path for path in (call.path, *call.path.parents) if not path.exists()]
        result = real(*call.arguments)
        record = getattr(self, f"_{call.name}", None)
        if call.name == "makedirs":
            for path in reversed([path for path in missing if path.is_relative_to(self.folder)]):
                self._made_folder(path)
        elif call.name == "open":
            if not there:
                node = self._new(call.path)
                self.content[node] = b""
                self.events.append(Entry(node, None, self._place(call.path)))
            self._fds[result] = self._nodes[call.path]
        elif record is not None:
            record(call)
        return result

    def _made_folder(self, path: Path) -> None:
        if path == self.folder:
            return  # the folder itself is there: without it there is nothing to look at
        node = self._new(path)
        self.folders.add(node)
        self.events.append(Entry(node, None, self._place(path)))

    def _unlink(self, call: SystemCall) -> None:
        node = self._nodes.pop(call.path)
        self.events.append(Entry(node, self._place(call.path), None))

    _rmdir = _unlink

    def _replace(self, call: SystemCall) -> None:
        assert call.to is not None
        node = self._nodes[call.path]
        for path in [path for path in self._nodes if path.is_relative_to(call.path)]:
            self._nodes[call.to / path.relative_to(call.path)] = self._nodes.pop(path)
        self.events.append(Entry(node, self._place(call.path), self._place(call.to)))

    def _close(self, call: SystemCall) -> None:
        del self._fds[call.arguments[0]]

    def _fsync(self, call: SystemCall) -> None:
        self.events.append(Sync(self._fds[call.arguments[0]]))

    def _pwrite(self, call: SystemCall) -> None:
        fd, data, offset = call.arguments
        self.events.append(Write(self._fds[fd], offset, bytes(data)))

    def _write(self, call: SystemCall) -> None:
        fd, data = call.arguments
        end = os.fstat(fd).st_size  # appended: it ends where the file ends now
        self.events.append(Write(self._fds[fd], end - len(data), bytes(data)))

    def _ftruncate(self, call: SystemCall) -> None:
        fd, nbytes = call.arguments
        self.events.append(Write(self._fds[fd], nbytes, None))

    def _posix_fallocate(self, call: SystemCall) -> None:
        fd, offset, nbytes = call.arguments
        self.events.append(Write(self._fds[fd], offset + nbytes, None, at_least=True))


@dataclass(frozen=True)
class Cut:
    """One state: the events before the cut, which directory operations survived, and each file's bytes."""

    at: int
    names: dict[str, int] = field(hash=False)
    content: dict[int, bytes] = field(hash=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for states that look alike."""
        files = [(name, node, self.content.get(node)) for name, node in self.names.items()]
        return tuple(sorted(files, key=lambda item: item[0]))


class Cuts:
    """The legal states of one recorded run under one model."""

    def __init__(self, run: Recorder, model: Model) -> None:
        self._run = run
        self._model = model

    def states(self, random: random.Random, limit: int, drawn: int) -> list[Cut]:
        """Return every legal state where there are at most ``limit``, else ``drawn`` of them."""
        return self.every(limit) or list(self.draw(random, drawn))

    def every(self, limit: int) -> list[Cut]:
        """Return every legal state, all of them different; none of them where there are more than ``limit``."""
        found: dict[tuple[Any, ...], Cut] = {}
        for tried, cut in enumerate(self._all()):
            found.setdefault(cut.key, cut)
            if len(found) > limit or tried > 100 * limit:
                return []
        return list(found.values())

    def _all(self) -> Iterator[Cut]:
        for at in range(len(self._run.events) + 1):
            entries = [event for event in self._run.events[:at] if isinstance(event, Entry)]
            for kept in self._subsets(entries, self._forced(at)):
                tree = _Tree(self._run)
                for number, how in sorted(kept.items()):
                    tree.apply(entries[number], keeps_source=how == "both names")
                names = tree.names()
                choices = {node: self._versions(node, at) for node in set(names.values())}
                for bytes_of in itertools.product(*choices.values()):
                    yield Cut(at, names, dict(zip(choices, bytes_of, strict=True)))

    def _subsets(self, entries: list[Entry], forced: set[int]) -> Iterator[dict[int, str]]:
        """Yield every legal set of surviving directory operations, by number, with how each survives."""

        def extend(number: int, kept: dict[int, str], lost: set[int]) -> Iterator[dict[int, str]]:
            if number == len(entries):
                yield kept
                return
            entry = entries[number]
            held_up = self._model == "journaled" and lost & entry.folders
            if number in forced or not held_up:
                yield from extend(number + 1, {**kept, number: "whole"}, lost)
            if number in forced:
                return
            if self._model == "any order" and entry.crosses:
                yield from extend(number + 1, {**kept, number: "both names"}, lost)
            yield from extend(number + 1, kept, lost | entry.folders)

        yield from extend(0, {}, set())

    def _versions(self, node: int, at: int) -> list[bytes]:
        """Return everything that may have survived of a file: of the pages that were not fsynced, each set of them."""
        if node in self._run.folders:
            return [b""]
        durable, now = self._durable_and_now(node, at)
        pages = range(0, len(now), PAGE)
        versions = {durable}
        for kept in itertools.product((False, True), repeat=len(pages)):
            mixed = bytearray(len(now))
            mixed[: len(durable)] = durable[: len(now)]
            for start in itertools.compress(pages, kept):
                mixed[start : start + PAGE] = now[start : start + PAGE]
            versions.add(bytes(mixed))
        return sorted(versions)

    def draw(self, random: random.Random, count: int) -> Iterator[Cut]:
        """Yield at most ``count`` different states, drawn over all moments; fewer where there are not as many."""
        seen: set[tuple[Any, ...]] = set()
        for _ in range(20 * count):
            cut = self._draw_one(random)
            if cut.key not in seen:
                seen.add(cut.key)
                yield cut
            if len(seen) == count:
                return

    def _draw_one(self, random: random.Random) -> Cut:
        at = random.randint(0, len(self._run.events))
        entries = [event for event in self._run.events[:at] if isinstance(event, Entry)]
        forced = self._forced(at)
        keep = random.choice((0.1, 0.5, 0.9))
        tree = _Tree(self._run)
        lost: set[int] = set()
        for number, entry in enumerate(entries):
            held_up = self._model == "journaled" and lost & entry.folders
            if number in forced or (not held_up and random.random() < keep):
                both = self._model == "any order" and entry.crosses and number not in forced
                tree.apply(entry, keeps_source=both and random.random() < 0.3)
            else:
                lost |= entry.folders
        names = tree.names()
        return Cut(at, names, {node: self._bytes(node, at, random) for node in names.values()})

    def _forced(self, at: int) -> set[int]:
        """Return the numbers of the directory operations that an fsync made durable (and what must come before)."""
        events = self._run.events[:at]
        number = sum(isinstance(event, Entry) for event in events)
        forced, synced = set(), set()
        for event in reversed(events):
            if isinstance(event, Sync) and event.node in self._run.folders:
                synced.add(event.node)
            if not isinstance(event, Entry):
                continue
            number -= 1
            if event.folders & synced:
                forced.add(number)
                if self._model == "journaled":
                    synced |= event.folders
        return forced

    def _bytes(self, node: int, at: int, random: random.Random) -> bytes:
        """Return what of a file survived: all that was fsynced, and of the rest nothing, zeros, some pages, or all."""
        if node in self._run.folders:
            return b""
        durable, now = self._durable_and_now(node, at)
        how = random.choice(("none", "zeros", "torn", "all"))
        if now == durable or how == "none":
            return durable
        if how == "all":
            return now
        mixed = bytearray(len(now))
        mixed[: len(durable)] = durable[: len(now)]
        for start in range(0, len(now), PAGE):
            if how == "torn" and random.random() < 0.5:
                mixed[start : start + PAGE] = now[start : start + PAGE]
        if how == "torn":
            del mixed[random.randint(min(len(durable), len(now)), len(now)) :]
        return bytes(mixed)

    def _durable_and_now(self, node: int, at: int) -> tuple[bytes, bytes]:
        """Return a file's bytes as they were fsynced last, and as they were written."""
        durable = self._run.content[node]
        now = bytearray(durable)
        for event in self._run.events[:at]:
            if isinstance(event, Write) and event.node == node:
                _write_into(now, event)
            elif event == Sync(node):
                durable = bytes(now)
        return durable, bytes(now)


def _write_into(data: bytearray, event: Write) -> None:
    if event.data is None:
        if len(data) < event.offset:
            data.extend(bytes(event.offset - len(data)))
        elif not event.at_least:
            del data[event.offset :]
        return
    end = event.offset + len(event.data)
    data.extend(bytes(max(0, end - len(data))))
    data[event.offset : end] = event.data


class _Tree:
    """Directories by node, as the surviving operations leave them."""

    def __init__(self, run: Recorder) -> None:
        self._run = run
        self._entries: dict[int, dict[str, int]] = {node: {} for node in run.folders}
        for entry in run.start:
            self.apply(entry)

    def apply(self, entry: Entry, *, keeps_source: bool = False) -> None:
        if entry.source is not None and not keeps_source:
            folder, name = entry.source
            if self._entries[folder].get(name) == entry.node:
                del self._entries[folder][name]
        if entry.target is not None:
            folder, name = entry.target
            self._entries[folder][name] = entry.node

    def names(self) -> dict[str, int]:
        """Return path to node of everything that can be reached."""
        found: dict[str, int] = {}
        todo = [(Recorder.ROOT, "")]
        while todo:
            folder, path = todo.pop()
            for name, node in self._entries[folder].items():
                found[path + name] = node
                if node in self._run.folders:
                    todo.append((node, f"{path}{name}/"))
        return found


def build(run: Recorder, cut: Cut) -> None:
    """Put a state on the disk in place of the run's folder.

    Inode numbers and times are new, so journal and note of rolled files, which know files by them, get the new ones.
    """
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    stamps: dict[int, tuple[int, int]] = {}
    first: dict[int, Path] = {}
    for name, node in sorted(cut.names.items()):
        path = run.folder / name
        if node in run.folders:
            path.mkdir()
        elif node in first:
            os.link(first[node], path)  # a rename that left both names
        else:
            path.write_bytes(cut.content[node])
            first[node] = path
            stamps[run.inodes[node]] = path.stat().st_ino, path.stat().st_mtime_ns
    state = run.folder / ".weight_sync"
    _rewrite(state / "rolled.jsonl", lambda raw: b"".join(_renoted(raw, stamps)))
    _rewrite(state / "journal.json", lambda raw: _restamped(raw, stamps))


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    if path.is_file():
        path.write_bytes(change(path.read_bytes()))


def _renoted(raw: bytes, stamps: Mapping[int, tuple[int, int]]) -> Iterator[bytes]:
    for line in raw.splitlines(keepends=True):
        try:
            name, inode, nbytes, _ = json.loads(line)
        except (ValueError, TypeError):
            yield line  # torn
            continue
        now, mtime_ns = stamps.get(inode, (1, 1))
        yield json.dumps([name, now, nbytes, mtime_ns]).encode() + b"\n"


def _restamped(raw: bytes, stamps: Mapping[int, tuple[int, int]]) -> bytes:
    try:
        journal = json.loads(raw)
    except ValueError:
        return raw
    del journal["seal"]
    for stamp in journal["stamps"].values():
        stamp["inode"], stamp["mtime_ns"] = stamps.get(stamp["inode"], (1, 1))
    return json.dumps(sealed(journal)).encode()
