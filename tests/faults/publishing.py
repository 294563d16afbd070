"""Runs of a publisher, for the campaign: what is published is whole and right, and the next publish goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import gpusync
from gpusync import Publisher
from gpusync.errors import CheckpointError, GpuSyncError, VersionConflictError
from gpusync.publisher import state
from gpusync.publisher.publish import publish_checkpoint
from tests.faults.kinds import Fault
from tests.faults.layer import SystemCall
from tests.support import (
    Tensors,
    as_arrays,
    bytes_of,
    make_checkpoint,
    move_one_ulp,
    publish_steps,
    read_checkpoint,
    version_dir,
)


@dataclass
class Publishing:
    """``Publisher.publish`` of a delta, on ``version`` published ones (0: the first publish of a run).

    From 2 on the kept tensors are written over spare ones, before that into a new file.

    A receiver that pulls what is there ends on the bytes of its version; the kept state is that of the newest version;
    a second publish of the same weights gives the next version, whether this one came out or not.
    """

    root: Path
    version: int = 1
    states: list[Tensors] = field(init=False)

    def __post_init__(self) -> None:
        first: Tensors = {
            "a": ("U8", (9000,), bytes(9000)),
            "b": ("BF16", (3, 7), bytes(range(42))),
            "c": ("I32", (0,), b""),
        }
        self.states = [first]
        for seed in range(1, self.version + 2):
            self.states.append(move_one_ulp(self.states[-1], 0.2, seed=seed))
        self.base = make_checkpoint(self.root / "base", first)
        self.new = make_checkpoint(self.root / "new", self.states[-1])
        self.disk = self.root / "disk"
        self.shared, self.kept = self.disk / "s", self.disk / "kept"
        self.disk.mkdir()
        self._publish_what_stands()
        self._start = self.disk.rename(self.root / "start")

    def _publish_what_stands(self) -> None:
        publish_steps(self.shared, self.base, self.states[1:-1], state_dir=self.kept)

    @property
    def source(self) -> tuple[Path, ...]:
        return self.base, self.new, self.shared, self.kept

    @property
    def local(self) -> tuple[Path, ...]:
        return self.shared, self.kept

    @property
    def scratch(self) -> tuple[Path, ...]:
        return ()

    def begin(self) -> None:
        shutil.rmtree(self.disk, ignore_errors=True)
        shutil.copytree(self._start, self.disk)
        self.publisher = Publisher(self.shared, self.base, state_dir=self.kept)

    def keep_as_start(self) -> None:
        """Have later runs start from how everything stands now."""
        shutil.rmtree(self._start)
        self.disk.rename(self._start)

    def act(self) -> None:
        self.publisher.publish(as_arrays(self.states[-1]))

    @property
    def job(self) -> tuple[str, list[str]]:
        """The same as a job of ``tests.crash.victim``, and its paths."""
        return "publish", [str(path) for path in (self.shared, self.base, self.kept, self.new)]

    def check(self, when: str, error: GpuSyncError | None) -> None:
        self.check_published(when, error)
        self.check_kept(when)

    def check_published(self, when: str, error: GpuSyncError | None) -> None:
        """The version is out whole, or not out."""
        newest = self.newest()
        allowed = {self.version + 1} if error is None else {self.version, self.version + 1}
        assert newest in allowed, f"{when}: version {newest} is out"
        self.check_pulled(when)

    def heal(self, when: str) -> None:
        before = self.newest()
        if before % 2:  # a trainer that goes on, and one that was restarted
            self.publisher = Publisher(self.shared, self.base, state_dir=self.kept)
        assert self.again() == before + 1, when
        assert self.newest() == before + 1, when
        self.check_pulled(when, self.states[-1])
        self.check_kept(when, self.states[-1])
        left = sorted(path.name for path in self.shared.glob(".*tmp"))
        assert not left, f"{when}: {left} were left behind"
        if self.kept.exists():
            expected = {f"version_{before + 1:06d}", "spare", "run.json"}
            left = sorted({path.name for path in self.kept.iterdir()} - expected)
            assert not left, f"{when}: {left} were left behind"
            assert not (self.kept / "spare" / "state.json").exists(), when

    def again(self) -> int:
        return self.publisher.publish(as_arrays(self.states[-1]))

    def right(self, fault: Fault, first: SystemCall, lasting: bool) -> tuple[type[Exception], ...]:
        return (CheckpointError,)

    # -- what must hold

    def newest(self) -> int:
        """Return the newest version that a receiver would see."""
        return max((int(path.name[-6:]) for path in self.shared.glob("weight_v*")), default=0)

    def check_pulled(self, when: str, wanted: Tensors | None = None) -> None:
        """A receiver that pulls the newest version ends on its bytes."""
        if self._is_at_start():
            return  # as it was made, and nothing new to pull
        local, version = self.root / "local", self.newest()
        shutil.rmtree(local, ignore_errors=True)
        gpusync.pull(local, self.base, self.shared, version, durable=False)
        wanted = wanted or self.states[version]
        assert read_checkpoint(local) == bytes_of(wanted), f"{when}: version {version} is wrong"

    def check_kept(self, when: str, wanted: Tensors | None = None) -> None:
        """The state of the newest version is there, whole; only a full version stands without one."""
        version = self.newest()
        folder = self.kept / f"version_{version:06d}"
        if version == 0 or "delta_encoding" not in self._index(version)["metadata"]:
            return
        state = json.loads((folder / "state.json").read_bytes())
        assert state["version"] == version, when
        wanted = wanted or self.states[version]
        assert read_checkpoint(folder) == bytes_of(wanted), f"{when}: the kept tensors are wrong"

    def _index(self, version: int) -> dict[str, dict[str, str]]:
        path = version_dir(self.shared, version) / "model.safetensors.index.json"
        index: dict[str, dict[str, str]] = json.loads(path.read_bytes())
        return index

    def _is_at_start(self) -> bool:
        return self.newest() == self.version


@dataclass
class PublishingFull(Publishing):
    """``Publisher.publish_full``; the next step is a delta on the full version."""

    def act(self) -> None:
        self.publisher.publish_full(self.new)

    @property
    def job(self) -> tuple[str, list[str]]:
        return "publish full", super().job[1]


@dataclass
class PublishingOnFull(Publishing):
    """``Publisher.publish`` on a full version: the tensors before are those of the shared folder."""

    def _publish_what_stands(self) -> None:
        full = make_checkpoint(self.root / "full", self.states[1])
        Publisher(self.shared, self.base, state_dir=self.kept).publish_full(full)


@dataclass
class PublishingFolders(Publishing):
    """``publish_checkpoint``, which is what ``gpusync publish`` calls: no state is kept."""

    def _publish_what_stands(self) -> None:
        folders = [self.base]
        for version, tensors in enumerate(self.states[1:-1], 1):
            folders.append(make_checkpoint(self.root / f"at{version}", tensors))
            publish_checkpoint(folders[-2], folders[-1], self.shared)
        self._folders = [*folders, self.new]

    @property
    def source(self) -> tuple[Path, ...]:
        return *self._folders, self.shared

    def act(self) -> None:
        publish_checkpoint(self._folders[self.version], self.new, self.shared)

    @property
    def job(self) -> tuple[str, list[str]]:
        paths = (self.shared, self._folders[self.version], self.new)
        return "publish folders", [str(path) for path in paths]

    def again(self) -> int:
        return publish_checkpoint(self._folders[self.newest()], self.new, self.shared).version

    def check_kept(self, when: str, wanted: Tensors | None = None) -> None:
        assert not self.kept.exists(), when


class PublishingAfterAPowerCut(Publishing):
    """``Publisher.publish`` where a power cut took the kept tensors: they are rebuilt first."""

    def _publish_what_stands(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "current_boot_id", lambda: "the boot before")
            super()._publish_what_stands()
        (self.kept / f"version_{self.version:06d}" / "model.safetensors").write_bytes(b"")

    def check_kept(self, when: str, wanted: Tensors | None = None) -> None:
        if self.newest() > self.version:
            super().check_kept(when, wanted)

    def right(self, fault: Fault, first: SystemCall, lasting: bool) -> tuple[type[Exception], ...]:
        right = super().right(fault, first, lasting)
        # A base that is cut short is not there, and nothing else leads to the kept tensors.
        return (*right, VersionConflictError) if fault.name == "early end" else right
