"""The pinned ring: the only host memory that copies to the device are made from."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from gpusync.device.runtime import Event, Runtime, Wait
from gpusync.errors import OutOfScratchError

MIN_SLOT_NBYTES = 1 << 20
"""The smallest slot that is tried before memory that is not pinned is taken."""


@dataclass(eq=False, slots=True)
class Slot:
    """One buffer of the ring: the same bytes as a tensor, to copy from, and as an array, to fill."""

    memory: torch.Tensor
    array: NDArray[np.uint8]
    event: Event | None = None


class PinnedRing:
    """Fixed host buffers, lent to one thread at a time and lent again once the copy out of them is done.

    Parameters
    ----------
    runtime
        Gives the pinned memory.
    slots, slot_nbytes
        Number of buffers, and the size of each. Where the system refuses to lock so much, the slots get smaller; under
        ``MIN_SLOT_NBYTES`` they are pageable, from which copies are slower and hold up the thread that queues them.

    Attributes
    ----------
    runtime
        The one it was made with.
    note
        What became of the request where it was not met, for the report; else None.
    """

    def __init__(self, runtime: Runtime, slots: int = 8, slot_nbytes: int = 4 << 20) -> None:
        self.runtime = runtime
        self.slots = slots
        self.slot_nbytes = slot_nbytes
        self.is_pinned = True
        self.note: str | None = None
        memory = self._allocate()
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for number in range(slots):
            part = memory[number * self.slot_nbytes : (number + 1) * self.slot_nbytes]
            self._free.put(Slot(part, part.numpy()))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_nbytes

    def lend(self) -> Slot:
        """Return a slot that may be filled; blocks until one was given back and the copy out of it is done.

        Raises
        ------
        ModelPoisonedError
            The device is lost.
        """
        slot = self._free.get()
        if slot.event is not None:
            try:
                slot.event.synchronize(Wait.HOST_FOR_COPY)
            except BaseException:
                self._free.put(slot)
                raise
            slot.event = None
        return slot

    def give_back(self, slot: Slot, event: Event | None) -> None:
        """Take a slot back; ``event`` is behind the copy out of it, None where none was queued."""
        slot.event = event
        self._free.put(slot)

    def _allocate(self) -> torch.Tensor:
        asked = self.slot_nbytes
        while True:
            try:
                memory = self.runtime.pinned(self.nbytes)
            except OutOfScratchError as err:
                if self.slot_nbytes // 2 >= MIN_SLOT_NBYTES:
                    self.slot_nbytes //= 2
                    continue
                self.slot_nbytes, self.is_pinned = asked, False
                self.note = f"staging from pageable memory: pinning was refused ({err})"
                return torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            if self.slot_nbytes < asked:
                self.note = (
                    f"staging through {self.nbytes} pinned bytes: {self.slots * asked} were refused"
                )
            return memory
