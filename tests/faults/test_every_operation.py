"""Every fault at every system call of a pull, a seed, a recovery, a prepare and a finish: once, and from then on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.harness import DELTA, FULL, RESET, SEED, Scenes, Victim
from tests.faults.campaign import Finished, Prepared, Pulled, Resumed, Run, inject_at_every_call
from tests.faults.kinds import EVERYTHING, FAULTS, Fault

# Every call meets EIO, and every call that takes space ENOSPC; of the others every n-th, unless all are asked for.
STRIDES = {"EDQUOT": 5, "EROFS": 4, "ESTALE": 3, "EINTR": 6, "short read": 4, "early end": 3}
SELDOM = ("full version", "reset")

Maker = Callable[[Scenes, Victim], Run]


def _resumed(**fault: int) -> Maker:
    def make(scenes: Scenes, victim: Victim) -> Run:
        scene = scenes(DELTA)
        kill = lambda: victim.kill(scene.stream, DELTA.target, **fault)  # noqa: E731
        return Resumed(scene, kill=kill)

    return make


RUNS: dict[str, tuple[str, Maker]] = {
    "pull": ("staged", lambda scenes, victim: Pulled(scenes(DELTA))),
    "rolling pull": ("rolling", lambda scenes, victim: Pulled(scenes(DELTA))),
    "seed": ("staged", lambda scenes, victim: Pulled(scenes(SEED))),
    "full version": ("staged", lambda scenes, victim: Pulled(scenes(FULL))),
    "reset": ("staged", lambda scenes, victim: Pulled(scenes(RESET))),
    "prepare": ("staged", lambda scenes, victim: Prepared(scenes(DELTA))),
    "finish": ("staged", lambda scenes, victim: Finished(scenes(DELTA))),
    "recovery": ("staged", _resumed(rename=1)),
    "rolling recovery": ("rolling", _resumed(rename=1)),
}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("name", RUNS)
def test_a_fault_at_every_call(
    scenes: Scenes,
    victim: Victim,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: Fault,
    lasting: bool,
) -> None:
    swap, make = RUNS[name]
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    if fault.name == "early end" and lasting and name.endswith("recovery"):
        pytest.skip(
            "a file that stays cut is damage, and here nothing is published to heal it from"
        )
    stride = STRIDES.get(fault.name, 1) * (3 if lasting else 1) * (3 if name in SELDOM else 1)
    run = make(scenes, victim)
    inject_at_every_call(run, fault, lasting=lasting, stride=1 if EVERYTHING else stride)
