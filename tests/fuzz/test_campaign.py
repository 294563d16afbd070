"""Thousands of bent versions and bent local folders: exact right bytes, or a typed error with nothing changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.driver import REPOSITORY
from tests.fuzz.campaign import KINDS

SLICES = 8
"""Processes that the mutants are dealt to: each has a memory cap of its own."""
# Of ten mutants, seven are of published versions.
SHARE = {"published": 0.7, "local": 0.3}
# The classes that a campaign must have met, else it bends nothing that reaches that far.
MET = {
    "published": {
        "ok",
        "IndexFormatError",
        "HeaderFormatError",
        "FrameFormatError",
        "SourceNotReadyError",
        "VersionConflictError",
    },
    "local": {"ok", "CheckpointIOError"},
}


def test_every_campaign_has_its_share() -> None:
    assert SHARE.keys() == MET.keys() == KINDS.keys()
    assert sum(SHARE.values()) == 1


@pytest.mark.timeout(
    0
)  # each mutant has a limit of its own, and a run by hand has as many as it is told
@pytest.mark.parametrize("part", range(SLICES))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_mutants(kind: str, part: int, request: pytest.FixtureRequest) -> None:
    total = request.config.getoption("--fuzz-mutants", default=5000)
    count = -(-int(total * SHARE[kind]) // SLICES)
    first = request.config.getoption("--fuzz-seed", default=0) + part * count
    command = ["-m", "tests.fuzz.campaign", kind, "--seed", str(first), "--count", str(count)]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout)
    print(found)
    assert found["mutants"] == count == sum(found["outcomes"].values())
    if count >= 400:
        assert found["outcomes"].keys() >= MET[kind]
