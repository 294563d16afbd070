"""The CPU applier: change lists against live memory, checked before the first store, undone on failure.

A change list holds, for one region, the 2-byte words that change: their index and new XOR live. It is made once,
whatever the encodings and however many versions fold, and costs 6 bytes per changed word.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpusync.errors import (
    DeviceError,
    KernelError,
    ModelPoisonedError,
    OutOfScratchError,
    PlacementError,
)
from gpusync.fold import Bytes, run_parallel

Words = NDArray[np.uint16]
Index = NDArray[np.unsignedinteger]

_ENTRIES_PER_PART = 1 << 19
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
    digest of the live words as they were at prepare, with index and value.
    """

    live: NDArray[np.unsignedinteger]
    index: Index
    value: NDArray[np.unsignedinteger]
    seen: int

    @property
    def nbytes(self) -> int:
        """Memory that the part takes."""
        return self.index.nbytes + self.value.nbytes

    def digest(self, words: NDArray[np.unsignedinteger]) -> int:
        """Return the digest of index, value and the given live words."""
        hasher = xxhash.xxh3_128()
        for array in (self.index, self.value, words):
            hasher.update(array.data)
        return hasher.intdigest()

    def gather(self) -> NDArray[np.unsignedinteger] | None:
        """Return the live words under the list, None where they are not what they were at prepare."""
        words: NDArray[np.unsignedinteger] = self.live.take(self._places(), mode="clip")
        return words if self.digest(words) == self.seen else None

    def store(self, words: NDArray[np.unsignedinteger]) -> None:
        """Store the gathered words with the list applied."""
        self.live[self._places()] = words ^ self.value

    def take_back(self, words: NDArray[np.unsignedinteger]) -> None:
        """Store the gathered words as they were, whether or not, or in part, the list was stored."""
        self.live[self._places()] = words
        if self.gather() is None:
            raise ModelPoisonedError("the live words under a list are not what they were")

    def _places(self) -> NDArray[np.intp]:
        """The index in the type that numpy gathers with; converting inside the gather costs twice as much."""
        return self.index.astype(np.intp)


class _Buffers(threading.local):
    """This thread's scratch for comparing one piece; fresh large arrays cost a page fault per 4 KiB."""

    def __init__(self) -> None:
        self.diff = np.empty(0, np.uint64)
        self.changed = np.empty(0, np.bool_)


_scratch = _Buffers()


def _buffers(nbytes: int) -> _Buffers:
    if _scratch.diff.nbytes < nbytes:
        _scratch.diff = np.empty((nbytes + 7) // 8, np.uint64)
        _scratch.changed = np.empty((nbytes + 7) // 8, np.bool_)
    return _scratch


class ChangeSink:
    """Collects one region's changes while its new bytes are folded. Live memory is only read."""

    def __init__(self, live: Bytes, budget: ListBudget) -> None:
        self._live = live
        self._budget = budget
        words = live.size // _WORD
        self._index_type = np.uint32 if words < 1 << 32 else np.uint64
        self._index: list[Index] = []
        self._value: list[Words] = []
        self._seen: list[Words] = []
        self._tail = 0

    def write(self, piece: Bytes, offset: int) -> None:
        """Compare a piece of new bytes with the live ones; ``offset`` is even."""
        live = self._live[offset : offset + piece.size]
        body = piece.size & ~7
        if body:
            diff = _buffers(piece.size).diff[: body // 8]
            np.bitwise_xor(piece[:body].view(np.uint64), live[:body].view(np.uint64), out=diff)
            self._collect(diff, live[:body].view(np.uint16), offset)
        rest = piece.size - body
        if rest:
            padded = np.zeros(8, np.uint8)
            padded[:rest] = piece[body:] ^ live[body:]
            if (offset + piece.size) % _WORD:
                self._tail = int(padded[rest - 1])
                padded[rest - 1] = 0
            before = np.zeros(8, np.uint8)
            before[:rest] = live[body:]
            self._collect(padded.view(np.uint64), before.view(np.uint16), offset + body)

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
        """Add the nonzero 2-byte words of ``diff``; first 8 bytes at a time, which skips what did not change.

        ``live`` are the words that ``diff`` was made from, still in this core's cache.
        """
        changed = _buffers(diff.nbytes).changed[: diff.size]
        wide = np.flatnonzero(np.not_equal(diff, 0, out=changed))  # a scan of bools is the fast one
        if not wide.size:
            return
        words = diff.take(wide).view(np.uint16)
        nonzero = np.flatnonzero(words != 0)
        value: Words = words.take(nonzero)
        place = (wide.take(nonzero >> 2) << 2) + (nonzero & 3)
        index: Index = (place + offset // _WORD).astype(self._index_type)
        self._budget.take(index.nbytes + value.nbytes)
        if int(np.add.reduce(diff)) != _sum_of_words(index, value, offset):
            raise KernelError("a change list does not add up to the difference that it was made of")
        self._index.append(index)
        self._value.append(value)
        self._seen.append(live.take(place))


def commit(parts: Sequence[ChangePart], workers: int) -> None:
    """Apply every list, or none.

    Raises
    ------
    PlacementError
        The live words are not those of prepare: the model changed since. Nothing was stored.
    DeviceError
        A store failed; every store was taken back.
    ModelPoisonedError
        A store failed and could not be taken back.
    """
    gathered = dict(run_parallel(_gather, list(enumerate(parts)), workers))
    try:
        for _ in run_parallel(
            lambda item: item[1].store(gathered[item[0]]), list(enumerate(parts)), workers
        ):
            pass
    except BaseException as err:
        _take_back(parts, gathered, err)
        raise DeviceError("committing failed and was taken back; prepare again") from err


def _gather(item: tuple[int, ChangePart]) -> tuple[int, NDArray[np.unsignedinteger]]:
    number, part = item
    words = part.gather()
    if words is None:
        raise PlacementError(
            "live weights changed since prepare; nothing was stored, prepare again"
        )
    return number, words


def _take_back(
    parts: Sequence[ChangePart],
    gathered: Mapping[int, NDArray[np.unsignedinteger]],
    cause: BaseException,
) -> None:
    try:
        for number, part in enumerate(parts):
            part.take_back(gathered[number])
    except BaseException as err:
        raise ModelPoisonedError(
            f"committing failed ({cause!r}) and could not be taken back: replace the process"
        ) from err


def _part(
    live: NDArray[np.unsignedinteger],
    index: Index,
    value: NDArray[np.unsignedinteger],
    seen: NDArray[np.unsignedinteger],
) -> ChangePart:
    part = ChangePart(live, index, value, 0)
    return replace(part, seen=part.digest(np.ascontiguousarray(seen)))


def _sum_of_words(index: Index, value: Words, offset: int) -> int:
    """Sum of the 8-byte words that the entries make up, modulo 2^64."""
    place = ((index - index.dtype.type(offset // _WORD)) & 3).astype(np.uint64) << np.uint64(4)
    return int(np.add.reduce(value.astype(np.uint64) << place))
