"""Copies in normal form, and writes that share a byte, against enumeration."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpusync.placement.trace.geometry import (
    Walk,
    Write,
    boxes_meet,
    find_collisions,
    normal_walk,
    span_nbytes,
)


def places(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Every byte of a box, in order."""
    return [
        sum(at * stride for at, stride in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


@st.composite
def slices(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of equal shape of two tensors; each element of both is its own byte offset."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(shape))))
    views = []
    for axes in (range(len(shape)), order):
        padded = [shape[axis] * draw(st.integers(1, 2)) + draw(st.integers(0, 1)) for axis in axes]
        whole = torch.arange(torch.Size(padded).numel()).view(padded)
        for dim, axis in enumerate(axes):
            step = padded[dim] // shape[axis]
            begin = draw(st.integers(0, padded[dim] - (shape[axis] - 1) * step - 1))
            whole = whole.narrow(dim, begin, padded[dim] - begin)
            whole = whole[(slice(None),) * dim + (slice(0, None, step),)].narrow(
                dim, 0, shape[axis]
            )
        views.append(whole.permute([list(axes).index(n) for n in range(len(shape))]))
    return views[0], views[1]


@given(slices(), st.sampled_from([1, 2, 4]))
def test_normal_form_moves_the_same_bytes(
    views: tuple[torch.Tensor, torch.Tensor], itemsize: int
) -> None:
    source, live = views
    walk = normal_walk(itemsize, tuple(source.shape), source.stride(), live.stride())
    assert isinstance(walk, Walk)
    begin_source, begin_live = int(source.min()) * itemsize, int(live.min()) * itemsize
    moved = {
        begin_source + there: begin_live + here
        for there, here in zip(
            places(walk.shape, walk.source_strides),
            places(walk.shape, walk.live_strides),
            strict=True,
        )
    }
    expected = {
        there * itemsize + byte: here * itemsize + byte
        for there, here in zip(source.flatten().tolist(), live.flatten().tolist(), strict=True)
        for byte in range(itemsize)
    }
    assert moved == expected
    read = places(walk.shape, walk.source_strides)
    assert read == sorted(read)


def test_dimensions_that_follow_each_other_merge() -> None:
    assert normal_walk(2, (3, 4, 5), (20, 5, 1), (20, 5, 1)) == Walk((120,), (1,), (1,))
    assert normal_walk(2, (3, 1, 4), (4, 77, 1), (8, 99, 1)) == Walk((3, 8), (8, 1), (16, 1))
    assert normal_walk(2, (3, 4), (1, 3), (4, 1)) == Walk((4, 3, 2), (6, 2, 1), (2, 8, 1))
    assert normal_walk(2, (3, 0), (1, 3), (4, 1)) == Walk((0,), (1,), (1,))
    assert normal_walk(4, (), (), ()) == Walk((4,), (1,), (1,))


def test_bytes_that_are_visited_twice_have_no_normal_form() -> None:
    assert "broadcast" in str(normal_walk(2, (3, 4), (0, 1), (4, 1)))
    assert "broadcast" in str(normal_walk(2, (3, 4), (3, 1), (4, 1)))
    assert "overlaps itself" in str(normal_walk(2, (3, 4), (4, 1), (2, 1)))


boxes = st.integers(1, 3).flatmap(
    lambda dims: st.tuples(
        st.tuples(*[st.integers(1, 5)] * dims), st.tuples(*[st.integers(1, 30)] * dims)
    )
)


@given(boxes, boxes, st.integers(-60, 60))
def test_boxes_meet_where_they_have_a_byte_in_common(
    one: tuple[tuple[int, ...], tuple[int, ...]],
    other: tuple[tuple[int, ...], tuple[int, ...]],
    distance: int,
) -> None:
    common = {*places(*one)} & {distance + place for place in places(*other)}
    assert boxes_meet(distance, *one, *other) is bool(common)


def write(begin: int, shape: tuple[int, ...], strides: tuple[int, ...], name: str | None) -> Write:
    return Write(begin, begin + span_nbytes(shape, strides), shape, strides, name, name or "fill")


def collided(*writes: Write) -> set[tuple[str, str]]:
    return {(c.earlier.what, c.later.what) for c in find_collisions(writes)}


def test_collisions() -> None:
    columns = [write(100 + 4 * n, (50, 4), (40, 1), f"w{n}") for n in range(10)]
    assert not collided(*columns)
    assert collided(*columns, write(138, (4,), (1,), "x")) == {("w9", "x"), ("w0", "x")}
    assert not collided(write(0, (500,), (1,), None), *columns)
    assert collided(*columns[:2], write(90, (500,), (1,), None)) == {("w0", "fill"), ("w1", "fill")}
    assert not collided(write(0, (0,), (1,), "w"), write(0, (0,), (1,), "v"))
    assert not collided(write(0, (8,), (1,), "w"), write(8, (8,), (1,), "v"))


def test_far_reaching_boxes_are_told_apart() -> None:
    rows = ((1 << 20, 4096, 2), (1 << 24, 1 << 12, 1))
    assert not boxes_meet(2, *rows, *rows)
    assert boxes_meet((1 << 24) * 5 + 1, *rows, *rows)
