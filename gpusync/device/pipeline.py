"""The pipeline of prepare: batches read, copied, decoded, digested and listed, two under way at a time.

::

    host     feed batch k+1 into the ring          allocate the list of batch k
    copy     ........ input of k+1 ........
    decode            frames of k -> layers -> delta of k
    apply                        digest, count, then list of k-1

Queues wait for each other by events, each named in :class:`Wait`; the host waits only for counts and for its own
buffers. Nothing here writes live memory.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpusync.device.chunks import Batch
from gpusync.device.launches import (
    Tiles,
    launch_check_guards,
    launch_fill_guards,
    launch_layers,
    launch_payloads,
    launch_records,
    launch_status_check,
)
from gpusync.device.listing import Listing, send_tables
from gpusync.device.nvcomp import DecodeArrays, Nvcomp
from gpusync.device.rounds import BatchBuffers, RoundTables, TableBlock, plan_round
from gpusync.device.runtime import Event, Runtime, Wait
from gpusync.device.scratch import Scratch, Slot, host_memory
from gpusync.device.segments import ENTRY_NBYTES, ListMemory, Segment
from gpusync.device.staging import Feeder
from gpusync.errors import GpuSyncError
from gpusync.types import StageTimes


@dataclass(frozen=True)
class Verdict:
    """What the device found, by number of tensor.

    Parameters
    ----------
    digests
        XXH3-128 of each region's new bytes.
    times
        "decode", "digest" and "list", by the device's clock.
    bad
        u32: 1 where nvCOMP reported a failure or another size, 2 where a payload breaks a rule.
    stopped, damaged, unlike
        Whether something shut the gate; a guard zone was written; a list is not what the digest pass counted.
    """

    digests: tuple[int, ...]
    times: StageTimes
    bad: NDArray[np.uint32]
    stopped: bool
    damaged: bool
    unlike: bool


@dataclass(frozen=True)
class _Span:
    """Work between two events of one stream."""

    stage: str
    begin: Event
    end: Event
    nbytes: int


class _GateShut(Exception):
    """A frame or a payload was found bad: what is behind it was skipped, and the verdict tells which."""


class Pipeline:
    """Runs batches on one device, once.

    Parameters
    ----------
    scratch
        Sized for the batches.
    lists
        Where finished lists go.
    on_batch
        Called with the bytes of regions of each batch that is under way; an exception from it stops the run.
    """

    def __init__(
        self,
        runtime: Runtime,
        nvcomp: Nvcomp,
        scratch: Scratch,
        feeder: Feeder,
        lists: ListMemory,
        on_batch: Callable[[int], None],
    ) -> None:
        self._nvcomp = nvcomp
        self._scratch = scratch
        self._feeder = feeder
        self._lists = lists
        self._on_batch = on_batch
        self._runtime = runtime
        self._copy, self._decode, self._apply = (runtime.stream() for _ in range(3))
        self._segments: list[Segment] = []
        self._spans: list[_Span] = []

    def run(self, batches: Sequence[Batch]) -> tuple[Verdict, list[Segment]]:
        """Run every batch, and return what was found with the finished lists. Blocks until the device is done.

        Raises
        ------
        GpuSyncError
            As the feeder, the list memory or the runtime raise; nothing of the device is in use any more.
        """
        try:
            for table in (self._scratch.flags, self._scratch.bad):
                self._decode.fill(table, 0)
            stopped = False
            try:
                self._run_batches(batches)
            except _GateShut:
                stopped = True
            return self._read_verdict(stopped), self._segments
        except BaseException:
            self._drain()
            raise

    def _run_batches(self, batches: Sequence[Batch]) -> None:
        waiting: Listing | None = None
        for number, batch in enumerate(batches):
            listing = self._run_batch(batch, self._scratch.slots[number % 2])
            if waiting is not None:
                self._finish_list(waiting)
            waiting = listing
            self._on_batch(batch.region_nbytes)
        if waiting is not None:
            self._finish_list(waiting)

    def _run_batch(self, batch: Batch, slot: Slot) -> Listing:
        scratch = self._scratch
        buffers = BatchBuffers(
            slot.delta.data_ptr(), slot.input.data_ptr(), scratch.output.data_ptr()
        )
        with self._runtime.marked("feed"):
            self._feeder.feed(batch, slot.input, self._copy)
        block = TableBlock()
        rounds = [plan_round(batch, number, buffers, block) for number in range(batch.rounds)]
        guards = block.add(np.array(scratch.guards, np.uint64))
        listing = send_tables(batch, slot, buffers, block, self._copy, self._lists, scratch.gate)
        self._decode.wait(listing.copied, Wait.DECODE_FOR_COPY)
        if slot.listed is not None:
            self._decode.wait(slot.listed, Wait.DECODE_FOR_APPLY)
        base = slot.tables.data_ptr()
        begin = self._decode.record()
        with self._runtime.marked("decode"):
            for number, tables in enumerate(rounds):
                self._run_round(batch, number, tables, listing.tiles, slot, base + guards)
        decoded = self._decode.record()
        self._timed("decode", begin, decoded, sum(tables.decoded_nbytes for tables in rounds))
        self._apply.wait(decoded, Wait.APPLY_FOR_DECODE)
        begin = self._apply.record()
        with self._runtime.marked("digest"):
            counted = listing.queue_digest(self._apply, scratch)
        self._timed("digest", begin, counted, batch.region_nbytes)
        return listing

    def _run_round(
        self,
        batch: Batch,
        number: int,
        tables: RoundTables,
        tiles: Tiles,
        slot: Slot,
        guards: int,
    ) -> None:
        stream, scratch, base = self._decode, self._scratch, slot.tables.data_ptr()
        if tables.has_bitmaps:
            stream.fill(scratch.output[: batch.output_nbytes(number)], 0)
        # What names positions starts from zeros; the others set theirs.
        if number == 0 and (tables.nitems or tables.nrecords):
            stream.fill(slot.delta[: batch.delta_nbytes], 0)
        if tables.nframes:
            arrays = DecodeArrays.within(base + tables.frames, tables.nframes)
            launch_fill_guards(stream, base + tables.zones, tables.nzones)
            launch_fill_guards(stream, guards, len(scratch.guards))
            self._nvcomp.decode(stream, arrays, scratch.temp)
            launch_status_check(
                stream,
                statuses=arrays.statuses,
                actual=arrays.out_nbytes,
                expected=arrays.out_capacities,
                frame_tensor=base + tables.frame_tensor,
                nframes=tables.nframes,
                bad=scratch.bad.data_ptr(),
                gate=scratch.gate,
            )
            launch_check_guards(stream, base + tables.zones, tables.nzones, scratch.damaged)
            launch_check_guards(stream, guards, len(scratch.guards), scratch.damaged)
        launch_layers(
            stream,
            tiles,
            layers=base + tables.layers,
            tile_layer=base + tables.tile_layer,
            ntiles=tables.nlayer_tiles,
        )
        launch_payloads(
            stream,
            tiles,
            payloads=base + tables.payloads,
            item_payload=base + tables.item_payload,
            nitems=tables.nitems,
            bad=scratch.bad.data_ptr(),
        )
        launch_records(
            stream,
            tiles,
            records=base + tables.records,
            nrecords=tables.nrecords,
            bad=scratch.bad.data_ptr(),
        )

    def _finish_list(self, listing: Listing) -> None:
        """Write the list of a batch that was counted.

        Raises
        ------
        _GateShut
            Something before it failed.
        """
        with self._runtime.marked("count"):
            count = listing.read_count()
        if count is None:
            raise _GateShut
        begin = self._apply.record()
        if count:
            with self._runtime.marked("list"):
                segment = listing.queue_list(self._apply, self._lists, count, self._scratch.unlike)
            self._segments.append(segment)
        listing.slot.listed = self._apply.record()
        self._timed("list", begin, listing.slot.listed, ENTRY_NBYTES * count)

    def _timed(self, stage: str, begin: Event, end: Event, nbytes: int) -> None:
        self._spans.append(_Span(stage, begin, end, nbytes))

    def _times(self) -> StageTimes:
        """Add up what the device's own clock says of the spans, all of them past."""
        seconds: defaultdict[str, float] = defaultdict(float)
        nbytes: defaultdict[str, int] = defaultdict(int)
        for span in self._spans:
            seconds[span.stage] += span.end.seconds_since(span.begin)
            nbytes[span.stage] += span.nbytes
        return StageTimes(dict(seconds), dict(nbytes))

    def _read_verdict(self, stopped: bool) -> Verdict:
        stream, scratch = self._apply, self._scratch
        stream.wait(self._decode.record(), Wait.APPLY_FOR_DECODE)
        tables = (scratch.digests, scratch.bad, scratch.flags)
        copies = [host_memory(self._runtime, table.numel()) for table in tables]
        for copy, table in zip(copies, tables, strict=True):
            stream.copy(copy, table)
        stream.record().synchronize(Wait.HOST_FOR_VERDICT)
        halves = copies[0].numpy().view(np.uint64).tolist()
        gate, damaged, unlike = copies[2].numpy().view(np.uint32).tolist()
        return Verdict(
            digests=tuple(
                high << 64 | low for low, high in zip(halves[::2], halves[1::2], strict=True)
            ),
            times=self._times(),
            bad=copies[1].numpy().view(np.uint32).copy(),
            stopped=stopped or bool(gate),
            damaged=bool(damaged),
            unlike=bool(unlike),
        )

    def _drain(self) -> None:
        """Wait for all that was queued: its memory is about to be freed. What fails here has failed before."""
        for stream in (self._copy, self._decode, self._apply):
            with contextlib.suppress(GpuSyncError):
                stream.synchronize()
