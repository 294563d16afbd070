"""Sinks that list what changes while a tensor's new bytes are folded. Live memory is only read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gpusync.errors import KernelError
from gpusync.folding.fold import Bytes
from gpusync.format.digest import new_hasher
from gpusync.host.changes import MOST_WORDS, ListBudget, RegionChanges
from gpusync.host.loops import Words
from gpusync.host.room import Room
from gpusync.placement.slices import Slice, any_within
from gpusync.ranks.sharefile import ShareWriter
from gpusync.types import Algorithm, Digest

# Entries that make a finished stretch of a list: more are copied out of the thread's room at once.
_ENTRIES_PER_STRETCH = 1 << 16
room = Room()


class ChangeList:
    """One region's change list under construction, by one thread. Live memory is only read."""

    def __init__(self, tensor: str, live: Bytes, budget: ListBudget) -> None:
        self._tensor = tensor
        self._live = live
        self._words = _as_words(live)
        self._budget = budget
        self._made: list[RegionChanges] = []
        self.restart()

    def restart(self) -> None:
        """Drop what was collected: the pieces come again from the first."""
        self._budget.give_back(sum(made.nbytes for made in self._made))
        self._made = []
        self._count = 0
        self._base = 0
        self._number = 0
        self._last: tuple[Bytes, Bytes] | None = None

    def collect(self, piece: Bytes, offset: int, *, holds_delta: bool) -> Bytes:
        """Add what changes in one piece; return piece XOR live, in memory of this thread's that is used again.

        Parameters
        ----------
        piece
            New XOR live if ``holds_delta``, else the new bytes.
        offset
            Of the piece in the region, a multiple of 8.

        Raises
        ------
        KernelError
            Another list was begun in this thread since: a callback prepared another update.
        OutOfScratchError
            The lists exceed their cap.
        """
        self._check_room()
        size = min(piece.size, self._words.nbytes - offset)
        live = self._live[offset : offset + piece.size]
        other = room.bytes(piece.size)
        unit = self._words.itemsize
        if (offset + size) // unit - self._base > MOST_WORDS or not self._count:
            self._finish_stretch()
            self._base = offset // unit
        self._count = room.list_words(
            piece[:size],
            live[:size],
            other[:size],
            holds_delta=holds_delta,
            first=offset // unit - self._base,
            kind=self._words.dtype,
            count=self._count,
        )
        self._number = room.lists
        if self._count >= _ENTRIES_PER_STRETCH:
            self._finish_stretch()
        if size < piece.size:  # the last byte of an odd-sized region
            seen = live[size:].copy()
            np.bitwise_xor(piece[size:], seen, out=other[size:])
            self._last = seen, (piece if holds_delta else other)[size:].copy()
        return other

    def finish(self) -> list[RegionChanges]:
        """Return the finished list, in several stretches; a last odd byte is one of its own."""
        self._finish_stretch()
        if self._last is not None and self._last[1]:
            seen, value = self._last
            index = np.zeros(1, np.uint32)
            self._add(RegionChanges(self._tensor, self._live[-1:], index, value, seen))
        return self._made

    def _check_room(self) -> None:
        if self._count and self._number != room.lists:
            raise KernelError(
                "a list was begun while another one was unfinished in the same thread: prepare no update in a callback "
                "of another one",
                tensor=self._tensor,
            )

    def _finish_stretch(self) -> None:
        if self._count:
            self._check_room()
            index, value, seen = room.entries(self._words.dtype, self._count)
            live = self._words[self._base :]
            self._add(RegionChanges(self._tensor, live, index.copy(), value.copy(), seen.copy()))
            self._count = 0

    def _add(self, made: RegionChanges) -> None:
        self._budget.take(made.nbytes)
        self._made.append(made)


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
        live = part.from_live((begin, end))
        kind: np.dtype[np.unsignedinteger[Any]] = np.dtype(
            np.uint16 if part.unit == 2 else np.uint8
        )
        other = room.bytes(new.size)
        count = room.list_words(new, live, other, holds_delta=False, first=0, kind=kind, count=0)
        if not count:
            return
        numbers, value, seen = room.entries(kind, count)
        bytes_before = begin + numbers.astype(np.intp) * kind.itemsize
        positions = part.live_positions(bytes_before) // kind.itemsize
        storage = part.data.numpy()
        words = storage[: storage.size // kind.itemsize * kind.itemsize].view(kind)
        for base in np.unique(positions // MOST_WORDS) * MOST_WORDS:
            here = positions // MOST_WORDS == base // MOST_WORDS
            index = (positions[here] - base).astype(np.uint32)
            made = RegionChanges(self._tensor, words[base:], index, value[here], seen[here])
            self._budget.take(made.nbytes)
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
        if self._changes is not None:
            other = self._changes.collect(piece, offset, holds_delta=self._holds_delta)
        else:
            live = self._live[offset : offset + piece.size]
            other = np.bitwise_xor(piece, live, out=room.bytes(piece.size))
        new = other if self._holds_delta else piece
        for hasher in self._hashers.values():
            hasher.update(new.data)

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


def _as_words(live: Bytes) -> Words:
    """Return the words of a region: of 2 bytes without a last odd one, or of one byte where it begins at an odd address."""
    if live.ctypes.data % 2:
        return live
    return live[: live.size & ~1].view(np.uint16)
