"""One batch on its way from a delta in scratch to a finished change list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from gpusync.device.chunks import Batch
from gpusync.device.kernels import CHUNK
from gpusync.device.launches import (
    CHECKS_NBYTES,
    CountTables,
    Entries,
    Tiles,
    launch_count,
    launch_digest,
    launch_list_check,
    launch_write,
)
from gpusync.device.rounds import BatchBuffers, TableBlock, chunk_rows, rounded, tile_rows
from gpusync.device.runtime import Event, Stream, Wait
from gpusync.device.scratch import Scratch, Slot
from gpusync.device.segments import ENTRY_NBYTES, ListMemory, Segment, commit_tables_nbytes
from gpusync.errors import KernelError


@dataclass
class Listing:
    """A batch whose tables are on the device.

    ``memory`` holds the tables that stay with the list; ``checks`` and ``total`` (the number of entries, behind
    the table of firsts) are views of it. ``copied`` is behind the copies of all tables, ``counted`` behind the count.
    """

    batch: Batch
    slot: Slot
    tiles: Tiles
    tables: CountTables
    tile_chunk: NDArray[np.uint32]
    memory: torch.Tensor
    checks: torch.Tensor
    total: torch.Tensor
    copied: Event
    counted: Event | None = field(default=None, init=False)

    def queue_digest(self, stream: Stream, scratch: Scratch) -> Event:
        """Queue the passes over the delta, up to the number of entries, which is copied out with the gate.

        Returns
        -------
        Event
            Behind all that.
        """
        stream.fill(self.checks, 0)
        launch_digest(
            stream,
            self.tiles,
            sums=self.slot.sums.data_ptr(),
            checks=self.checks.data_ptr(),
            states=scratch.states.data_ptr(),
            digests=scratch.digests.data_ptr(),
        )
        launch_count(stream, self.tiles, self.tables)
        stream.copy(self.slot.count[:4], self.total)
        stream.copy(self.slot.count[4:], scratch.flags[:4])
        self.counted = stream.record()
        return self.counted

    def read_count(self) -> int | None:
        """Wait for the number of entries, and return it; None where the gate is shut and nothing was counted."""
        if self.counted is None:
            raise KernelError("a batch was not counted")
        self.counted.synchronize(Wait.HOST_FOR_COUNT)
        count, gate = self.slot.count.numpy().view(np.uint32).tolist()
        return None if gate else count

    def queue_list(self, stream: Stream, lists: ListMemory, count: int, unlike: int) -> Segment:
        """Allocate the list, and queue writing it and holding it against the digest pass.

        Parameters
        ----------
        unlike
            Address of the u32 that becomes 1 where it does not add up.

        Raises
        ------
        OutOfScratchError
            There is no room for it.
        KernelError
            There are more entries than words: the count is not to be trusted.
        """
        if count > self.batch.region_nbytes:
            raise KernelError("more changes were counted than a batch has bytes", got=count)
        memory = lists.take_entries(ENTRY_NBYTES * count)
        entries = Entries(self.tables.firsts, memory.data_ptr(), memory.data_ptr() + 2 * count)
        launch_write(stream, self.tiles, self.tables, entries)
        stream.fill(self.slot.list_sums, 0)
        launch_list_check(
            stream,
            self.tiles,
            entries,
            sums=self.slot.list_sums.data_ptr(),
            checks=self.checks.data_ptr(),
            differs=unlike,
        )
        chunks = self.batch.chunks
        return Segment(
            tiles=replace(self.tiles, gate=0),
            entries=entries,
            checks=self.checks,
            count=count,
            unit_nbytes=max(chunk.tensor.region.unit for chunk in chunks),
            names=tuple(chunk.tensor.name for chunk in chunks),
            tile_chunk=self.tile_chunk,
            memory=(self.memory, memory),
        )


def send_tables(
    batch: Batch,
    slot: Slot,
    buffers: BatchBuffers,
    block: TableBlock,
    stream: Stream,
    lists: ListMemory,
    gate: int,
) -> Listing:
    """Queue the copies of a batch's tables: ``block``, those of its rounds, and those that stay with its list.

    Raises
    ------
    OutOfScratchError
        There is no room for those that stay.
    """
    kept = TableBlock()
    tile_chunk = tile_rows([chunk.tiles for chunk in batch.chunks])
    chunks, tile_chunk_at = kept.add(chunk_rows(batch, buffers)), kept.add(tile_chunk)
    sent_nbytes = kept.nbytes
    firsts = kept.reserve(4 * (batch.tiles + 1))
    checks = kept.reserve(CHECKS_NBYTES * batch.tiles)
    memory = lists.take_tables(kept.nbytes)
    block.write_to(slot.staging)
    kept.write_to(slot.staging[block.nbytes :])
    stream.copy(slot.tables[: block.nbytes], slot.staging[: block.nbytes])
    stream.copy(memory[:sent_nbytes], slot.staging[block.nbytes :][:sent_nbytes])
    copied = stream.record()
    base = memory.data_ptr()
    return Listing(
        batch=batch,
        slot=slot,
        tiles=Tiles(base + chunks, len(batch.chunks), base + tile_chunk_at, batch.tiles, gate),
        tables=CountTables(
            slot.counts.data_ptr(),
            slot.rows.data_ptr(),
            slot.totals.data_ptr(),
            slot.groups.data_ptr(),
            base + firsts,
        ),
        tile_chunk=tile_chunk,
        memory=memory,
        checks=memory[checks:][: CHECKS_NBYTES * batch.tiles],
        total=memory[firsts + 4 * batch.tiles :][:4],
        copied=copied,
    )


def list_tables_nbytes(batches: Sequence[Batch]) -> int:
    """Return what the tables of all lists of an update take, entries apart, where every batch has some."""
    kept = sum(
        rounded(len(batch.chunks) * CHUNK.itemsize)
        + rounded(4 * batch.tiles)
        + rounded(4 * (batch.tiles + 1))
        + rounded(CHECKS_NBYTES * batch.tiles)
        for batch in batches
    )
    return kept + commit_tables_nbytes(len(batches), sum(batch.tiles for batch in batches))
