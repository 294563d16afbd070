"""The real device: torch's memory, streams of our own, kernels compiled and launched by CuPy.

The only module that knows CuPy, which is imported when a runtime is made. Nothing is ever taken from CuPy's memory
pool: all memory is torch's, which counts it.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch

from gpusync.device.cuda_streams import CudaEvent, CudaStream, record
from gpusync.device.kernels import kernel_source
from gpusync.device.nvcomp import find_nvcomp
from gpusync.errors import (
    KernelError,
    MissingDependencyError,
    ModelPoisonedError,
    OutOfScratchError,
)

# cudaError_t (CUDA runtime API, data types)
_SUCCESS, _NOT_READY = 0, 600
_CAPTURE_ERRORS = range(900, 909)

# CUstreamCaptureMode (CUDA driver API): a capture elsewhere neither forbids this thread anything nor is ended by it
_CAPTURE_MODE_RELAXED = 2


def cuda_runtime(device: torch.device) -> CudaRuntime:
    """Return the process's runtime of a CUDA device; without an index, of the current one.

    Raises
    ------
    MissingDependencyError
        There is no CUDA device, or no CuPy.
    """
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "there is no CUDA device that torch can use: take device='cpu', or install torch for CUDA and a driver"
        )
    return _runtime_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _runtime_of(index: int) -> CudaRuntime:
    return CudaRuntime(torch.device("cuda", index))


class CudaRuntime:
    """One CUDA device. Implements :class:`gpusync.device.runtime.Runtime`; made by :func:`cuda_runtime`.

    Parameters
    ----------
    device
        With its index. torch can use it.

    Raises
    ------
    MissingDependencyError
        CuPy, its compiler or the driver's library cannot be loaded, or CuPy sees no device.
    """

    name: Literal["cuda", "emulated"] = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cupy = _import_cupy()
        _check_compiler(self._cupy)
        self._driver = _load_driver()
        # CuPy keeps the compiled module per device, and on disk between processes.
        self._module = self._cupy.RawModule(code=kernel_source(), options=("--std=c++17",))
        self._kernels: dict[str, Any] = {}
        self._idle: deque[Any] = deque()
        with torch.cuda.device(device):
            self._probe = self._cupy.cuda.Stream(non_blocking=True)
        self._memory = torch.cuda.ExternalStream(self._probe.ptr, device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            self._host_reads = self._cupy.cuda.Stream(non_blocking=True)

    def describe(self) -> str:
        """Return the device's name for reports."""
        return torch.cuda.get_device_name(self.device)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized device memory of ``nbytes``; torch aligns it to 512 bytes.

        Freed, it goes only to a later call of this method: the block belongs to a stream that the engine never sees.

        Raises
        ------
        OutOfScratchError
            torch's allocator has none left, after giving back what it had cached.
        """
        with self.translated("allocating device memory"), torch.cuda.stream(self._memory):
            try:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                # Allocations of cudaMallocAsync, and the fill that torch.use_deterministic_algorithms adds, are queued.
                self._memory.synchronize()
                return memory
            except torch.cuda.OutOfMemoryError as err:
                raise OutOfScratchError(
                    "the device has no memory left for scratch: lower scratch_bytes",
                    needed_bytes=nbytes,
                    budget_bytes=self.free_nbytes(),
                ) from err

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked host memory of ``nbytes``, at the same address for host and kernels.

        torch's host allocator rounds up to a power of two, and keeps freed blocks for later calls.

        Raises
        ------
        OutOfScratchError
            The system refuses to lock so much.
        """
        with torch.cuda.device(self.device):
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as err:
                self._raise_if_lost(err)
                raise OutOfScratchError(
                    f"the system refuses to lock so much host memory: {err}", needed_bytes=nbytes
                ) from err

    def stream(self) -> CudaStream:
        """Return a stream that no one else has now.

        It is created here, not taken from torch's pool: those are dealt out in turn, so that an engine could get the
        same one and capture our work into its graph. It is never destroyed, for torch may still record events on it
        when it frees memory that was copied there; once its user is gone it serves the next.
        """
        with self.translated("creating a stream"), torch.cuda.device(self.device):
            try:
                handle = self._idle.popleft()
            except IndexError:
                handle = self._cupy.cuda.Stream(non_blocking=True)
            stream = CudaStream(handle, self.device, self.kernel, self.translated)
        weakref.finalize(stream, self._idle.append, handle).atexit = False
        return stream

    def engine_event(self) -> CudaEvent:
        """Return an event behind all that is queued on the calling thread's current torch stream."""
        with self.translated("asking for the engine's stream"):
            stream = torch.cuda.current_stream(self.device)
        return record(stream, self.translated)

    def free_nbytes(self) -> int:
        """Return the device memory that could be allocated now: the driver's, and what torch could give back to it."""
        with self.translated("asking for free memory"):
            free, _ = torch.cuda.mem_get_info(self.device)
            stats = torch.cuda.memory_stats(self.device)
        cached = (
            stats.get("reserved_bytes.all.current", 0)
            - stats.get("allocated_bytes.all.current", 0)
            - stats.get("inactive_split_bytes.all.current", 0)  # parts of blocks that are in use
        )
        return int(free) + max(int(cached), 0)

    def nvcomp_library(self) -> str:
        """Return the path of the nvCOMP library.

        Raises
        ------
        MissingDependencyError
            There is none.
        """
        return str(find_nvcomp())

    def is_capturing(self) -> bool:
        """Return whether the calling thread's current torch stream is being captured into a graph."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Block the host until all work on the device is done, the engine's as well.

        Raises
        ------
        ModelPoisonedError
            The device is lost.
        KernelError
            The device may not be waited for, such as while any stream of it is being captured.
        """
        with self.translated("waiting for the device"):
            torch.cuda.synchronize(self.device)

    @contextmanager
    def marked(self, stage: str) -> Iterator[None]:
        """Push an NVTX range for the block: some nanoseconds where no profiler is attached."""
        torch.cuda.nvtx.range_push(f"gpusync.{stage}")  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Make the device and a stream of ours current for the calling thread, which may work while an engine captures.

        For threads of our own: it lasts until the thread ends. Without relaxed capture mode, a call such as an allocation
        would fail, and end the engine's capture with it, wherever that capture is global.
        """
        torch.cuda.set_device(self.device)
        # torch's own copies, such as reads of live bytes by the host: not behind what the engine has queued.
        torch.cuda.set_stream(torch.cuda.ExternalStream(self._host_reads.ptr, self.device))  # type: ignore[no-untyped-call]
        # The driver's function: torch's and CuPy's CUDA runtimes may be two libraries, and both sit on this driver.
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        status = self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if status:
            raise KernelError("the driver refuses a thread its relaxed capture mode", got=status)

    def kernel(self, name: str) -> Any:
        """Return a kernel, compiling all of them at first use.

        Raises
        ------
        KernelError
            There is no such kernel, or the sources do not compile; the message holds the compiler's text.
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            with self.translated(f"building {name}"), torch.cuda.device(self.device):
                try:
                    kernel = self._kernels[name] = self._module.get_function(name)
                except self._cupy.cuda.compiler.CompileException as err:
                    raise KernelError(f"the kernels do not compile: {err}") from err
                except ImportError as err:
                    raise MissingDependencyError(
                        "CuPy lacks a library that it compiles with", got=str(err)
                    ) from err
                except OSError as err:
                    raise KernelError(
                        f"CuPy cannot keep what it compiles, see CUPY_CACHE_DIR: {err}"
                    ) from err
        return kernel

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Turn what torch and CuPy raise into our errors.

        Raises
        ------
        ModelPoisonedError
            The device is lost.
        KernelError
            Anything else went wrong.
        """
        try:
            yield
        except RuntimeError as err:  # torch's and CuPy's CUDA errors derive from it
            self._raise_if_lost(err)
            raise KernelError(f"{doing} failed: {err}") from err

    def _raise_if_lost(self, err: Exception) -> None:
        """Raise ModelPoisonedError if the device's context is gone: then every call fails, even a harmless one."""
        status = self._cupy.cuda.runtime.streamQuery(self._probe.ptr)
        if status not in (_SUCCESS, _NOT_READY, *_CAPTURE_ERRORS):
            raise ModelPoisonedError(
                f"the CUDA device is lost, and what its memory holds with it: {err}", got=status
            ) from err


def _import_cupy() -> Any:
    try:
        cupy = importlib.import_module("cupy")
    except (ImportError, OSError) as err:
        raise MissingDependencyError(
            "the CUDA path needs CuPy: install gpusync[cuda12] or gpusync[cuda13]", got=str(err)
        ) from err
    if not cupy.is_available():
        raise MissingDependencyError(
            "CuPy sees no CUDA device: is it built for this driver's CUDA?", got=cupy.__version__
        )
    return cupy


def _check_compiler(cupy: Any) -> None:
    """Have CuPy load NVRTC: where it cannot, what it raises later does not tell that from a kernel that is wrong."""
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as err:
        raise MissingDependencyError(
            "CuPy finds no CUDA compiler library (NVRTC): install gpusync[cuda12] or gpusync[cuda13]",
            got=str(err),
        ) from err


def _load_driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as err:
        raise MissingDependencyError(
            "the CUDA driver's library cannot be loaded", file="libcuda.so.1", got=str(err)
        ) from err
