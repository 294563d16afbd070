"""The tally: the ranks' shares of tensors, added up to the digests of the wholes, which must be the published ones.

Each tensor is one rank's to judge. It gets the shares of all who hold slices of it, block by block in several swaps, so
that buffers stay small; a rank sends a sixteenth of what it holds, wherever the others are. (An all-reduce of the sums
would send a sixteenth of the whole tensor from every rank, twice.) What it finds wrong it raises after the last swap,
and the vote makes it everyone's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpusync.errors import DigestMismatchError
from gpusync.format.sums import (
    BLOCK_NBYTES,
    SUMS_NBYTES,
    Bytes,
    SummedDigest,
    Sums,
    add_sums,
    tail_begin,
    whole_blocks,
)
from gpusync.ranks.channel import Channel
from gpusync.ranks.sharefile import ShareFile
from gpusync.ranks.shares import Extent, Holder, SharedTensor
from gpusync.types import Digest


@dataclass(frozen=True)
class Step:
    """Some blocks of a tensor, and its tail where ``ends``. ``judge`` is the rank that gets the shares of them."""

    tensor: SharedTensor
    judge: int
    first: int
    end: int
    ends: bool

    def part_nbytes(self, extent: Extent) -> int:
        """Return how much of an extent's share the step moves."""
        return extent.blocks(self.first, self.end).size * SUMS_NBYTES + self.tail_nbytes(extent)

    def tail_nbytes(self, extent: Extent) -> int:
        return extent.tail_nbytes(self.tensor.nbytes) if self.ends else 0

    def most_nbytes(self, extent: Extent) -> int:
        """Return a bound on :meth:`part_nbytes`, without counting blocks."""
        return extent.most_blocks(self.first, self.end) * SUMS_NBYTES + self.tail_nbytes(extent)


def plan_swaps(
    tensors: Mapping[str, SharedTensor], size: int, cap_bytes: int
) -> Iterator[list[Step]]:
    """Yield the steps of each swap, alike on every rank.

    No rank sends or gets more than ``cap_bytes`` in one, or one block of one tensor where that is more.
    """
    steps: list[Step] = []
    sent, got = [0] * size, [0] * size
    for step in _steps(tensors, size, cap_bytes):
        moved = [0] * size
        for extent, holders in step.tensor.holders.items():
            for holder in holders:
                moved[holder.rank] += step.most_nbytes(extent)
        fits = got[step.judge] + sum(moved) <= cap_bytes
        if steps and not (
            fits and all(a + b <= cap_bytes for a, b in zip(sent, moved, strict=True))
        ):
            yield steps
            steps, sent, got = [], [0] * size, [0] * size
        steps.append(step)
        got[step.judge] += sum(moved)
        sent = [a + b for a, b in zip(sent, moved, strict=True)]
    if steps:
        yield steps


