"""kill -9 at every write operation of a publish, and a power cut: a version is out whole and right, or it is not out."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusync import fsio
from gpusync.errors import GpuSyncError, VersionConflictError
from gpusync.publisher import state
from tests.crash.figures import counted
from tests.crash.harness import Victim
from tests.crash.powercut import Cuts, Model, Recorder, build
from tests.faults.kinds import EVERYTHING
from tests.faults.publishing import (
    Publishing,
    PublishingFolders,
    PublishingFull,
    PublishingOnFull,
)

RUNS: dict[str, Callable[[Path], Publishing]] = {
    "delta": Publishing,
    "over a spare": lambda root: Publishing(root, version=2),
    "the first": lambda root: Publishing(root, version=0),
    "full version": PublishingFull,
    "on a full version": PublishingOnFull,
    "folders": PublishingFolders,
}
KILLED = GpuSyncError("killed")


@pytest.mark.parametrize("name", RUNS)
def test_kill_at_every_write_operation_of_a_publish(
    fast_path: Path, victim: Victim, name: str
) -> None:
    run = RUNS[name](fast_path)
    job, paths = run.job
    run.begin()
    operations = victim.run(job, paths).operations
    assert len(operations) > 15 and set(operations) <= set(fsio.WRITE_OPERATIONS)
    ends = set()
    for number, operation in enumerate(operations):
        for half in (False, True) if operation == "pwrite" else (False,):
            run.begin()
            when = f"killed at operation {number} ({operation}{', half' * half})"
            death = victim.run(job, paths, operation=number, half=half)
            assert death.killed and death.operations == operations[: number + 1], f"{when}: {death}"
            run.check(when, KILLED)
            ends.add(run.newest())
            run.heal(f"{when}, published again")
    assert ends == {run.version, run.version + 1}, "kills fell on one side only"


@pytest.mark.parametrize("model", ["journaled", "any order"])
@pytest.mark.parametrize("name", RUNS)
def test_power_cut_of_a_publish(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, model: Model
) -> None:
    """Every legal state, or some drawn: what is out is whole, and the run goes on from it without a full version.

    The kept tensors are not fsynced. The next boot proves them, or rebuilds them from what is published.
    """
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    run = RUNS[name](fast_path)
    run.begin()
    with pytest.MonkeyPatch.context() as patch:
        recorded = Recorder(patch, run.disk)
        run.act()
    monkeypatch.setattr(state, "current_boot_id", lambda: "the next boot")
    limit, drawn = (10_000, 2_000) if EVERYTHING else (60, 60)
    states = Cuts(recorded, model).states(random.Random(5), limit, drawn)
    ends = set()
    for number, cut in enumerate(states):
        run.begin()
        build(recorded, cut)
        when = f"state {number}, after event {cut.at} of {len(recorded.events)}"
        run.check_published(when, KILLED)
        ends.add(run.newest())
        run.heal(f"{when}, published again")
        counted["states after a power cut of a publish"] += 1
    assert ends == {run.version, run.version + 1}, "cuts fell on one side only"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "cut": lambda data: data[:-1],
    "torn": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_kept_tensors_that_a_power_cut_took_are_rebuilt_from_what_is_published(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    run = _after_a_power_cut(fast_path, monkeypatch, DAMAGE[damage])
    run.act()
    assert run.newest() == 3
    run.check("rebuilt", None)
    assert [path.name for path in run.kept.glob("*_*")] == ["version_000003"]


def test_kept_tensors_that_are_whole_after_a_power_cut_are_proven_and_used(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _after_a_power_cut(fast_path, monkeypatch, lambda data: data)
    run.base.rename(fast_path / "gone")  # nothing to rebuild them from
    run.act()
    (fast_path / "gone").rename(run.base)
    run.check("proven", None)


def test_kept_tensors_that_are_lost_with_what_they_came_from_take_a_full_version(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _after_a_power_cut(fast_path, monkeypatch, lambda data: b"")
    shutil.rmtree(run.shared / "weight_v000001")
    for _ in range(2):
        with pytest.raises(VersionConflictError, match="Publish a full version"):
            run.act()
    assert run.newest() == 2
    assert run.publisher.publish_full(run.new) == 3
    run.heal("a delta on the full version")


@pytest.mark.parametrize("half", [False, True])
def test_kill_at_every_write_operation_of_a_rebuild(
    fast_path: Path, victim: Victim, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    run = _after_a_power_cut(fast_path, monkeypatch, lambda data: b"")
    run.keep_as_start()
    job, paths = run.job
    number = 0
    while True:
        run.begin()
        death = victim.run(job, paths, operation=number, half=half)
        if not death.killed:
            break
        run.check_published(f"killed at operation {number}", KILLED)
        run.heal(f"killed at operation {number}, published again")
        number += 7
    assert death.exit == 0 and number > 80, death


def _after_a_power_cut(
    root: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> Publishing:
    """Two versions are out, and the next boot finds their tensors so."""
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "current_boot_id", lambda: "the boot before")
        run = Publishing(root, version=2)
    run.begin()
    path = run.kept / "version_000002" / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    return run
