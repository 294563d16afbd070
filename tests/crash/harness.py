"""What the crash tests share: streams to pull, kills, and what must hold after one."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import gpusync
from gpusync.local.swap import Step
from tests import wire
from tests.driver import REPOSITORY, check_at

SHARDS = 4
SHARD_NAMES = tuple(f"model-{n:05d}-of-{SHARDS:05d}.safetensors" for n in range(1, SHARDS + 1))
LAYOUT = tuple(
    wire.Row(file, f"t{number}.{part}", "U8", (nbytes,), nbytes)
    for number, file in enumerate(SHARD_NAMES, 1)
    for part, nbytes in enumerate((700 + 31 * number, 1403 - 17 * number))
)
CHANGED = ("t1.0", "t2.0", "t2.1", "t3.1")
"""Tensors of three of the four shards."""

OURS_AT_REST = {".weight_sync/state.json", ".weight_sync/lock", ".weight_sync/digests.json"}


# ---- killing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Death:
    """How a pull in the victim process ended."""

    exit: int
    steps: tuple[int, ...]
    operations: tuple[str, ...]
    outcome: str
    error: str
    seconds: float = 0.0
    """How long it took, if it was not killed."""

    @property
    def killed(self) -> bool:
        return self.exit == -9


class Victim:
    """A warmed process that forks for every pull it is asked for."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.victim"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )

    def pull(
        self,
        stream: wire.Stream,
        target: int,
        *,
        local: Path | None = None,
        options: Mapping[str, Any] | None = None,
        job: str = "pull",
        **fault: Any,
    ) -> Death:
        """Pull in a fork, with one thread so that operations come in one order; die where ``fault`` says.

        ``job="update"``: prepare, commit and finish an update of a module that holds the folder's tensors.
        """
        paths = [str(local or stream.local), str(stream.base), str(stream.source), target]
        return self.run(job, paths, options, **fault)

    def run(
        self, job: str, paths: Sequence[Any], options: Mapping[str, Any] | None = None, **fault: Any
    ) -> Death:
        """Do a job of ``tests.crash.victim`` in a fork, with one thread; die where ``fault`` says."""
        environment = {k: v for k, v in os.environ.items() if k.startswith("GPUSYNC_")}
        request = {
            "job": job,
            "paths": paths,
            "options": dict(options or {}),
            "environment": {"GPUSYNC_THREADS": "1", **environment},
            "fault": fault,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Death(**{k: tuple(v) if isinstance(v, list) else v for k, v in answer.items()})

    def kill(self, stream: wire.Stream, target: int, **fault: Any) -> Death:
        """Like ``pull``, and it must die."""
        death = self.pull(stream, target, **fault)
        assert death.killed, f"{fault}: the pull was not killed: {death}"
        return death

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._process.stdout.close()


# ---- streams ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A pull to be killed: a folder that stands somewhere, and where it should go.

    ``before`` is the version that the folder stands at, None for a fresh host.
    """

    name: str
    before: int | None
    target: int
    publish: Callable[[wire.Stream], None]


def _deltas(count: int) -> Callable[[wire.Stream], None]:
    def publish(stream: wire.Stream) -> None:
        for _ in range(count):
            stream.delta(CHANGED)

    return publish


def _full_between(*, single: bool, side_files: bool) -> Callable[[wire.Stream], None]:
    """v1, v2 deltas; v3 full in another sharding, with or without side files; v4 a delta on it."""

    def publish(stream: wire.Stream) -> None:
        _deltas(2)(stream)
        version = stream.full(single=single)
        folder = stream.folder(version)
        (folder / "config.json").write_text('{"model_type": "tiny", "of": "the full version"}')
        if not side_files:
            for name in ("config.json", "tokenizer.json"):
                (folder / name).unlink()
        stream.delta(CHANGED)

    return publish


DELTA = Case("one delta", 1, 2, _deltas(2))
DELTAS = Case("three deltas", 1, 4, _deltas(4))
SEED = Case("seed", None, 2, _deltas(2))
RESET = Case("reset", 2, 0, _deltas(2))
FULL = Case("full", 2, 4, _full_between(single=True, side_files=True))
BARE_FULL = Case("full without config", 2, 4, _full_between(single=True, side_files=False))
FULL_SEED = Case("seed from full", None, 4, _full_between(single=True, side_files=True))


class Scene:
    """One case set up once: the folder before, the folder after a pull that nothing disturbed, and a working copy."""

    def __init__(self, root: Path, case: Case) -> None:
        self.case = case
        self.stream = wire.Stream(root / "stream", LAYOUT)
        case.publish(self.stream)
        self.local = self.stream.local
        self._before, self._after = root / "before", root / "after"
        if case.before is not None:
            self.pull(case.before)
            shutil.copytree(self.local, self._before)
        self.pull(case.target)
        self.local.rename(self._after)
        self._gone = root / "gone"
        self.old = files_of(self._before)
        self.new = files_of(self._after)

    @cached_property
    def marker_before(self) -> bytes:
        return (self._before / wire.MARKER).read_bytes()

    def restore(self) -> None:
        """Put the working copy back to where the case starts."""
        self.show_versions()
        shutil.rmtree(self.local, ignore_errors=True)
        if self.case.before is not None:
            shutil.copytree(self._before, self.local)

    def hide_versions(self) -> None:
        """The publisher has pruned everything; the folder itself stays."""
        self.stream.source.rename(self._gone)
        self.stream.source.mkdir()

    def show_versions(self) -> None:
        if self._gone.exists():
            shutil.rmtree(self.stream.source)
            self._gone.rename(self.stream.source)

    def pull(self, target: int | None = None, **options: Any) -> gpusync.PullReport:
        stream = self.stream
        target = self.case.target if target is None else target
        return gpusync.pull(self.local, stream.base, stream.source, target, **options)

    # -- what must hold

    def check_no_file_is_torn(self, when: str) -> None:
        """Every file is whole, old or new; a folder that can be loaded, or has a marker, is not a mixture."""
        have = files_of(self.local)
        for name, data in have.items():
            assert data in (self.old.get(name), self.new.get(name)), f"{when}: {name} is torn"
        if "config.json" in have:
            assert have in (self.old, self.new), f"{when}: a mixed folder can be loaded"
        version = marker_version(self.local)
        if version is not None:
            files = self.new if version == self.case.target else self.old
            assert without_config(have) == without_config(files), (
                f"{when}: the marker says {version}, and the files are not that version's"
            )
            assert version in (self.case.before, self.case.target), when

    def check_old(self, when: str) -> None:
        """The folder stands where it stood, byte for byte, config.json and marker included (fresh: still fresh)."""
        assert files_of(self.local) == self.old, f"{when}: the old version is not intact"
        if self.case.before is None:
            assert marker_version(self.local) is None, f"{when}: a fresh folder has a marker"
        else:
            assert (self.local / wire.MARKER).read_bytes() == self.marker_before, when
        self.check_nothing_is_left(when)

    def check_new(self, when: str) -> None:
        """The folder is at the target, verified, and holds nothing else."""
        check_at(self.stream, self.case.target, self.local)
        assert files_of(self.local) == self.new, f"{when}: not the files of a pull in one go"
        report = gpusync.verify(self.local)
        assert report.ok and report.evidence == "table" and not report.unproven, f"{when}: {report}"
        self.check_nothing_is_left(when)

    def check_nothing_is_left(self, when: str) -> None:
        strays = state_files(self.local) - OURS_AT_REST
        assert not strays, f"{when}: {sorted(strays)} were left behind"

    @property
    def first_resumable_step(self) -> Step:
        """From here on a pull ends at the target without the publisher.

        With no marker to go back to (a fresh folder) that is from the journal on, else from the marker's removal on.
        """
        return Step.JOURNALED if self.case.before is None else Step.MARKER_REMOVED


def open_descriptors() -> list[str]:
    """Return what this process has open, by path, once nothing waits for collection."""
    gc.collect()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the listing's own
    return sorted(names)


def count_of_descriptors() -> int:
    """Return how many descriptors this process has open; cheap, and counting those that wait for collection."""
    return len(os.listdir("/proc/self/fd"))


def files_of(folder: Path) -> dict[str, bytes]:
    """Return what an engine could see in a folder: its top-level files."""
    if not folder.exists():
        return {}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def state_files(folder: Path) -> set[str]:
    """Return every file and folder under ``.weight_sync``, by path from the checkpoint's folder."""
    state = folder / ".weight_sync"
    return {str(path.relative_to(folder)) for path in state.rglob("*")}


def copy_keeping_inodes(folder: Path, to: Path) -> None:
    """Copy a folder by hard links: a rolling journal knows its new files by inode, and no file is written in place.

    Only the lock file and the note of rolled files are, so those are copied.
    """
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, copy_function=os.link)
    for name in ("lock", "rolled.jsonl"):
        path = to / ".weight_sync" / name
        if path.exists():
            path.unlink()
            shutil.copy2(folder / ".weight_sync" / name, path)


def without_config(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != "config.json"}


def marker_version(folder: Path) -> int | None:
    return wire.marker_version(folder) if folder.exists() else None


@dataclass
class Scenes:
    """Builds each case's scene once per session, in memory where the machine has a memory file system."""

    root: Path
    _made: dict[str, Scene] = field(default_factory=dict)

    def __call__(self, case: Case) -> Scene:
        if case.name not in self._made:
            self._made[case.name] = Scene(self.root / case.name.replace(" ", "_"), case)
        scene = self._made[case.name]
        scene.restore()
        return scene
