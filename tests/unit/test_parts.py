"""Parts of one update: all are stored, or none."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpusync.errors import ModelPoisonedError, PlacementError
from gpusync.host.applier import HostChanges
from gpusync.host.changes import ListBudget
from gpusync.host.parts import commit_parts
from gpusync.host.sinks import ChangeList, LiveSink

Bytes = NDArray[np.uint8]


def part_of(live: Bytes, new: Bytes) -> HostChanges:
    """Lists that make ``new`` of ``live``."""
    sink = LiveSink(live, (), ChangeList("w", live, ListBudget(1 << 30)), holds_delta=False)
    sink.write(new, 0)
    return HostChanges(sink.finish(), workers=2)


@pytest.fixture
def lives() -> tuple[Bytes, Bytes]:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 256, (2, 1 << 16), np.uint8)
    return first, second


def moved(live: Bytes) -> Bytes:
    new = live.copy()
    new[::7] ^= 1
    return new


def test_every_part_is_stored(lives: tuple[Bytes, Bytes]) -> None:
    wanted = [moved(live) for live in lives]
    commit_parts([part_of(live, new) for live, new in zip(lives, wanted, strict=True)])
    for live, new in zip(lives, wanted, strict=True):
        assert (live == new).all()


def test_a_part_that_changed_has_the_parts_before_it_taken_back(lives: tuple[Bytes, Bytes]) -> None:
    first, second = lives
    before = first.copy()
    parts = [part_of(first, moved(first)), part_of(second, moved(second))]
    second[7 * 5000] ^= 0x80  # under the list, and not in the sample that is looked at first
    changed = second.copy()
    with pytest.raises(PlacementError, match="changed since"):
        commit_parts(parts)
    assert (first == before).all()
    assert (second == changed).all()


def test_a_part_that_cannot_be_taken_back_poisons(lives: tuple[Bytes, Bytes]) -> None:
    first, second = lives
    parts = [part_of(first, moved(first)), part_of(second, moved(second))]

    def fail() -> None:
        for region in parts[0]._changes:
            region.live.flags.writeable = False
        raise PlacementError("the second part changed")

    parts[1].store = fail  # type: ignore[method-assign]
    with pytest.raises(ModelPoisonedError):
        commit_parts(parts)
