"""What the sections of gpu_check share: sizes, one device, memory to and from it, a clock, and what they report."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gpu_isolate import NeedsCudaError, Tell
from numpy.typing import DTypeLike, NDArray

from gpusync.device.cuda_runtime import cuda_runtime
from gpusync.device.nvcomp import Nvcomp
from gpusync.device.runtime import Runtime, Stream
from gpusync.testing import emulated_runtime

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Sizes:
    """How large everything is; bytes. ``runs`` are timed runs, ``together`` how often work is queued in each."""

    whole_frames: tuple[int, ...]
    decode_nbytes: int
    single_nbytes: int
    frame_nbytes: tuple[int, ...]
    batch_nbytes: tuple[int, ...]
    kernel_nbytes: int
    kernel_region_nbytes: int
    model_nbytes: int
    copies: tuple[int, ...]
    densities: tuple[float, ...]
    runs: int
    together: int
    corrupt_seconds: float


FULL = Sizes(
    whole_frames=(64 * KIB, MIB, 16 * MIB, 17 * MIB, 256 * MIB, GIB),
    decode_nbytes=GIB,
    single_nbytes=256 * MIB,
    frame_nbytes=(64 * KIB, 256 * KIB, MIB, 16 * MIB),
    batch_nbytes=(64 * MIB, 256 * MIB),
    kernel_nbytes=2 * GIB,
    kernel_region_nbytes=64 * MIB,
    model_nbytes=1_000_000_000,
    copies=(4, 16),
    densities=(0.01, 0.002, 0.03),
    runs=5,
    together=8,
    corrupt_seconds=8.0,
)
SMOKE = Sizes(
    whole_frames=(64 * KIB, MIB + 1),
    decode_nbytes=MIB,
    single_nbytes=MIB // 2,
    frame_nbytes=(64 * KIB, 256 * KIB),
    batch_nbytes=(256 * KIB,),
    kernel_nbytes=MIB,
    kernel_region_nbytes=256 * KIB,
    model_nbytes=1_000_000,
    copies=(1, 2),
    densities=(0.01,),
    runs=1,
    together=1,
    corrupt_seconds=8.0,
)


@dataclass(frozen=True)
class Task:
    """What a section is asked to do, and by when. ``tell`` sends a record to whoever started it."""

    device: str
    smoke: bool
    tell: Tell
    seconds: float
    begin: float = field(default_factory=time.monotonic)

    @property
    def sizes(self) -> Sizes:
        return SMOKE if self.smoke else FULL

    @property
    def left(self) -> float:
        """Seconds until the section is stopped."""
        return self.begin + self.seconds - time.monotonic()

    def send(self, kind: str, **values: Any) -> None:
        """Report something, with the device that it was found on."""
        self.tell({"kind": kind, "device": self.device, **values})

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        """Report something that must be so."""
        self.send("check", name=name, ok=bool(ok), detail=detail)

    def fact(self, name: str, detail: str) -> None:
        """Report something that is neither right nor wrong."""
        self.send("check", name=name, ok=None, detail=detail)

    def row(self, table: str, **cells: Any) -> None:
        """Report a row of a table of figures."""
        self.send("row", table=table, cells=cells)

    def target(self, name: str, value: float, limit: float, *, at_most: bool) -> None:
        """Report a figure that was promised; figures of emulated devices and tiny sizes are not held against it."""
        if self.device != "cuda" or self.smoke:
            return
        met = value <= limit if at_most else value >= limit
        self.send(
            "target",
            name=name,
            value=round(value, 4),
            sense="<=" if at_most else ">=",
            limit=limit,
            met=bool(met),
        )

    def skip(self, what: str) -> None:
        """Report what is left out because the time would not do."""
        self.fact(what, "left out: no time")

    def needs_cuda(self) -> None:
        """End the section where the device is emulated.

        Raises
        ------
        NeedsCudaError
            It is.
        """
        if self.device != "cuda":
            raise NeedsCudaError("not tried on the emulated device")


class Lab:
    """One device, entered by this thread, and one stream of it."""

    def __init__(self, device: str) -> None:
        self.runtime: Runtime = (
            cuda_runtime(torch.device("cuda", 0)) if device == "cuda" else emulated_runtime()
        )
        self.on_cuda = device == "cuda"
        self.runtime.enter_thread()
        self.stream: Stream = self.runtime.stream()

    @cached_property
    def nvcomp(self) -> Nvcomp:
        """Return the decoder's library."""
        return Nvcomp(self.runtime.nvcomp_library())

    def upload(self, array: NDArray[Any], *, slack: int = 0) -> torch.Tensor:
        """Return a copy of an array's bytes in device memory, with zeros behind it for decoders that read ahead."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target = self.runtime.empty(data.size + slack)
        if slack:
            self.stream.fill(target[data.size :], 0)
        if data.size:
            source = torch.from_numpy(data if data.flags.writeable else data.copy())
            self.stream.copy(target[: data.size], source)
        self.stream.synchronize()
        return target

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return device memory of zeros."""
        memory = self.runtime.empty(nbytes)
        self.stream.fill(memory, 0)
        return memory

    def download(self, memory: torch.Tensor, dtype: DTypeLike = np.uint8) -> NDArray[Any]:
        """Wait for the stream, and return a copy of device memory."""
        host = torch.empty(memory.numel(), dtype=torch.uint8)
        if memory.numel():
            self.stream.copy(host, memory)
        self.stream.synchronize()
        return host.numpy().view(dtype)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked host memory, 256 bytes aligned."""
        return self.runtime.pinned(nbytes)

    def same(self, memory: torch.Tensor, expected: torch.Tensor) -> bool:
        """Wait for the device, and return whether two pieces of its memory are alike."""
        self.runtime.synchronize()
        return torch.equal(memory, expected)

    def time(self, work: Callable[[], None], together: int = 1) -> float:
        """Return the seconds that ``work``, which queues on the lab's stream, takes there; the mean of ``together``.

        By events of the stream on a CUDA device; by the host's clock, until the stream is empty, on an emulated one.
        """
        if not self.on_cuda:
            begin = time.perf_counter()
            for _ in range(together):
                work()
            self.stream.synchronize()
            return (time.perf_counter() - begin) / together
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(self.torch_stream)
        for _ in range(together):
            work()
        last.record(self.torch_stream)
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / together

    def measure(
        self,
        work: Callable[[], None],
        sizes: Sizes,
        *,
        together: int | None = None,
        most: float = 2.0,
    ) -> Timing:
        """Time ``work`` after one untimed run; fewer runs where they would take more than ``most`` seconds."""
        first = self.time(work)
        if first > most:
            return Timing((first,))
        runs = max(1, min(sizes.runs, math.ceil(most / max(first, 1e-6))))
        together = sizes.together if together is None else together
        return Timing(tuple(self.time(work, together) for _ in range(runs)))

    @cached_property
    def torch_stream(self) -> torch.cuda.Stream:
        """Return torch's view of the lab's stream; CUDA only."""
        handles: list[int] = []

        def take(handle: int) -> int:
            handles.append(handle)
            return 0

        self.stream.call(take)
        return torch.cuda.ExternalStream(handles[0], self.runtime.device)


@dataclass(frozen=True)
class Timing:
    """Seconds of the runs of one piece of work."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def rate(self, nbytes: float) -> float:
        """Return GB/s (10^9)."""
        return nbytes / self.median / 1e9

    def cells(self, nbytes: float | None = None) -> dict[str, Any]:
        """Return cells of a table: milliseconds, and GB/s of so many bytes."""
        found: dict[str, Any] = {
            "ms": round(1e3 * self.median, 4),
            "min_ms": round(1e3 * min(self.seconds), 4),
            "max_ms": round(1e3 * max(self.seconds), 4),
            "runs": len(self.seconds),
        }
        return found if nbytes is None else {"GB/s": round(self.rate(nbytes), 2), **found}


def make_delta(nbytes: int, density: float, seed: int) -> Bytes:
    """Return an XOR delta of bf16 words of which about ``density`` moved by one unit in the last place."""
    rng = np.random.default_rng(seed)
    words = np.zeros(-(-nbytes // 2), np.uint16)
    places = rng.integers(0, words.size, max(1, round(words.size * density)))
    # A step of one turns the trailing ones, or zeros, and the bit above: each further bit half as often.
    words[places] = (1 << rng.geometric(0.5, places.size).clip(max=9)) - 1
    return words.view(np.uint8)[:nbytes]


def name_nbytes(nbytes: int) -> str:
    """Return a size for people."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
