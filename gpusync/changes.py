"""Change lists: which 2-byte words of a live region change, and by what XOR.

A list is made once per region, whatever the encodings and however many versions fold, and costs 6 bytes per changed
word. Its words are counted on the region's own grid; a last odd byte is an entry of its own, so that two regions never
share one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpusync.digest import new_hasher
from gpusync.errors import KernelError, ModelPoisonedError, OutOfScratchError
from gpusync.fold import Bytes
from gpusync.types import Algorithm, Digest

Words = NDArray[np.uint16]
Index = NDArray[np.unsignedinteger]
Live = NDArray[np.unsignedinteger]

# At 1 % density the words under a part span about 13 MB, and its index converted for a gather fits a core's cache.
_ENTRIES_PER_PART = 1 << 16
_WORD = 2


class ListBudget:
    """Counts the bytes of change lists against their cap; shared by threads."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self.used_bytes = 0

    def take(self, nbytes: int) -> None:
        """Count ``nbytes`` more.

        Raises
        ------
        OutOfScratchError
            The cap would be exceeded.
        """
        with self._lock:
            self.used_bytes += nbytes
            if self.used_bytes > self._cap_bytes:
                raise OutOfScratchError(
                    "the change lists do not fit: apply the chain as several updates, or raise "
                    "GPUSYNC_CHANGE_LIST_BYTES",
                    needed_bytes=self.used_bytes,
                    budget_bytes=self._cap_bytes,
                )


@dataclass(frozen=True)
class ChangePart:
    """Part of a change list: unique, increasing word indexes into ``live`` and the XOR of each.

    ``live`` is the region's even-sized body as 2-byte words (or its last odd byte alone, as bytes); ``seen`` is the
    digest of index, value and the live words as they were at prepare.
    """

    live: Live
    index: Index
    value: Live
    seen: int

    @property
    def nbytes(self) -> int:
        """Memory that the part takes."""
        return self.index.nbytes + self.value.nbytes

    def digest(self, words: Live) -> int:
        """Return the digest of index, value and the given live words."""
        hasher = xxhash.xxh3_128()
        for array in (self.index, self.value, words):
            hasher.update(array.data)
        return hasher.intdigest()

    def gather(self) -> Live | None:
        """Return the live words under the list, None where they are not what they were at prepare."""
        words: Live = self.live.take(self._places(), mode="clip")
        return words if self.digest(words) == self.seen else None

    def store(self, words: Live) -> None:
        """Store the gathered words with the list applied."""
        self.live[self._places()] = words ^ self.value

    def take_back(self, words: Live) -> None:
        """Store the gathered words as they were, whether or not, or in part, the list was stored.

        Raises
        ------
        ModelPoisonedError
            The live words do not come back.
        """
        self.live[self._places()] = words
        if self.gather() is None:
            raise ModelPoisonedError("the live words under a list are not what they were")

    def _places(self) -> NDArray[np.intp]:
        """The index in the type that numpy gathers with; converting inside the gather costs twice as much."""
        return self.index.astype(np.intp)


class ChangeList:
    """One region's change list under construction. Live memory is only read."""

    def __init__(self, live: Bytes, budget: ListBudget) -> None:
        self._live = live
        self._budget = budget
        self._index_type = np.uint32 if live.size // _WORD < 1 << 32 else np.uint64
        self._index: list[Index] = []
        self._value: list[Words] = []
        self._seen: list[Words] = []
        self._tail = 0

    def collect(self, diff: Bytes, live: Bytes, offset: int) -> None:
        """Add what changes in one piece.

        Parameters
        ----------
        diff, live
            New XOR live, and the live bytes, of the same range; ``diff`` is 8-byte aligned.
        offset
            Of the range in the region, a multiple of 8.
        """
        body = diff.size & ~7
        if body:
            self._collect(diff[:body].view(np.uint64), live[:body].view(np.uint16), offset)
        rest = diff.size - body
        if not rest:
            return
        padded = np.zeros((2, 8), np.uint8)
        padded[0, :rest], padded[1, :rest] = diff[body:], live[body:]
        if (offset + diff.size) % _WORD:
            self._tail = int(padded[0, rest - 1])
            padded[0, rest - 1] = 0
        self._collect(padded[0].view(np.uint64), padded[1].view(np.uint16), offset + body)

    def parts(self) -> list[ChangePart]:
        """Return the finished list in parts, each with the digest of the live words that were compared."""
        words = self._live[: self._live.size & ~1].view(np.uint16)
        made = []
        if self._index:
            index, value = np.concatenate(self._index), np.concatenate(self._value)
            seen = np.concatenate(self._seen)
            for start in range(0, index.size, _ENTRIES_PER_PART):
                span = slice(start, start + _ENTRIES_PER_PART)
                made.append(_part(words, index[span], value[span], seen[span]))
        if self._tail:
            last, value_of_tail = self._live[-1:], np.array([self._tail], np.uint8)
            made.append(_part(last, np.zeros(1, np.uint32), value_of_tail, last))
        self._index, self._value, self._seen = [], [], []
        return made

    def _collect(self, diff: NDArray[np.uint64], live: Words, offset: int) -> None:
        """Add the nonzero 2-byte words of ``diff``; first 8 bytes at a time, which skips what did not change."""
        changed = _scratch.flags(diff.size)
        wide = np.flatnonzero(np.not_equal(diff, 0, out=changed))  # a scan of bools is the fast one
        if not wide.size:
            return
        found = diff.take(wide)
        words = found.view(np.uint16)
        place = np.flatnonzero(words != 0)
        value: Words = words.take(place)
        _check_sum(diff, found)
        _check_sum(words, value)
        half = place & 3
        place >>= 2
        place = wide.take(place)
        place <<= 2
        place += half
        index: Index = (place + offset // _WORD).astype(self._index_type)
        self._budget.take(index.nbytes + value.nbytes)
        self._index.append(index)
        self._value.append(value)
        self._seen.append(live.take(place))


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
        self._hashers = {algorithm: new_hasher(algorithm) for algorithm in algorithms}
        self._changes = changes
        self._holds_delta = holds_delta

    def write(self, piece: Bytes, offset: int) -> None:
        """Take one piece; ``offset`` is a multiple of 8."""
        live = self._live[offset : offset + piece.size]
        other = np.bitwise_xor(piece, live, out=_scratch.bytes(piece.size))
        new, diff = (other, piece) if self._holds_delta else (piece, other)
        for hasher in self._hashers.values():
            hasher.update(new.data)
        if self._changes is not None:
            self._changes.collect(diff, live, offset)

    def digests(self) -> dict[Algorithm, Digest]:
        """Return the digests of the new bytes."""
        return {algorithm: hasher.digest() for algorithm, hasher in self._hashers.items()}

    def parts(self) -> list[ChangePart]:
        """Return the finished change list; empty for a second name."""
        return self._changes.parts() if self._changes is not None else []


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


def _part(live: Live, index: Index, value: Live, seen: Live) -> ChangePart:
    part = ChangePart(live, index, value, 0)
    return replace(part, seen=part.digest(np.ascontiguousarray(seen)))


def _check_sum(whole: Live, chosen: Live) -> None:
    """The entries chosen from a range must add up to all of it: what was left out was zero.

    Raises
    ------
    KernelError
        They do not.
    """
    if np.add.reduce(whole, dtype=np.uint64) != np.add.reduce(chosen, dtype=np.uint64):
        raise KernelError("a change list does not add up to the difference that it was made of")
