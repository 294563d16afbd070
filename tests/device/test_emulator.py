"""The emulated device itself: builds, launches, memory, late queues, planned failures, AddressSanitizer."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from gpusync.device.runtime import Runtime, Wait
from gpusync.errors import (
    DecodeError,
    KernelError,
    MissingDependencyError,
    ModelPoisonedError,
    OutOfScratchError,
)
from gpusync.testing import (
    EmulatedRuntime,
    EmulatedStream,
    Order,
    build,
    compiling,
    emulated_runtime,
    sanitizer_environment,
)
from gpusync.testing.memory import Arena
from tests.device.support import download, upload, zeros

pytestmark = pytest.mark.usefixtures("needs_compiler")

KERNELS = """#line 1 "kernels_of_the_test.cu"
typedef unsigned int u32;
typedef unsigned long long u64;
__device__ __constant__ const u64 TABLE[3] = {7, 70, 700};

extern "C" __global__ void gs_number(u64* out)
{
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = i + gridDim.x * 1000000ull + TABLE[2];
}

extern "C" __global__ void __launch_bounds__(256) gs_atomics(u32* narrow, u64* wide)
{
    atomicAdd(&narrow[0], threadIdx.x);
    atomicOr(&narrow[1], 1u << (threadIdx.x & 31));
    atomicMax(&narrow[2], threadIdx.x);
    atomicAdd(&wide[0], (u64)threadIdx.x << 32);
    atomicMax(&wide[1], (u64)threadIdx.x << 32);
}

extern "C" __global__ void gs_multiply(const u64* a, const u64* b, u64* low_high, u64 n)
{
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    *(ulonglong2*)(low_high + 2 * i) = make_ulonglong2(a[i] * b[i], __umul64hi(a[i], b[i]));
}

extern "C" __global__ void gs_copy(unsigned char* out, const unsigned char* in, u64 n)
{
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) out[i] = in[i];
}

extern "C" __global__ void gs_read_vector(ulonglong2* out, const ulonglong2* in)
{
    *out = *in;
}
"""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device runs the kernels above instead of gpusync's."""
    monkeypatch.setattr(compiling, "kernel_source", lambda: KERNELS)


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


# What both runtimes promise


def test_copies_and_fills_keep_their_order(runtime: Runtime) -> None:
    data = np.arange(1000, dtype=np.uint8)
    device = upload(runtime, data)
    copy = runtime.empty(1000)
    stream = runtime.stream()
    stream.fill(copy, 7)
    stream.copy(copy[10:], device[:990])
    assert (download(runtime, copy) == [7] * 10 + data[:990].tolist()).all()


def test_device_memory_is_aligned_and_pinned_memory_is_the_hosts(runtime: Runtime) -> None:
    taken = [runtime.empty(nbytes) for nbytes in (1, 255, 257, 4096)]
    assert all(tensor.data_ptr() % 256 == 0 for tensor in taken)
    assert all(tensor.device.type == runtime.device.type for tensor in taken)
    pinned = runtime.pinned(4096)
    assert pinned.device.type == "cpu"
    pinned.fill_(9)
    stream = runtime.stream()
    stream.copy(taken[3], pinned)
    stream.synchronize()
    assert (download(runtime, taken[3]) == 9).all()
    assert runtime.empty(0).numel() == 0
    assert runtime.free_nbytes() > 0


def test_one_stream_waits_for_another_and_the_host_for_both(runtime: Runtime) -> None:
    first, second = runtime.stream(), runtime.stream()
    source, middle, end = (zeros(runtime, 1 << 20) for _ in range(3))
    first.fill(source, 5)
    first.copy(middle, source)
    second.wait(first.record(), Wait.DECODE_FOR_COPY)
    second.wait(runtime.engine_event(), Wait.HOST_FOR_ENGINE)
    second.copy(end, middle)
    second.record().synchronize(Wait.HOST_FOR_VERDICT)
    assert (download(runtime, end) == 5).all()


