"""Updates of a live model on a device: prepare and commit, against a full copy of the weights from the host and
against decoding on the host."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
import zstandard
from gpu_lab import Lab, Task, Timing
from gpu_model import (
    Parameters,
    Step,
    make_step,
    make_weights,
    publish,
    read_blob,
    shard_name,
)

import gpusync

_PIECE_NBYTES = 16 << 20
_BESIDE = 4  # times the copied weights: room beside the parameters
_STEP_NBYTES = 2 << 20  # decoded at a time on the host, of the order of an L2 cache


def run_apply(task: Task) -> None:
    """Every size and density that the time allows, the likeliest density first."""
    lab = Lab(task.device)
    sizes = task.sizes
    weights = make_weights(sizes.model_nbytes)
    host = lab.pinned(weights.nbytes)
    host.numpy()[:] = weights.data
    base = lab.upload(weights.data)
    receiver = HostReceiver(lab)
    chosen = _copies_that_fit(task, lab, weights.nbytes)
    all_copies = Parameters(weights, max(chosen), lab.runtime.device)
    needed = 0.0
    with tempfile.TemporaryDirectory(prefix="gpusync-bench-") as root:
        for density in sizes.densities:
            name = f"apply_to_model at {density:.1%}"
            if task.left < 1.3 * needed + 5:
                task.skip(name)
                continue
            begin = time.monotonic()
            step = make_step(weights, density)
            new = lab.upload(step.new)
            folder = Path(root, f"{density}")
            whole = publish(folder / "whole", step, max(chosen))
            task.fact(f"{name}: building", f"{time.monotonic() - begin:.1f} s")
            for copies in chosen:
                source = whole
                if copies != max(chosen):
                    source = publish(folder / f"{copies}", step, copies, shards_of=whole)
                parameters = all_copies.first(copies)
                case = _Case(task, lab, parameters, step, source, host, base, new, receiver)
                case.run()
            needed = time.monotonic() - begin


def _copies_that_fit(task: Task, lab: Lab, nbytes: int) -> list[int]:
    """Return the numbers of copies that leave room for base, new, scratch and lists."""
    room = lab.runtime.free_nbytes() // nbytes - _BESIDE
    fitting = [copies for copies in task.sizes.copies if copies <= max(1, room)]
    for copies in task.sizes.copies:
        if copies not in fitting:
            task.fact(f"{copies * nbytes / 1e9:.3g} GB", "left out: the device has not the memory")
    return fitting or [1]


class _Case:
    """One size and one density. Every round: ours from base to new, the host's way back to base, a full copy."""

    def __init__(
        self,
        task: Task,
        lab: Lab,
        parameters: Parameters,
        step: Step,
        source: Path,
        host: torch.Tensor,
        base: torch.Tensor,
        new: torch.Tensor,
        receiver: HostReceiver,
    ) -> None:
        self._task, self._lab = task, lab
        self._parameters, self._step, self._source = parameters, step, source
        self._host, self._base, self._new, self._receiver = host, base, new, receiver
        self._seconds: dict[str, list[float]] = {}
        self._report: gpusync.UpdateReport | None = None
        self._wrong: list[str] = []

    def run(self) -> None:
        """Run one round that is checked and not timed, then those that are both."""
        nbytes = self._parameters.nbytes
        name = f"{nbytes / 1e9:.3g} GB, {self._step.density:.1%}"
        self._parameters.fill(self._base)
        rounds = 1 + min(3, self._task.sizes.runs)
        longest = 0.0
        for number in range(rounds):
            if number > 1 and self._task.left < 2 * longest:
                break
            begin = time.monotonic()
            if number == 1:
                self._seconds.clear()
            self._update()
            self._expect("apply_to_model", self._new)
            self._timed("CPU decode + H2D + XOR", self._decode_on_host)
            self._expect("CPU decode + H2D + XOR", self._base)
            self._parameters.fill(self._new)
            self._timed_on_device("full H2D", lambda: self._parameters.fill(self._host))
            self._expect("full H2D", self._base)
            longest = max(longest, time.monotonic() - begin)
            if self._wrong:
                break
        self._task.check(
            f"{name}: bytes after every round", not self._wrong, ", ".join(self._wrong)
        )
        if not self._wrong:
            self._tell(name, nbytes)

    def _update(self) -> None:
        module = self._parameters.module()
        device = "cuda" if self._lab.on_cuda else "emulated"
        begin = time.perf_counter()
        chain = gpusync.open_chain(self._source, 1)
        opened = time.perf_counter()
        update = gpusync.prepare(module, chain, device=device, write_back="none")
        prepared = time.perf_counter()
        update.commit()
        committed = time.perf_counter()
        self._report = update.finish()
        finished = time.perf_counter()
        for part, seconds in (
            ("open", opened - begin),
            ("prepare", prepared - opened),
            ("commit (the pause)", committed - prepared),
            ("total", finished - begin),
        ):
            self._seconds.setdefault(part, []).append(seconds)

    def _decode_on_host(self) -> None:
        self._receiver.apply(self._parameters, self._source / "weight_v000001", self._step)

    def _timed(self, what: str, work: Callable[[], None]) -> None:
        self._lab.runtime.synchronize()
        begin = time.perf_counter()
        work()
        self._lab.runtime.synchronize()
        self._seconds.setdefault(what, []).append(time.perf_counter() - begin)

    def _timed_on_device(self, what: str, work: Callable[[], None]) -> None:
        if not self._lab.on_cuda:
            self._timed(what, work)
            return
        self._lab.runtime.synchronize()
        with torch.cuda.stream(self._lab.torch_stream):
            self._seconds.setdefault(what, []).append(self._lab.time(work))

    def _expect(self, what: str, data: torch.Tensor) -> None:
        self._lab.runtime.synchronize()
        if not self._parameters.are(data):
            self._wrong.append(what)

    def _tell(self, name: str, nbytes: int) -> None:
        timings = {what: Timing(seconds) for what, seconds in self._seconds.items()}
        for what, timing in timings.items():
            self._task.row("apply", case=name, what=what, **timing.cells(nbytes))
        total, copy = timings["total"].median, timings["full H2D"].median
        pause = timings["commit (the pause)"].median
        self._task.row(
            "apply, ratios",
            case=name,
            **{
                "wire share": f"{self._step.wire_nbytes / self._parameters.weights.nbytes:.2%}",
                "total / full H2D": round(total / copy, 2),
                "total / (CPU decode + H2D)": round(
                    total / timings["CPU decode + H2D + XOR"].median, 2
                ),
                "pause / full H2D": round(pause / copy, 3),
                "pause, ms per GB": round(1e12 * pause / nbytes, 3),
            },
        )
        report = self._report
        if report is not None:
            stages = ", ".join(f"{k} {v:.3f} s" for k, v in report.stages.seconds.items())
            self._task.fact(f"{name}: the last report", f"{dict(report.tensors_by_path)}; {stages}")
            self._task.fact(f"{name}: notes and reasons", f"{report.notes} {dict(report.reasons)}")
        if self._step.density == 0.01:
            limit = 1e12 * pause / nbytes
            self._task.target(f"{name}: pause, ms per GB", limit, 0.3, at_most=True)
        self._task.target(f"{name}: total / full H2D", total / copy, 1.0, at_most=True)


