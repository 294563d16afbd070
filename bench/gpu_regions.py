"""Regions of device memory with a delta each, and the kernels of the device path over them, one step at a time."""

from __future__ import annotations

import numpy as np
import torch
from gpu_lab import Lab

from gpusync.device.kernels import CHUNK, LIST, TILE_NBYTES
from gpusync.device.launches import (
    CHECKS_NBYTES,
    COUNTS_NBYTES,
    ROWS_NBYTES,
    SUMS_NBYTES,
    THREADS,
    CountTables,
    Entries,
    Lists,
    Tiles,
    launch_count,
    launch_digest,
    launch_list_check,
    launch_live_check,
    launch_store,
    launch_write,
)

ENTRY_NBYTES = 4


class Regions:
    """Contiguous regions, one chunk each, at even addresses; deltas packed in the same order.

    Parameters
    ----------
    live, delta
        Device memory that holds them one behind the other, each from a multiple of 16 on.
    sizes
        Bytes of each region.
    """

    def __init__(self, lab: Lab, live: torch.Tensor, delta: torch.Tensor, sizes: list[int]) -> None:
        self.lab = lab
        counts = [-(-nbytes // TILE_NBYTES) for nbytes in sizes]
        self.nbytes, self.ntiles, self.nregions = sum(sizes), sum(counts), len(sizes)
        rows = np.zeros(len(sizes), CHUNK)
        begin = first_tile = 0
        for number, (nbytes, ntiles) in enumerate(zip(sizes, counts, strict=True)):
            row = rows[number]
            row["delta"], row["live"] = delta.data_ptr() + begin, live.data_ptr() + begin
            row["run_nbytes"] = row["run_stride"] = row["nbytes"] = row["region_nbytes"] = nbytes
            row["region"], row["first_tile"] = number, first_tile
            row["unit"], row["listed"] = 2, 1
            begin, first_tile = begin + nbytes, first_tile + ntiles
        self._rows = lab.upload(rows)
        self._tile_chunk = lab.upload(np.repeat(np.arange(len(sizes), dtype=np.uint32), counts))
        self.sums = lab.runtime.empty(self.ntiles * SUMS_NBYTES)
        self.checks = lab.zeros(self.ntiles * CHECKS_NBYTES)
        self.states = lab.runtime.empty(self.nregions * 64)
        self.results = lab.zeros(self.nregions * 16)
        self.flag = lab.zeros(4)
        self._now = lab.runtime.empty(self.ntiles * 8)
        self._count_memory = [
            lab.runtime.empty(nbytes)
            for nbytes in (
                self.ntiles * COUNTS_NBYTES,
                self.ntiles * ROWS_NBYTES,
                self.ntiles * 4,
                -(-self.ntiles // 64) * 4,
                (self.ntiles + 1) * 4,
            )
        ]
        self.tables = CountTables(*(memory.data_ptr() for memory in self._count_memory))
        self.tiles = Tiles(
            self._rows.data_ptr(), len(sizes), self._tile_chunk.data_ptr(), self.ntiles, 0
        )
        self.live, self._delta = live, delta

    # ---- steps, each queued on the lab's stream ----

    def digest(self) -> None:
        """Digest live XOR delta of every region; takes the sums that lists are held against."""
        self.lab.stream.fill(self.checks, 0)
        launch_digest(
            self.lab.stream,
            self.tiles,
            sums=self.sums.data_ptr(),
            checks=self.checks.data_ptr(),
            states=self.states.data_ptr(),
            digests=self.results.data_ptr(),
        )

    def digest_sums(self) -> None:
        """Only the pass over all bytes. It adds to the sums that lists are held against."""
        self.lab.stream.launch(
            "gs_digest_sums",
            self.ntiles,
            (
                self.tiles.chunks,
                self.tiles.tile_chunk,
                self.ntiles,
                self.sums.data_ptr(),
                self.checks.data_ptr(),
                0,
            ),
        )

    def digest_chain(self) -> None:
        """Only the fold of the block sums, serial within a region, and the end of each digest."""
        chunks, count, states = self.tiles.chunks, self.nregions, self.states.data_ptr()
        self.lab.stream.launch(
            "gs_digest_chain",
            -(-count * 8 // THREADS),
            (chunks, count, self.sums.data_ptr(), states, 0),
        )
        self.lab.stream.launch(
            "gs_digest_finish",
            -(-count // THREADS),
            (chunks, count, states, self.results.data_ptr(), 0),
        )

    def count(self) -> None:
        """Count the entries of the change list, and place each tile's."""
        launch_count(self.lab.stream, self.tiles, self.tables)

    def take_list(self) -> int:
        """Wait for the count, allocate the list, and return its number of entries."""
        firsts = self.lab.download(self._count_memory[4][-4:], np.uint32)
        self.nentries = int(firsts[0])
        self._list = self.lab.runtime.empty(ENTRY_NBYTES * max(1, self.nentries))
        index = self._list.data_ptr()
        self.entries = Entries(self.tables.firsts, index, index + 2 * self.nentries)
        row = np.zeros(1, LIST)
        row["chunks"], row["tile_chunk"] = self.tiles.chunks, self.tiles.tile_chunk
        row["firsts"], row["checks"] = self.tables.firsts, self.checks.data_ptr()
        row["index"], row["value"] = self.entries.index, self.entries.value
        self._list_rows = self.lab.upload(row)
        self._tile_list = self.lab.zeros(self.ntiles * 4)
        self.lists = Lists(self._list_rows.data_ptr(), self._tile_list.data_ptr(), self.ntiles)
        return self.nentries

    def write(self) -> None:
        """Write the list."""
        launch_write(self.lab.stream, self.tiles, self.tables, self.entries)

    def check_list(self) -> None:
        """Hold the list against what the digest pass took; the flag tells."""
        self.lab.stream.fill(self._now, 0)
        launch_list_check(
            self.lab.stream,
            self.tiles,
            self.entries,
            sums=self._now.data_ptr(),
            checks=self.checks.data_ptr(),
            differs=self.flag.data_ptr(),
        )

    def check_live(self) -> None:
        """Gather the live words under the list, and hold them against what was digested; the flag tells."""
        self.lab.stream.fill(self._now, 0)
        launch_live_check(
            self.lab.stream, self.lists, sums=self._now.data_ptr(), differs=self.flag.data_ptr()
        )

    def store(self) -> None:
        """XOR the list into the live words."""
        launch_store(self.lab.stream, self.lists)

    # ---- what was found; each waits for the stream ----

    def digests(self) -> list[int]:
        """Return XXH3-128 of each region."""
        halves = self.lab.download(self.results, np.uint64).tolist()
        return [high << 64 | low for low, high in zip(halves[::2], halves[1::2], strict=True)]

    def flagged(self) -> bool:
        """Return whether a check found something."""
        return bool(self.lab.download(self.flag).any())