def test_a_kernel_of_ours_runs(runtime: Runtime) -> None:
    a = np.arange(100_000, dtype=np.uint64)
    b = a.copy()
    b[77_777] ^= np.uint64(1) << np.uint64(63)
    one, two, differs = upload(runtime, a), upload(runtime, b), zeros(runtime, 8)
    stream = runtime.stream()
    for other, expected in ((one, 0), (two, 1)):
        args = [one.data_ptr(), 1, other.data_ptr(), 1, a.size, differs.data_ptr()]
        stream.launch("gs_compare", -(-a.size // 256), args)
        stream.synchronize()
        assert download(runtime, differs, np.uint32)[0] == expected


def test_no_blocks_are_no_launch_and_unknown_kernels_are_refused(runtime: Runtime) -> None:
    stream = runtime.stream()
    stream.launch("gs_compare", 0, [])
    with pytest.raises(KernelError):
        stream.launch("gs_no_such_kernel", 1, [])


def test_a_library_gets_a_handle_and_its_status_comes_back(runtime: Runtime) -> None:
    handles: list[int] = []

    def refuse(handle: int) -> int:
        handles.append(handle)
        return 12

    assert runtime.stream().call(refuse) == 12
    assert isinstance(handles[0], int)


def test_threads_may_use_a_runtime_at_once(runtime: Runtime) -> None:
    def work(number: int) -> None:
        runtime.enter_thread()
        stream = runtime.stream()
        for _ in range(20):
            stream.fill(parts[number], number)
            stream.copy(copies[number], parts[number])
            stream.record().synchronize(Wait.HOST_FOR_COPY)

    parts = [runtime.empty(10_000) for _ in range(8)]
    copies = [runtime.empty(10_000) for _ in range(8)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((download(runtime, copy) == number).all() for number, copy in enumerate(copies))


def test_a_runtime_says_what_it_is(runtime: Runtime) -> None:
    assert runtime.describe()
    assert not runtime.is_capturing()


# Builds


def test_what_was_built_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = 'extern "C" int answer() { return 42; }'
    first = build(text, "answer")
    assert first.is_relative_to(tmp_path / "gpusync" / "emulated")
    assert os.listdir(first.parent) == ["answer.so"]
    before = first.stat()
    assert build(text, "answer") == first
    assert first.stat().st_mtime_ns == before.st_mtime_ns
    others = {build(text + " ", "answer"), build(text, "answer", flags=("-O0",))}
    assert len({first, *others}) == 3


def test_processes_that_build_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    code = (
        "import ctypes; from gpusync.testing import build;"
        "p = build('extern \"C\" int answer() { return 42; }', 'answer');"
        "print(p, ctypes.CDLL(str(p)).answer())"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    said = {process.communicate(timeout=100)[0] for process in running}
    assert len(said) == 1
    assert said.pop().endswith(b"answer.so 42\n")


def test_a_compilers_refusal_names_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = KERNELS.replace("out[i] = in[i];", "__syncthreads();")
    monkeypatch.setattr(compiling, "kernel_source", lambda: broken)
    with pytest.raises(KernelError, match=r"kernels_of_the_test\.cu:\d+"):
        EmulatedRuntime().stream().launch("gs_copy", 1, [0, 0, 0])


def test_a_kernels_parameters_are_8_bytes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = KERNELS.replace("u64* low_high, u64 n)", "u64* low_high, u32 n)")
    monkeypatch.setattr(compiling, "kernel_source", lambda: broken)
    with pytest.raises(KernelError, match="every parameter of a kernel is 8 bytes"):
        EmulatedRuntime().kernel("gs_multiply")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match=r"install g\+\+"):
        build("", "nothing")


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KernelError, match="XDG_CACHE_HOME"):
        build("", "nothing")


# Launches


@pytest.mark.usefixtures("kernels")
def test_every_thread_of_every_block_runs_once() -> None:
    runtime = EmulatedRuntime()
    out = runtime.empty(8 * 5 * 96)
    runtime.stream().launch("gs_number", 5, [out.data_ptr()], threads=96)
    expected = np.arange(5 * 96) + 5 * 1_000_000 + 700
    assert (download(runtime, out, np.uint64) == expected).all()


@pytest.mark.usefixtures("kernels")
def test_atomics_and_products_are_exact() -> None:
    runtime = EmulatedRuntime()
    stream = runtime.stream()
    narrow, wide = zeros(runtime, 12), zeros(runtime, 16)
    stream.launch("gs_atomics", 3, [narrow.data_ptr(), wide.data_ptr()])
    total = 3 * sum(range(256))
    assert download(runtime, narrow, np.uint32).tolist() == [total, 0xFFFFFFFF, 255]
    assert download(runtime, wide, np.uint64).tolist() == [total << 32, 255 << 32]

    a, b = np.random.default_rng(0).integers(0, 1 << 64, (2, 1000), np.uint64)
    out = runtime.empty(16 * 1000)
    args = [upload(runtime, a), upload(runtime, b), out]
    stream.launch("gs_multiply", 4, [*(tensor.data_ptr() for tensor in args), 1000])
    got = download(runtime, out, np.uint64).reshape(-1, 2).tolist()
    assert [low + (high << 64) for low, high in got] == [
        x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("order", [None, Order()])
def test_a_wrong_number_of_arguments_is_refused(order: Order | None) -> None:
    runtime = EmulatedRuntime(order)
    with pytest.raises(KernelError, match="another number of parameters"):
        runtime.stream().launch("gs_copy", 1, [0, 0])
        runtime.synchronize()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("blocks", "threads"), [(-1, 256), (1 << 31, 256), (1, 0), (1, 1025)])
def test_a_grid_that_cuda_would_refuse_is_refused(blocks: int, threads: int) -> None:
    with pytest.raises(KernelError, match="cannot be launched"):
        EmulatedRuntime().stream().launch("gs_copy", blocks, [0, 0, 0], threads=threads)


def test_copies_of_anything_but_bytes_of_one_size_are_refused() -> None:
    runtime = EmulatedRuntime()
    stream = runtime.stream()
    with pytest.raises(KernelError, match="of one size"):
        stream.copy(runtime.empty(4), runtime.empty(5))
    for odd in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), runtime.empty(8)[::2]):
        with pytest.raises(KernelError, match="flat contiguous uint8"):
            stream.copy(runtime.empty(4), odd)


