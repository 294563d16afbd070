"""Power cuts: whatever of a pull reached the disk, in any legal order, the next pull ends verified at the target.

Every legal state of a run is looked at where there are at most 600 (pulls and recoveries), else some that a fixed seed draws.
``GPUSYNC_TEST_FAULTS=all`` (with ``--timeout 0``): every one where there are at most 10,000, else 10,000.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpusync
from gpusync.errors import SourceNotReadyError
from gpusync.local.swap import Step
from tests import wire
from tests.crash.figures import counted
from tests.crash.harness import (
    DELTA,
    FULL,
    SEED,
    Case,
    Scene,
    Scenes,
    Victim,
    files_of,
)
from tests.crash.powercut import Cuts, Model, Recorder, build
from tests.faults.kinds import EVERYTHING
from tests.faults.layer import Real, System, SystemCall

LIMIT = 10_000 if EVERYTHING else 600
DRAWN = 10_000 if EVERYTHING else 80
MODELS: tuple[Model, ...] = ("journaled", "any order")
RUNS = {
    "pull": (DELTA, "staged"),
    "rolling pull": (DELTA, "rolling"),
    "seed": (SEED, "staged"),
    "full version": (FULL, "staged"),
}
runs = pytest.mark.parametrize("name", RUNS)
models = pytest.mark.parametrize("model", MODELS)


def record(scene: Scene, act: Callable[[], object]) -> Recorder:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, scene.local)
        act()
    return recorder


def prepared(scenes: Scenes, monkeypatch: pytest.MonkeyPatch, case: Case, swap: str) -> Scene:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    return scenes(case)


@models
@runs
def test_power_cut_at_any_moment(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch, name: str, model: Model
) -> None:
    scene = prepared(scenes, monkeypatch, *RUNS[name])
    run = record(scene, scene.pull)
    assert set(run.steps) == set(Step)
    ends = {"old": 0, "new": 0}
    for number, cut in enumerate(Cuts(run, model).states(random.Random(f"{name} 9"), LIMIT, DRAWN)):
        build(run, cut)
        when = f"{name}, {model}, state {number}: cut after operation {cut.at}"
        must_be_new = cut.at >= run.steps[scene.first_resumable_step]
        ends[check_cut(scene, must_be_new, when)] += 1
    assert min(ends.values()) > 5, f"the cuts fell on one side only: {ends}"


@models
@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_power_cut_in_a_recovery(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, swap: str, model: Model
) -> None:
    """Killed with one shard in place; then the power goes in the pull that resumes, with nothing published any more."""
    scene = prepared(scenes, monkeypatch, DELTA, swap)
    victim.kill(scene.stream, DELTA.target, rename=1)
    scene.hide_versions()
    run = record(scene, scene.pull)
    scene.show_versions()
    for number, cut in enumerate(Cuts(run, model).states(random.Random(f"{swap} 8"), LIMIT, DRAWN)):
        build(run, cut)
        check_cut(scene, True, f"recovery, {swap}, {model}, state {number}: after {cut.at}")


@models
@pytest.mark.parametrize("name", ["pull", "rolling pull"])
def test_a_folder_taken_over_after_a_power_cut_is_theirs(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch, name: str, model: Model
) -> None:
    """Another receiver finds no marker, or an old one, and writes version 1 into the folder, in place: then ours is void."""
    scene = prepared(scenes, monkeypatch, *RUNS[name])
    run = record(scene, scene.pull)
    for cut in Cuts(run, model).draw(random.Random(f"{name} 7"), DRAWN // 4):
        build(run, cut)
        scene.stream.write_checkpoint(scene.local, scene.stream.states[1])
        wire.write_marker(scene.local, json.dumps({"version": "000001"}))
        theirs = files_of(scene.local)
        scene.hide_versions()
        with pytest.raises(SourceNotReadyError):
            scene.pull()
        scene.show_versions()
        assert files_of(scene.local) == theirs, f"{name}, after {cut.at}: written into"
        assert wire.marker_version(scene.local) == 1
        scene.pull()
        scene.check_new(f"{name}, after {cut.at}: taken over")
        counted["power cuts"] += 1


@models
@pytest.mark.parametrize("name", ["pull", "rolling pull", "seed"])
def test_power_cut_of_a_pull_that_is_not_durable(
    scenes: Scenes,
    monkeypatch: pytest.MonkeyPatch,
    fast_path: Path,
    name: str,
    model: Model,
) -> None:
    """Nothing but the marker was fsynced: after the restart every tensor is hashed, and what the cut took is rebuilt."""
    scene = prepared(scenes, monkeypatch, *RUNS[name])
    run = record(scene, lambda: scene.pull(durable=False))
    other_boot = fast_path / "boot_id"
    other_boot.write_text("00000000-0000-0000-0000-000000000000\n")

    def rebooted(call: SystemCall, real: Real) -> Any:
        if call.name == "open" and call.path.name == "boot_id":
            return real(other_boot, *call.arguments[1:])
        return real(*call.arguments)

    for cut in Cuts(run, model).draw(random.Random(f"{name} 6"), DRAWN // 3):
        build(run, cut)
        when = f"{name}, {model}: cut after operation {cut.at}"
        with pytest.MonkeyPatch.context() as patch:
            System(patch, rebooted)
            scene.pull()
            assert wire.read_tensors(scene.local) == scene.stream.states[scene.case.target], when
            assert gpusync.verify(scene.local).ok, when
        counted["power cuts, not durable"] += 1


def check_cut(scene: Scene, must_be_new: bool, when: str) -> str:
    """Pull while nothing is published, then with everything back; return what the folder was without."""
    scene.check_no_file_is_torn(when)
    counted["power cuts"] += 1
    scene.hide_versions()
    try:
        scene.pull()
        scene.check_new(f"{when}, resumed from local disk")
        return "new"
    except SourceNotReadyError as err:
        assert not must_be_new, f"{when}: the way to the new version is gone: {err}"
        scene.check_old(when)
    finally:
        scene.show_versions()
    scene.pull()
    scene.check_new(f"{when}, versions back")
    return "old"


def test_the_states_are_not_all_alike(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay does cut: a pull that syncs nothing is caught by it."""
    scene = prepared(scenes, monkeypatch, DELTA, "staged")
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, scene.local)
        patch.setattr("gpusync.fsio.fsync", lambda fd: None)
        patch.setattr("gpusync.fsio.fsync_dir", lambda path: None)
        scene.pull()
    caught = 0
    for cut in Cuts(recorder, "journaled").draw(random.Random(3), 60):
        build(recorder, cut)
        try:
            check_cut(scene, False, "nothing synced")
        except (AssertionError, gpusync.GpuSyncError):
            caught += 1
            scene.show_versions()
    assert caught > 5
