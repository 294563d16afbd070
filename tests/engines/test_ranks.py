"""Four ranks in four processes: all commit, or all are as before, or all are poisoned."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpusync.errors import DeviceError
from gpusync.ranks.ballots import Ballot, judge_ballots
from gpusync.ranks.group import Limits, join
from gpusync.ranks.rounds import Process
from tests import live, wire
from tests.engines.ranks import Folders, Seen, Step, run, state_of

NAMES = ("a.weight", "s.scale", "d.weight", "b.lut", "c.weight", "o.byte")
RANKS = range(4)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> wire.Stream:
    """A stream with versions 1 to 3; its local folder is left alone."""
    stream = wire.Stream(tmp_path_factory.mktemp("published"))
    for _ in range(3):
        stream.delta(NAMES)
    return stream


@pytest.fixture
def folders(published: wire.Stream, tmp_path: Path) -> Folders:
    return replace(Folders.of(published), local=tmp_path / "local")


@pytest.fixture
def held(published: wire.Stream) -> dict[str, int]:
    """Digest of a version's bytes to the version."""
    return {state_of(state): version for version, state in published.states.items()}


def step_of(seen: Sequence[Sequence[Seen]], number: int) -> list[Seen]:
    """Return what all ranks that lived saw of one update."""
    return [rank[number] for rank in seen if len(rank) > number]


def check_committed(ranks: Sequence[Seen], version: int, held: dict[str, int]) -> None:
    for seen in ranks:
        assert (seen.error, seen.version, held[seen.state]) == (None, version, version), seen


def check_discarded(
    ranks: Sequence[Seen], version: int, held: dict[str, int], error: str, text: str
) -> None:
    """All ranks have this error and stand at a version as if nothing had been tried."""
    for seen in ranks:
        assert (seen.error, seen.poisoned, held[seen.state]) == (error, False, version), seen
        assert text in seen.text
        assert seen.known_version in (version, None)


def check_poisoned(ranks: Sequence[Seen]) -> None:
    for seen in ranks:
        assert (seen.error, seen.version, seen.poisoned) == ("ModelPoisonedError", None, True), seen


def check_not_waited(ranks: Sequence[Seen]) -> None:
    """The ranks were told, or found out: none of them sat through the whole timeout."""
    assert all(seen.seconds < Step.timeout_seconds for seen in ranks), ranks


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_all_commit_and_one_process_writes_back(
    folders: Folders, held: dict[str, int], device: str
) -> None:
    live.need(device)
    steps = [Step(1, device=device), Step(3, device=device), Step(3, device=device)]
    seen = run([folders] * 4, steps)
    for number, version in enumerate((1, 3, 3)):
        check_committed(step_of(seen, number), version, held)
        writers = [rank.write_back for rank in step_of(seen, number)]
        assert writers == ["sync", "none", "none", "none"]
    assert all("rank 0 writes back" in " ".join(rank[0].notes) for rank in seen[1:])
    assert folders.local is not None
    assert held[state_of(wire.read_tensors(folders.local))] == 3
    most = max(rank[2].keys for rank in seen)
    assert most <= max(rank[0].keys for rank in seen) + 4, "rounds leave their keys behind"


def test_each_folder_of_a_host_has_its_own_writer(
    folders: Folders, held: dict[str, int], tmp_path: Path
) -> None:
    own = replace(folders, local=tmp_path / "own")
    none = replace(folders, local=None)
    seen = run([none, folders, own, own], [Step(2)])
    check_committed(step_of(seen, 0), 2, held)
    assert [rank[0].write_back for rank in seen] == ["none", "sync", "sync", "none"]


