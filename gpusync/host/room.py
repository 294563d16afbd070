"""Where a thread collects the changed words of the pieces that it folds."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpusync.errors import KernelError
from gpusync.folding.fold import Bytes
from gpusync.host.loops import Words, list_words

# 8-byte words that are searched in one go.
_WIDE_AT_ONCE = 256
# Entries beyond those asked for: a list that grows by pieces of one size needs no new room with each.
_SPARE_ENTRIES = 1 << 16

Number = TypeVar("Number", bound=np.unsignedinteger[Any])


class Room(threading.local):
    """This thread's buffers; fresh large arrays cost a page fault per 4 KiB. One list is in it at a time.

    ``lists`` counts those that were begun: a list whose number is passed is there no more.
    """

    def __init__(self) -> None:
        self.lists = 0
        self._bytes = np.empty(0, np.uint8)
        self._index: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._value: Words = np.empty(0, np.uint16)
        self._seen: Words = np.empty(0, np.uint16)
        self._places: NDArray[np.uint32] = np.empty(_WIDE_AT_ONCE, np.uint32)
        self._lines: NDArray[np.uint32] = np.empty(_WIDE_AT_ONCE // 8, np.uint32)

    def bytes(self, nbytes: int) -> Bytes:
        """Return bytes to work in, of no list, aligned to 8."""
        if self._bytes.size < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes]

    def list_words(
        self,
        piece: Bytes,
        live: Bytes,
        other: Bytes,
        *,
        holds_delta: bool,
        first: int,
        kind: np.dtype[np.unsignedinteger[Any]],
        count: int,
    ) -> int:
        """Set ``other`` to piece XOR live, and add the changed words to the list; return how many it holds then.

        Parameters
        ----------
        piece
            New XOR live if ``holds_delta``, else the new bytes; whole words.
        live
            Read once: what a list saw is worked out from the other two.
        other
            As :meth:`bytes` returns it.
        first
            Number of the piece's first word.
        kind
            uint16, or uint8 for words of one byte.
        count
            Entries that the list holds already; 0 for a new one.

        Raises
        ------
        KernelError
            The three are not of one size, or that is not whole words: the loop would reach behind them.
        """
        if not piece.size == live.size == other.size or piece.size % kind.itemsize:
            raise KernelError(
                f"a piece, live bytes and room are not as many whole {kind.itemsize}-byte words",
                expected=piece.size,
                got=(live.size, other.size),
            )
        if not count:
            self.lists += 1
        self._reserve(count, piece.size // kind.itemsize + 9)
        value, seen = self._value.view(kind), self._seen.view(kind)

        def add(piece: Bytes, live: Bytes, other: Bytes, first: int, count: int) -> int:
            words = (piece.view(np.uint64), live.view(np.uint64), other.view(np.uint64))
            room = (self._index, value, seen)
            work = (self._places, self._lines)
            return int(list_words(*words, holds_delta, first, *room, count, *work))

        body = piece.size & ~7
        if body:
            count = add(piece[:body], live[:body], other[:body], first, count)
        rest = piece.size - body
        if rest:
            padded = np.zeros((3, 8), np.uint8)
            padded[0, :rest], padded[1, :rest] = piece[body:], live[body:]
            count = add(padded[0], padded[1], padded[2], first + body // kind.itemsize, count)
            other[body:] = padded[2, :rest]
        return count

    def entries(
        self, kind: np.dtype[np.unsignedinteger[Any]], count: int
    ) -> tuple[NDArray[np.uint32], Words, Words]:
        """Return the list's index, value and seen; they are void once the next list begins."""
        value, seen = self._value.view(kind), self._seen.view(kind)
        return self._index[:count], value[:count], seen[:count]

    def _reserve(self, count: int, more: int) -> None:
        """Make room for ``more`` entries behind those that are there.

        The array that is set last is looked at: an interrupt between them leaves it as it was.
        """
        if self._seen.size < count + more:
            size = count + more + _SPARE_ENTRIES
            self._index = _grown(self._index, count, size)
            self._value = _grown(self._value, count, size)
            self._seen = _grown(self._seen, count, size)


def _grown(array: NDArray[Number], count: int, size: int) -> NDArray[Number]:
    """Return an array of ``size`` with the first ``count`` entries; no page behind them is touched."""
    grown: NDArray[Number] = np.empty(size, array.dtype)
    grown[:count] = array[:count]
    return grown
