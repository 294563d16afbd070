"""kill -9 at each numbered step of a swap (gpusync/local/swap.py), for every kind of pull, staged and rolling."""

from __future__ import annotations

import pytest

from gpusync.errors import SourceNotReadyError
from gpusync.local.swap import Step
from tests.crash.harness import (
    BARE_FULL,
    DELTA,
    DELTAS,
    FULL,
    FULL_SEED,
    RESET,
    SEED,
    Case,
    Scene,
    Scenes,
    Victim,
)

# With no room for a second copy a pull rolls by itself; a seed has no old shards to roll over.
NO_ROOM = {"free_bytes": 4096}
RUNS = [
    *[(case, "staged", {}) for case in (DELTA, DELTAS, SEED, RESET, FULL, BARE_FULL, FULL_SEED)],
    *[(case, "rolling", {}) for case in (DELTA, DELTAS)],
    (DELTA, "auto", NO_ROOM),
]
IDS = [f"{case.name}-{swap}{'-no room' if room else ''}" for case, swap, room in RUNS]


def end_without_versions(scene: Scene, step: Step, when: str) -> None:
    """Pull after a kill while nothing is published any more."""
    scene.hide_versions()
    case = scene.case
    if step >= scene.first_resumable_step:
        report = scene.pull()
        assert report.recovered == ("none" if step == Step.CLEANED else "resumed"), when
        assert report.to_version == case.target
        scene.check_new(f"{when}, resumed from local disk")
    elif case.target == 0:
        # A reset needs no version. To see the old one intact, pull what the folder stands at.
        assert case.before is not None
        assert scene.pull(case.before).outcome == "unchanged"
        scene.check_old(when)
    else:
        with pytest.raises(SourceNotReadyError):
            scene.pull()
        scene.check_old(when)
    scene.show_versions()


@pytest.mark.parametrize(("case", "swap", "room"), RUNS, ids=IDS)
def test_kill_at_every_step(
    scenes: Scenes,
    victim: Victim,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    swap: str,
    room: dict[str, int],
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(case)
    undisturbed = victim.pull(scene.stream, case.target, **room)
    assert undisturbed.steps == tuple(Step), "a pull does not pass its steps once each, in order"
    scene.check_new("undisturbed")
    for step in Step:
        scene.restore()
        when = f"{case.name}, {swap}: killed at step {step} {step.name}"
        assert victim.kill(scene.stream, case.target, step=int(step), **room).steps[-1] == step
        scene.check_no_file_is_torn(when)
        end_without_versions(scene, step, when)
        report = scene.pull()
        assert report.to_version == case.target
        scene.check_new(f"{when}, versions back")


@pytest.mark.parametrize("step", list(Step), ids=lambda step: step.name)
@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_a_pull_after_a_kill_goes_on_to_a_newer_target(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, swap: str, step: Step
) -> None:
    """The next target is another one: what was begun is finished or undone first, and nothing is folded twice."""
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(DELTAS)
    victim.kill(scene.stream, 2, step=int(step))
    report = scene.pull()
    finished = step >= Step.MARKER_REMOVED
    assert report.from_version == (2 if finished else 1)
    assert report.versions == ((3, 4) if finished else (2, 3, 4))
    scene.check_new(f"killed at {step.name} on the way to 2, pulled 4")


def test_rolling_is_what_a_full_disk_leads_to(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs above were what their names say: modes by name, and by the room there is."""
    scene = scenes(DELTA)
    assert scene.pull().swap == "staged"
    scene.restore()
    monkeypatch.setenv("GPUSYNC_SWAP", "rolling")
    assert scene.pull().swap == "rolling"
    monkeypatch.delenv("GPUSYNC_SWAP")
    scene.restore()
    monkeypatch.setattr("gpusync.fsio.free_bytes", lambda path: NO_ROOM["free_bytes"])
    assert scene.pull().swap == "rolling"
    scene.check_new("rolled")
