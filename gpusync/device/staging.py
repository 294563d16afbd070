"""Feeding a batch: its bytes are read by host threads into the pinned ring, checked, and copied to the device.

The plan says where in the batch's input buffer every layer's bytes belong. Layers that lie side by side there share a
slot of the ring, and so a copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpusync.device.chunks import Batch, Chunk, ChunkLayer
from gpusync.device.layers import FoldedLayer, RawLayer
from gpusync.device.readers import (
    Bytes,
    FoldReader,
    FramesReader,
    NeedsHost,
    RawReader,
    Reader,
)
from gpusync.device.ring import PinnedRing, Slot
from gpusync.device.runtime import Stream
from gpusync.folding.fold import Fold
from gpusync.folding.parallel import run_parallel
from gpusync.format.digest import new_hasher
from gpusync.published.blobmaps import BlobMap
from gpusync.published.blobs import BlobFile, hash_blob, hold_digest, locate_blob
from gpusync.types import StageTimes

__all__ = ["Feeder", "NeedsHost", "PinnedRing"]

# Loads per thread, so that threads end together; and the least that is worth a copy of its own.
_LOADS_PER_WORKER = 4
_MIN_LOAD_NBYTES = 256 << 10


class Feeder:
    """Feeds the batches of one update, in their order.

    Parameters
    ----------
    ring
        What copies are made from.
    fold
        Folds what the host decodes; its ``workers`` is the number of threads that read.
    """

    def __init__(self, ring: PinnedRing, fold: Fold) -> None:
        self._ring = ring
        self._fold = fold
        self._copying = threading.Lock()
        self._tally = _Tally()
        self._folds: dict[int, FoldReader] = {}
        self._checked: set[tuple[int, str]] = set()

    def feed(self, batch: Batch, target: torch.Tensor, stream: Stream) -> None:
        """Read a batch's bytes and queue their copies to the device on ``stream``; blocks until all are queued.

        When it returns, every frame has been walked, and every blob whose digest the manifest gives, and of which the
        batch holds a part, has been held against it.

        Parameters
        ----------
        batch
            The next one of the update.
        target
            Its input buffer: device memory of at least ``batch.input_nbytes``.

        Raises
        ------
        NeedsHost
            A tensor must be planned anew, to be folded by the host.
        FormatError, SourceNotReadyError, VersionConflictError
            Published bytes cannot be read, or are not what they should be.
        GpuSyncError
            As an origin, the fold or the runtime raise.
        """
        loads = _loads(batch, self._load_nbytes(batch))
        run_parallel(lambda load: self._run(load, target, stream), loads, self._fold.workers)

    def times(self) -> StageTimes:
        """Return seconds, added up over threads, and bytes so far: "read", "fold" and "copy" (to queue copies)."""
        return self._tally.times()

    def _load_nbytes(self, batch: Batch) -> int:
        share = batch.input_nbytes // (_LOADS_PER_WORKER * self._fold.workers)
        return min(self._ring.slot_nbytes, max(_MIN_LOAD_NBYTES, share))

    def _run(self, load: list[_Item], target: torch.Tensor, stream: Stream) -> None:
        self._ring.runtime.enter_thread()
        with _Window(self._ring, self._copying, self._tally, target, stream) as window:
            for item in load:
                self._read(item, window)

    def _read(self, item: _Item, window: _Window) -> None:
        stage = "fold" if isinstance(item.layer.plan, FoldedLayer) else "read"
        start = time.monotonic()
        reader = self._reader(item)
        if reader is None:
            return
        done = 0
        while done < item.nbytes:
            self._tally.add(stage, time.monotonic() - start)
            out = window.room(item.offset + done, item.nbytes - done)
            start = time.monotonic()
            reader.fill(out)
            done += out.size
        reader.finish()
        self._tally.add(stage, time.monotonic() - start, item.nbytes)

    def _reader(self, item: _Item) -> Reader | None:
        """Return the reader of a layer's bytes; None for frames of which the chunk needs none."""
        chunk, plan = item.chunk, item.layer.plan
        if isinstance(plan, RawLayer):
            return RawReader(plan.origin, chunk, item.at)
        if isinstance(plan, FoldedLayer):
            return self._fold_reader(chunk, plan)
        return self._frames_reader(locate_blob(plan.blob), plan.map, item.layer)

    def _fold_reader(self, chunk: Chunk, plan: FoldedLayer) -> FoldReader:
        tensor = chunk.tensor
        if chunk.offset == 0:
            self._folds[tensor.number] = FoldReader(
                self._fold, plan, tensor.tensor_nbytes, tensor.region
            )
        if chunk.ends_region:
            return self._folds.pop(tensor.number)
        return self._folds[tensor.number]

    def _frames_reader(
        self, blob: BlobFile, map: BlobMap, layer: ChunkLayer
    ) -> FramesReader | None:
        """Have the blob's digest checked once: on the way where the chunk takes all frames, else before."""
        key = (blob.where.version or 0, blob.where.tensor or "")
        unchecked = blob.stated is not None and key not in self._checked
        complete = layer.end_frame - layer.first_frame == map.count > 0
        if unchecked and not complete:
            hasher = new_hasher("xxh3-128")
            hash_blob(blob, hasher, 0, blob.nbytes)
            hold_digest(blob, hasher)
            self._checked.add(key)
        if layer.first_frame == layer.end_frame:
            return None
        return FramesReader(blob, map, layer, hashed=unchecked and complete)


