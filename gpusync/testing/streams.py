"""A queue of an emulated device, as the device path sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from gpusync.device.runtime import Event, Wait
from gpusync.errors import DecodeError, KernelError
from gpusync.testing.ledger import Ledger
from gpusync.testing.queues import EmulatedEvent, Queues

Launcher = Callable[..., int]
"""A kernel's C function: grid, block, addresses of the arguments, their number; returns 1 where that is wrong."""


class EmulatedStream:
    """A queue of an emulated device. Implements :class:`gpusync.device.runtime.Stream`."""

    def __init__(
        self,
        queues: Queues,
        ledger: Ledger,
        kernel: Callable[[str], Launcher],
        is_pinned: Callable[[torch.Tensor], bool],
        is_ours: Callable[[torch.Tensor], bool],
    ) -> None:
        self.number = queues.add()
        """Which of its device's streams it is: 0 is the engine's."""
        self._queues = queues
        self._ledger = ledger
        self._kernel = kernel
        self._is_pinned = is_pinned
        self._is_ours = is_ours

    def record(self) -> EmulatedEvent:
        """Return an event behind all that is queued now."""
        return self._queues.record(self.number)

    def wait(self, event: Event, why: Wait) -> None:
        """Have what is queued from now on wait for the event."""
        if not isinstance(event, EmulatedEvent):
            raise KernelError("an emulated stream waits for emulated events", got=type(event))
        self._queues.hold(self.number, event, why)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between two flat uint8 tensors of one size."""
        self._ledger.count("copy")
        for tensor in (target, source):
            _check_bytes(tensor)
        if target.numel() != source.numel():
            raise KernelError("a copy is of one size", expected=target.numel(), got=source.numel())
        if self._is_pinned(target) and self._is_pinned(source):
            raise KernelError("CUDA runs a copy within the host's memory at once, not in the queue")
        to, of, nbytes = target.data_ptr(), source.data_ptr(), target.numel()
        kept = self._kept(target, source)
        self._queues.put(self.number, lambda: _copy(to, of, nbytes, kept))

    def fill(self, target: torch.Tensor, byte: int) -> None:
        """Queue setting every byte of a flat uint8 tensor."""
        self._ledger.count("fill")
        _check_bytes(target)
        if self._is_pinned(target):
            raise KernelError("CUDA fills the host's memory at once, not in the queue")
        to, nbytes, kept = target.data_ptr(), target.numel(), self._kept(target)
        self._queues.put(self.number, lambda: _fill(to, byte, nbytes, kept))

    def _kept(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the memory that a queue may keep alive: not the device's own, which CUDA does not keep either."""
        return [tensor for tensor in tensors if not self._is_ours(tensor)]

    def launch(self, kernel: str, blocks: int, args: Sequence[int], *, threads: int = 256) -> None:
        """Queue a kernel; its arguments are taken now.

        Raises
        ------
        KernelError
            There is no such kernel, it has another number of parameters, or the grid cannot be launched.
        """
        if blocks == 0:
            self._kernel(kernel)
            return
        self._ledger.count("launch", kernel)
        if not (0 < blocks < 1 << 31 and 0 < threads <= 1024):
            raise KernelError(f"{kernel} cannot be launched so", got=f"{blocks} x {threads}")
        launcher = self._kernel(kernel)
        values = (ctypes.c_uint64 * len(args))(*args)
        first = ctypes.addressof(values)
        addresses = (ctypes.c_void_p * len(args))(*range(first, first + 8 * len(args), 8))

        def run() -> None:
            # values must live until here: addresses point into it
            if launcher(blocks, threads, addresses, len(values)):
                raise KernelError(f"{kernel} has another number of parameters", got=len(values))

        self._queues.put(self.number, run)

    def call(self, function: Callable[[int], int]) -> int:
        """Queue a library's work; late, another status than 0 raises DecodeError at the next wait of the host."""
        self._ledger.count("call")
        status = 0

        def run() -> None:
            nonlocal status
            status = function(0)
            if status and self._queues.late:
                raise DecodeError("the decoder's library refused its arguments", got=status)

        self._queues.put(self.number, run)
        return status

    def synchronize(self) -> None:
        """Run queued work until this queue is empty."""
        self._queues.drain(self.number)


def _check_bytes(tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise KernelError(
            "device memory is handled as flat contiguous uint8 tensors",
            got=f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
        )


# Through the C library, so that AddressSanitizer checks both sides. ``kept`` is only there to be referred to.
def _copy(to: int, of: int, nbytes: int, kept: object) -> None:
    ctypes.memmove(to, of, nbytes)


def _fill(to: int, byte: int, nbytes: int, kept: object) -> None:
    ctypes.memset(to, byte, nbytes)
