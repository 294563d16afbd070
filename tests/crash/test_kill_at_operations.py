"""kill -9 at every single write operation of a pull, once, and once more in the pull that recovers from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusync import fsio
from gpusync.errors import SourceNotReadyError
from gpusync.local.swap import Step
from tests.crash.harness import DELTA, FULL, SEED, Case, Scene, Scenes, Victim, copy_keeping_inodes
from tests.driver import Trace

# What starts from a seed has no old shards to roll over: it is always staged.
RUNS = [(DELTA, "staged"), (DELTA, "rolling"), (SEED, "staged"), (FULL, "staged")]


@pytest.mark.parametrize(("case", "swap"), RUNS, ids=[f"{case.name}-{swap}" for case, swap in RUNS])
def test_kill_at_every_write_operation(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, swap: str, case: Case
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(case)
    operations = victim.pull(scene.stream, case.target).operations
    assert len(operations) > 60 and set(operations) <= set(fsio.WRITE_OPERATIONS)
    ends = {"old": 0, "new": 0}
    for number, name in enumerate(operations):
        for half in (False, True) if name == "pwrite" else (False,):
            scene.restore()
            when = f"{case.name}, {swap}: killed at operation {number} ({name}{', half' * half})"
            death = victim.kill(scene.stream, case.target, operation=number, half=half)
            assert death.operations == operations[: number + 1], "operations come in another order"
            scene.check_no_file_is_torn(when)
            ends[end_without_versions(scene, death.steps, when)] += 1
            scene.pull()
            scene.check_new(f"{when}, versions back")
    assert ends["old"] >= 10 and ends["new"] >= 10, "kills fell on one side only"


def end_without_versions(scene: Scene, steps: tuple[int, ...], when: str) -> str:
    """Pull while nothing is published: the old version, or the new one; say which. Steps passed say which it may be."""
    last = Step(steps[-1]) if steps else Step.LOCKED
    scene.hide_versions()
    try:
        scene.pull()
        scene.check_new(f"{when}, resumed from local disk")
        # The step before the first resumable one is passed, and its durable effect may be there already.
        assert last >= scene.first_resumable_step - 1, when
        return "new"
    except SourceNotReadyError:
        scene.check_old(when)
        assert last < scene.first_resumable_step, f"{when}: the old version after {last.name}"
        return "old"
    finally:
        scene.show_versions()


FIRST_KILLS = {
    "staged, journaled": ("staged", {"step": Step.JOURNALED}),
    "staged, config aside": ("staged", {"step": Step.CONFIG_ASIDE}),
    "staged, one shard renamed": ("staged", {"rename": 1}),
    "staged, config back": ("staged", {"step": Step.CONFIG_BACK}),
    "staged, marked": ("staged", {"step": Step.MARKED}),
    "rolling, journaled": ("rolling", {"step": Step.JOURNALED}),
    "rolling, marker removed": ("rolling", {"step": Step.MARKER_REMOVED}),
    "rolling, two shards renamed": ("rolling", {"rename": 2}),
    "rolling, table placed": ("rolling", {"step": Step.TABLE_PLACED}),
}


@pytest.mark.parametrize("name", FIRST_KILLS)
def test_kill_again_at_every_write_operation_of_the_recovery(
    scenes: Scenes,
    victim: Victim,
    monkeypatch: pytest.MonkeyPatch,
    fast_path: Path,
    name: str,
) -> None:
    """The second pull dies too, at each of its operations; the third still ends old or new, then at the target."""
    swap, first = FIRST_KILLS[name]
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(DELTA)
    victim.kill(scene.stream, scene.case.target, **first)
    left = fast_path / "left"
    scene.local.rename(left)
    resumable = "aside" not in name and "journaled" not in name
    number = 0
    while True:
        copy_keeping_inodes(left, scene.local)
        scene.hide_versions()
        death = victim.pull(scene.stream, scene.case.target, operation=number)
        scene.check_no_file_is_torn(f"{name}, then operation {number}")
        if not death.killed:
            break
        when = f"{name}, then killed at operation {number} ({death.operations[-1]})"
        if resumable:
            scene.pull()
            scene.check_new(f"{when}, resumed from local disk")
        else:
            with pytest.raises(SourceNotReadyError):
                scene.pull()
            scene.check_old(when)
        scene.show_versions()
        scene.pull()
        scene.check_new(f"{when}, versions back")
        number += 1
    assert death.exit == (0 if resumable else 3), death
    assert number >= 8, "recovery did too little for this test to mean anything"
    scene.show_versions()


@pytest.mark.parametrize("renamed", [0, 1, 2, 3])
def test_recovery_builds_only_what_was_not_renamed(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    """A rolling swap killed with k of n shards in place: at most n - k are built when it is resumed."""
    monkeypatch.setenv("GPUSYNC_SWAP", "rolling")
    scene = scenes(DELTA)
    changed = [name for name in scene.new if scene.new[name] != scene.old[name]]
    assert len(changed) == 3
    fault: dict[str, int] = {"rename": renamed} if renamed else {"step": Step.MARKER_REMOVED}
    victim.kill(scene.stream, scene.case.target, **fault)
    in_place = [name for name in changed if (scene.local / name).read_bytes() == scene.new[name]]
    assert len(in_place) == renamed
    scene.hide_versions()
    with pytest.MonkeyPatch.context() as patch:
        trace = Trace(patch)
        assert scene.pull().recovered == "resumed"
    built = _shards(trace, "create", scene)
    assert sorted(built) == sorted(set(changed) - set(in_place))
    assert sorted(trace.renamed_onto(scene.local, ".safetensors")) == sorted(built)
    scene.check_new(f"resumed with {renamed} shards in place")


@pytest.mark.parametrize("renamed", [0, 1, 2, 3])
def test_recovery_of_a_staged_swap_builds_nothing(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    scene = scenes(DELTA)
    fault: dict[str, int] = {"rename": renamed} if renamed else {"step": Step.MARKER_REMOVED}
    victim.kill(scene.stream, scene.case.target, **fault)
    with pytest.MonkeyPatch.context() as patch:
        trace = Trace(patch)
        scene.pull()
    assert _shards(trace, "create", scene) == []
    assert len(trace.renamed_onto(scene.local, ".safetensors")) == 3 - renamed
    scene.check_new(f"resumed with {renamed} shards in place")


def _shards(trace: Trace, operation: str, scene: Scene) -> list[str]:
    """Return the shards that an operation was called for in staging."""
    calls = trace.of(operation, scene.local / ".weight_sync" / "staging")
    return [call.path.name for call in calls if call.path.suffix == ".safetensors"]
