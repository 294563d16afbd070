"""A CUDA stream and its events, as the device path sees them: torch's copies and CuPy's launches in one queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpusync.device.runtime import Event, Wait
from gpusync.errors import KernelError

_CUDA_ERROR = 1000  # nvcompStatus_t (nvcomp/shared_types.h)

Translated = Callable[[str], AbstractContextManager[None]]
"""Says what is being done, and turns what torch and CuPy raise meanwhile into our errors."""


@dataclass(frozen=True)
class CudaEvent:
    """A point in a CUDA stream. Implements :class:`gpusync.device.runtime.Event`."""

    event: torch.cuda.Event
    translated: Translated

    def synchronize(self, why: Wait) -> None:
        """Block the host, asleep, until the stream has passed the point.

        Raises
        ------
        ModelPoisonedError
            The device is lost.
        """
        with self.translated("waiting for an event"):
            self.event.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        """Return the time between two points of one device; both have been passed."""
        with self.translated("reading an event's time"):
            milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1e3


def record(stream: torch.cuda.Stream, translated: Translated) -> CudaEvent:
    """Return an event behind all that a torch stream holds now."""
    with translated("recording an event"):
        # blocking: a host thread that waits sleeps, where it would else keep a core busy that the engine needs
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
    return CudaEvent(event, translated)


class CudaStream:
    """A CUDA stream. Implements :class:`gpusync.device.runtime.Stream`.

    Every method raises ModelPoisonedError where the device is lost, and KernelError where it refuses the call.

    Parameters
    ----------
    handle
        CuPy's stream, which stays alive longer than any memory copied on it.
    device
        The stream's device.
    kernel
        Returns a compiled kernel by its name.
    """

    def __init__(
        self,
        handle: Any,
        device: torch.device,
        kernel: Callable[[str], Any],
        translated: Translated,
    ) -> None:
        self._handle = handle
        self._stream = torch.cuda.ExternalStream(handle.ptr, device)  # type: ignore[no-untyped-call]
        self._device = device
        self._kernel = kernel
        self._translated = translated

    def record(self) -> CudaEvent:
        """Return an event behind all that is queued now."""
        return record(self._stream, self._translated)

    def wait(self, event: Event, why: Wait) -> None:
        """Have what is queued from now on wait for the event; the host goes on."""
        if not isinstance(event, CudaEvent):
            raise KernelError("a CUDA stream waits for CUDA events", got=type(event))
        with self._translated("waiting on the device"):
            self._stream.wait_event(event.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. From or to pageable host memory, the host may wait for it."""
        with self._translated("copying"), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        """Queue setting every byte of device memory."""
        with self._translated("filling"), torch.cuda.stream(self._stream):
            target.fill_(byte)

    def launch(self, kernel: str, blocks: int, args: Sequence[int], *, threads: int = 256) -> None:
        """Queue a kernel; the first launch in a process compiles all of them, or takes them from CuPy's cache.

        Raises
        ------
        KernelError
            It cannot be built or launched.
        """
        function = self._kernel(kernel)
        if blocks == 0:
            return
        values = tuple(np.uint64(value) for value in args)
        # CuPy launches on its own notion of the current stream, which it keeps per device and thread
        with self._translated(f"launching {kernel}"), torch.cuda.device(self._device), self._handle:
            function((blocks,), (threads,), values)

    def call(self, function: Callable[[int], int]) -> int:
        """Have a library queue its own work on the stream's ``cudaStream_t``; return its status."""
        with self._translated("calling the decoder"), torch.cuda.device(self._device):
            status = function(self._handle.ptr)
            if status == _CUDA_ERROR:
                raise RuntimeError("the decoder reports a CUDA error")
            return status

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""
        with self._translated("waiting for a stream"):
            self._stream.synchronize()