def test_one_fails_in_prepare(folders: Folders, held: dict[str, int]) -> None:
    seen = run([folders] * 4, [Step(1), Step(2, {2: "fails in prepare"}), Step(2)])
    check_discarded(step_of(seen, 1), 1, held, "DigestMismatchError", "bad bytes")
    others = [seen[rank][1] for rank in (0, 1, 3)]
    assert all("rank 2 failed" in one.text and one.values["rank"] == 2 for one in others)
    assert all(one.values["tensor"] == "a.weight" for one in others)
    check_not_waited(others)
    check_committed(step_of(seen, 2), 2, held)


def test_one_discards(folders: Folders, held: dict[str, int]) -> None:
    seen = run([folders] * 4, [Step(1, {0: "discards"}), Step(1)])
    assert seen[0][0].error is None
    check_discarded(step_of(seen[1:], 0), 0, held, "DeviceError", "rank 0 failed: the update was d")
    check_committed(step_of(seen, 1), 1, held)


def test_one_dies_in_prepare(folders: Folders, held: dict[str, int]) -> None:
    seen = run([folders] * 4, [Step(1), Step(2, {1: "dies in prepare"})])
    assert [len(rank) for rank in seen] == [2, 1, 2, 2]
    check_discarded(step_of(seen, 1), 1, held, "DeviceError", "rank 1 did not vote")
    check_not_waited(step_of(seen, 1))


def test_the_rank_with_the_store_dies_in_prepare(folders: Folders, held: dict[str, int]) -> None:
    seen = run([folders] * 4, [Step(1), Step(2, {0: "dies in prepare"})], own_store=True)
    assert [len(rank) for rank in seen] == [1, 2, 2, 2]
    check_discarded(step_of(seen, 1), 1, held, "DeviceError", "store is lost")


def test_one_dies_between_vote_and_commit(folders: Folders) -> None:
    seen = run([folders] * 4, [Step(1), Step(2, {1: "dies after the vote"}), Step(2)])
    assert [len(rank) for rank in seen] == [3, 1, 3, 3]
    check_poisoned(step_of(seen, 1))
    check_poisoned(step_of(seen, 2))
    check_not_waited(step_of(seen, 1))


def test_the_rank_with_the_store_dies_after_the_vote(
    folders: Folders, held: dict[str, int]
) -> None:
    """A rank that has not heard the verdict yet has stored nothing; one that has cannot know about the others."""
    seen = run([folders] * 4, [Step(1), Step(2, {0: "dies after the vote"})], own_store=True)
    assert [len(rank) for rank in seen] == [1, 2, 2, 2]
    for one in step_of(seen, 1):
        if one.error == "DeviceError":
            check_discarded([one], 1, held, "DeviceError", "store is lost")
        else:
            check_poisoned([one])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_one_refuses_to_store(folders: Folders, held: dict[str, int], device: str) -> None:
    live.need(device)
    steps = [Step(1, {1: "refuses to store"}, device=device), Step(1, device=device)]
    seen = run([folders] * 4, steps)
    check_discarded(step_of(seen, 0), 0, held, "PlacementError", "the weights changed")
    check_committed(step_of(seen, 1), 1, held)


def test_one_fails_to_store(folders: Folders, held: dict[str, int]) -> None:
    seen = run([folders] * 4, [Step(1), Step(2, {3: "fails to store"}), Step(3)])
    check_discarded(step_of(seen, 1), 1, held, "DeviceError", "committing failed and was taken b")
    assert all("rank 3 failed" in rank[1].text for rank in seen[:3])
    check_committed(step_of(seen, 2), 3, held)


@pytest.mark.parametrize(
    "faults",
    [
        {0: "fails to store", 3: "cannot take back"},
        {1: "fails and cannot take back"},
    ],
)
def test_a_store_that_is_not_taken_back_poisons_all(
    folders: Folders, faults: dict[int, str]
) -> None:
    seen = run([folders] * 4, [Step(2, faults)])
    check_poisoned(step_of(seen, 0))
    check_not_waited(step_of(seen, 0))


