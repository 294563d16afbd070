"""Four ranks in four processes, each with slices of the tensors: what none can prove alone they prove together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import gpusync
from tests import live, wire
from tests.engines.ranks import Folders, Seen, Step, run, state_of
from tests.unit.test_sharded import ROWS, loaded

RANKS = 4
TOGETHER = tuple(
    f"{name}.weight" for name in ("q", "k", "v", "o", "gate", "up", "down", "conv", "norm", "embed")
)
"""What four ranks hold all of, on 16-byte borders: rows, columns, copies of rows, transposed and uneven rows, copies."""


def shard(rank: int, size: int, folders: Folders) -> nn.Module:
    model = loaded(wire.read_tensors(folders.base), (rank, size))
    gpusync.attach(model, folders.base, load_weights=model.load_weights)
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> wire.Stream:
    """Versions 1 to 3 of what ranks prove together, in every encoding; version 4 of everything."""
    stream = wire.Stream(tmp_path_factory.mktemp("published"), ROWS)
    for encoding in ("xor", "overwrite", "xor_sparse"):
        new = stream.changed(TOGETHER, stream.states[stream.last], 40)
        stream.delta(new=new, encoding=encoding)
    stream.delta([row.name for row in ROWS])
    return stream


@pytest.fixture
def folders(published: wire.Stream) -> Folders:
    """A chain alone: no checkpoint and no base has the whole."""
    return Folders(published.source, published.base, None, chain_only=True)


@pytest.fixture(scope="module")
def held(published: wire.Stream) -> dict[str, tuple[int, int]]:
    """What a rank holds of a version: the digest of its bytes to rank and version."""
    return {
        state_of(live.bytes_of(loaded(state, (rank, RANKS)))): (rank, version)
        for version, state in published.states.items()
        for rank in range(RANKS)
    }


Held = dict[str, tuple[int, int]]


def check(seen: Sequence[Sequence[Seen]], number: int, version: int, held: Held) -> None:
    """All ranks committed this update."""
    for rank, every in enumerate(seen):
        one = every[number]
        assert (one.error, one.version, held[one.state]) == (None, version, (rank, version)), one


def check_refused(
    seen: Sequence[Sequence[Seen]], number: int, version: int, held: Held, error: str, text: str
) -> None:
    """All ranks that lived have this error, and hold a version as if nothing had been tried."""
    for rank, every in enumerate(seen):
        if len(every) > number:
            one = every[number]
            assert (one.error, one.poisoned) == (error, False), one
            assert held[one.state] == (rank, version)
            assert text in one.text, one.text


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_chain_alone_is_enough(folders: Folders, held: Held, device: str) -> None:
    live.need(device)
    steps = [Step(version, device=device) for version in (1, 3, 3)]
    seen = run([folders] * RANKS, steps, build=shard)
    for number, version in enumerate((1, 3, 3)):
        check(seen, number, version, held)
    notes = [" ".join(rank[0].notes) for rank in seen]
    assert all("10 tensor(s) in slices were proven by all ranks together" in note for note in notes)
    assert not any("alone" in note for note in notes)
    on_host = "tensor(s) in slices again, for the sums"
    assert all((on_host in note) == (device == "emulated") for note in notes)
    assert max(rank[2].keys for rank in seen) <= max(rank[0].keys for rank in seen) + 4


def test_in_many_small_swaps(folders: Folders, held: Held) -> None:
    seen = run([folders] * RANKS, [Step(2, exchange_bytes=4096)], build=shard)
    check(seen, 0, 2, held)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_what_the_ranks_cannot_prove_is_proven_from_the_whole(
    folders: Folders, held: Held, device: str
) -> None:
    with_base = replace(folders, chain_only=False)
    seen = run([with_base] * RANKS, [Step(4, device=device)], build=shard)
    check(seen, 0, 4, held)
    for rank in seen:
        notes = " ".join(rank[0].notes)
        assert (
            "1 tensor(s) in slices were proven by this rank alone, from the whole: the r" in notes
        )


def test_without_the_whole_the_reason_says_why_not_together(folders: Folders, held: Held) -> None:
    seen = run([folders] * RANKS, [Step(3), Step(4)], build=shard)
    check(seen, 0, 3, held)
    check_refused(seen, 1, 3, held, "PlacementError", "cannot prove it together")


@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (0, "rots qkv 0"),
        (2, "rots o 17"),  # one unit of a column
        (3, "rots qkv 2047"),  # the last row of q: tail and last stripe of the whole
        (1, "rots qkv 2048"),  # the second copy of a row of k
        (2, "rots norm_again 255"),  # one of eight copies of a whole
        (1, "rots down 1500"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_wrong_bytes_in_one_slice_are_refused_by_all(
    folders: Folders, held: Held, rank: int, fault: str, device: str
) -> None:
    steps = [Step(1, {rank: fault}, device=device), Step(1, device=device)]
    seen = run([folders] * RANKS, steps, build=shard)
    check_refused(seen, 0, 0, held, "DigestMismatchError", "nothing was changed")
    check(seen, 1, 1, held)


def test_a_wrong_published_digest_is_refused_by_all(
    published: wire.Stream, folders: Folders, held: Held, tmp_path: Path
) -> None:
    stream = wire.Stream(tmp_path / "other", ROWS)
    stream.delta(["down.weight"], bend=wire.Bend(digest={"down.weight": "0" * 32}))
    seen = run([replace(folders, source=stream.source)] * RANKS, [Step(1)], build=shard)
    check_refused(seen, 0, 0, held, "DigestMismatchError", "down.weight")


@pytest.mark.parametrize(
    "fault", ["dies in prepare", "dies before the sums", "dies finding the others", "dies adding"]
)
def test_one_dies_before_or_while_the_sums_are_added(
    folders: Folders, held: Held, fault: str
) -> None:
    small = {"exchange_bytes": 4096}
    seen = run([folders] * RANKS, [Step(1), Step(2, {1: fault}, **small)], build=shard)
    assert [len(rank) for rank in seen] == [2, 1, 2, 2]
    check_refused(seen, 1, 1, held, "DeviceError", "nothing was stored")


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("fails in prepare", "DigestMismatchError", "bad bytes"),
        ("fails adding", "DeviceError", "the file of slices' sums failed"),
    ],
)
def test_one_fails_before_or_while_the_sums_are_added(
    folders: Folders, held: Held, fault: str, error: str, text: str
) -> None:
    seen = run([folders] * RANKS, [Step(1, {2: fault}), Step(1)], build=shard)
    check_refused(seen, 0, 0, held, error, text)
    check(seen, 1, 1, held)


def test_one_is_late_for_the_sums(folders: Folders, held: Held) -> None:
    steps = [Step(1, {3: "late for the sums"}, timeout_seconds=1), Step(1)]
    seen = run([folders] * RANKS, steps, build=shard)
    check_refused(seen, 0, 0, held, "DeviceError", "rank 3 did not get ready to prove them with")
    check(seen, 1, 1, held)


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_other_sizes(published: wire.Stream, folders: Folders, ranks: int) -> None:
    seen = run([folders] * ranks, [Step(3)], build=shard)
    for rank, (one,) in enumerate(seen):
        expected = live.bytes_of(loaded(published.states[3], (rank, ranks)))
        assert (one.error, one.state) == (None, state_of(expected))
        assert "proven by all ranks together" in " ".join(one.notes)
