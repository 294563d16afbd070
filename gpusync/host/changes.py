"""Change lists: which 2-byte words of a live region change, and by what XOR.

A list is made once per region, whatever the encodings and however many versions fold, and costs 8 bytes per changed
word (12 in a region of 8 GiB and more). Its words are counted on the region's own grid; a last odd byte is an entry of its own, so that two regions never
share one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpusync.errors import ModelPoisonedError, OutOfScratchError

Words = NDArray[np.uint16]
Index = NDArray[np.unsignedinteger]
Live = NDArray[np.unsignedinteger]

# Entries that are checked and stored in one go: the lines under them stay in a core's cache in between.
_ENTRIES_PER_PART = 1 << 12
_SAMPLE_STEP = 512


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
    """A finished stretch of one region's change list, in parts of 4096 entries, the last one shorter.

    Parameters
    ----------
    tensor
        The checkpoint's name for the region, for errors.
    live
        The region's even-sized body as 2-byte words, or its last odd byte alone.
    index, value
        Unique, increasing word indexes into ``live``, and the XOR of each.
    seen
        For each part the digest of its live words as they were at prepare.
    sample
        Every 512th live word as it was at prepare.
    words
        Room for the live words that commit gathers: nothing large is allocated in the pause.
    """

    tensor: str
    live: Live
    index: Index
    value: Live
    seen: tuple[int, ...]
    sample: Live
    words: Live

    @property
    def nbytes(self) -> int:
        """Memory that the list takes."""
        return self.index.nbytes + self.value.nbytes + self.words.nbytes

    def sample_is_unchanged(self) -> bool:
        """Look at a few words before any is stored: a model that was reloaded or merged differs everywhere."""
        places = self.index[::_SAMPLE_STEP].astype(np.intp)
        return bool(np.array_equal(self.live.take(places, mode="clip"), self.sample))

    def places(self, part: int) -> NDArray[np.intp]:
        """Return one part's index, in the type that numpy gathers with."""
        return self.index[_span(part)].astype(np.intp)

    def gather(self, part: int, places: NDArray[np.intp]) -> bool:
        """Gather the live words under one part; return whether they are what they were at prepare."""
        words = self.words[_span(part)]
        self.live.take(places, out=words, mode="clip")
        return _digest(words) == self.seen[part]

    def store(self, part: int, places: NDArray[np.intp]) -> None:
        """Store the gathered words with the list applied."""
        span = _span(part)
        self.live[places] = self.words[span] ^ self.value[span]

    def take_back(self, part: int) -> None:
        """Store the gathered words as they were, whether or not, or half, the part was stored.

        Raises
        ------
        ModelPoisonedError
            The live words do not come back.
        """
        places = self.places(part)
        self.live[places] = self.words[_span(part)]
        if not self.gather(part, places):
            raise ModelPoisonedError(
                "the live words under a list are not what they were", tensor=self.tensor
            )


def finish_changes(
    tensor: str, live: Live, index: Index, value: Live, seen: Live, budget: ListBudget
) -> RegionChanges:
    """Return a finished list of words of ``live``, where ``seen`` are those words as they are now.

    ``seen`` is kept, as room for the words that commit gathers.
    """
    parts = range(-(-index.size // _ENTRIES_PER_PART))
    made = RegionChanges(
        tensor,
        live,
        index,
        value,
        seen=tuple(_digest(seen[_span(part)]) for part in parts),
        sample=seen[::_SAMPLE_STEP].copy(),
        words=seen,  # it has done its part and is of the right size; its pages are there already
    )
    budget.take(made.nbytes)
    return made


def _span(part: int) -> slice:
    return slice(part * _ENTRIES_PER_PART, (part + 1) * _ENTRIES_PER_PART)


def _digest(words: Live) -> int:
    return xxhash.xxh3_128_intdigest(words.data)
