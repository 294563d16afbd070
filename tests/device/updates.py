"""Whole updates through the device path: a device of the test's own, streams of several batches, planned failures."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpusync
from gpusync.device.cuda_runtime import CudaRuntime
from gpusync.device.cuda_streams import CudaEvent, CudaStream
from gpusync.device.warmup import warm_up
from gpusync.live import devices
from gpusync.testing import EmulatedEvent, EmulatedRuntime, EmulatedStream
from tests import live, wire
from tests.unit.strategies import seekable

MIB = 1 << 20
DEVICES = ("emulated", pytest.param("cuda", marks=pytest.mark.gpu))

SCRATCH = 10 * MIB
"""Scratch for batches of little more than 1 MiB, so that ``BIG`` takes several."""

BIG = wire.Row(wire.SECOND, "big.weight", "BF16", (1280, 1024), 2560 << 10)
LAYOUT = (*wire.LAYOUT, BIG)
NAMES = tuple(row.name for row in LAYOUT if row.nbytes)


@dataclass
class Device:
    """The device of one test. ``runtime`` is the emulated one, where it is that."""

    name: str
    runtime: EmulatedRuntime | None
    base_nbytes: int = 0

    @property
    def emulated(self) -> EmulatedRuntime:
        assert self.runtime is not None
        return self.runtime

    @property
    def held_nbytes(self) -> int:
        """Device memory that updates hold now."""
        if self.runtime is not None:
            return self.runtime.scratch_nbytes
        return torch.cuda.memory_allocated() - self.base_nbytes

    @property
    def peak_nbytes(self) -> int:
        """Most device memory that updates held at once."""
        if self.runtime is not None:
            return self.runtime.scratch_peak_nbytes
        return torch.cuda.max_memory_allocated() - self.base_nbytes

    def start_counting(self) -> None:
        """Count device memory from here on; the model is there already."""
        if self.runtime is None:
            torch.cuda.reset_peak_memory_stats()
            self.base_nbytes = torch.cuda.memory_allocated()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """The engine captures a graph, on this thread's current stream."""
        if self.runtime is None:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
                yield
            return
        self.runtime.capturing = True
        try:
            yield
        finally:
            self.runtime.capturing = False


def own_device(name: str, patch: pytest.MonkeyPatch, **options: Any) -> Device:
    """Return a device; an emulated one is new, and ``device="emulated"`` means it from now on."""
    live.need(name)
    if name == "cuda":
        return Device(name, None)
    warm_up(EmulatedRuntime())  # what the self-test takes is not the update's
    runtime = EmulatedRuntime(**options)
    patch.setattr(devices, "emulated_runtime", lambda: runtime)
    return Device(name, runtime)