def _steps(tensors: Mapping[str, SharedTensor], size: int, cap_bytes: int) -> Iterator[Step]:
    largest_first = sorted(tensors.values(), key=lambda tensor: (-tensor.nbytes, tensor.name))
    for number, tensor in enumerate(largest_first):
        blocks = whole_blocks(tensor.nbytes)
        copies = sum(map(len, tensor.holders.values()))
        at_once = max(
            1, (cap_bytes // copies - BLOCK_NBYTES) // SUMS_NBYTES
        )  # a tail is a block at most
        for first in range(0, max(blocks, 1), at_once):
            end = min(first + at_once, blocks)
            yield Step(tensor, number % size, first, end, end == blocks)


@dataclass
class _Judgement:
    """A tensor whose digest is being made."""

    digest: SummedDigest
    unequal: tuple[Holder, Holder] | None = None


@dataclass
class Tally:
    """One rank's part in adding up; ``cap_bytes`` bounds what it sends, and what it gets, at a time."""

    channel: Channel
    shares: ShareFile
    cap_bytes: int
    _sent: dict[tuple[str, int], int] = field(default_factory=dict)
    _judged: dict[str, _Judgement] = field(default_factory=dict)

    def run(self, tensors: Mapping[str, SharedTensor]) -> None:
        """Swap all shares and judge this rank's tensors.

        Raises
        ------
        DigestMismatchError
            A tensor would not be the published one, or two ranks would hold different bytes of it.
        GpuSyncError
            A rank failed or was lost meanwhile.
        """
        failure: DigestMismatchError | None = None
        for steps in plan_swaps(tensors, self.channel.size, self.cap_bytes):
            incoming, from_each = self._swap(steps)
            for step, parts in self._dealt(steps, incoming, from_each):
                failure = failure or self._judge(step, parts)
        if failure is not None:
            raise failure

    def _swap(self, steps: Sequence[Step]) -> tuple[Bytes, list[int]]:
        to_each, from_each = [0] * self.channel.size, [0] * self.channel.size
        mine: list[list[tuple[str, Holder, int]]] = [[] for _ in range(self.channel.size)]
        for step in steps:
            for extent, holders in step.tensor.holders.items():
                here = [holder for holder in holders if holder.rank == self.channel.rank]
                if not here and step.judge != self.channel.rank:
                    continue
                nbytes = step.part_nbytes(extent)
                for holder in here:
                    mine[step.judge].append((step.tensor.name, holder, nbytes))
                    to_each[step.judge] += nbytes
                if step.judge == self.channel.rank:
                    for holder in holders:
                        from_each[holder.rank] += nbytes
        outgoing: Bytes = np.empty(sum(to_each), np.uint8)
        at = 0
        for name, holder, nbytes in (part for parts in mine for part in parts):
            offset = self._sent.get((name, holder.number), 0)
            self.shares.read(name, holder.number, offset, outgoing[at : at + nbytes])
            self._sent[name, holder.number] = offset + nbytes
            at += nbytes
        incoming: Bytes = np.empty(sum(from_each), np.uint8)
        self.channel.swap(outgoing, to_each, incoming, from_each)
        return incoming, from_each

    def _dealt(
        self, steps: Sequence[Step], incoming: Bytes, from_each: Sequence[int]
    ) -> Iterator[tuple[Step, dict[Holder, Bytes]]]:
        """Yield this rank's steps with the part of each holder's share."""
        at = [sum(from_each[:rank]) for rank in range(self.channel.size)]
        for step in steps:
            if step.judge != self.channel.rank:
                continue
            parts = {}
            for extent, holders in step.tensor.holders.items():
                nbytes = step.part_nbytes(extent)
                for holder in holders:
                    parts[holder] = incoming[at[holder.rank] : at[holder.rank] + nbytes]
                    at[holder.rank] += nbytes
            yield step, parts

    def _judge(self, step: Step, parts: Mapping[Holder, Bytes]) -> DigestMismatchError | None:
        """Take the parts of a step; at the tensor's end return what is wrong with it, if anything."""
        tensor = step.tensor
        judged = self._judged.setdefault(tensor.name, _Judgement(SummedDigest(tensor.nbytes)))
        total: Sums = np.zeros((step.end - step.first, 8), np.uint64)
        begin = tail_begin(tensor.nbytes)
        tail: Bytes = np.zeros(tensor.nbytes - begin if step.ends else 0, np.uint8)
        for extent, holders in tensor.holders.items():
            counted = parts[holders[0]]
            for other in holders[1:]:
                if judged.unequal is None and not np.array_equal(counted, parts[other]):
                    judged.unequal = (holders[0], other)
            blocks = extent.blocks(step.first, step.end)
            sums = counted[: blocks.size * SUMS_NBYTES].view(np.uint64).reshape(-1, 8)
            add_sums(total, step.first, blocks, sums)
            raw = counted[blocks.size * SUMS_NBYTES :]
            places = extent.positions(extent.nbytes - raw.size, extent.nbytes)
            tail[places - begin] = raw
        judged.digest.add(total)
        if not step.ends:
            return None
        del self._judged[tensor.name]
        return _wrong(tensor, judged, judged.digest.finish(tail))


def _wrong(tensor: SharedTensor, judged: _Judgement, got: Digest) -> DigestMismatchError | None:
    expected = Digest("xxh3-128", tensor.digest)
    if got != expected:
        return DigestMismatchError(
            "what the ranks' slices make is not the published tensor; nothing was changed, publish the version again",
            version=tensor.version,
            tensor=tensor.name,
            expected=expected,
            got=got,
        )
    if judged.unequal is not None:
        first, second = judged.unequal
        return DigestMismatchError(
            "two copies of a slice would not become the same; nothing was changed, load the model again",
            version=tensor.version,
            tensor=tensor.name,
            expected=f"slice {first.number} of rank {first.rank}",
            got=f"other bytes in slice {second.number} of rank {second.rank}",
        )
    return None
