"""Batches of zstd frames decoded by nvCOMP, with everything around them that can be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from gpu_lab import MIB, Bytes, Lab
from numpy.typing import NDArray

from gpusync.device.nvcomp import DecodeArrays
from gpusync.format.encode import compress_frames

GUARD = 0xC7
SLACK_NBYTES = 4096


@dataclass(frozen=True)
class Results:
    """What a decode left: statuses and sizes by frame, and whether the bytes between outputs are as they were."""

    statuses: NDArray[np.int32]
    sizes: NDArray[np.uint64]
    guards_intact: bool

    @property
    def all_good(self) -> bool:
        return not self.statuses.any() and self.guards_intact


class DecodeBatch:
    """Frames in device memory, and room for what they decode to, one output behind the other.

    Parameters
    ----------
    capacities
        Bytes that each frame may decode to.
    guard_nbytes
        Bytes before, between and behind the outputs.
    in_place
        Leave the frames in page-locked host memory, where the decoder reads them; ``staged`` is then that memory.
    """

    def __init__(
        self,
        lab: Lab,
        frames: Sequence[bytes],
        capacities: Sequence[int],
        *,
        guard_nbytes: int = 0,
        in_place: bool = False,
    ) -> None:
        self.lab, self.count = lab, len(frames)
        self.guard_nbytes = guard_nbytes
        sizes = np.array([len(frame) for frame in frames], np.uint64)
        room = np.array(capacities, np.uint64)
        self.frame_nbytes, self.content_nbytes = int(sizes.sum()), int(room.sum())
        joined = np.frombuffer(bytearray(b"".join(frames)) + bytes(SLACK_NBYTES), np.uint8)
        self.staged = lab.pinned(joined.size)
        self.staged.numpy()[:] = joined
        self.input = self.staged if in_place else lab.runtime.empty(joined.size)
        self.output = lab.runtime.empty(
            self.content_nbytes + guard_nbytes * (self.count + 1) or 1  # never without an address
        )
        self.offsets = np.cumsum(room + np.uint64(guard_nbytes)) - room
        temp_nbytes = lab.nvcomp.decode_temp_nbytes(
            self.count, max(1, *capacities), max(1, self.content_nbytes)
        )
        self.temp = lab.runtime.empty(temp_nbytes)
        columns = (
            np.cumsum(sizes) - sizes + np.uint64(self.input.data_ptr()),
            sizes,
            room,
            self.offsets + np.uint64(self.output.data_ptr()),
        )
        written = np.full(self.count * 12, GUARD, np.uint8)
        self.table = lab.upload(np.concatenate([np.concatenate(columns).view(np.uint8), written]))
        self.arrays = DecodeArrays.within(self.table.data_ptr(), self.count)
        self._room = room
        self.copy_in()
        lab.stream.fill(self.output, GUARD)

    def copy_in(self) -> None:
        """Queue the copy of the frames to the device."""
        if self.input is not self.staged:
            self.lab.stream.copy(self.input, self.staged)

    def decode(self) -> None:
        """Queue the decode."""
        self.lab.nvcomp.decode(self.lab.stream, self.arrays, self.temp)

    def results(self) -> Results:
        """Wait, and return what was found."""
        table = self.lab.download(self.table)[32 * self.count :]
        return Results(
            statuses=table[8 * self.count :].view(np.int32),
            sizes=table[: 8 * self.count].view(np.uint64),
            guards_intact=self._guards_intact(),
        )

    def _guards_intact(self) -> bool:
        if not self.guard_nbytes:
            return True
        ends = np.concatenate([[0], self.offsets + self._room]).astype(np.int64)
        zones = [self.output[end : end + self.guard_nbytes] for end in ends.tolist()]
        self.lab.runtime.synchronize()
        return all(bool((zone == GUARD).all()) for zone in zones)

    def content(self, number: int) -> torch.Tensor:
        """Return the device memory of one output."""
        begin = int(self.offsets[number])
        return self.output[begin : begin + int(self._room[number])]


def cut_into_frames(content: Bytes, frame_nbytes: int) -> list[bytes]:
    """Return the content as zstd frames of so many bytes each, as a publisher makes them."""
    step = max(frame_nbytes, 16 * MIB // frame_nbytes * frame_nbytes)
    pieces = [content[begin : begin + step] for begin in range(0, content.size, step)]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda piece: compress_frames(piece, frame_nbytes), pieces)
    return [frame.data for frames in found for frame in frames]


def cut_sizes(nbytes: int, frame_nbytes: int) -> list[int]:
    """Return what each of these frames decodes to."""
    return [min(frame_nbytes, nbytes - begin) for begin in range(0, nbytes, frame_nbytes)]
