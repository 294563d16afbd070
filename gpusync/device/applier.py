"""The device applier: from planned tensors to change lists that are verified and ready to be stored.

Everything is decided before any live byte changes: frames are walked, statuses and sizes checked, guard zones looked at,
every result digested on the device and held against what was published.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from gpusync.device.batches import plan_batches
from gpusync.device.capacities import capacities_for
from gpusync.device.chunks import Capacities
from gpusync.device.cuts import why_not_device
from gpusync.device.dry import DEVICE_ALGORITHM, Proof, explain, needs_dry_pass, prove_on_host
from gpusync.device.layers import (
    DeviceTensor,
    FoldedLayer,
    FramesLayer,
    LayerPlan,
    PayloadLayer,
    RawLayer,
    RecordsLayer,
    RegionMap,
)
from gpusync.device.listing import list_tables_nbytes
from gpusync.device.nvcomp import Nvcomp
from gpusync.device.pipeline import Pipeline, Verdict
from gpusync.device.runtime import Event, Runtime, Wait
from gpusync.device.scratch import Scratch
from gpusync.device.segments import DeviceChanges, ListMemory, Segment
from gpusync.device.selftest import nvcomp_is_trusted
from gpusync.device.staging import Feeder, NeedsHost, PinnedRing
from gpusync.errors import DecodeError, DeviceError, KernelError, ModelPoisonedError
from gpusync.folding.fold import Fold
from gpusync.folding.parallel import run_parallel, shut_down
from gpusync.folding.plan import TensorPlan
from gpusync.host.changes import ListBudget
from gpusync.host.parts import LiveWork, PreparedPart
from gpusync.placement.slices import Slice
from gpusync.published.blobmaps import BlobMap, read_blob_map
from gpusync.published.blobs import BlobSource
from gpusync.timing import Meter, StageClock
from gpusync.types import Digest

_DEFAULT_SCRATCH_NBYTES = 1 << 30
_RING_SLOTS = 8
HOST_PATH = "host_decode"
"""Where tensors are counted that host threads decode for the device."""


@dataclass(frozen=True)
class DeviceCaps:
    """Caps on memory, in bytes; 0: by what is free.

    Parameters
    ----------
    scratch_bytes
        On device memory while an update is prepared; 0: the smaller of 1 GiB and a quarter of what is free.
    list_bytes
        On device memory for change lists; 0: a quarter of what is free.
    ring_bytes
        Of the pinned ring that published bytes are read into.
    host_lists
        The cap on change lists in host memory, shared by all devices.
    """

    scratch_bytes: int
    list_bytes: int
    ring_bytes: int
    host_lists: ListBudget

    def fitted_to(self, runtime: Runtime) -> DeviceCaps:
        """Return the caps with zeros replaced."""
        quarter = runtime.free_nbytes() // 4
        return replace(
            self,
            scratch_bytes=self.scratch_bytes or min(_DEFAULT_SCRATCH_NBYTES, quarter),
            list_bytes=self.list_bytes or quarter,
        )


def prepare_on_device(
    work: LiveWork,
    runtime: Runtime,
    caps: DeviceCaps,
    fold: Fold,
    meter: Meter,
    *,
    untrusted_source: bool,
) -> PreparedPart:
    """Decode, digest and list every tensor of one device; live memory is read, never written.

    Blocks until the device is done. Scratch memory is given back; the lists stay with the part.

    Raises
    ------
    FrameFormatError, SourceNotReadyError, DigestMismatchError, VersionConflictError
        What was published is not usable; as on the CPU path.
    OutOfScratchError
        Scratch or lists do not fit their caps.
    DecodeError, KernelError
        The device failed.
    ModelPoisonedError
        The device is lost, or memory was written that nobody may write.
    """
    if runtime.is_capturing():
        raise DeviceError("this thread is capturing a graph; prepare from another thread, or after")
    engine = runtime.engine_event()
    # In a thread of our own: the caller's device, stream and capture mode stay as they are.
    pool = ThreadPoolExecutor(1, "gpusync-device")
    preparation = _Preparation(work, runtime, fold, meter, untrusted_source, engine)
    futures = [pool.submit(preparation.run, caps)]
    try:
        return futures[0].result()
    except BaseException:
        preparation.stopped = True
        raise
    finally:
        shut_down(pool)
        futures.clear()  # a future holds an error that holds this frame: scratch would wait for a collection


@dataclass(frozen=True)
class _Destination:
    """A tensor, whole or one slice of it, and where it lives. ``part`` is the slice's number."""

    tensor: TensorPlan
    part: int | None
    region: RegionMap

    @property
    def needs_proof(self) -> bool:
        """Whether the published digest is none that the device can take of this destination."""
        return self.part is not None or needs_dry_pass(self.tensor)

    def expected(self, proven: Mapping[str, Proof]) -> Digest | None:
        """Return what the device's digest must be."""
        proof = proven.get(self.tensor.name)
        if proof is None:
            return self.tensor.expected
        return proof.whole if self.part is None else proof.slices[self.part]


