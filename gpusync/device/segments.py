"""Finished change lists on a device: one segment per batch, from prepare to the end of the update.

They lie in device memory up to their cap, then in pinned host memory, which kernels reach as well, up to its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpusync.device.kernels import LIST
from gpusync.device.launches import (
    Entries,
    Lists,
    Tiles,
    launch_live_check,
    launch_store,
    load_commit_kernels,
)
from gpusync.device.rounds import TableBlock, rounded, tile_rows
from gpusync.device.runtime import Runtime, Stream, Wait
from gpusync.device.scratch import host_memory
from gpusync.errors import (
    DeviceError,
    GpuSyncError,
    ModelPoisonedError,
    OutOfScratchError,
    PlacementError,
)
from gpusync.host.changes import ListBudget

ENTRY_NBYTES = 4
"""Of an entry: u16 index within its tile, and u16 new XOR live."""


@dataclass(frozen=True)
class Segment:
    """One batch's change list.

    ``memory`` holds tables and entries; ``checks`` is its part with the digest pass's sums, u64[ntiles, 2]. ``names`` are
    the chunks' tensors, and ``tile_chunk`` says which chunk a tile is of.
    """

    tiles: Tiles
    entries: Entries
    checks: torch.Tensor
    count: int
    unit_nbytes: int
    names: tuple[str, ...]
    tile_chunk: NDArray[np.uint32]
    memory: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() for tensor in self.memory)


_UNDONE = "committing failed and could not be taken back"


class ListMemory:
    """Where lists go: device memory under its cap, then pinned host memory under its own."""

    def __init__(self, runtime: Runtime, on_device: ListBudget, on_host: ListBudget) -> None:
        self._runtime = runtime
        self._on_device = on_device
        self._on_host = on_host
        self.spilled_nbytes = 0
        self._taken: list[tuple[ListBudget, int]] = []

    def reserve_tables(self, nbytes: int) -> None:
        """Count what :meth:`take_tables` will give, ahead of the entries: those can go elsewhere.

        Raises
        ------
        OutOfScratchError
            It is over the device's cap.
        """
        self._on_device.take(nbytes)
        self._taken.append((self._on_device, nbytes))

    def take_tables(self, nbytes: int) -> torch.Tensor:
        """Return device memory that is counted already: a copy to pinned memory is no part of a queue.

        Raises
        ------
        OutOfScratchError
            The device has none left.
        """
        return self._runtime.empty(nbytes)

    def take_entries(self, nbytes: int) -> torch.Tensor:
        """Return memory that only kernels write and read.

        Raises
        ------
        OutOfScratchError
            Neither has room: the chain can be applied as several updates.
        """
        try:
            self._on_device.take(nbytes)
        except OutOfScratchError:
            self._on_device.give_back(nbytes)
        else:
            try:
                memory = self._runtime.empty(nbytes)
            except OutOfScratchError:
                self._on_device.give_back(nbytes)
            else:
                self._taken.append((self._on_device, nbytes))
                return memory
        self._on_host.take(nbytes)
        self._taken.append((self._on_host, nbytes))
        self.spilled_nbytes += nbytes
        return self._runtime.pinned(nbytes)

    def give_all_back(self) -> None:
        """Uncount what was taken: its lists are dropped."""
        for budget, nbytes in self._taken:
            budget.give_back(nbytes)
        self._taken = []


class DeviceChanges:
    """Change lists of one device; see :class:`gpusync.host.parts.LiveChanges`.

    What commit needs is allocated and sent when this is made: in the pause there are three launches, whatever the
    number of lists, and one flag to read.

    Parameters
    ----------
    stream
        No one else's.
    memory
        Counts the tables that are made here along with the lists.
    """

    def __init__(
        self, runtime: Runtime, stream: Stream, segments: Sequence[Segment], memory: ListMemory
    ) -> None:
        self._runtime = runtime
        self._stream = stream
        self._segments = segments
        block = TableBlock()
        rows = block.add(_list_rows(segments))
        tile_list = block.add(tile_rows([segment.tiles.ntiles for segment in segments]))
        self._ntiles = sum(segment.tiles.ntiles for segment in segments)
        sums, differs = block.reserve(8 * self._ntiles), block.reserve(4)
        self._tables = memory.take_tables(block.nbytes)
        staging = host_memory(runtime, sums)
        block.write_to(staging)
        stream.copy(self._tables[:sums], staging)
        stream.fill(self._tables[sums:], 0)
        load_commit_kernels(stream)
        stream.record().synchronize(Wait.HOST_FOR_COPY)
        base = self._tables.data_ptr()
        self._lists = Lists(base + rows, base + tile_list, self._ntiles)
        self._sums = self._tables[sums:][: 8 * self._ntiles]
        self._differs = self._tables[differs:][:4]
        self._flag = host_memory(runtime, 4)

    @property
    def nbytes(self) -> int:
        return self._tables.numel() + sum(segment.nbytes for segment in self._segments)

    @property
    def changed_bytes(self) -> int:
        return sum(segment.unit_nbytes * segment.count for segment in self._segments)

    def await_engine(self) -> None:
        if self._runtime.is_capturing():
            raise DeviceError("the engine is capturing a graph; commit after the capture has ended")
        self._runtime.synchronize()

    def check(self) -> None:
        try:
            with self._runtime.marked("check"):
                self._check()
        except BaseException:
            with contextlib.suppress(GpuSyncError):
                self._stream.synchronize()  # the tables may go now
            raise

    def _check(self) -> None:
        launch_live_check(
            self._stream,
            self._lists,
            sums=self._sums.data_ptr(),
            differs=self._differs.data_ptr(),
        )
        self._stream.copy(self._flag, self._differs)
        self._stream.record().synchronize(Wait.HOST_FOR_VERDICT)
        if self._flag.any():
            raise PlacementError(
                "live weights changed since prepare; they are as they were, prepare again",
                tensor=self._changed_tensor(),
            )

    def store(self) -> None:
        with self._runtime.marked("store"):
            try:
                launch_store(self._stream, self._lists)
            except DeviceError as err:  # it was not launched; of anything else, nobody can say
                raise DeviceError(
                    "committing failed before anything was stored; prepare again"
                ) from err
            self._wait_for_store("committing failed on the device")

    def take_back(self) -> None:
        try:
            launch_store(self._stream, self._lists)
        except BaseException as err:
            raise ModelPoisonedError(f"{_UNDONE}: replace the process") from err
        self._wait_for_store(_UNDONE)

    def _wait_for_store(self, failure: str) -> None:
        """Wait for the stores, which are all on one stream; from here on nobody can say which of them ran."""
        try:
            self._stream.synchronize()
        except BaseException as err:
            raise ModelPoisonedError(f"{failure}: replace the process") from err

    def _changed_tensor(self) -> str:
        """Return the tensor of the first tile whose live words differ from prepare's."""
        now = _read_words(self._stream, self._sums)
        first = 0
        for segment in self._segments:
            seen = _read_words(self._stream, segment.checks)[1::2]
            unlike = np.flatnonzero(now[first : first + seen.size] != seen)
            if unlike.size:
                return segment.names[int(segment.tile_chunk[unlike[0]])]
            first += seen.size
        return ""


def commit_tables_nbytes(lists: int, tiles: int) -> int:
    """Return what the tables of a commit take."""
    return rounded(lists * LIST.itemsize) + rounded(4 * tiles) + rounded(8 * tiles) + rounded(4)


def _list_rows(segments: Sequence[Segment]) -> NDArray[np.void]:
    rows = np.zeros(len(segments), LIST)
    first_tile = 0
    for row, segment in zip(rows, segments, strict=True):
        row["chunks"], row["tile_chunk"] = segment.tiles.chunks, segment.tiles.tile_chunk
        row["firsts"] = segment.entries.firsts
        row["index"], row["value"] = segment.entries.index, segment.entries.value
        row["checks"] = segment.checks.data_ptr()
        row["first_tile"] = first_tile
        first_tile += segment.tiles.ntiles
    return rows


def _read_words(stream: Stream, table: torch.Tensor) -> NDArray[np.uint64]:
    host = torch.empty(table.numel(), dtype=torch.uint8, device="cpu")
    stream.copy(host, table)
    stream.record().synchronize(Wait.HOST_FOR_VERDICT)
    return host.numpy().view(np.uint64)
