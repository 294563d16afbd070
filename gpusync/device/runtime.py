"""The seam between the device path and what it runs on: memory, streams, events and launches.

Two implementations: :mod:`gpusync.device.cuda_runtime` (torch memory and streams, CuPy launches) and
:mod:`gpusync.testing` (host memory, the same kernels built by g++, streams that can run late and out of order).
All memory is torch uint8 tensors, so that one allocator owns and counts it; an address is a tensor's ``data_ptr()``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch


class Wait(enum.Enum):
    """Every place where one queue of work waits for another; leaving any one out gives wrong bytes.

    The value says who waits for what.
    """

    DECODE_FOR_COPY = "frames are decoded after their bytes have been copied in"
    DECODE_FOR_APPLY = (
        "a slot's delta is written after the list of the batch that had the slot before"
    )
    APPLY_FOR_DECODE = "a delta is digested and listed after it has been decoded"
    HOST_FOR_ENGINE = "live bytes are read after the engine's queued writes"
    HOST_FOR_COPY = "a pinned buffer is filled after the copy that read it before"
    HOST_FOR_COUNT = "a list is allocated after its entries have been counted"
    HOST_FOR_VERDICT = "digests and flags are read by the host after they have been copied out"


class Event(Protocol):
    """A point in a stream's queue."""

    def synchronize(self, why: Wait) -> None:
        """Block the host until the queue has passed the point."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the time between two points of one device; both have been passed."""


class Stream(Protocol):
    """A queue of work on the device, run in order.

    A stream of the runtime's own does not wait for the legacy default stream, nor makes it wait.
    """

    def record(self) -> Event:
        """Return an event behind all that is queued now."""

    def wait(self, event: Event, why: Wait) -> None:
        """Have what is queued from now on wait for the event; the host goes on."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of bytes between host and device, in either direction, or within the device.

        Both are flat uint8 tensors of one size. Host memory must stay untouched until the copy has run: pinned memory
        is read when the queue gets there.
        """

    def fill(self, target: torch.Tensor, byte: int) -> None:
        """Queue setting every byte of device memory."""

    def launch(self, kernel: str, blocks: int, args: Sequence[int], *, threads: int = 256) -> None:
        """Queue a kernel; with ``blocks`` 0 it is only built and loaded.

        Parameters
        ----------
        kernel
            Its name in the sources of ``kernels/``.
        blocks, threads
            Thread blocks in the grid, below 2^31, and threads in each.
        args
            One 8-byte value per parameter: device addresses, and counts.

        Raises
        ------
        KernelError
            It cannot be built or launched.
        """

    def call(self, function: Callable[[int], int]) -> int:
        """Have a library queue its own work: ``function`` gets the stream's handle and returns a status.

        Returns
        -------
        int
            The status. Where the queue runs late it is 0, and another status raises DecodeError at the next wait.
        """

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""


class Runtime(Protocol):
    """One device."""

    name: Literal["cuda", "emulated"]
    device: torch.device

    def describe(self) -> str:
        """Return the device's name for reports."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized device memory of ``nbytes``, aligned to 256 bytes.

        Raises
        ------
        OutOfScratchError
            The allocator has none left.
        """

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked host memory of ``nbytes``, which kernels may also address.

        Raises
        ------
        OutOfScratchError
            The system refuses to lock so much.
        """

    def stream(self) -> Stream:
        """Return a new stream."""

    def engine_event(self) -> Event:
        """Return an event behind all that the engine has queued on its current stream."""

    def free_nbytes(self) -> int:
        """Return the device memory that could be allocated now."""

    def nvcomp_library(self) -> str:
        """Return the path of the nvCOMP library.

        Raises
        ------
        MissingDependencyError
            There is none.
        """

    def is_capturing(self) -> bool:
        """Return whether the engine's current stream is being captured into a graph."""

    def synchronize(self) -> None:
        """Block the host until all work on the device is done, the engine's as well.

        Raises
        ------
        ModelPoisonedError
            The device is lost.
        """

    def marked(self, stage: str) -> AbstractContextManager[None]:
        """Return a block whose work a profiler shows as ``gpusync.<stage>``: what this host thread queues or waits for."""

    def enter_thread(self) -> None:
        """Prepare the calling host thread: its device is current, and an engine's graph capture does not mind it."""
