"""The device memory that an update needs while it is prepared: taken at the start, given back at the end."""

from __future__ import annotations

import torch

from gpusync.device.capacities import INPUT_SLACK_NBYTES
from gpusync.device.chunks import GUARD_NBYTES, Capacities
from gpusync.device.launches import COUNTS_NBYTES, ROWS_NBYTES, SUMS_NBYTES
from gpusync.device.nvcomp import MAX_FRAME_NBYTES, Nvcomp
from gpusync.device.runtime import Event, Runtime
from gpusync.errors import OutOfScratchError

_GROUP_TILES = 64

KEPT_NBYTES_PER_TILE = 160
"""Of the tables that are sent with a batch and stay with its list: a chunk's row, and a tile's."""


class Slot:
    """The buffers of one batch under way; there are two, so that one is filled while the other is worked on.

    The host has waited for the number of entries of a batch before it gives the batch's slot to another one: everything
    up to there has run. ``listed`` is behind what had not: the list, which reads ``delta`` and ``counts``.
    """

    def __init__(self, runtime: Runtime, capacities: Capacities) -> None:
        tiles = capacities.tiles
        self.input = runtime.empty(capacities.input_nbytes + INPUT_SLACK_NBYTES)
        self.delta = runtime.empty(capacities.delta_nbytes)
        self.sums = runtime.empty(tiles * SUMS_NBYTES)
        self.counts = runtime.empty(tiles * COUNTS_NBYTES)
        self.rows = runtime.empty(tiles * ROWS_NBYTES)
        self.totals = runtime.empty(tiles * 4)
        self.groups = runtime.empty(-(-tiles // _GROUP_TILES) * 4)
        self.list_sums = runtime.empty(tiles * 8)
        self.count = host_memory(runtime, 8)
        self.tables = runtime.empty(capacities.tables_nbytes)
        self.staging = host_memory(runtime, capacities.tables_nbytes + tiles * KEPT_NBYTES_PER_TILE)
        self.listed: Event | None = None


class Scratch:
    """Two slots, and what the one decode stream uses for batch after batch.

    Parameters
    ----------
    regions
        Rows of the tables of states (u64[8]), digests (u64[2]) and marks (u32 per tensor).
    """

    def __init__(
        self, runtime: Runtime, capacities: Capacities, nvcomp: Nvcomp, regions: int
    ) -> None:
        self.slots = (Slot(runtime, capacities), Slot(runtime, capacities))
        self._output = runtime.empty(GUARD_NBYTES + capacities.output_nbytes)
        output_nbytes = capacities.output_nbytes
        temp_nbytes = nvcomp.decode_temp_nbytes(
            capacities.frames, min(output_nbytes, MAX_FRAME_NBYTES), output_nbytes
        )
        self._temp = runtime.empty(temp_nbytes + 2 * GUARD_NBYTES)
        self.states = runtime.empty(regions * 64)
        self.digests = runtime.empty(regions * 16)
        self.bad = runtime.empty(regions * 4)
        self.flags = runtime.empty(12)

    @property
    def output(self) -> torch.Tensor:
        """Where frames are decoded to, without the guard before it; behind every layer's output is another."""
        return self._output[GUARD_NBYTES:]

    @property
    def temp(self) -> torch.Tensor:
        """nvCOMP's scratch, without the guards around it."""
        return self._temp[GUARD_NBYTES:-GUARD_NBYTES]

    @property
    def guards(self) -> tuple[int, int, int]:
        """Addresses of the guards around nvCOMP's scratch, and of that before the output."""
        begin = self._temp.data_ptr()
        return begin, begin + self._temp.numel() - GUARD_NBYTES, self._output.data_ptr()

    @property
    def gate(self) -> int:
        """Address of the flag that stops what follows a failure."""
        return self.flags.data_ptr()

    @property
    def damaged(self) -> int:
        """Address of the flag of a guard zone that was written."""
        return self.flags.data_ptr() + 4

    @property
    def unlike(self) -> int:
        """Address of the flag of a list that is not what the digest pass counted."""
        return self.flags.data_ptr() + 8


def host_memory(runtime: Runtime, nbytes: int) -> torch.Tensor:
    """Return pinned memory, or pageable where the system refuses to pin: slower, and right all the same."""
    try:
        return runtime.pinned(nbytes)
    except OutOfScratchError:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