@contextmanager
def counted_device(name: str, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[Device]:
    """Give a device to a test: no thread is left behind, and nothing outside the device's memory is written."""
    device = own_device(name, patch, **options)
    threads = set(threading.enumerate())
    yield device
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert not left, f"threads are left: {left}"
    if device.runtime is not None:
        gc.collect()
        assert device.runtime.damage == ()


# ---- publishing ---------------------------------------------------------------------------------------


def publish(
    stream: wire.Stream, names: tuple[str, ...] = NAMES, *, nbytes: int = 999, **options: Any
) -> int:
    """Publish a delta of a few changed bytes per tensor, in seekable blobs."""
    old = stream.states[stream.last]
    new = stream.changed(names, old, nbytes)
    blobs = {name: seekable(wire.xor(old[name], new[name]), 64 << 10) for name in names}
    return stream.delta(new=new, bend=wire.Bend(blob=blobs), **options)


def published(root: Path, versions: int = 2, layout: tuple[wire.Row, ...] = LAYOUT) -> wire.Stream:
    """Return a stream of that many deltas that change every tensor."""
    stream = wire.Stream(root, layout)
    for _ in range(versions):
        publish(stream, tuple(row.name for row in layout if row.nbytes))
    return stream


# ---- updating -----------------------------------------------------------------------------------------


def model_at(stream: wire.Stream, version: int, device: str) -> nn.Module:
    """Return a module with a version's bytes, known to hold it."""
    model = live.model_from(stream.base, stream.states[version], device)
    if version:
        folder = stream.root / f"at_{version}"
        if not folder.exists():
            stream.write_checkpoint(folder, stream.states[version])
        gpusync.attach(model, folder, version=version)
    return model


def prepare(
    stream: wire.Stream, model: nn.Module, target: int, device: str, **options: Any
) -> gpusync.Update:
    """Prepare an update of the model alone, in several batches."""
    options = {"scratch_bytes": SCRATCH, "write_back": "none", "durable": False, **options}
    checkpoint = options.pop("checkpoint", None)
    chain = gpusync.open_chain(stream.source, target, checkpoint=checkpoint, base_dir=stream.base)
    return gpusync.prepare(model, chain, device=device, **options)


@dataclass(frozen=True)
class ListSizes:
    """Bytes of an update's change lists: tables, which stay on the device, and entries, which may go to host memory."""

    tables: int
    entries: int

    @property
    def nbytes(self) -> int:
        return self.tables + self.entries


def list_sizes(stream: wire.Stream, target: int, device: str, **options: Any) -> ListSizes:
    """Return what the lists of an update from version 0 take where there is room for them."""
    with prepare(stream, model_at(stream, 0, device), target, device, **options) as update:
        report = update.report
    # an entry is 4 bytes, and stands for a word of 2
    entries = 2 * report.changed_bytes
    return ListSizes(report.change_list_bytes - entries, entries)


def check_next_update(
    stream: wire.Stream, model: nn.Module, target: int, device: str, **options: Any
) -> gpusync.UpdateReport:
    """Bring the model to a version, and hold its bytes against it."""
    update = prepare(stream, model, target, device, **options)
    update.commit()
    report = update.finish()
    assert live.bytes_of(model) == stream.states[target]
    assert gpusync.live_version(model) == target
    return report


def flat_bytes(model: nn.Module, name: str) -> torch.Tensor:
    """Return a tensor's live bytes, to change them."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return named[name].detach().reshape(-1).view(torch.uint8)


# ---- failures -----------------------------------------------------------------------------------------

_CLASSES: Mapping[str, tuple[type, type, type]] = {
    "emulated": (EmulatedStream, EmulatedEvent, EmulatedRuntime),
    "cuda": (CudaStream, CudaEvent, CudaRuntime),
}
KINDS = ("launch", "copy", "fill", "call", "synchronize", "empty", "pinned")


class Failing:
    """Has one kind of call fail: the ``number``-th from now, from 1, and with ``lasting`` all after it.

    With ``after`` it does its work first, as when an interrupt arrives before it returns. Any wait of the host is a "synchronize"; "empty" and "pinned" are allocations.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        device: str,
        kind: str,
        number: int,
        error: BaseException,
        *,
        lasting: bool = False,
        after: bool = False,
    ) -> None:
        self.happened = False
        self._left, self._error, self._lasting, self._after = number, error, lasting, after
        self._lock = threading.Lock()
        stream, event, runtime = _CLASSES[device]
        owners = {"synchronize": (stream, event, runtime)}
        owners |= dict.fromkeys(("launch", "copy", "fill", "call"), (stream,))
        owners |= dict.fromkeys(("empty", "pinned"), (runtime,))
        for owner in owners[kind]:
            patch.setattr(owner, kind, self._failing(getattr(owner, kind)))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                self._left -= 1
                fails = self._left == 0 or (self._lasting and self._left < 0)
                self.happened |= fails
            if fails and not self._after:
                raise copy.copy(self._error)  # a traceback is kept by nobody here
            result = function(*args, **options)
            if fails:
                raise copy.copy(self._error)
            return result

        return call
