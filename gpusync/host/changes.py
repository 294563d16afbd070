"""Change lists: which words of a live region change, and by what XOR.

A list is made once per region, whatever the encodings and however many versions fold, and costs 8 bytes per changed
2-byte word. Where a region's address is odd its words are single bytes; the last byte of an odd-sized region is a list
of its own, so that two regions never share a word.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpusync.errors import ModelPoisonedError, OutOfScratchError
from gpusync.host.loops import Words, store_words

# Entries that are checked and stored in one go: the lines under them stay in a core's cache in between.
ENTRIES_PER_STEP = 1 << 12
_SAMPLE_STEP = 512
MOST_WORDS = 1 << 32
"""Live words that one stretch may reach over: what a uint32 index counts."""


class ListBudget:
    """Counts the bytes of change lists against their cap; shared by threads.

    ``setting`` is the variable that sets the cap, for the error.
    """

    def __init__(self, cap_bytes: int, setting: str = "GPUSYNC_CHANGE_LIST_BYTES") -> None:
        self._cap_bytes = cap_bytes
        self._setting = setting
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
                    f"{self._setting}",
                    needed_bytes=self.used_bytes,
                    budget_bytes=self._cap_bytes,
                )

    def give_back(self, nbytes: int) -> None:
        """Count ``nbytes`` less."""
        with self._lock:
            self.used_bytes -= nbytes


@dataclass(frozen=True)
class RegionChanges:
    """A finished stretch of one region's change list.

    Parameters
    ----------
    tensor
        The checkpoint's name for the region, for errors.
    live
        The live words from the stretch's first one on.
    index
        Unique indexes into ``live``, uint32.
    value, seen
        The XOR of each word, and the word as it was at prepare.
    """

    tensor: str
    live: Words
    index: NDArray[np.uint32]
    value: Words
    seen: Words

    @property
    def nbytes(self) -> int:
        """Memory that the list takes."""
        return self.index.nbytes + self.value.nbytes + self.seen.nbytes

    def sample_is_unchanged(self) -> bool:
        """Look at a few words before any is stored: a model that was reloaded or merged differs everywhere."""
        places = self.index[::_SAMPLE_STEP].astype(np.intp)
        return bool(np.array_equal(self.live[places], self.seen[::_SAMPLE_STEP]))

    def store(self, begin: int, end: int, begun: NDArray[np.uint64]) -> bool:
        """Store the entries from ``begin`` to ``end``, each step checked right before; return whether all were as seen.

        ``begun[0]`` is the end of the entries of which any may have been stored, whatever happens.
        """
        stopped = store_words(
            self.live, self.index, self.value, self.seen, begin, end, ENTRIES_PER_STEP, begun
        )
        return int(stopped) == end

    def take_back(self, begin: int, end: int) -> None:
        """Store the words as they were, whether or not, or half, the entries were stored.

        Raises
        ------
        ModelPoisonedError
            The live words do not come back.
        """
        places = self.index[begin:end].astype(np.intp)
        self.live[places] = self.seen[begin:end]
        if not np.array_equal(self.live[places], self.seen[begin:end]):
            raise ModelPoisonedError(
                "the live words under a list are not what they were", tensor=self.tensor
            )
