"""Sixteen processes and more on one local checkpoint: all end right, one at a time works, one does the work."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gpusync
from tests import wire
from tests.crash.figures import counted
from tests.crash.harness import OURS_AT_REST, state_files
from tests.driver import check_at
from tests.warm import Ended, Running, Warm

CROWD = 16
NAMES = ("a.weight", "s.scale", "d.weight", "b.lut", "c.weight", "o.byte")

# Waits for the others, then pulls, in as many threads as there are targets.
PULLER = """
import json, os, sys, threading, time, gpusync
local, base, source, gate, *targets = sys.argv[1:]
rows = []

def run(target):
    try:
        report = gpusync.pull(local, base, source, int(target), durable=False)
        rows.append([int(target), report.outcome, report.to_version])
    except gpusync.GpuSyncError as err:
        rows.append([int(target), type(err).__name__, str(err)])

threads = [threading.Thread(target=run, args=[target]) for target in targets]
while not os.path.exists(gate):
    time.sleep(0.002)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(rows), flush=True)
os._exit(0)  # a whole interpreter takes its time to end
"""

# The same with a live model, which stands at the base.
UPDATER = """
import json, os, sys, time, gpusync
from pathlib import Path
from tests import live
local, base, source, gate, target = sys.argv[1:]
model = live.model_from(Path(base))
gpusync.attach(model, base)
while not os.path.exists(gate):
    time.sleep(0.002)
chain = gpusync.open_chain(source, int(target), checkpoint=local, base_dir=base)
report = gpusync.apply_to_model(model, chain, durable=False)
print(json.dumps([report.to_version, {n: d.hex() for n, d in live.bytes_of(model).items()}]), flush=True)
os._exit(0)
"""


@pytest.fixture
def stream(fast_path: Path) -> wire.Stream:
    """A fresh host; versions 1 to 4 are published."""
    made = wire.Stream(fast_path / "stream")
    for encoding in ("xor", "overwrite", "xor_sparse", "xor"):
        made.delta(NAMES, encoding=encoding)
    return made


def start(warm: Warm, stream: wire.Stream, code: str, targets: Sequence[int]) -> Running:
    gate = stream.root / "gate"
    counted["processes in crowds"] += 1
    return warm.start(code, stream.local, stream.base, stream.source, gate, *targets)


def go(stream: wire.Stream, crowd: Sequence[Running]) -> list[Ended]:
    """Let all begin, and wait for all."""
    (stream.root / "gate").touch()
    return [running.wait() for running in crowd]


def rows_of(ended: Sequence[Ended]) -> list[Any]:
    return [row for one in ended for row in one.json()]


def check_folder(stream: wire.Stream, version: int) -> None:
    check_at(stream, version)
    report = gpusync.verify(stream.local)
    assert report.ok and not report.unproven
    assert state_files(stream.local) <= OURS_AT_REST


def test_sixteen_processes_with_one_target_and_one_does_the_work(
    warm: Warm, stream: wire.Stream
) -> None:
    crowd = [start(warm, stream, PULLER, [4]) for _ in range(CROWD)]
    rows = rows_of(go(stream, crowd))
    assert Counter(outcome for _, outcome, _ in rows) == {"applied": 1, "unchanged": CROWD - 1}
    assert {version for *_, version in rows} == {4}
    check_folder(stream, 4)


def test_sixteen_processes_of_two_threads_with_different_targets_end_at_the_highest(
    warm: Warm, stream: wire.Stream
) -> None:
    """A lower target than the applied version is a no-op that says so; each version is applied once at most."""
    crowd = [
        start(warm, stream, PULLER, [1 + (number + step) % 4 for step in range(2)])
        for number in range(CROWD)
    ]
    rows = rows_of(go(stream, crowd))
    assert len(rows) == 2 * CROWD
    applied = [version for _, outcome, version in rows if outcome == "applied"]
    assert len(applied) == len(set(applied)) and max(applied) == 4
    for target, outcome, version in rows:
        assert outcome in ("applied", "unchanged", "stale"), (outcome, version)
        assert version == target if outcome != "stale" else version > target
    check_folder(stream, 4)


def test_resets_among_a_crowd_leave_a_whole_version(warm: Warm, stream: wire.Stream) -> None:
    crowd = [start(warm, stream, PULLER, [(number * 3) % 5] * 2) for number in range(CROWD)]
    rows = rows_of(go(stream, crowd))
    outcomes = {outcome for _, outcome, _ in rows}
    assert outcomes <= {"applied", "unchanged", "stale", "reset"}, rows
    version = wire.marker_version(stream.local)
    assert version is not None
    check_folder(stream, version)
    gpusync.pull(stream.local, stream.base, stream.source, 4)
    check_folder(stream, 4)


def test_a_crowd_of_which_some_are_killed_ends_right(warm: Warm, stream: wire.Stream) -> None:
    """Whoever has the lock may die with it: the next one finishes, or undoes, what it left."""
    crowd = [start(warm, stream, PULLER, [1 + number % 4]) for number in range(CROWD)]
    (stream.root / "gate").touch()
    kill_holders(stream, {running.pid for running in crowd}, CROWD // 4)
    ended = [running.wait() for running in crowd]
    rows = rows_of([one for one in ended if one.code != -signal.SIGKILL])
    assert CROWD - CROWD // 4 <= len(rows) < CROWD
    assert all(outcome in ("applied", "unchanged", "stale") for _, outcome, _ in rows), rows
    gpusync.pull(stream.local, stream.base, stream.source, 4)
    check_folder(stream, 4)


def kill_holders(stream: wire.Stream, pids: set[int], count: int) -> None:
    """Kill whoever is seen in the lock file, one after the other."""
    lock = stream.local / ".weight_sync" / "lock"
    killed: set[int] = set()
    deadline = time.monotonic() + 30
    while len(killed) < count and time.monotonic() < deadline:
        try:
            holder = int(lock.read_text() or 0)
        except FileNotFoundError:
            continue
        if holder in pids - killed:
            os.kill(holder, signal.SIGKILL)
            killed.add(holder)


def test_live_models_of_eight_processes_and_eight_pulls_share_one_folder(
    warm: Warm, stream: wire.Stream
) -> None:
    models = [start(warm, stream, UPDATER, [1 + number % 4]) for number in range(CROWD // 2)]
    pulls = [start(warm, stream, PULLER, [1 + number % 4]) for number in range(CROWD // 2)]
    ended = go(stream, [*models, *pulls])
    for one in ended[: len(models)]:
        version, held = one.json()
        assert held == {name: data.hex() for name, data in stream.states[version].items()}
    rows = rows_of(ended[len(models) :])
    assert all(outcome in ("applied", "unchanged", "stale") for _, outcome, _ in rows), rows
    check_folder(stream, 4)