# Memory


def test_memory_is_counted_until_its_last_view_is_gone() -> None:
    runtime = EmulatedRuntime()
    first, second = runtime.empty(1000), runtime.empty(500)
    view = first[10:20].view(torch.int16)
    assert (first == 0xCD).all()
    del first
    assert runtime.scratch_nbytes == 1500
    del view, second
    assert runtime.scratch_nbytes == 0
    assert runtime.scratch_peak_nbytes == 1500
    pinned = runtime.pinned(300)
    assert (runtime.pinned_nbytes, runtime.pinned_peak_nbytes) == (300, 300)
    del pinned
    assert runtime.pinned_nbytes == runtime.scratch_nbytes == 0
    assert runtime.damage == ()


def test_caps_are_kept() -> None:
    runtime = EmulatedRuntime(capacity_nbytes=1000, pinned_limit_nbytes=100)
    held = runtime.empty(600)
    assert runtime.free_nbytes() == 400
    with pytest.raises(OutOfScratchError) as refused:
        runtime.empty(401)
    assert (refused.value.needed_bytes, refused.value.budget_bytes) == (1001, 1000)
    with pytest.raises(OutOfScratchError):
        runtime.pinned(101)
    assert runtime.scratch_peak_nbytes == held.numel()
    del held
    assert runtime.empty(1000).numel() == 1000


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("shift", "where"), [(2, "behind"), (-1, "before")])
def test_a_write_outside_memory_is_found(shift: int, where: str) -> None:
    runtime = EmulatedRuntime(flags=())
    source, target = runtime.empty(100), runtime.empty(100)
    args = [target.data_ptr() + shift, source.data_ptr(), 100]
    runtime.stream().launch("gs_copy", 1, args)
    assert runtime.damage == ()
    del target
    (found,) = runtime.damage
    assert f"{abs(shift)} bytes {where} memory of 100 bytes" in found


# Late queues


def numbered_streams(runtime: EmulatedRuntime, count: int) -> list[EmulatedStream]:
    streams = [runtime.stream() for _ in range(count)]
    assert [stream.number for stream in streams] == list(range(1, count + 1))
    return streams


@pytest.mark.parametrize(
    ("priorities", "expected"),
    [
        ((), "engine engine a a b b"),
        ((0, 1, 2), "b b a a engine engine"),
        ((1, 0, 2), "b b engine engine a a"),
        ((-1, 0, 0), "a a b b engine engine"),
    ],
)
def test_the_stream_of_highest_priority_runs_first(
    priorities: tuple[int, ...], expected: str
) -> None:
    runtime = EmulatedRuntime(Order(priorities))
    ran: list[str] = []
    a, b = numbered_streams(runtime, 2)
    for _ in range(2):
        for stream, name in ((b, "b"), (a, "a"), (runtime.engine_stream, "engine")):
            stream.call(lambda handle, name=name: ran.append(name) or 0)  # type: ignore[misc]
    assert ran == []
    runtime.synchronize()
    assert " ".join(ran) == expected


