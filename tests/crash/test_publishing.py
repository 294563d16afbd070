"""kill -9 at every write operation of a publish, and a power cut: a version is out whole and right, or it is not out."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusync import fsio
from gpusync.errors import GpuSyncError
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
    """Every legal state, or some drawn: what is out is whole, and the run goes on from it without a full version."""
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    run = RUNS[name](fast_path)
    run.begin()
    with pytest.MonkeyPatch.context() as patch:
        recorded = Recorder(patch, run.disk)
        run.act()
    limit, drawn = (10_000, 2_000) if EVERYTHING else (60, 60)
    states = Cuts(recorded, model).states(random.Random(5), limit, drawn)
    ends = set()
    for number, cut in enumerate(states):
        run.begin()
        build(recorded, cut)
        when = f"state {number}, after event {cut.at} of {len(recorded.events)}"
        run.check(when, KILLED)
        ends.add(run.newest())
        run.heal(f"{when}, published again")
        counted["states after a power cut of a publish"] += 1
    assert ends == {run.version, run.version + 1}, "cuts fell on one side only"
