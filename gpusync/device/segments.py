"""Finished change lists on a device: one segment per batch, from prepare to the end of the update.

They lie in device memory up to their cap, then in pinned host memory, which kernels reach as well, up to its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from gpusync.changes import ListBudget
from gpusync.device.launches import (
    Entries,
    Tiles,
    launch_compare,
    launch_scatter,
    launch_sums_of_live,
)
from gpusync.device.runtime import Runtime, Stream, Wait
from gpusync.errors import DeviceError, ModelPoisonedError, OutOfScratchError, PlacementError

ENTRY_NBYTES = 4
"""Of an entry: u16 index within its tile, and u16 new XOR live."""


@dataclass(frozen=True)
class Segment:
    """One batch's change list.

    ``memory`` holds tables and entries; ``checks`` is the address of the digest pass's sums, ``now`` that of a table
    of as many tiles for commit's. ``names`` are the chunks' tensors.
    """

    tiles: Tiles
    entries: Entries
    checks: torch.Tensor
    now: torch.Tensor
    count: int
    unit_nbytes: int
    names: tuple[str, ...]
    tile_chunk: NDArray[np.uint32]
    memory: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() for tensor in self.memory)


class ListMemory:
    """Where lists go: device memory under its cap, then pinned host memory under its own."""

    def __init__(self, runtime: Runtime, on_device: ListBudget, on_host: ListBudget) -> None:
        self._runtime = runtime
        self._on_device = on_device
        self._on_host = on_host
        self.spilled_nbytes = 0
        self._taken: list[tuple[ListBudget, int]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory that kernels may write.

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
    """Change lists of one device; see :class:`gpusync.parts.LiveChanges`."""

    def __init__(self, runtime: Runtime, stream: Stream, segments: Sequence[Segment]) -> None:
        self._runtime = runtime
        self._stream = stream
        self._segments = segments
        # Taken now: nothing is allocated in the pause.
        self._differs = runtime.empty(4 * max(1, len(segments)))
        self._seen = torch.empty(self._differs.numel(), dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    @property
    def changed_bytes(self) -> int:
        return sum(segment.unit_nbytes * segment.count for segment in self._segments)

    def check(self) -> None:
        if self._runtime.is_capturing():
            raise DeviceError("the engine is capturing a graph; commit after the capture has ended")
        self._runtime.synchronize()  # what the engine has queued may read or write the weights
        self._stream.fill(self._differs, 0)
        for number, segment in enumerate(self._segments):
            self._stream.fill(segment.now, 0)
            launch_sums_of_live(
                self._stream, segment.tiles, segment.entries, segment.now.data_ptr()
            )
            launch_compare(
                self._stream,
                segment.tiles,
                sums=segment.now.data_ptr(),
                checks=segment.checks.data_ptr(),
                of_live=True,
                differs=self._differs.data_ptr() + 4 * number,
            )
        self._stream.copy(self._seen, self._differs)
        self._stream.record().synchronize(Wait.HOST_FOR_VERDICT)
        differs = np.flatnonzero(self._seen.numpy().view(np.uint32)[: len(self._segments)])
        if differs.size:
            raise PlacementError(
                "live weights changed since prepare; they are as they were, prepare again",
                tensor=self._changed_tensor(self._segments[int(differs[0])]),
            )

    def store(self) -> None:
        launched: list[Segment] = []
        try:
            for segment in self._segments:
                launch_scatter(self._stream, segment.tiles, segment.entries)
                launched.append(segment)
        except BaseException as err:
            self._undo(launched, err)
            raise DeviceError("committing failed and was taken back; prepare again") from err
        self._runtime.synchronize()

    def take_back(self) -> None:
        self._undo(self._segments, None)

    def _undo(self, segments: Sequence[Segment], cause: BaseException | None) -> None:
        """Store segments once more: XOR undoes itself."""
        try:
            for segment in segments:
                launch_scatter(self._stream, segment.tiles, segment.entries)
            self._runtime.synchronize()
        except BaseException as err:
            raise ModelPoisonedError(
                f"committing failed ({cause!r}) and could not be taken back: replace the process"
            ) from err

    def _changed_tensor(self, segment: Segment) -> str:
        """Return the tensor of the first tile whose live words differ from prepare's."""
        read = partial(_read_words, self._stream)
        seen = read(segment.checks).reshape(-1, 2)[:, 1]
        tile = int(np.flatnonzero(read(segment.now) != seen)[0])
        return segment.names[int(segment.tile_chunk[tile])]


def _read_words(stream: Stream, table: torch.Tensor) -> NDArray[np.uint64]:
    host = torch.empty(table.numel(), dtype=torch.uint8)
    stream.copy(host, table)
    stream.record().synchronize(Wait.HOST_FOR_VERDICT)
    return host.numpy().view(np.uint64)