@dataclass(frozen=True, slots=True)
class _Item:
    """A part of a layer's input, ``at`` bytes into it; ``offset`` is its place in the input buffer."""

    chunk: Chunk
    layer: ChunkLayer
    at: int
    nbytes: int

    @property
    def offset(self) -> int:
        return self.layer.input_offset + self.at


def _loads(batch: Batch, most_nbytes: int) -> list[list[_Item]]:
    """Return what one thread reads at a time: neighbours in the input buffer of up to so many bytes, or one layer.

    The largest come first. Frames are walked, and tensors folded, in order: only raw bytes are divided.
    """
    loads: list[list[_Item]] = []
    for item in _items(batch, most_nbytes):
        if loads and item.offset + item.nbytes - loads[-1][0].offset <= most_nbytes:
            loads[-1].append(item)
        else:
            loads.append([item])
    return sorted(loads, key=lambda load: load[0].offset - load[-1].offset - load[-1].nbytes)


def _items(batch: Batch, most_nbytes: int) -> Iterator[_Item]:
    for chunk in batch.chunks:
        for layer in chunk.layers:
            if not isinstance(layer.plan, RawLayer):
                yield _Item(chunk, layer, 0, layer.input_nbytes)
                continue
            for at in range(0, layer.input_nbytes, most_nbytes):
                yield _Item(chunk, layer, at, min(most_nbytes, layer.input_nbytes - at))


class _Window:
    """The slot that a thread is filling: a window on the input buffer, moved on by a copy."""

    def __init__(
        self,
        ring: PinnedRing,
        copying: threading.Lock,
        tally: _Tally,
        target: torch.Tensor,
        stream: Stream,
    ) -> None:
        self._ring = ring
        self._copying = copying
        self._tally = tally
        self._target = target
        self._stream = stream
        self._slot: Slot | None = None
        self._begin = self._end = 0

    def room(self, offset: int, nbytes: int) -> Bytes:
        """Return where to put input bytes from ``offset`` on: up to ``nbytes``, at least one."""
        if self._slot is not None and offset >= self._begin + self._ring.slot_nbytes:
            self._send()
        if self._slot is None:
            self._slot = self._ring.lend()
            self._begin = offset
        self._end = min(offset + nbytes, self._begin + self._ring.slot_nbytes)
        return self._slot.array[offset - self._begin : self._end - self._begin]

    def __enter__(self) -> _Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._send()
        elif self._slot is not None:
            self._ring.give_back(self._slot, None)

    def _send(self) -> None:
        """Queue the copy of what the slot holds, and give the slot back."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        nbytes = self._end - self._begin
        start = time.monotonic()
        event = None
        try:
            with self._copying:  # the event is right behind the copy
                self._stream.copy(self._target[self._begin : self._end], slot.memory[:nbytes])
                event = self._stream.record()
        finally:
            self._ring.give_back(slot, event)
        self._tally.add("copy", time.monotonic() - start, nbytes)


class _Tally:
    """Adds up what several threads do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}

    def add(self, stage: str, seconds: float, nbytes: int = 0) -> None:
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
            self._bytes[stage] = self._bytes.get(stage, 0) + nbytes

    def times(self) -> StageTimes:
        with self._lock:
            return StageTimes(dict(self._seconds), dict(self._bytes))