def test_only_what_is_waited_for_runs() -> None:
    runtime = EmulatedRuntime(Order((0, 0, 1)))
    low, high = numbered_streams(runtime, 2)
    target = torch.zeros(3, dtype=torch.uint8)
    low.fill(target[:1], 1)
    event = low.record()
    low.fill(target[1:2], 1)
    high.fill(target[2:], 1)
    event.synchronize(Wait.HOST_FOR_COPY)
    assert target.tolist() == [1, 0, 1]
    low.synchronize()
    assert target.tolist() == [1, 1, 1]


@pytest.mark.parametrize("ignored", [None, Wait.DECODE_FOR_COPY, Wait.HOST_FOR_ENGINE])
@pytest.mark.parametrize("first", [1, 2])
def test_a_wait_is_kept_and_its_absence_shows(ignored: Wait | None, first: int) -> None:
    runtime = EmulatedRuntime(Order((0, 2 - first, first - 1)), ignored=ignored)
    copy, decode = numbered_streams(runtime, 2)
    source, middle, end = bytes_of(5), bytes_of(0), bytes_of(0)
    copy.copy(middle, source)
    decode.wait(copy.record(), Wait.DECODE_FOR_COPY)
    decode.copy(end, middle)
    runtime.synchronize()
    torn = ignored is Wait.DECODE_FOR_COPY and first == 2
    assert end.item() == (0 if torn else 5)


def test_an_ignored_wait_of_the_host_returns_at_once() -> None:
    runtime = EmulatedRuntime(Order(), ignored=Wait.HOST_FOR_VERDICT)
    stream = runtime.stream()
    target = bytes_of(0)
    stream.fill(target, 1)
    event = stream.record()
    event.synchronize(Wait.HOST_FOR_VERDICT)
    assert target.item() == 0
    event.synchronize(Wait.HOST_FOR_COUNT)
    assert target.item() == 1


@pytest.mark.usefixtures("kernels")
def test_host_memory_is_read_late_and_arguments_are_taken_at_once() -> None:
    runtime = EmulatedRuntime(Order())
    stream = runtime.stream()
    host, device, copied = runtime.pinned(4), runtime.empty(4), runtime.empty(4)
    host.fill_(1)
    args = [copied.data_ptr(), device.data_ptr(), 4]
    stream.copy(device, host)
    stream.launch("gs_copy", 1, args)
    args[2] = 0
    host.fill_(2)
    runtime.synchronize()
    assert copied.tolist() == [2] * 4


@pytest.mark.usefixtures("kernels")
def test_memory_given_back_too_early_shows() -> None:
    runtime = EmulatedRuntime(Order())
    stream = runtime.stream()
    source, target = runtime.empty(8), runtime.empty(8)
    result = runtime.empty(8)
    stream.fill(source, 1)
    stream.launch("gs_copy", 1, [target.data_ptr(), source.data_ptr(), 8])
    stream.launch("gs_copy", 1, [result.data_ptr(), target.data_ptr(), 8])
    del target
    runtime.synchronize()
    assert "written after it had been given back" in runtime.damage[0]


def test_what_fails_late_comes_out_of_the_next_wait_and_the_queue_goes_on() -> None:
    runtime = EmulatedRuntime(Order())
    stream = runtime.stream()
    target = bytes_of(0)
    assert stream.call(lambda handle: 10) == 0
    stream.fill(target, 1)
    event = stream.record()
    with pytest.raises(DecodeError, match="10"):
        event.synchronize(Wait.HOST_FOR_VERDICT)
    assert target.item() == 1
    runtime.synchronize()


# Planned failures


def test_operations_are_counted() -> None:
    runtime = EmulatedRuntime()
    stream = runtime.stream()
    one, two = runtime.empty(8), runtime.empty(8)
    stream.fill(one, 0)
    stream.copy(two, one)
    stream.launch("gs_compare", 1, [one.data_ptr(), 1, two.data_ptr(), 1, 0, one.data_ptr()])
    stream.call(lambda handle: 0)
    stream.record().synchronize(Wait.HOST_FOR_COPY)
    stream.synchronize()
    runtime.synchronize()
    assert runtime.operations == {
        "fill": 1,
        "copy": 1,
        "launch": 1,
        "gs_compare": 1,
        "call": 1,
        "synchronize": 3,
    }


