"""Sinks that list what changes while a tensor's new bytes are folded. Live memory is only read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpusync.errors import KernelError
from gpusync.folding.fold import Bytes
from gpusync.format.digest import new_hasher
from gpusync.host.changes import Index, ListBudget, Live, RegionChanges, Words, finish_changes
from gpusync.placement.slices import Slice, any_within
from gpusync.ranks.sharefile import ShareWriter
from gpusync.types import Algorithm, Digest

# The narrow search runs over this many 8-byte words at a time: few calls, and still in cache.
_WIDE_PER_SEARCH = 1 << 16
_WORD = 2


class ChangeList:
    """One region's change list under construction. Live memory is only read."""

    def __init__(self, tensor: str, live: Bytes, budget: ListBudget) -> None:
        self._tensor = tensor
        self._live = live
        self._words = live[: live.size & ~1].view(np.uint16)
        self._budget = budget
        self._index_type = np.uint32 if self._words.size < 1 << 32 else np.uint64
        # Changed 8-byte words that were not searched yet: where, by what XOR, and the live ones.
        capacity = min(_WIDE_PER_SEARCH, live.size // 8 + 1)
        self._places = np.empty(capacity, np.intp)
        self._diff = np.empty(capacity, np.uint64)
        self._before = np.empty(capacity, np.uint64)
        self._made: list[RegionChanges] = []
        self.restart()

    def restart(self) -> None:
        """Drop what was collected: the pieces come again from the first."""
        self._budget.give_back(sum(made.nbytes for made in self._made))
        self._made = []
        self._count = 0
        self._sum = 0
        self._tail = 0

    def collect(self, diff: Bytes, new: Bytes, offset: int) -> None:
        """Add what changes in one piece. Live memory is not read again: what it held is new XOR ``diff``.

        Parameters
        ----------
        diff, new
            New XOR live, and the new bytes, of the same range; ``diff`` is 8-byte aligned.
        offset
            Of the range in the region, a multiple of 8.
        """
        body = diff.size & ~7
        if body:
            self._collect(diff[:body].view(np.uint64), new[:body].view(np.uint64), offset // 8)
        rest = diff.size - body
        if not rest:
            return
        padded = np.zeros((2, 8), np.uint8)
        padded[0, :rest], padded[1, :rest] = diff[body:], new[body:]
        if (offset + diff.size) % _WORD:
            self._tail = int(padded[0, rest - 1])
            padded[0, rest - 1] = 0
        self._collect(padded[0].view(np.uint64), padded[1].view(np.uint64), (offset + body) // 8)

    def finish(self) -> list[RegionChanges]:
        """Return the finished list, in several pieces; a last odd byte is one of its own.

        Raises
        ------
        KernelError
            The entries do not add up to the differences that they were chosen from, modulo 2^64.
        """
        self._search()
        if self._sum % (1 << 64):
            raise KernelError(
                "a change list does not add up to the difference that it was made of",
                tensor=self._tensor,
            )
        if self._tail:
            last, value = self._live[-1:], np.array([self._tail], np.uint8)
            self._add(last, np.zeros(1, np.uint32), value, last.copy())
        return self._made

    def _collect(self, diff: NDArray[np.uint64], new: NDArray[np.uint64], first_place: int) -> None:
        """Keep the 8-byte words that change; most do not, and each call here is paid for by other threads too."""
        places = _nonzero(diff)
        if not places.size:
            return
        self._sum += int(np.add.reduce(diff))
        while places.size:
            fitting = places[: self._places.size - self._count]
            span = slice(self._count, self._count + fitting.size)
            np.add(fitting, first_place, out=self._places[span])
            diff.take(fitting, out=self._diff[span], mode="clip")
            new.take(fitting, out=self._before[span], mode="clip")
            self._before[span] ^= self._diff[span]
            self._count += fitting.size
            places = places[fitting.size :]
            if self._count == self._places.size:
                self._search()

    def _search(self) -> None:
        """Find the 2-byte words that change within the 8-byte words kept so far."""
        if not self._count:
            return
        words = self._diff[: self._count].view(np.uint16)
        chosen = (words != 0).nonzero()[0]
        value: Words = words.take(chosen)
        # Each 2-byte word weighs what its place in the 8-byte word makes it.
        lanes = chosen & 3
        by_lane = np.bincount(lanes, value, minlength=4)  # sums below 2^53: exact
        self._sum -= sum(int(total) << (16 * lane) for lane, total in enumerate(by_lane))
        index: Index = ((self._places.take(chosen >> 2) << 2) + lanes).astype(self._index_type)
        seen: Words = self._before[: self._count].view(np.uint16).take(chosen)
        self._count = 0
        self._add(self._words, index, value, seen)

    def _add(self, live: Live, index: Index, value: Live, seen: Live) -> None:
        self._made.append(finish_changes(self._tensor, live, index, value, seen, self._budget))


class SliceSink:
    """Lists what changes in slices of a tensor while its new bytes are folded.

    A list makes of the live words what the new ones are, whatever they were; the digest of the whole tensor is whoever's
    folds it, or whoever's adds up the slices' shares.

    Parameters
    ----------
    shares
        Take each slice's new bytes; none where the whole tensor is folded.
    """

    def __init__(
        self,
        tensor: str,
        slices: Sequence[Slice],
        budget: ListBudget,
        shares: Sequence[ShareWriter] = (),
    ) -> None:
        self._tensor = tensor
        self._slices = slices
        self._budget = budget
        self._shares = shares
        self._made: list[RegionChanges] = []

    def write(self, piece: Bytes, offset: int) -> None:
        """Take one piece; ``offset`` is even."""
        if offset == 0 and self._made:
            self._budget.give_back(sum(made.nbytes for made in self._made))
            self._made = []
        if offset == 0:
            for share in self._shares:
                share.restart()
        for number, part in enumerate(self._slices):
            begin, end = part.part_of(offset, piece.size)
            if begin < end:
                new = part.from_tensor(piece, offset, (begin, end))
                self._collect(part, new, begin, end)
                if self._shares:
                    self._shares[number].write(begin, new)

    def wants(self, offset: int, nbytes: int) -> bool:
        """Return whether any of the slices has bytes in a range of the tensor."""
        return any_within(self._slices, offset, nbytes)

    def finish(self) -> list[RegionChanges]:
        """Return the finished lists; the shares are complete."""
        for share in self._shares:
            share.finish()
        return self._made

    def _collect(self, part: Slice, new: Bytes, begin: int, end: int) -> None:
        kind: np.dtype[np.unsignedinteger] = np.dtype(np.uint16 if part.unit == 2 else np.uint8)
        live: Live = part.from_live((begin, end)).view(kind)
        diff: Live = np.bitwise_xor(live, new.view(kind))
        chosen = diff.nonzero()[0]
        if not chosen.size:
            return
        positions = part.live_positions(begin + chosen * kind.itemsize) // kind.itemsize
        storage = part.data.numpy()
        words = storage[: storage.size // kind.itemsize * kind.itemsize].view(kind)
        index: Index = positions.astype(np.uint32 if words.size < 1 << 32 else np.uint64)
        made = finish_changes(self._tensor, words, index, diff[chosen], live[chosen], self._budget)
        self._made.append(made)


class LiveSink:
    """Digests a region's new bytes as they are folded, and collects what changes.

    Parameters
    ----------
    live
        The region's bytes.
    algorithms
        Digests to take of the new bytes.
    changes
        None for a second name of a region, which is only digested.
    holds_delta
        The pieces are new XOR live (xor deltas folded over zeros), else the new bytes themselves.
    """

    def __init__(
        self,
        live: Bytes,
        algorithms: Iterable[Algorithm],
        changes: ChangeList | None,
        *,
        holds_delta: bool,
    ) -> None:
        self._live = live
        self._algorithms = tuple(algorithms)
        self._hashers = {algorithm: new_hasher(algorithm) for algorithm in self._algorithms}
        self._changes = changes
        self._holds_delta = holds_delta
        self._written = 0

    def write(self, piece: Bytes, offset: int) -> None:
        """Take one piece; ``offset`` is a multiple of 8."""
        if offset == 0 and self._written:
            self._restart()
        self._written += piece.size
        live = self._live[offset : offset + piece.size]
        other = np.bitwise_xor(piece, live, out=_scratch.bytes(piece.size))
        new, diff = (other, piece) if self._holds_delta else (piece, other)
        for hasher in self._hashers.values():
            hasher.update(new.data)
        if self._changes is not None:
            self._changes.collect(diff, new, offset)

    def digests(self) -> dict[Algorithm, Digest]:
        """Return the digests of the new bytes."""
        return {algorithm: hasher.digest() for algorithm, hasher in self._hashers.items()}

    def finish(self) -> list[RegionChanges]:
        """Return the finished change list; empty for a second name."""
        return self._changes.finish() if self._changes is not None else []

    def _restart(self) -> None:
        self._hashers = {algorithm: new_hasher(algorithm) for algorithm in self._algorithms}
        self._written = 0
        if self._changes is not None:
            self._changes.restart()


class _Scratch(threading.local):
    """This thread's buffers for one piece; fresh large arrays cost a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._flags = np.empty(0, np.bool_)

    def bytes(self, nbytes: int) -> Bytes:
        if self._bytes.size < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes]

    def flags(self, count: int) -> NDArray[np.bool_]:
        if self._flags.size < count:
            self._flags = np.empty(count, np.bool_)
        return self._flags[:count]


_scratch = _Scratch()


def _nonzero(words: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return where words are not zero. In two steps: numpy finds sparse places one by one, dense ones without a branch."""
    groups = -(-words.size // 8)
    flags = _scratch.flags(8 * groups)
    flags[words.size :] = False
    np.not_equal(words, 0, out=flags[: words.size])
    eights = flags.view(np.uint64)
    first = (eights != 0).nonzero()[0]
    within = eights.take(first).view(np.bool_).nonzero()[0]
    places: NDArray[np.intp] = first.take(within >> 3)
    places <<= 3
    within &= 7
    places += within
    return places