class _Preparation:
    def __init__(
        self,
        work: LiveWork,
        runtime: Runtime,
        fold: Fold,
        meter: Meter,
        untrusted_source: bool,
        engine: Event,
    ) -> None:
        self._engine = engine
        self._work = work
        self._runtime = runtime
        self._fold = fold
        self._meter = meter
        self._untrusted_source = untrusted_source
        self.stopped = False
        """Set by who waits for it, where it is no longer wanted."""
        self._clock = StageClock()
        self._notes: list[str] = []

    def run(self, caps: DeviceCaps) -> PreparedPart:
        self._runtime.enter_thread()
        self._nvcomp = Nvcomp(self._runtime.nvcomp_library())
        self._caps = caps.fitted_to(self._runtime)
        on_device = ListBudget(self._caps.list_bytes, "GPUSYNC_DEVICE_LIST_BYTES")
        self._lists = ListMemory(self._runtime, on_device, caps.host_lists)
        with _decoding(self._runtime):
            self._distrust = nvcomp_is_trusted(self._runtime, self._nvcomp)
            self._engine.synchronize(Wait.HOST_FOR_ENGINE)
            with self._runtime.marked("prepare"):
                return self._prepare()

    def _prepare(self) -> PreparedPart:
        empty = [tensor for tensor in self._work.tensors if not tensor.nbytes]
        planned = self._destinations()
        with self._clock.stage("dry_pass"), self._runtime.marked("dry_pass"):
            doubtful = {to.tensor.name: to.tensor for to in planned if to.needs_proof}
            proven = prove_on_host(
                [*empty, *doubtful.values()], self._runtime, self._fold, self._work
            )
        summed = sum(proof.whole is None for proof in proven.values())
        if summed:
            self._notes.append(
                f"host threads decoded {summed} tensor(s) in slices again, for the sums that the ranks add up"
            )
        tensors: list[DeviceTensor] = []
        segments: list[Segment] = []
        wholes = {tensor.name: proven[tensor.name].whole for tensor in empty}
        digests = {name: whole for name, whole in wholes.items() if whole is not None}
        if planned:
            tensors, verdict, segments = self._run_until_settled(planned)
            self._judge(planned, verdict, proven)
            digests |= {
                to.tensor.name: Digest(DEVICE_ALGORITHM, f"{value:032x}")
                for to, value in zip(planned, verdict.digests, strict=True)
                if to.part is None
            }
        return self._part(tensors, len(empty), segments, digests)

    def _destinations(self) -> list[_Destination]:
        """Return every place that gets new bytes, in the order of the tensors."""
        work, found = self._work, []
        for tensor in work.tensors:
            parts = work.slices.get(tensor.name)
            if parts is None and tensor.nbytes:
                address = work.regions[tensor.name].address
                found.append(_Destination(tensor, None, RegionMap.whole(address, tensor.nbytes)))
            for number, part in enumerate(parts or ()):
                if part.nbytes:
                    found.append(_Destination(tensor, number, _map_of(part)))
        return found

    def _run_until_settled(
        self, planned: Sequence[_Destination]
    ) -> tuple[list[DeviceTensor], Verdict, list[Segment]]:
        """Run the pipeline; again, where reading shows that a tensor is one for the host after all."""
        to_host: dict[str, str] = {}
        while True:
            capacities = capacities_for(
                self._caps.scratch_bytes,
                self._nvcomp.decode_temp_nbytes,
                sum(to.region.nbytes for to in planned),
                len(planned),
            )
            tensors = self._device_tensors(planned, to_host, capacities)
            try:
                verdict, segments = self._run_pipeline(tensors, capacities)
            except NeedsHost as err:
                to_host[err.name] = err.reason
                continue
            return tensors, verdict, segments

    def _run_pipeline(
        self, tensors: Sequence[DeviceTensor], capacities: Capacities
    ) -> tuple[Verdict, list[Segment]]:
        batches = plan_batches(tensors, capacities)
        lists = self._lists
        lists.reserve_tables(list_tables_nbytes(batches))
        scratch = Scratch(self._runtime, capacities, self._nvcomp, len(tensors))
        ring = PinnedRing(self._runtime, _RING_SLOTS, self._caps.ring_bytes // _RING_SLOTS)
        feeder = Feeder(ring, self._fold)
        pipeline = Pipeline(self._runtime, self._nvcomp, scratch, feeder, lists, self._count_batch)
        try:
            found = pipeline.run(batches)
        except BaseException:
            lists.give_all_back()
            raise
        self._clock.add(feeder.times())
        self._clock.add(found[0].times)
        if ring.note is not None:
            self._notes.append(ring.note)
        if lists.spilled_nbytes:
            self._notes.append(f"{lists.spilled_nbytes} bytes of change lists are in host memory")
        return found

    def _count_batch(self, nbytes: int) -> None:
        if self.stopped:
            raise DeviceError("prepare was interrupted; nothing was changed")
        self._meter.add(nbytes)

    def _device_tensors(
        self, planned: Sequence[_Destination], to_host: Mapping[str, str], capacities: Capacities
    ) -> list[DeviceTensor]:
        def one(item: tuple[int, _Destination]) -> DeviceTensor:
            number, to = item
            tensor = to.tensor
            reason = to_host.get(tensor.name) or self._distrust
            on_device = None if reason else self._layers(to)
            if isinstance(on_device, str):
                reason = on_device
            found = DeviceTensor(
                number,
                tensor.name,
                tensor.nbytes,
                to.region,
                on_device if isinstance(on_device, tuple) else (_folded(tensor),),
                reason,
                listed=self._work.names_beside(tensor.name)[0] == tensor.name,
            )
            reason = reason or why_not_device(found, capacities)
            if reason == found.host_reason:
                return found
            return replace(found, layers=(_folded(tensor),), host_reason=reason)

        found = run_parallel(one, list(enumerate(planned)), self._fold.workers)
        return sorted(found, key=lambda tensor: tensor.number)

    def _layers(self, to: _Destination) -> tuple[LayerPlan, ...] | str:
        """Return the layers over a destination's live bytes, or why the host must fold the tensor."""
        tensor = to.tensor
        layers: list[LayerPlan] = []
        if not tensor.origin_is_live:
            layers.append(RawLayer(tensor.origin))
        for blob in tensor.blobs:
            found = read_blob_map(blob, tensor.nbytes, untrusted=self._untrusted_source)
            if isinstance(found, str):
                return found
            layers.append(_layer_of(blob, found))
        return tuple(layers)

    def _judge(
        self, planned: Sequence[_Destination], verdict: Verdict, proven: Mapping[str, Proof]
    ) -> None:
        """Raise for whatever the device found wrong; where the bytes are at fault, as the CPU path does."""
        if verdict.damaged:
            raise ModelPoisonedError(
                "the decoder wrote outside of the memory it was given: replace the process"
            )
        for to, bad in zip(planned, verdict.bad.tolist(), strict=True):
            if bad:
                raise self._explain(to, "could not decode a blob")
        if verdict.stopped:
            raise KernelError("the device stopped without saying at which tensor")
        for to, value in zip(planned, verdict.digests, strict=True):
            expected = to.expected(proven)
            if expected is not None and expected.hex != f"{value:032x}":
                raise self._explain(to, "digested other bytes")
        if verdict.unlike:
            raise KernelError("a change list is not what the digest pass counted")

    def _explain(self, to: _Destination, what: str) -> DecodeError:
        return explain(to.tensor, self._runtime, self._fold, self._work, what)

    def _part(
        self,
        tensors: Sequence[DeviceTensor],
        empty: int,
        segments: Sequence[Segment],
        digests: Mapping[str, Digest],
    ) -> PreparedPart:
        reasons = Counter(tensor.host_reason for tensor in tensors if tensor.host_reason)
        on_host = reasons.total() + empty
        if empty:
            reasons["no bytes"] = empty
        by_path: dict[str, int] = {
            self._runtime.name: len(tensors) + empty - on_host,
            HOST_PATH: on_host,
        }
        why: dict[str, str] = {self._runtime.name: self._runtime.describe()}
        if on_host:
            shown = (f"{count} tensor(s): {reason}" for reason, count in reasons.most_common(5))
            why[HOST_PATH] = "; ".join(shown)
        return PreparedPart(
            self._runtime.name,
            DeviceChanges(self._runtime, self._runtime.stream(), segments, self._lists),
            digests,
            {path: count for path, count in by_path.items() if count},
            why,
            self._clock.times(),
            tuple(self._notes),
        )


def _decoding(runtime: Runtime) -> threading.Lock:
    """Return the device's lock: nvCOMP has been seen to fail where several streams of one device decode at once."""
    with _locks_lock:
        return _locks.setdefault(runtime, threading.Lock())


_locks: weakref.WeakKeyDictionary[Runtime, threading.Lock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def _layer_of(blob: BlobSource, found: BlobMap) -> LayerPlan:
    encoding = blob.delta.index.encoding if blob.delta.index is not None else "xor"
    if encoding == "overwrite" or encoding == "xor_sparse":
        return PayloadLayer(blob, found, encoding)
    return RecordsLayer(blob, found) if encoding == "xor_rows" else FramesLayer(blob, found)


def _map_of(part: Slice) -> RegionMap:
    return RegionMap(
        part.address,
        part.nbytes,
        part.run_nbytes,
        part.live_stride,
        part.tensor_begin,
        part.tensor_stride,
    )


def _folded(tensor: TensorPlan) -> FoldedLayer:
    """Return the layer of a tensor that the host folds: its delta where only xor deltas come, else its new bytes."""
    alone = tensor.origin_is_live and all(blob.is_xor for blob in tensor.blobs)
    return FoldedLayer(None if alone else tensor.origin, tensor.blobs)
