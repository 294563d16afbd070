"""Slices: any part of one, from within a run to within another, is where its geometry says."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpusync.placement.slices import Slice

Bytes = NDArray[np.uint8]


@st.composite
def slices(draw: st.DrawFn) -> tuple[Slice, int]:
    """A slice of a live storage of random bytes, and the size of its tensor."""
    run, runs = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    live_stride, tensor_stride = (run + draw(st.integers(0, 9)) for _ in range(2))
    live_begin, tensor_begin = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    live = np.random.default_rng(1).bytes(live_begin + runs * live_stride)
    data = torch.frombuffer(bytearray(live), dtype=torch.uint8)
    made = Slice(data, ("w",), run, runs, live_begin, live_stride, tensor_begin, tensor_stride)
    return made, tensor_begin + runs * tensor_stride


def tensor_positions(part: Slice) -> NDArray[np.intp]:
    run, column = np.divmod(np.arange(part.nbytes), part.run_nbytes)
    return part.tensor_begin + run * part.tensor_stride + column


@settings(max_examples=300, deadline=None)
@given(slices(), st.data())
def test_a_part_is_read_and_written_where_it_lies(
    drawn: tuple[Slice, int], data: st.DataObject
) -> None:
    part, nbytes = drawn
    begin = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(begin, nbytes))
    tensor = np.frombuffer(np.random.default_rng(2).bytes(nbytes), np.uint8).copy()
    positions = tensor_positions(part)
    inside = np.flatnonzero((positions >= begin) & (positions < end))
    range_ = part.part_of(begin, end - begin)
    assert range_[1] - range_[0] == inside.size
    if inside.size:
        assert range_[0] == inside[0]
    live = part.live_positions(np.arange(*range_))
    before = part.data.numpy().copy()
    piece = tensor[begin:end].copy()

    assert part.from_tensor(piece, begin, range_).tolist() == tensor[positions[inside]].tolist()
    assert part.from_live(range_).tolist() == before[live].tolist()

    wanted = tensor.copy()
    wanted[positions[inside]] = before[live]
    into = piece.copy()
    part.into_tensor(into, begin, range_)
    assert into.tolist() == wanted[begin:end].tolist()

    part.fill(piece, begin)
    before[live] = tensor[positions[inside]]
    assert part.data.numpy().tolist() == before.tolist()
