"""What the CUDA runtime makes of missing packages and of errors: on stand-ins for torch.cuda and CuPy, without a GPU."""

from __future__ import annotations

import contextlib
import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusync.device import cuda_runtime as module
from gpusync.device.cuda_runtime import CudaRuntime, cuda_runtime
from gpusync.device.runtime import Wait
from gpusync.errors import (
    KernelError,
    MissingDependencyError,
    ModelPoisonedError,
    OutOfScratchError,
)

ILLEGAL_ADDRESS = 700
CAPTURE_UNSUPPORTED = 900


class CompileException(Exception):
    pass


class Handle:
    """CuPy's stream."""

    made = 0

    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking
        Handle.made += 1
        self.ptr = 4096 * Handle.made

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Device:
    """A device whose every operation can be made to fail, and whose context can be lost."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.status = 0
        self.launches: list[tuple[str, Any, Any, Any]] = []

    def act(self, *_: Any, **__: Any) -> None:
        if self.error is not None:
            raise self.error

    def get_function(self, name: str) -> Any:
        self.act()
        return lambda grid, block, args: (
            self.act(),
            self.launches.append((name, grid, block, args)),
        )

    def cupy(self) -> Any:
        return SimpleNamespace(
            RawModule=lambda code, options: SimpleNamespace(get_function=self.get_function),
            cuda=SimpleNamespace(
                Stream=Handle,
                compiler=SimpleNamespace(CompileException=CompileException),
                nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
                runtime=SimpleNamespace(streamQuery=lambda ptr: self.status),
            ),
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    stream = SimpleNamespace(synchronize=fake.act, wait_event=fake.act)
    event = SimpleNamespace(synchronize=fake.act, record=fake.act)
    monkeypatch.setattr(module, "_import_cupy", fake.cupy)
    monkeypatch.setattr(module, "_load_driver", SimpleNamespace)
    for name, value in {
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "ExternalStream": lambda pointer, device: stream,
        "Event": lambda enable_timing, blocking: event,
        "current_stream": lambda device: stream,
        "synchronize": fake.act,
        "mem_get_info": lambda device: (1000, 2000),
        "memory_stats": lambda device: {
            "reserved_bytes.all.current": 500,
            "allocated_bytes.all.current": 300,
            "inactive_split_bytes.all.current": 50,
        },
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", fake.act)
    return fake


@pytest.fixture
def runtime(device: Device) -> CudaRuntime:
    return CudaRuntime(torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(MissingDependencyError, match="no CUDA device"):
        cuda_runtime(torch.device("cuda", 0))


def test_a_missing_cupy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match=r"gpusync\[cuda12\]"):
        CudaRuntime(torch.device("cuda", 0))


def test_launches_pass_8_byte_values_and_none_without_blocks(
    device: Device, runtime: CudaRuntime
) -> None:
    stream = runtime.stream()
    stream.launch("gs_one", 3, [1, (1 << 64) - 1])
    stream.launch("gs_two", 0, [])
    ((name, grid, block, args),) = device.launches
    assert (name, grid, block) == ("gs_one", (3,), (256,))
    assert [(value.itemsize, int(value)) for value in args] == [(8, 1), (8, (1 << 64) - 1)]


def test_streams_are_used_again_and_never_by_two(runtime: CudaRuntime) -> None:
    first, second = runtime.stream(), runtime.stream()
    pointers = [stream.call(lambda handle: handle) for stream in (first, second)]
    assert len(set(pointers)) == 2
    del first
    gc.collect()
    third = runtime.stream()
    assert third.call(lambda handle: handle) == pointers[0]


@pytest.mark.parametrize("status", [0, 600, CAPTURE_UNSUPPORTED])
def test_an_error_of_one_call_is_a_kernel_error(
    device: Device, runtime: CudaRuntime, status: int
) -> None:
    stream = runtime.stream()
    event = stream.record()
    tensor = torch.zeros(1, dtype=torch.uint8)
    device.error, device.status = RuntimeError("refused"), status
    for call in (
        runtime.synchronize,
        stream.synchronize,
        stream.record,
        runtime.engine_event,
        lambda: event.synchronize(Wait.HOST_FOR_COPY),
        lambda: stream.wait(event, Wait.DECODE_FOR_COPY),
        lambda: stream.launch("gs_one", 1, []),
        lambda: runtime.empty(1),
    ):
        with pytest.raises(KernelError, match="refused"):
            call()
    with pytest.raises(OutOfScratchError):
        runtime.pinned(1)
    device.error = None
    stream.copy(tensor, torch.ones(1, dtype=torch.uint8))
    stream.fill(tensor, 3)
    assert tensor.item() == 3


def test_a_lost_device_poisons_the_model(device: Device, runtime: CudaRuntime) -> None:
    stream = runtime.stream()
    event = stream.record()
    device.error, device.status = RuntimeError("an illegal memory access"), ILLEGAL_ADDRESS
    for call in (
        runtime.synchronize,
        stream.synchronize,
        lambda: event.synchronize(Wait.HOST_FOR_COPY),
        lambda: stream.launch("gs_one", 1, []),
        lambda: runtime.empty(1),
        lambda: runtime.pinned(1),
    ):
        with pytest.raises(ModelPoisonedError, match="lost"):
            call()


def test_memory_that_is_used_up_says_how_much_there_is(
    device: Device, runtime: CudaRuntime
) -> None:
    assert runtime.free_nbytes() == 1000 + 500 - 300 - 50
    device.error = torch.cuda.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(OutOfScratchError) as refused:
        runtime.empty(4000)
    assert (refused.value.needed_bytes, refused.value.budget_bytes) == (4000, 1150)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CompileException("xxh3.cu(3): error"), KernelError),
        (ImportError("libnvrtc.so.12"), MissingDependencyError),
    ],
)
def test_what_keeps_kernels_from_being_built(
    device: Device, runtime: CudaRuntime, error: Exception, expected: type[Exception]
) -> None:
    device.error = error
    with pytest.raises(expected, match=str(error)[:5]):
        runtime.stream().launch("gs_one", 1, [])


def test_marked_stages_are_nvtx_ranges_and_end_with_their_block(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    with pytest.raises(KeyError), runtime.marked("prepare"), runtime.marked("decode"):
        raise KeyError
    assert said == ["gpusync.prepare", "gpusync.decode", "pop", "pop"]
