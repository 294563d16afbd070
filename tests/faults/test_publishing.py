"""Every fault at every system call of a publish: of a delta, the first one, a full version, one on it, and of folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaign import inject_at_every_call
from tests.faults.kinds import EVERYTHING, FAULTS, Fault
from tests.faults.publishing import (
    Publishing,
    PublishingAfterAPowerCut,
    PublishingFolders,
    PublishingFull,
    PublishingOnFull,
)

# A delta and a full version meet EIO at every call and ENOSPC at every one that takes space; the others at every n-th.
STRIDES = {"EDQUOT": 9, "EROFS": 9, "ESTALE": 7, "EINTR": 7, "short read": 4}
SELDOM = ("the first", "on a full version", "folders", "folders, the first")

RUNS: dict[str, Callable[[Path], Publishing]] = {
    "delta": Publishing,
    "over a spare": lambda root: Publishing(root, version=2),
    "the first": lambda root: Publishing(root, version=0),
    "full version": PublishingFull,
    "on a full version": PublishingOnFull,
    "after a power cut": PublishingAfterAPowerCut,
    "folders": PublishingFolders,
    "folders, the first": lambda root: PublishingFolders(root, version=0),
}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("name", RUNS)
def test_a_fault_at_every_call_of_a_publish(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Fault, lasting: bool
) -> None:
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    stride = STRIDES.get(fault.name, 1) * (3 if lasting else 1) * (3 if name in SELDOM else 1)
    if name == "after a power cut":
        stride *= 5  # a whole pull is in it, which meets every fault elsewhere
    run = RUNS[name](fast_path)
    inject_at_every_call(run, fault, lasting=lasting, stride=1 if EVERYTHING else stride)