class HostReceiver:
    """The usual receiver's way: host threads decode each blob piece by piece into page-locked memory, from which it is
    copied to the device and XORed in there. Reading, decoding, copying and XORing overlap; largest tensors first."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._threads = len(os.sched_getaffinity(0))
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(2 * self._threads):
            self._slots.put(_Slot(lab.pinned(_PIECE_NBYTES), lab.runtime.empty(_PIECE_NBYTES)))
        self._stream = lab.torch_stream if lab.on_cuda else None

    def apply(self, parameters: Parameters, version: Path, step: Step) -> None:
        """Apply a published version to every parameter; returns when all is queued."""
        places = parameters.weights.places
        work = []
        for number, (name, target) in enumerate(parameters.each()):
            begin, end = places[name]
            work.append((end - begin, version / shard_name(number // len(places)), name, target))
        work.sort(key=lambda item: item[0], reverse=True)
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(lambda item: self._one(*item, step), work))

    def _one(self, nbytes: int, shard: Path, name: str, target: torch.Tensor, step: Step) -> None:
        blob = read_blob(shard, step, name)
        with zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True) as reader:
            for begin in range(0, nbytes, _PIECE_NBYTES):
                slot = self._slots.get()
                try:
                    length = min(_PIECE_NBYTES, nbytes - begin)
                    self._decode(reader, slot, length, name)
                    self._queue(slot, target[begin // 2 : (begin + length) // 2])
                finally:
                    self._slots.put(slot)

    def _decode(
        self, reader: zstandard.ZstdDecompressionReader, slot: _Slot, length: int, name: str
    ) -> None:
        if slot.used is not None:
            slot.used.synchronize()
        room = memoryview(slot.host.numpy()[:length])
        done = 0
        while done < length:
            got = reader.readinto(room[done : done + _STEP_NBYTES])
            if not got:
                raise ValueError(f"{name}: the blob ends {length - done} bytes early")
            done += got

    def _queue(self, slot: _Slot, target: torch.Tensor) -> None:
        nbytes = 2 * target.numel()
        if self._stream is None:
            target.bitwise_xor_(slot.host[:nbytes].view(torch.int16))
            return
        with torch.cuda.stream(self._stream):
            slot.device[:nbytes].copy_(slot.host[:nbytes], non_blocking=True)
            target.bitwise_xor_(slot.device[:nbytes].view(torch.int16))
            slot.used = torch.cuda.Event()
            slot.used.record()


@dataclass
class _Slot:
    """A piece of page-locked memory and one of the device; ``used`` is behind what was queued with them."""

    host: torch.Tensor
    device: torch.Tensor
    used: torch.cuda.Event | None = None
