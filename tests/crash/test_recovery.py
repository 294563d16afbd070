"""What the next pull makes of what a crash, a power cut, another receiver or an interruption left."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

import gpusync
from gpusync import fsio
from gpusync.errors import GpuSyncError, SourceNotReadyError
from gpusync.folder.marker import read_marker, sealed, write_marker
from gpusync.local.swap import Step
from tests import wire
from tests.crash.harness import (
    DELTA,
    DELTAS,
    LAYOUT,
    SEED,
    SHARD_NAMES,
    Case,
    Scene,
    Scenes,
    Victim,
    count_of_descriptors,
    files_of,
    open_descriptors,
)
from tests.driver import Call, Trace


def _two_over_every_shard(stream: wire.Stream) -> None:
    for _ in range(2):
        stream.delta([row.name for row in LAYOUT])


EVERY_SHARD = Case("two deltas over every shard", 1, 2, _two_over_every_shard)
ANOTHER_BOOT = "00000000-0000-0000-0000-000000000000"


# ---- durable=False ----------------------------------------------------------------------------------


def stand_at_version_1_from_another_boot(scene: Scene) -> None:
    """Pull version 1 without fsync, and reboot: the marker is whole, the bytes under it may not be."""
    shutil.rmtree(scene.local)
    assert not scene.pull(1, durable=False).durable
    marker = read_marker(scene.local).marker
    assert marker is not None and not marker.durable and marker.boot_id
    write_marker(scene.local, replace(marker, boot_id=ANOTHER_BOOT))
    assert read_marker(scene.local).state == "ours"


@pytest.mark.parametrize("tensor", ["t1.0", "t1.1", "t4.0"], ids=["patched", "beside", "untouched"])
@pytest.mark.parametrize("target", [1, 2])
def test_bytes_of_another_boot_are_hashed_again_and_healed(
    scenes: Scenes, tensor: str, target: int
) -> None:
    scene = scenes(DELTA)
    stand_at_version_1_from_another_boot(scene)
    wire.flip_tensor_byte(scene.local, tensor, 33)
    report = scene.pull(target)
    assert report.tensors_healed == (tensor,)
    assert wire.read_tensors(scene.local) == scene.stream.states[target]
    assert gpusync.verify(scene.local).ok
    assert scene.pull(target).outcome == "unchanged", "the bytes are hashed at every pull"


def test_bytes_of_another_boot_that_are_good_are_kept(scenes: Scenes) -> None:
    scene = scenes(DELTA)
    stand_at_version_1_from_another_boot(scene)
    report = scene.pull()
    assert report.seed == "local" and report.tensors_healed == ()
    scene.check_new("another boot")


def test_bytes_of_another_boot_are_not_healed_from_nothing(scenes: Scenes) -> None:
    """With the versions pruned, a damaged tensor is named; it is not served as good."""
    scene = scenes(DELTA)
    stand_at_version_1_from_another_boot(scene)
    wire.flip_tensor_byte(scene.local, "t2.0", 5)
    scene.stream.hide(1)
    try:
        with pytest.raises(GpuSyncError, match=r"t2\.0"):
            scene.pull()
    finally:
        scene.stream.show(1)
    scene.pull()
    scene.check_new("version 1 is back")


def test_a_durable_pull_makes_durable_what_an_earlier_one_left(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a durable marker stands, every file of the folder was fsynced, also those that this pull did not touch."""
    scene = scenes(DELTA)
    for target in (1, 2):
        shutil.rmtree(scene.local)
        scene.pull(1, durable=False)
        with pytest.MonkeyPatch.context() as patch:
            trace = Trace(patch)
            scene.pull(target)
        synced = fsynced_before_marker(trace, scene)
        assert set(files_of(scene.local)) - synced == set(), f"pull to {target}"
        marker = read_marker(scene.local).marker
        assert marker is not None and marker.durable


def fsynced_before_marker(trace: Trace, scene: Scene) -> set[str]:
    """Return the names that were fsynced, in the folder or in staging, before the marker was renamed into place."""
    marker = scene.local / wire.MARKER
    end = max(at for at, call in enumerate(trace.calls) if call.to == marker)
    return {call.path.name for call in trace.calls[:end] if call.operation == "fsync"}