def test_one_is_stopped_just_as_the_vote_says_yes(folders: Folders, held: dict[str, int]) -> None:
    seen = run([folders] * 4, [Step(1, {2: "interrupted voting"}), Step(1)])
    assert seen[2][0].error == "GpuSyncError"
    check_discarded(seen[2][:1], 0, held, "GpuSyncError", "stopped in the vote")
    others = [seen[rank][0] for rank in (0, 1, 3)]
    check_discarded(others, 0, held, "DeviceError", "rank 2 failed: stopped in the vote")
    check_committed(step_of(seen, 1), 1, held)


def test_one_is_late_for_the_vote(folders: Folders, held: dict[str, int]) -> None:
    seen = run([folders] * 4, [Step(1, {3: "late to commit"}, timeout_seconds=4), Step(2)])
    check_discarded(step_of(seen, 0), 0, held, "DeviceError", "rank 3 did not vote within 4 s")
    check_committed(step_of(seen, 1), 2, held)


@pytest.mark.parametrize("fault", ["late", "absent"])
def test_one_is_late_for_the_update(folders: Folders, held: dict[str, int], fault: str) -> None:
    seen = run([folders] * 4, [Step(1, {3: fault}, timeout_seconds=4), Step(1)])
    text = "rank 3 did not begin the update within 4 s"
    check_discarded(step_of(seen[:3], 0), 0, held, "DeviceError", text)
    check_committed(step_of(seen[:3], 1), 1, held)
    check_committed([seen[3][0 if fault == "late" else 1]], 1, held)  # late, it meets their next


def test_ranks_with_other_targets_refuse(folders: Folders, held: dict[str, int]) -> None:
    seen = run([folders] * 4, [Step(2, targets={1: 3}), Step(2)])
    check_discarded(step_of(seen, 0), 0, held, "ChainError", "asked for different versions")
    check_committed(step_of(seen, 1), 2, held)


def test_ranks_that_follow_different_runs_refuse(
    folders: Folders, published: wire.Stream, held: dict[str, int], tmp_path: Path
) -> None:
    """Equal version numbers, equal index files, other bytes."""
    other = tmp_path / "other"
    shutil.copytree(published.source, other)
    fork = wire.Stream.continuing(other, 0, published.states[0])
    shutil.rmtree(other)
    fork.delta(NAMES)
    theirs = Folders(fork.source, published.base, tmp_path / "theirs")
    seen = run([folders, folders, folders, theirs], [Step(1)])
    check_discarded(step_of(seen, 0), 0, held, "VersionConflictError", "version 1")
    assert seen[0][0].values["ranks"] == [0, 3]


def refusal(*ballots: Ballot) -> str:
    return judge_ballots(ballots).error


def test_ballots() -> None:
    one = Ballot(3, 3, {0: "base", 2: "two", 3: "three"}, {2: "run", 3: "run"})
    assert judge_ballots([one] * 3).go
    assert judge_ballots([one, Ballot(3, 3, {3: "three"})]).go, "from another version to the same"
    assert refusal(one, replace(one, target=4)) == "ChainError"
    assert refusal(one, replace(one, reached=5)) == "ChainError"
    assert refusal(one, replace(one, runs={2: "other"})) == "VersionConflictError"
    assert refusal(one, replace(one, fingerprints={2: "2"})) == "VersionConflictError"
    assert refusal(one, replace(one, fingerprints={3: "3"})) == "VersionConflictError"
    assert refusal(one, replace(one, fingerprints={0: "0"})) == "BaseMismatchError"


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(DeviceError, match="not an initialized"):
        join(object(), None, Limits(1.0, 1 << 20))


def test_whether_a_process_has_ended() -> None:
    here = Process.of(os.getpid())
    assert here is not None and not here.has_ended(here)
    assert replace(here, started="0").has_ended(here), "another process has its number now"
    assert not replace(here, started="0", boot_id="elsewhere").has_ended(here)
    assert not replace(here, pid=1 << 30, namespace="elsewhere").has_ended(here)
