"""The emulated device: host memory, the CUDA kernels built by g++, and queues that can run late and out of order."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import torch

from gpusync.device.runtime import Wait
from gpusync.errors import KernelError
from gpusync.testing.compiling import (
    build_kernels,
    build_nvcomp_stand_in,
    compiler_version,
    sanitizer_flags,
)
from gpusync.testing.ledger import Kind, Ledger
from gpusync.testing.memory import Arena
from gpusync.testing.queues import EmulatedEvent, Order, Queues
from gpusync.testing.streams import EmulatedStream, Launcher


class EmulatedRuntime:
    """A device in host memory. Implements :class:`gpusync.device.runtime.Runtime`.

    Addresses are host addresses. Every operation may be called from any thread.

    Parameters
    ----------
    order
        How late, and in which order, queued work runs; None: at once.
    ignored
        A wait that is left out everywhere, which a test must notice.
    capacity_nbytes, pinned_limit_nbytes
        How much device memory, and how much page-locked memory, there is; None: as much as the host gives.
    nvcomp
        A library to use as nvCOMP instead of the stand-in over libzstd.
    flags
        Flags of the compiler for kernels and stand-in. None: those of :func:`gpusync.testing.sanitizer_flags`.
    """

    name: Literal["cuda", "emulated"] = "emulated"

    def __init__(
        self,
        order: Order | None = None,
        *,
        ignored: Wait | None = None,
        capacity_nbytes: int | None = None,
        pinned_limit_nbytes: int | None = None,
        nvcomp: Path | None = None,
        flags: Sequence[str] | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.ledger = Ledger()
        self.capturing = False
        """What :meth:`is_capturing` returns."""
        self._queues = Queues(order, ignored, self.ledger)
        self._scratch = Arena("device", capacity_nbytes, lambda: self._queues.busy)
        self._pinned = Arena("page-locked", pinned_limit_nbytes, lambda: self._queues.busy)
        self._nvcomp = nvcomp
        self._flags = sanitizer_flags() if flags is None else tuple(flags)
        self.engine_stream = self.stream()
        """The engine's current stream, number 0: a test queues the engine's own work on it."""

    @property
    def operations(self) -> Counter[str]:
        """How often each kind of operation, and each kernel by its name, has been asked for."""
        return self.ledger.operations

    @property
    def scratch_nbytes(self) -> int:
        """Device memory held now, without margins."""
        return self._scratch.nbytes

    @property
    def scratch_peak_nbytes(self) -> int:
        """Most device memory ever held at once."""
        return self._scratch.peak_nbytes

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked memory held now."""
        return self._pinned.nbytes

    @property
    def pinned_peak_nbytes(self) -> int:
        """Most page-locked memory ever held at once."""
        return self._pinned.peak_nbytes

    @property
    def damage(self) -> tuple[str, ...]:
        """Writes outside memory that was handed out, or after it had been given back; found when it is given back."""
        return self._scratch.damage + self._pinned.damage

    def fail_at(self, kind: Kind, number: int, error: Exception, *, lasting: bool = False) -> None:
        """Have an operation raise an error instead of being queued: the ``number``-th of its kind from now, from 1.

        With ``lasting``, all of its kind from then on, as on a lost device.
        """
        self.ledger.fail_at(kind, number, error, lasting)

    def describe(self) -> str:
        """Return the device's name for reports."""
        return f"emulated in host memory, kernels built by {compiler_version()}"

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return device memory of ``nbytes``, aligned to 256 bytes and filled with 0xCD.

        Raises
        ------
        OutOfScratchError
            ``capacity_nbytes`` would be exceeded.
        """
        return self._scratch.take(nbytes)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host memory of ``nbytes``, aligned to 256 bytes and filled with 0xCD.

        Raises
        ------
        OutOfScratchError
            ``pinned_limit_nbytes`` would be exceeded.
        """
        return self._pinned.take(nbytes)

    def stream(self) -> EmulatedStream:
        """Return a new stream."""
        return EmulatedStream(
            self._queues, self.ledger, self.kernel, self._is_pinned, self._is_ours
        )

    def _is_ours(self, memory: torch.Tensor) -> bool:
        address = memory.data_ptr()
        return self._pinned.holds(address) or self._scratch.holds(address)

    def _is_pinned(self, memory: torch.Tensor) -> bool:
        return self._pinned.holds(memory.data_ptr())

    def engine_event(self) -> EmulatedEvent:
        """Return an event behind all that :attr:`engine_stream` holds now."""
        return self.engine_stream.record()

    def free_nbytes(self) -> int:
        """Return what is left of the capacity; without one, the host's free memory."""
        if self._scratch.limit_nbytes is None:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self._scratch.limit_nbytes - self._scratch.nbytes

    def nvcomp_library(self) -> str:
        """Return the path of the library that stands in for nvCOMP, building it at first use.

        Raises
        ------
        MissingDependencyError
            There is no g++.
        """
        return str(self._nvcomp or build_nvcomp_stand_in(flags=self._flags))

    def is_capturing(self) -> bool:
        """Return :attr:`capturing`."""
        return self.capturing

    def synchronize(self) -> None:
        """Run all that is queued, the engine's work as well.

        Raises
        ------
        KernelError
            A graph is being captured: CUDA refuses then.
        """
        if self.capturing:
            raise KernelError("the device cannot be waited for while a graph is captured")
        with self._queues.lock:
            self._queues.drain()
            self._scratch.settle()
            self._pinned.settle()

    def marked(self, stage: str) -> AbstractContextManager[None]:
        """Note the stage in :attr:`ledger`."""
        return self.ledger.marked(stage)

    def enter_thread(self) -> None:
        """Do nothing: every thread may use host memory."""

    def kernel(self, name: str) -> Launcher:
        """Return a kernel's launcher.

        Raises
        ------
        KernelError
            There is no such kernel, or the sources do not compile.
        """
        function: Launcher | None = getattr(self._kernels, f"gs_launch_{name}", None)
        if function is None:
            raise KernelError("no kernel of this name is in the sources", got=name)
        return function

    @cached_property
    def _kernels(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(build_kernels(flags=self._flags)))


@cache
def emulated_runtime() -> EmulatedRuntime:
    """Return the process's own emulated device, which runs everything at once."""
    return EmulatedRuntime()
