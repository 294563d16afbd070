"""Change lists over host memory: what is listed, stored, refused and taken back, for every size and address."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpusync.errors import KernelError, OutOfScratchError, PlacementError
from gpusync.format.digest import digest_of
from gpusync.host import sinks
from gpusync.host.applier import HostChanges
from gpusync.host.changes import ENTRIES_PER_STEP, ListBudget, RegionChanges
from gpusync.host.room import Room
from gpusync.host.sinks import ChangeList, LiveSink, SliceSink
from gpusync.placement.slices import Slice

Bytes = NDArray[np.uint8]

_GUARD = 64
_PIECE = 1 << 12


def memory(nbytes: int, address: int, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Return random bytes that begin ``address`` bytes behind a multiple of 64, and all the memory around them."""
    held = np.random.default_rng(seed).integers(0, 256, nbytes + 4 * _GUARD, np.uint8)
    begin = _GUARD + (-held.ctypes.data) % 64 + address
    return held[begin : begin + nbytes], held


def lists_for(live: Bytes, new: Bytes, budget: ListBudget | None = None) -> list[RegionChanges]:
    changes = ChangeList("w", live, budget or ListBudget(1 << 30))
    for offset in range(0, live.size, _PIECE):
        part, was = new[offset : offset + _PIECE], live[offset : offset + _PIECE]
        holds_delta = offset // _PIECE % 2 == 0
        other = changes.collect(
            part ^ was if holds_delta else part, offset, holds_delta=holds_delta
        )
        assert (other == (part if holds_delta else part ^ was)).all()
    return changes.finish()


def mutations(live: Bytes) -> dict[str, Bytes]:
    """Return new bytes of a region, by what changes."""
    rng = np.random.default_rng(live.size)
    masks = {
        "nothing": np.zeros(live.size, np.bool_),
        "everything": np.ones(live.size, np.bool_),
        "the first byte": np.arange(live.size) == 0,
        "the last byte": np.arange(live.size) == live.size - 1,
        "a hundredth": rng.random(live.size) < 0.01,
        "a half": rng.random(live.size) < 0.5,
    }
    return {what: np.where(mask, live ^ 0x5A, live) for what, mask in masks.items()}


SIZES = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, _PIECE - 1, _PIECE, _PIECE + 1, 70_001]