@pytest.mark.parametrize("order", [None, Order()])
def test_the_planned_operation_fails_and_is_not_queued(order: Order | None) -> None:
    runtime = EmulatedRuntime(order)
    stream = runtime.stream()
    target = bytes_of(0, 0, 0)
    runtime.fail_at("copy", 2, KernelError("planned"))
    stream.copy(target[:1], bytes_of(1))
    with pytest.raises(KernelError, match="planned"):
        stream.copy(target[1:2], bytes_of(1))
    stream.copy(target[2:], bytes_of(1))
    runtime.synchronize()
    assert target.tolist() == [1, 0, 1]


def test_a_lost_device_stays_lost() -> None:
    runtime = EmulatedRuntime()
    stream = runtime.stream()
    runtime.fail_at("synchronize", 2, ModelPoisonedError("the device is lost"), lasting=True)
    stream.synchronize()
    for wait in (
        runtime.synchronize,
        stream.synchronize,
        lambda: stream.record().synchronize(Wait.HOST_FOR_COPY),
    ):
        with pytest.raises(ModelPoisonedError):
            wait()


def test_calls_and_launches_fail_where_planned() -> None:
    runtime = EmulatedRuntime()
    stream = runtime.stream()
    runtime.fail_at("call", 1, DecodeError("planned"))
    runtime.fail_at("launch", 1, KernelError("planned"))
    runtime.fail_at("fill", 1, KernelError("planned"))
    with pytest.raises(DecodeError):
        stream.call(lambda handle: 0)
    with pytest.raises(KernelError):
        stream.launch("gs_compare", 1, [])
    with pytest.raises(KernelError):
        stream.fill(runtime.empty(1), 0)


def test_capture_is_what_a_test_says() -> None:
    runtime = EmulatedRuntime()
    runtime.capturing = True
    assert runtime.is_capturing()
    assert not emulated_runtime().is_capturing()
    assert emulated_runtime() is emulated_runtime()


# AddressSanitizer

UNDER_SANITIZER = """
import sys
from gpusync.testing import EmulatedRuntime, compiling, sanitizer_flags
from tests.device import test_emulator
assert sanitizer_flags()
compiling.kernel_source = lambda: test_emulator.KERNELS
runtime = EmulatedRuntime()
stream = runtime.stream()
source, target = runtime.empty(100), runtime.empty(100)
at = {name: tensor.data_ptr() for name, tensor in (("source", source), ("target", target))}
stream.launch("gs_copy", 2, [at["target"], at["source"], 100])
print("within", flush=True)
exec(sys.argv[1])
print("missed", flush=True)
"""


@pytest.mark.parametrize(
    ("planted", "report"),
    [
        ('stream.launch("gs_copy", 1, [at["target"], at["source"] + 1, 100])', "READ of size 1"),
        ('stream.launch("gs_copy", 1, [at["target"] - 1, at["source"], 9])', "WRITE of size 1"),
        ('stream.launch("gs_read_vector", 1, [at["target"], at["source"] + 8])', "misaligned"),
        ("del source; stream.launch('gs_copy', 1, [at['target'], at['source'], 1])", "free"),
    ],
)
def test_a_planted_overrun_is_found(repository: Path, planted: str, report: str) -> None:
    try:
        sanitizer = sanitizer_environment()
    except MissingDependencyError as err:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(err))
    done = subprocess.run(
        [sys.executable, "-c", UNDER_SANITIZER, planted],
        env={**os.environ, **sanitizer, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "within\n", done.stderr
    assert done.returncode != 0
    assert report in done.stderr
    assert "kernels_of_the_test.cu" in done.stderr


def test_memory_that_a_collection_gives_back_meanwhile_does_not_disturb_a_look_for_an_address() -> (
    None
):
    arena = Arena("device", None, lambda: False)
    held = arena.take(16)
    thresholds = gc.get_threshold()
    gc.disable()
    try:
        for _ in range(200):
            cycle: list[object] = [arena.take(16)]
            cycle.append(cycle)
        kept = [(object(), number) for number in range(5000)]  # no tuple is left to be used again
        gc.set_threshold(gc.get_count()[0] + 60)  # amid what a look over 201 spans makes
        gc.enable()
        assert arena.holds(held.data_ptr() + 15)
        assert len(kept) == 5000
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
