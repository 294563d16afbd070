"""Shares: what slices of a tensor, held by several ranks, add to the digest of the whole.

A share is that of one slice: the XXH3 sums of the blocks that it has bytes in (:mod:`gpusync.format.sums`), and its bytes of the
tensor's tail. The shares of slices that together are the tensor, once, make its digest; and where two ranks hold the same
slice and their shares are equal, so is the digest with either.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpusync.errors import DigestMismatchError
from gpusync.format.sums import (
    BLOCK_NBYTES,
    SUMS_NBYTES,
    UNIT_NBYTES,
    Bytes,
    blocks_of,
    tail_begin,
    whole_blocks,
)
from gpusync.placement.slices import Slice

_MAX_RUNS = 1 << 20
"""Most runs of one tensor's slices, over all ranks, that are held against each other."""


@dataclass(frozen=True, order=True)
class Extent:
    """The bytes of a tensor that a slice holds: runs at a stride. ``begin``, ``run_nbytes`` and ``stride`` are bytes."""

    begin: int
    run_nbytes: int
    runs: int
    stride: int

    @classmethod
    def of(cls, part: Slice) -> Extent:
        """Return a slice's extent; one that is contiguous in the tensor has one run, however it lies live."""
        if part.runs == 1 or part.tensor_stride == part.run_nbytes:
            return cls(part.tensor_begin, part.nbytes, 1, part.nbytes)
        return cls(part.tensor_begin, part.run_nbytes, part.runs, part.tensor_stride)

    @property
    def nbytes(self) -> int:
        return self.run_nbytes * self.runs

    def before(self, position: int) -> int:
        """Return how many of the bytes come before a tensor byte."""
        inside = position - self.begin
        if inside <= 0:
            return 0
        if self.runs == 1:
            return min(inside, self.nbytes)
        run, column = divmod(inside, self.stride)
        return min(run * self.run_nbytes + min(column, self.run_nbytes), self.nbytes)

    def ranges(self, begin: int, end: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return where, in the tensor, the runs of bytes ``begin`` to ``end`` of the extent begin and end."""
        if begin >= end:
            return np.empty(0, np.intp), np.empty(0, np.intp)
        first, column = divmod(begin, self.run_nbytes)
        last, last_column = divmod(end - 1, self.run_nbytes)
        begins = self.begin + self.stride * np.arange(first, last + 1)
        ends = begins + self.run_nbytes
        ends[-1] = begins[-1] + last_column + 1
        begins[0] += column
        return begins, ends

    def positions(self, begin: int, end: int) -> NDArray[np.intp]:
        """Return where, in the tensor, each of the bytes ``begin`` to ``end`` of the extent lies; for a few."""
        begins, ends = self.ranges(begin, end)
        found = [np.arange(*range_) for range_ in zip(begins, ends, strict=True)]
        return np.concatenate(found or [begins])

    def blocks(self, first: int, end: int) -> NDArray[np.intp]:
        """Return which of the blocks from ``first`` to ``end`` have bytes of the extent."""
        begin, behind = self.before(first * BLOCK_NBYTES), self.before(end * BLOCK_NBYTES)
        return blocks_of(*self.ranges(begin, behind))

    def most_blocks(self, first: int, end: int) -> int:
        """Return a bound on the number of :meth:`blocks`, without counting them."""
        nbytes = self.before(end * BLOCK_NBYTES) - self.before(first * BLOCK_NBYTES)
        runs = nbytes // self.run_nbytes + 2 if nbytes else 0
        return min(end - first, nbytes // BLOCK_NBYTES + 2 * runs)

    def share_nbytes(self, tensor_nbytes: int) -> int:
        """Return the size of the extent's share of a tensor."""
        blocks = self.blocks(0, whole_blocks(tensor_nbytes)).size
        return blocks * SUMS_NBYTES + self.tail_nbytes(tensor_nbytes)

    def tail_nbytes(self, tensor_nbytes: int) -> int:
        """Return how many of the bytes lie in the tensor's tail."""
        return self.nbytes - self.before(tail_begin(tensor_nbytes))


@dataclass(frozen=True)
class Offer:
    """A tensor of which a rank holds slices: its size, its published xxh3-128, by which version, and the slices."""

    nbytes: int
    digest: str
    version: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Holder:
    """Who holds a slice: a rank, as its slice of this number."""

    rank: int
    number: int


@dataclass(frozen=True)
class SharedTensor:
    """A tensor whose slices, over all ranks, are the whole.

    ``holders`` has each distinct extent, and everyone who holds it; the first one's share is counted, the others' must
    equal it.
    """

    name: str
    nbytes: int
    digest: str
    version: int
    holders: Mapping[Extent, tuple[Holder, ...]]


@dataclass(frozen=True)
class Agreement:
    """What the ranks prove together: tensors by name; and, for slices that one of them proves alone, why."""

    tensors: Mapping[str, SharedTensor] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


def pack_offers(offers: Mapping[str, Offer]) -> bytes:
    """Return offers as bytes for other ranks; slices that many tensors have alike are named once."""
    numbers: dict[tuple[Extent, ...], int] = {}
    rows = [
        [
            name,
            offer.nbytes,
            offer.digest,
            offer.version,
            numbers.setdefault(offer.extents, len(numbers)),
        ]
        for name, offer in offers.items()
    ]
    shapes = [
        [[each.begin, each.run_nbytes, each.runs, each.stride] for each in extents]
        for extents in numbers
    ]
    return zlib.compress(json.dumps([shapes, rows]).encode(), 1)


def unpack_offers(packed: bytes) -> dict[str, Offer]:
    """Return another rank's offers."""
    shapes, rows = json.loads(zlib.decompress(packed))
    extents = [tuple(Extent(*each) for each in shape) for shape in shapes]
    return {
        name: Offer(nbytes, digest, version, extents[number])
        for name, nbytes, digest, version, number in rows
    }


def agree(offers: Sequence[Mapping[str, Offer]]) -> Agreement:
    """Decide from all ranks' offers, by rank, what they prove together; every rank comes to the same."""
    tensors: dict[str, SharedTensor] = {}
    reasons: dict[str, str] = {}
    judged: dict[tuple[int, tuple[Extent, ...]], str] = {}
    for name in sorted({name for offered in offers for name in offered}):
        found = [(rank, offered[name]) for rank, offered in enumerate(offers) if name in offered]
        first = found[0][1]
        holders: dict[Extent, list[Holder]] = {}
        for rank, offer in found:
            for number, extent in enumerate(offer.extents):
                if extent.nbytes:
                    holders.setdefault(extent, []).append(Holder(rank, number))
        key = (first.nbytes, tuple(sorted(holders)))
        if any((offer.nbytes, offer.digest) != (first.nbytes, first.digest) for _, offer in found):
            reasons[name] = "the ranks know it with other digests or sizes"
            continue
        if key not in judged:
            judged[key] = why_not_added(*key)
        if judged[key]:
            reasons[name] = judged[key]
        else:
            tensors[name] = SharedTensor(
                name,
                first.nbytes,
                first.digest,
                first.version,
                {extent: tuple(holders[extent]) for extent in sorted(holders)},
            )
    return Agreement(tensors, reasons)


def why_not_added(nbytes: int, extents: Sequence[Extent]) -> str:
    """Return why the shares of distinct extents do not make a tensor's digest; empty where they do."""
    if sum(extent.runs for extent in extents) > _MAX_RUNS:
        return f"its slices are more than {_MAX_RUNS} runs"
    if any(extent.runs > 1 and extent.stride < extent.run_nbytes for extent in extents):
        return "a slice of it holds bytes twice"
    if whole_blocks(nbytes) and any(_off_units(extent, nbytes) for extent in extents):
        return f"a slice of it begins or ends within {UNIT_NBYTES} bytes"
    ranges = [extent.ranges(0, extent.nbytes) for extent in extents]
    begins = np.concatenate([begin for begin, _ in ranges] or [np.empty(0, np.intp)])
    ends = np.concatenate([end for _, end in ranges] or [np.empty(0, np.intp)])
    order = np.argsort(begins, kind="stable")
    begins, ends = np.append(begins[order], nbytes), np.insert(ends[order], 0, 0)
    if (begins < ends).any():
        return "slices of it overlap in part"
    if (begins > ends).any():
        return "the ranks' slices together are not all of it"
    return ""


def _off_units(extent: Extent, nbytes: int) -> bool:
    end = extent.begin + extent.stride * (extent.runs - 1) + extent.run_nbytes
    odd = extent.begin | (extent.stride if extent.runs > 1 else 0)
    odd |= 0 if extent.runs == 1 and end == nbytes else extent.run_nbytes
    return odd % UNIT_NBYTES != 0


class SlicesOrigin:
    """A tensor as slices of it are live, for who needs no other bytes of it: those between are left as they come.

    ``parts`` are the slices of the tensor ``name``: alike, or without a common byte.
    """

    def __init__(self, name: str, parts: Sequence[Slice]) -> None:
        self._name = name
        by_extent: dict[Extent, list[Slice]] = {}
        for part in parts:
            by_extent.setdefault(Extent.of(part), []).append(part)
        self._copies = list(by_extent.values())

    def read_into(self, piece: Bytes, offset: int) -> None:
        """Fill ``piece`` where it has bytes of the slices.

        Raises
        ------
        DigestMismatchError
            Slices that are alike hold different bytes: with one delta they do not become the same.
        """
        for first, *others in self._copies:
            range_ = first.part_of(offset, piece.size)
            if range_[0] == range_[1]:
                continue
            first.into_tensor(piece, offset, range_)
            for other in others:
                if not np.array_equal(
                    other.from_live(range_), other.from_tensor(piece, offset, range_)
                ):
                    raise DigestMismatchError(
                        "two copies of a tensor are not the same here; nothing was changed, load the model again",
                        tensor=self._name,
                        expected=f"as in {', '.join(first.live_names)}",
                        got=f"other bytes in {', '.join(other.live_names)}",
                    )
