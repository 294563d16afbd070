"""Slices: parts of a checkpoint tensor that lie live as runs of bytes, as sharded and fused parameters hold them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gpusync.placement.trace import Copy

Bytes = NDArray[np.uint8]

MAX_SLICES = 4096
"""Most slices that one copy may fall into: beyond it the walk over them would cost more than the bytes."""


@dataclass(frozen=True)
class Slice:
    """Runs of a tensor, in tensor order. Position q counts the slice's bytes from 0. Sizes and positions are bytes.

    Parameters
    ----------
    data
        Flat uint8 view of the whole live storage, on whatever device; the model owns it.
    live_names
        Parameters and buffers that share the storage.
    run_nbytes, runs
        Bytes of a run that is contiguous on both sides, and number of runs.
    live_begin, live_stride
        Of the first run in ``data``, and from one run's begin to the next one's.
    tensor_begin, tensor_stride
        Likewise in the tensor.
    """

    data: torch.Tensor
    live_names: tuple[str, ...]
    run_nbytes: int
    runs: int
    live_begin: int
    live_stride: int
    tensor_begin: int
    tensor_stride: int

    @property
    def nbytes(self) -> int:
        return self.run_nbytes * self.runs

    @property
    def extent_nbytes(self) -> int:
        """Live bytes from the first run's begin to the last one's end."""
        steps = (self.runs - 1) * self.live_stride
        return steps + self.run_nbytes if self.nbytes else 0

    @property
    def address(self) -> int:
        """Where the first run begins."""
        return self.data.data_ptr() + self.live_begin

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def unit(self) -> int:
        """2 where the slice is whole 2-byte words of the storage and of the tensor, else 1."""
        odd = self.data.data_ptr() | self.live_begin | self.run_nbytes | self.tensor_begin
        if self.runs > 1:
            odd |= self.live_stride | self.tensor_stride
        return 1 if odd & 1 else 2

    def part_of(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the slice's bytes, from and to, that lie in a range of the tensor."""
        return self._before(offset), self._before(offset + nbytes)

    def from_tensor(self, piece: Bytes, offset: int, part: tuple[int, int]) -> Bytes:
        """Return a part's bytes, copied out of a piece of the tensor that begins at ``offset`` and holds them."""
        return self._gather(
            torch.from_numpy(piece), self.tensor_begin - offset, self.tensor_stride, part
        )

    def into_tensor(self, piece: Bytes, offset: int, part: tuple[int, int]) -> None:
        """Copy a part's live bytes into a piece of the tensor that begins at ``offset`` and holds them."""
        memory = torch.from_numpy(piece)
        into = self._views(memory, self.tensor_begin - offset, self.tensor_stride, part)
        out_of = self._views(self.data, self.live_begin, self.live_stride, part)
        for view, live in zip(into, out_of, strict=True):
            view.copy_(live)

    def from_live(self, part: tuple[int, int]) -> Bytes:
        """Return a part's live bytes, copied."""
        return self._gather(self.data, self.live_begin, self.live_stride, part)

    def fill(self, piece: Bytes, offset: int) -> None:
        """Write what a piece of the tensor, which begins at ``offset``, has of the slice to where it lies in ``data``."""
        part = self.part_of(offset, piece.size)
        source = torch.from_numpy(piece)
        for run, column, runs, width in self._blocks(*part):
            begin = self.tensor_begin - offset + run * self.tensor_stride + column
            to = self.live_begin + run * self.live_stride + column
            torch.as_strided(self.data, (runs, width), (self.live_stride, 1), to).copy_(
                torch.as_strided(source, (runs, width), (self.tensor_stride, 1), begin)
            )

    def live_positions(self, q: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return where in ``data`` bytes of the slice lie."""
        if self.runs == 1:
            return q + self.live_begin
        run, column = np.divmod(q, self.run_nbytes)
        return run * self.live_stride + column + self.live_begin

    def _before(self, position: int) -> int:
        """Return how many of the slice's bytes come before a tensor byte."""
        inside = position - self.tensor_begin
        if inside <= 0:
            return 0
        if self.runs == 1:
            return min(inside, self.nbytes)
        run, column = divmod(inside, self.tensor_stride)
        return min(run * self.run_nbytes + min(column, self.run_nbytes), self.nbytes)

    def _gather(
        self, memory: torch.Tensor, begin: int, stride: int, part: tuple[int, int]
    ) -> Bytes:
        gathered = torch.empty(part[1] - part[0], dtype=torch.uint8, device=memory.device)
        at = 0
        for view in self._views(memory, begin, stride, part):
            gathered[at : at + view.numel()].view(view.shape).copy_(view)
            at += view.numel()
        array: Bytes = gathered.cpu().numpy()
        return array

    def _views(
        self, memory: torch.Tensor, begin: int, stride: int, part: tuple[int, int]
    ) -> list[torch.Tensor]:
        """Return a part as views of memory that has the first run at ``begin``, and the others a stride apart."""
        return [
            torch.as_strided(
                memory,
                (runs, width),
                (stride, 1),
                memory.storage_offset() + begin + run * stride + column,
            )
            for run, column, runs, width in self._blocks(*part)
        ]

    def _blocks(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (run, column, runs, width): the rest of a run, whole runs, and the begin of one."""
        while begin < end:
            run, column = divmod(begin, self.run_nbytes)
            if column or end - begin < self.run_nbytes:
                runs, width = 1, min(self.run_nbytes - column, end - begin)
            else:
                runs, width = (end - begin) // self.run_nbytes, self.run_nbytes
            yield run, column, runs, width
            begin += runs * width


def slices_of(copy: Copy, data: torch.Tensor, live_names: tuple[str, ...]) -> list[Slice]:
    """Return the slices that a copy falls into, in tensor order."""
    *outer, runs, run_nbytes = copy.shape if len(copy.shape) > 1 else (1, *copy.shape)
    strides = zip(copy.source_strides[: len(outer)], copy.live_strides[: len(outer)], strict=True)
    steps = list(strides)
    inner = len(copy.shape) - 2
    found = []
    for place in itertools.product(*(range(size) for size in outer)):
        source = sum(at * step for at, (step, _) in zip(place, steps, strict=True))
        live = sum(at * step for at, (_, step) in zip(place, steps, strict=True))
        found.append(
            Slice(
                data,
                live_names,
                run_nbytes,
                runs,
                copy.live_offset + live,
                copy.live_strides[inner] if inner >= 0 else run_nbytes,
                copy.source_offset + source,
                copy.source_strides[inner] if inner >= 0 else run_nbytes,
            )
        )
    return found


def any_within(slices: Sequence[Slice], offset: int, nbytes: int) -> bool:
    """Return whether any of the slices has bytes in a range of the tensor."""
    for part in slices:
        begin, end = part.part_of(offset, nbytes)
        if begin < end:
            return True
    return False


def count_slices(copy: Copy) -> int:
    """Return how many slices a copy falls into."""
    count = 1
    for size in copy.shape[:-2]:
        count *= size
    return count