@pytest.mark.parametrize("swap", ["staged", "rolling"])
@pytest.mark.parametrize("step", [Step.MARKER_REMOVED, Step.RENAMED, Step.CONFIG_BACK])
def test_a_swap_of_another_boot_without_fsync_is_dropped(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, swap: str, step: Step
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(DELTA)
    victim.kill(scene.stream, scene.case.target, step=step, options={"durable": False})
    state = scene.local / ".weight_sync"
    journal = json.loads((state / "journal.json").read_bytes())
    del journal["seal"]
    journal["boot_id"] = ANOTHER_BOOT
    (state / "journal.json").write_text(json.dumps(sealed(journal)))
    lost = list(scene.local.rglob("*.safetensors"))
    for path in lost:  # what the page cache held is zeros after the power cut
        path.write_bytes(bytes(path.stat().st_size))
    report = scene.pull()
    assert report.recovered == "discarded" and report.seed == "base"
    scene.check_new(f"{swap}, cut at {step.name}")


def test_a_swap_of_this_boot_without_fsync_is_resumed(scenes: Scenes, victim: Victim) -> None:
    scene = scenes(DELTA)
    victim.kill(
        scene.stream, scene.case.target, step=Step.MARKER_REMOVED, options={"durable": False}
    )
    scene.hide_versions()
    assert scene.pull().recovered == "resumed"
    scene.check_new("same boot")


# ---- damage on top of a crash -----------------------------------------------------------------------


def rot(path: Path, at: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x5A
    path.write_bytes(data)


def _spooled(state: Path) -> Path:
    return min((state / "spool" / "weight_v000002").glob("*.safetensors"))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "journal emptied": lambda state: (state / "journal.json").write_bytes(b""),
    "journal cut": lambda state: os.truncate(state / "journal.json", 100),
    "table emptied": lambda state: (state / "staging" / "digests.json").write_bytes(b""),
    "table lost": lambda state: (state / "staging" / "digests.json").unlink(),
    "local shard lost": lambda state: (state.parent / SHARD_NAMES[2]).unlink(),
    "local shard rotten": lambda state: rot(state.parent / SHARD_NAMES[2]),
    "untouched shard rotten": lambda state: rot(state.parent / SHARD_NAMES[3]),
    "untouched shard cut": lambda state: os.truncate(state.parent / SHARD_NAMES[3], 40),
}
ROLLING_DAMAGE: dict[str, Callable[[Path], None]] = {
    "spool lost": lambda state: shutil.rmtree(state / "spool"),
    "spooled version lost": lambda state: shutil.rmtree(state / "spool" / "weight_v000002"),
    "spooled shard rotten": lambda state: rot(_spooled(state)),
    "spooled shard cut": lambda state: os.truncate(_spooled(state), 70),
}
DAMAGES = [
    *[("staged", name) for name in DAMAGE],
    *[("rolling", name) for name in (*DAMAGE, *ROLLING_DAMAGE)],
]


@pytest.mark.parametrize(("swap", "name"), DAMAGES, ids=[" ".join(pair) for pair in DAMAGES])
def test_damage_to_what_a_crash_left_never_wedges_the_folder(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, swap: str, name: str
) -> None:
    """With the versions there, pulls end verified at the target. One may fail on the way, with a typed error."""
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(DELTA)
    victim.kill(scene.stream, scene.case.target, rename=1)
    {**DAMAGE, **ROLLING_DAMAGE}[name](scene.local / ".weight_sync")
    monkeypatch.delenv("GPUSYNC_SWAP")
    heal(scene)
    assert not scene.local.joinpath(".weight_sync", "journal.json").exists()
    if "untouched" in name:
        return  # rot outside of the delta is a scrub's to find, or the next pull's that touches it
    scene.check_new(f"{swap}, {name}")


def heal(scene: Scene) -> None:
    try:
        scene.pull()
    except GpuSyncError as err:
        first = err
    else:
        return
    try:
        scene.pull()
    except GpuSyncError as err:
        raise AssertionError(f"the folder is wedged: {first!r}, then {err!r}") from err


# ---- another receiver takes over --------------------------------------------------------------------


TAKEN_AT = [
    ("staged", {"step": Step.SYNCED}),
    ("staged", {"step": Step.JOURNALED}),
    ("staged", {"step": Step.CONFIG_ASIDE}),
    ("staged", {"step": Step.MARKER_REMOVED}),
    ("staged", {"rename": 2}),
    ("staged", {"step": Step.CONFIG_BACK}),
    ("rolling", {"step": Step.JOURNALED}),
    ("rolling", {"step": Step.MARKER_REMOVED}),
    ("rolling", {"rename": 1}),
    ("rolling", {"rename": 2}),
]


@pytest.mark.parametrize("theirs", [1, 2, 3])
@pytest.mark.parametrize(("swap", "fault"), TAKEN_AT, ids=[f"{s}-{f}" for s, f in TAKEN_AT])
def test_a_folder_that_another_receiver_took_over_is_theirs(
    scenes: Scenes,
    victim: Victim,
    monkeypatch: pytest.MonkeyPatch,
    swap: str,
    fault: dict[str, int],
    theirs: int,
) -> None:
    """Killed on the way from 1 to 2; another receiver reseeds to the same, an equal or a newer version; the journal is void."""
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(DELTAS)
    stream = scene.stream
    victim.kill(stream, 2, **fault)
    stream.write_checkpoint(scene.local, stream.states[theirs])
    wire.write_marker(scene.local, json.dumps({"version": f"{theirs:06d}"}))
    monkeypatch.delenv("GPUSYNC_SWAP")
    before = files_of(scene.local)
    if theirs < 4:
        scene.hide_versions()
        with pytest.raises(SourceNotReadyError):
            scene.pull()
        assert files_of(scene.local) == before, "the journal wrote into their folder"
        assert wire.marker_version(scene.local) == theirs
        scene.show_versions()
    report = scene.pull()
    assert report.recovered == "none"  # the pull before has dropped the journal
    assert report.from_version == theirs
    assert report.versions == tuple(range(theirs + 1, 5))
    assert report.seed == "local" and report.tensors_healed == ()
    scene.check_new(f"taken over at version {theirs}")


BEGUN_AT = [{"step": Step.MARKER_REMOVED}, {"rename": 1}, {"rename": 3}, {"step": Step.CONFIG_BACK}]


@pytest.mark.parametrize("over", [0, 1, 3], ids=["renamed first", "renamed second", "not renamed"])
@pytest.mark.parametrize("fault", BEGUN_AT, ids=lambda fault: str(*fault.values()))
@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_a_takeover_that_died_on_the_way_is_not_built_on(
    scenes: Scenes,
    victim: Victim,
    monkeypatch: pytest.MonkeyPatch,
    swap: str,
    fault: dict[str, int],
    over: int,
) -> None:
    """Ours is killed; another receiver finds no marker, begins to seed the folder in place, and is killed before its own.

    The file names and our journal are all there, and the bytes under a name that counts as done are the base's.
    """
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(EVERY_SHARD)
    stream = scene.stream
    victim.kill(stream, 2, **fault)
    with open(scene.local / SHARD_NAMES[over], "wb") as theirs:
        theirs.write((stream.base / SHARD_NAMES[over]).read_bytes())
    scene.pull()
    scene.check_new("their half of a seed is not ours")


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_a_folder_copied_in_mid_swap_is_digested_and_kept(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    """Other inodes and times, the same bytes: nothing vouches for them but their digests, and those are enough."""
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(DELTA)
    victim.kill(scene.stream, 2, step=Step.RENAMED)
    scene.local.rename(scene.local.with_name("moved"))
    shutil.copytree(scene.local.with_name("moved"), scene.local, copy_function=shutil.copy)
    shutil.rmtree(scene.local.with_name("moved"))
    if swap == "staged":
        scene.hide_versions()
    report = scene.pull()
    assert report.tensors_healed == ()
    scene.show_versions()
    scene.check_new(f"{swap}, copied")


def test_a_marker_that_says_it_is_not_valid_means_rebuild(scenes: Scenes, victim: Victim) -> None:
    scene = scenes(DELTAS)
    victim.kill(scene.stream, 2, rename=1)
    wire.write_marker(scene.local, json.dumps({"version": "000002", "valid": False}))
    wire.flip_tensor_byte(scene.local, "t4.0")
    assert scene.pull().seed == "base"
    scene.check_new("invalid marker")


# ---- interruptions ----------------------------------------------------------------------------------


class Stopped(BaseException):
    """What a host's signal handler raises; no ``except Exception`` may swallow it."""


def test_an_exception_at_every_write_operation_leaves_old_or_resumable(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KeyboardInterrupt wherever the pull is: the old version with its marker, or a swap that the next pull finishes."""
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    for swap in ("staged", "rolling"):
        monkeypatch.setenv("GPUSYNC_SWAP", swap)
        scene = scenes(DELTA)
        number = 0
        while interrupt(scene, number):
            when = f"{swap}: interrupted at operation {number}"
            scene.check_no_file_is_torn(when)
            scene.pull()
            scene.check_new(when)
            scene.restore()
            number += 1
        assert number > 60


def interrupt(scene: Scene, number: int) -> bool:
    """Pull and raise KeyboardInterrupt in place of a write operation; False where the pull ended before."""
    left = number

    def before(call: Call) -> None:
        nonlocal left
        if call.operation in fsio.WRITE_OPERATIONS:
            left -= 1
            if left == -1:
                raise KeyboardInterrupt

    opened = count_of_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        trace = Trace(patch, before)
        try:
            scene.pull()
            assert left >= 0, f"the interruption at operation {number} was swallowed"
            return False
        except KeyboardInterrupt:
            marked = wire.marker_version(scene.local)
            removed = any(call.path == scene.local / wire.MARKER for call in trace.of("unlink"))
            assert marked is not None or removed, "the marker went before its step"
        finally:
            if count_of_descriptors() > opened:
                gc.collect()
            assert count_of_descriptors() <= opened, f"operation {number} left descriptors open"
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_a_signal_in_the_middle_leaves_the_old_version(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch, swap: str, number: int
) -> None:
    """A real signal, while worker threads fold, to a handler that raises."""
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(DELTAS)

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped

    sent = []

    def send(event: gpusync.Progress) -> None:
        if event.stage in ("materialize", "verify") and not sent:
            sent.append(event)
            os.kill(os.getpid(), number)

    opened = open_descriptors()
    handler = signal.signal(number, stop)
    try:
        with pytest.raises(Stopped):
            scene.pull(progress=send)
    finally:
        signal.signal(number, handler)
    assert open_descriptors() == opened
    workers = [t.name for t in threading.enumerate() if t.name.startswith("ThreadPool")]
    assert not workers, "a worker outlived the pull"
    scene.check_old(f"{swap}: signal {number}")
    scene.pull()
    scene.check_new(f"{swap}: after signal {number}")


@pytest.mark.parametrize("step", [Step.MATERIALIZED, Step.CONFIG_ASIDE, Step.RENAMED])
def test_sigterm_with_its_default_action_frees_the_lock(
    scenes: Scenes, victim: Victim, step: Step
) -> None:
    scene = scenes(DELTA)
    death = victim.pull(scene.stream, scene.case.target, step=step, signal=int(signal.SIGTERM))
    assert death.exit == -signal.SIGTERM
    scene.check_no_file_is_torn(f"SIGTERM at {step.name}")
    scene.pull(lock_timeout_seconds=0.0)
    scene.check_new("the lock was free")


@pytest.mark.parametrize(
    ("case", "swap"),
    [(DELTAS, "staged"), (DELTAS, "rolling"), (SEED, "staged")],
    ids=["deltas-staged", "deltas-rolling", "seed-staged"],
)
def test_an_exception_from_progress_stops_at_a_safe_point(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch, case: Case, swap: str
) -> None:
    """Whichever call of progress raises, the pull passes that exception on, and the next pull ends verified."""
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(case)
    stages: list[str] = []
    scene.pull(progress=lambda event: stages.append(event.stage))
    assert "swap" in stages
    for number in range(len(stages)):
        scene.restore()
        calls = iter(range(len(stages)))

        def raise_at(event: gpusync.Progress, calls: object = calls, number: int = number) -> None:
            if next(calls) == number:  # type: ignore[call-overload]
                raise Stopped(event.stage)

        opened = open_descriptors()
        with pytest.raises(Stopped):
            scene.pull(progress=raise_at)
        assert open_descriptors() == opened
        when = f"{swap}: progress raised at call {number} ({stages[number]})"
        scene.check_no_file_is_torn(when)
        if number <= stages.index("swap"):
            assert files_of(scene.local) == scene.old, when
        scene.pull()
        scene.check_new(when)