@pytest.mark.parametrize("address", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_list_makes_the_new_bytes_and_back_and_touches_nothing_else(
    nbytes: int, address: int
) -> None:
    live, around = memory(nbytes, address)
    for what, new in mutations(live).items():
        before = around.copy()
        changes = HostChanges(lists_for(live, new), workers=2)
        differing = np.flatnonzero(live != new)
        unit = 1 if address % 2 else 2
        in_body = differing[differing < nbytes - nbytes % unit]
        words = unit * np.unique(in_body // unit).size + (differing.size - in_body.size)
        assert changes.changed_bytes == words, what
        changes.check()
        changes.store()
        assert (live == new).all(), what
        changes.take_back()
        assert (around == before).all(), what


@pytest.mark.parametrize("address", [0, 1])
def test_a_word_that_changed_meanwhile_is_left_as_it_is_with_all_others(address: int) -> None:
    live, _ = memory(1 << 16, address)
    new = live ^ 1
    entries = new.size // (2 - address)
    assert entries > 3 * ENTRIES_PER_STEP
    for at in (3, new.size // 2 + 5, new.size - 2):  # none of them is looked at by sample
        changes = HostChanges(lists_for(live, new), workers=1)
        live[at] ^= 0x80
        changed = live.copy()
        changes.check()
        with pytest.raises(PlacementError, match="changed since prepare"):
            changes.store()
        assert (live == changed).all()
        live[at] ^= 0x80


def test_what_was_taken_back_is_not_ours_any_more() -> None:
    """A second try, or a second undoing, leaves alone what changed since the first was taken back."""
    live, _ = memory(1 << 16, 0)
    changes = HostChanges(lists_for(live, live ^ 1), workers=1)
    changes.store()
    changes.take_back()
    live[:] = np.random.default_rng(1).integers(0, 256, live.size, np.uint8)
    loaded = live.copy()
    with pytest.raises(PlacementError, match="changed since prepare"):
        changes.store()
    changes.take_back()
    assert (live == loaded).all()


def test_a_model_that_was_loaded_anew_is_seen_before_anything_is_stored() -> None:
    live, _ = memory(1 << 16, 0)
    changes = HostChanges(lists_for(live, live ^ 1), workers=1)
    live[:] = np.random.default_rng(1).integers(0, 256, live.size, np.uint8)
    with pytest.raises(PlacementError, match="changed since prepare"):
        changes.check()


def test_lists_of_more_than_an_index_reaches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MOST_WORDS", _PIECE)
    live, _ = memory(20 * _PIECE + 5, 0)
    for what, new in mutations(live).items():
        lists = lists_for(live, new)
        assert all(int(made.index.max()) < _PIECE for made in lists), what
        before = live.copy()
        changes = HostChanges(lists, workers=2)
        changes.store()
        assert (live == new).all(), what
        changes.take_back()
        assert (live == before).all(), what


@pytest.mark.parametrize("unit", [1, 2])
def test_slices_of_any_geometry_become_the_new_bytes_and_touch_nothing_else(
    unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "MOST_WORDS", 64)
    rng = np.random.default_rng(unit)
    for case in range(60):
        run, gap, tensor_gap, begin, tensor_begin = (unit * rng.integers(0, 40, 5)).tolist()
        run, runs = run + unit, int(rng.integers(1, 20))
        around = torch.from_numpy(rng.integers(0, 256, begin + (run + gap) * runs + 1, np.uint8))
        part = Slice(around, (), run, runs, begin, run + gap, tensor_begin, run + tensor_gap)
        assert part.unit >= unit
        new = rng.integers(0, 256, tensor_begin + (run + tensor_gap) * runs + 1, np.uint8)
        sink = SliceSink("w", [part], ListBudget(1 << 30))
        piece = int(rng.choice([8, 64, 4096]))
        for end in (piece, new.size):  # a fold that starts over gives the first pieces again
            for offset in range(0, end, piece):
                sink.write(new[offset : offset + piece], offset)
        before, expected = around.clone(), around.clone()
        for number in range(runs):
            at, of = begin + number * (run + gap), tensor_begin + number * (run + tensor_gap)
            expected[at : at + run] = torch.from_numpy(new[of : of + run])
        changes = HostChanges(sink.finish(), workers=2)
        changes.store()
        assert torch.equal(around, expected), case
        changes.take_back()
        assert torch.equal(around, before), case


def test_a_fold_that_starts_over_half_way_through_makes_the_same_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinks, "_ENTRIES_PER_STRETCH", 300)
    live, _ = memory(3 * _PIECE + 1, 0)
    new = mutations(live)["a half"]
    for pieces in range(5):
        budget = ListBudget(1 << 30)
        sink = LiveSink(live, ("xxh3-128",), ChangeList("w", live, budget), holds_delta=False)
        for offset in [*range(0, pieces * _PIECE, _PIECE), *range(0, live.size, _PIECE)]:
            sink.write(new[offset : offset + _PIECE], offset)
        before, made = live.copy(), sink.finish()
        assert sink.digests()["xxh3-128"] == digest_of("xxh3-128", new)
        changes = HostChanges(made, workers=1)
        assert changes.nbytes == budget.used_bytes
        changes.store()
        assert (live == new).all()
        changes.take_back()
        assert (live == before).all()


def test_lists_are_counted_against_their_cap_and_given_back() -> None:
    live, _ = memory(1 << 16, 0)
    budget = ListBudget(8 * (live.size // 2))
    changes = ChangeList("w", live, budget)
    for _ in range(2):
        changes.restart()
        changes.collect(np.full(live.size, 1, np.uint8), 0, holds_delta=True)
        made = changes.finish()
        assert sum(part.nbytes for part in made) == budget.used_bytes == 4 * live.size
    tight = ListBudget(8 * (live.size // 2) - 1)
    with pytest.raises(OutOfScratchError, match="change lists do not fit"):
        lists_for(live, live ^ 1, tight)


@pytest.mark.parametrize(("piece", "offset"), [(80, 72), (13, 0)])
def test_a_piece_behind_its_region_or_of_half_a_word_is_refused(piece: int, offset: int) -> None:
    live, _ = memory(64, 0)
    changes = ChangeList("w", live, ListBudget(1 << 30))
    with pytest.raises(KernelError, match="whole 2-byte words"):
        changes.collect(np.ones(piece, np.uint8), offset, holds_delta=True)


@pytest.mark.parametrize("what_next", ["another piece", "the end"])
def test_a_list_that_another_one_of_its_thread_was_begun_over_is_refused(what_next: str) -> None:
    live, _ = memory(2 * _PIECE, 0)
    one, other = (ChangeList(name, live, ListBudget(1 << 30)) for name in ("one", "other"))
    changed = np.full(_PIECE, 1, np.uint8)
    one.collect(changed, 0, holds_delta=True)
    other.collect(changed, 0, holds_delta=True)
    with pytest.raises(KernelError, match="unfinished"):
        if what_next == "the end":
            one.finish()
        else:
            one.collect(changed, _PIECE, holds_delta=True)
    assert sum(made.index.size for made in other.finish()) == _PIECE // 2


def test_an_interrupt_while_room_is_made_leaves_no_array_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(Room):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "_value" and isinstance(value, np.ndarray) and value.size and armed:
                armed.clear()
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    armed = [True]
    monkeypatch.setattr(sinks, "room", Interrupted())
    live, _ = memory(_PIECE, 0)
    with pytest.raises(KeyboardInterrupt):
        lists_for(live, live ^ 1)
    changes = HostChanges(lists_for(live, live ^ 1), workers=1)
    new = live ^ 1
    changes.store()
    assert (live == new).all()


def test_no_index_of_the_compiled_loops_is_out_of_bounds(tmp_path: Path) -> None:
    """All of this file again, with numba's checks of every index compiled in."""
    env = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    if os.environ.get("NUMBA_BOUNDSCHECK"):
        return
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
