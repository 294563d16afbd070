"""Host memory that stands for a device's: counted, capped, and with margins that show a write outside."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpusync.errors import OutOfScratchError

ALIGNMENT = 256
MARGIN = 512
"""Bytes before and behind what is handed out: so many that numpy gives even the smallest block back to the system."""

FRESH, FREED, CANARY = 0xCD, 0xDD, 0xC3
"""Bytes of memory nobody has written yet, of memory given back, and of the margins around what is handed out."""

_PROCESS = ctypes.CDLL(None)
_Bytes = npt.NDArray[np.uint8]


@dataclass
class _Block:
    """Memory with its margins. ``raw`` owns it; what is handed out begins at ``begin``."""

    raw: _Bytes
    begin: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.begin + self.nbytes

    def margins(self) -> tuple[_Bytes, _Bytes]:
        return self.raw[: self.begin], self.raw[self.end :]

    def damaged_margin(self) -> str | None:
        before, after = self.margins()
        for margin, where, origin in ((before, "before", self.begin), (after, "behind", 0)):
            (changed,) = np.nonzero(margin != CANARY)
            if changed.size:
                distance = origin - int(changed[-1]) if origin else int(changed[0]) + 1
                return f"{changed.size} bytes {where} memory of {self.nbytes} bytes were written, {distance} off"
        return None


class Arena:
    """Memory of one kind, counted until the last view of it is gone.

    Parameters
    ----------
    kind
        Its name in messages.
    limit_nbytes
        How much may be held at once; None: as much as the host gives.
    busy
        Whether work is queued. Memory given back meanwhile is kept, filled with ``FREED``, until the queues are empty
        (:meth:`settle`), so that queued work which still uses it shows as wrong bytes.
    """

    def __init__(
        self, kind: str, limit_nbytes: int | None, busy: Callable[[], bool] = lambda: False
    ) -> None:
        self.kind = kind
        self.limit_nbytes = limit_nbytes
        self._busy = busy
        self._lock = threading.Lock()
        self._taken_nbytes = 0
        self._peak_nbytes = 0
        # Finalizers run anywhere, in a thread that may hold the lock: they only append.
        self._returned: deque[int] = deque()
        self._spans: dict[int, int] = {}
        self._kept: deque[_Block] = deque()
        self._damage: deque[str] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes held now, without margins."""
        with self._lock:
            return self._count()

    @property
    def peak_nbytes(self) -> int:
        """Most bytes ever held at once."""
        return self._peak_nbytes

    @property
    def damage(self) -> tuple[str, ...]:
        """What was found written that nobody had been given."""
        return tuple(self._damage)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` at an address that is a multiple of ``ALIGNMENT``, filled with ``FRESH``.

        Raises
        ------
        OutOfScratchError
            The limit, or the host, has no more.
        """
        with self._lock:
            held = self._count()
            if self.limit_nbytes is not None and held + nbytes > self.limit_nbytes:
                raise self._exhausted(held + nbytes, self.limit_nbytes)
            try:
                raw = np.empty(MARGIN + ALIGNMENT + nbytes + MARGIN, np.uint8)
            except MemoryError as err:
                raise self._exhausted(held + nbytes, held) from err
            self._taken_nbytes += nbytes
            self._peak_nbytes = max(self._peak_nbytes, held + nbytes)
        begin = MARGIN + -(raw.ctypes.data + MARGIN) % ALIGNMENT
        block = _Block(raw, begin, nbytes)
        for margin in block.margins():
            margin.fill(CANARY)
        given = raw[begin : block.end]
        given.fill(FRESH)
        self._spans[given.ctypes.data] = given.ctypes.data + nbytes
        # torch keeps the array until the storage goes, whatever views were made of it.
        weakref.finalize(given, self._give_back, block).atexit = False
        _set_poisoned(block, True)
        return torch.from_numpy(given)

    def holds(self, address: int) -> bool:
        """Return whether an address lies in memory that was handed out."""
        # Of numbers that exist already: making pairs could begin a collection, and that takes spans out meanwhile.
        begins = list(self._spans)
        return any(begin <= address < self._spans.get(begin, begin) for begin in begins)

    def settle(self) -> None:
        """Let go of what was given back while work was queued. The queues are empty."""
        while self._kept:
            block = self._kept.popleft()
            if (block.raw[block.begin : block.end] != FREED).any():
                self._damage.append(
                    f"{self.kind} memory of {block.nbytes} bytes was written after it had been given back"
                )

    def _give_back(self, block: _Block) -> None:
        self._spans.pop(block.raw.ctypes.data + block.begin, None)
        _set_poisoned(block, False)
        damage = block.damaged_margin()
        if damage is not None:
            self._damage.append(f"{self.kind} memory: {damage}")
        if self._busy():
            block.raw[block.begin : block.end] = FREED
            self._kept.append(block)
        self._returned.append(block.nbytes)

    def _count(self) -> int:
        while self._returned:
            self._taken_nbytes -= self._returned.popleft()
        return self._taken_nbytes

    def _exhausted(self, needed: int, budget: int) -> OutOfScratchError:
        return OutOfScratchError(
            f"the emulated device has no more {self.kind} memory",
            needed_bytes=needed,
            budget_bytes=budget,
        )


def _set_poisoned(block: _Block, poisoned: bool) -> None:
    """Have AddressSanitizer, where this process runs under it, refuse even reads of the margins."""
    verb = "poison" if poisoned else "unpoison"
    function = getattr(_PROCESS, f"__asan_{verb}_memory_region", None)
    if function is None:
        return
    for margin in block.margins():
        function(ctypes.c_void_p(margin.ctypes.data), ctypes.c_size_t(margin.size))
