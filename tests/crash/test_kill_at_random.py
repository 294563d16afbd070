"""kill -9 at random instants of a pull, a seed and a live update, and again in the pull that recovers from it.

A real process, killed from outside. In CI some 200 kills; ``GPUSYNC_TEST_KILLS=1000`` makes it so many of each job.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from gpusync.errors import SourceNotReadyError
from gpusync.local.swap import Step
from tests.crash.figures import counted
from tests.crash.harness import DELTA, FULL, SEED, Case, Death, Scene, Scenes, Victim, files_of
from tests.driver import Trace

KILLS = int(os.environ.get("GPUSYNC_TEST_KILLS", "40"))
"""Of each job."""


@dataclass(frozen=True)
class Job:
    """What is killed: a case, how it is swapped in, and by what."""

    case: Case
    swap: str
    job: str = "pull"


JOBS = {
    "pull": Job(DELTA, "staged"),
    "rolling pull": Job(DELTA, "rolling"),
    "seed": Job(SEED, "staged"),
    "full version": Job(FULL, "staged"),
    "prepare and finish": Job(DELTA, "staged", "update"),
    "rolling prepare and finish": Job(DELTA, "rolling", "update"),
}


@pytest.mark.parametrize("name", JOBS)
def test_kill_at_random_instants(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After the kill, or two: no file is torn, the folder is old or resumes to new on its own, and ends at the target."""
    work = JOBS[name]
    monkeypatch.setenv("GPUSYNC_SWAP", work.swap)
    scene = scenes(work.case)
    draw = random.Random(f"{name} 5")
    undisturbed = victim.pull(scene.stream, work.case.target, job=work.job)
    assert undisturbed.outcome == "applied", undisturbed
    scene.check_new("undisturbed")
    landed, longest = 0, 1.1 * undisturbed.seconds
    for number in range(KILLS):
        scene.restore()
        after = draw.uniform(0, longest)
        when = f"{name}, kill {number}, after {after:.4f} s"
        deaths = [victim.pull(scene.stream, work.case.target, job=work.job, after_seconds=after)]
        if draw.random() < 0.5:
            # The pull that recovers is killed, too.
            after = draw.uniform(0, longest)
            deaths.append(victim.pull(scene.stream, work.case.target, after_seconds=after))
            when += f", and again after {after:.4f} s"
        if not deaths[0].killed:
            longest = min(longest, 1.1 * deaths[0].seconds)  # the machine was slower at first
        landed += sum(death.killed for death in deaths)
        check_after(scene, deaths, when)
    counted["kills at random instants"] += landed
    assert landed >= KILLS // 4, f"only {landed} kills came before the end"


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_kill_at_every_step_of_a_live_update(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(DELTA)
    for step in Step:
        scene.restore()
        death = victim.kill(scene.stream, DELTA.target, job="update", step=int(step))
        assert death.steps[-1] == step
        check_after(scene, [death], f"update, {swap}: killed at {step.name}")
        counted["kills at steps of an update"] += 1


def check_after(scene: Scene, deaths: list[Death], when: str) -> None:
    """No file is torn; without the publisher the folder is old or new, as the steps passed say; with it, new."""
    scene.check_no_file_is_torn(when)
    reached = max([Step.LOCKED, *(Step(step) for death in deaths for step in death.steps)])
    missing = {name for name, data in scene.new.items() if files_of(scene.local).get(name) != data}
    scene.hide_versions()
    try:
        with pytest.MonkeyPatch.context() as patch:
            trace = Trace(patch)
            scene.pull()
        scene.check_new(f"{when}, resumed from local disk")
        # The step before the first resumable one is passed, and its durable effect may be there already.
        assert reached >= scene.first_resumable_step - 1, when
        check_work(trace, scene, missing, when)
    except SourceNotReadyError:
        scene.check_old(when)
        assert reached < scene.first_resumable_step, f"{when}: the old version after {reached.name}"
    finally:
        scene.show_versions()
    scene.pull()
    scene.check_new(f"{when}, versions back")


def check_work(trace: Trace, scene: Scene, missing: set[str], when: str) -> None:
    """Recovery writes no shard that was new already, and none twice."""
    staging = scene.local / ".weight_sync" / "staging"
    built = [call.path.name for call in trace.of("create", staging)]
    placed = trace.renamed_onto(scene.local, ".safetensors")
    for names in ([name for name in built if name.endswith(".safetensors")], placed):
        assert len(names) == len(set(names)) and set(names) <= missing, f"{when}: {names} again"
