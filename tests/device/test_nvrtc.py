"""Every kernel compiled by NVRTC, without a GPU, for each architecture: it must not spill, nor need a stack."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpusync.device.kernels import kernel_source
from gpusync.testing.compiling import KERNEL

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
VERSION = "12.9"

# What ptxas writes with -v. The first line of a kernel names it, and its registers come after its frame.
KERNEL_LINE = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FUNCTION_LINE = re.compile(r"Function properties for (\w+)")
FRAME_LINE = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
REGISTERS_LINE = re.compile(r"Used (\d+) registers")

PLANTED = """
__device__ __noinline__ int deep(const int* p, int n) { return n ? p[n] + deep(p, n - 1) * deep(p, n / 2) : 1; }
extern "C" __global__ void gs_plain(int* p) { p[threadIdx.x] = 1; }
extern "C" __global__ void gs_calls(int* p) { *p = deep(p, *p); }
extern "C" __global__ void gs_indexes(int* p)
{
    int a[512];
    for (int i = 0; i < 512; i++) a[p[i] & 511] = i;
    *p = a[*p & 511];
}
extern "C" __global__ void __launch_bounds__(1024) gs_spills(volatile int* p)
{
    int a[96];  // in at most 64 registers
#pragma unroll
    for (int i = 0; i < 96; i++) a[i] = p[i];
#pragma unroll
    for (int i = 0; i < 96; i++) p[i] = a[i] + 1;
}
"""


@dataclass(frozen=True)
class Frame:
    """What a function, a kernel or one that is not inlined, keeps in memory of its own; all in bytes."""

    function: str
    stack_nbytes: int
    stores_nbytes: int
    loads_nbytes: int

    @property
    def is_empty(self) -> bool:
        return not (self.stack_nbytes or self.stores_nbytes or self.loads_nbytes)


@dataclass(frozen=True)
class Compiled:
    """What NVRTC's log says of a translation unit."""

    architecture: str
    frames: tuple[Frame, ...]
    registers: dict[str, int]
    """Of each kernel."""

    def faults(self) -> list[str]:
        """Return a line for each function that spills or needs a stack."""
        return [
            f"{frame.function} on {self.architecture}: {frame.stack_nbytes} bytes stack frame, "
            f"{frame.stores_nbytes} bytes spill stores, {frame.loads_nbytes} bytes spill loads"
            for frame in self.frames
            if not frame.is_empty
        ]


def parse_log(log: str, architecture: str) -> Compiled:
    """Return what a log says; a kernel without a frame or without registers in it is an error."""
    frames: list[Frame] = []
    kernels: list[str] = []
    registers: dict[str, int] = {}
    function = None
    for line in log.splitlines():
        if found := KERNEL_LINE.search(line):
            assert found[2] == architecture
            kernels.append(found[1])
        elif found := FUNCTION_LINE.search(line):
            function = found[1]
        elif found := FRAME_LINE.search(line):
            assert function is not None, f"a frame of no function: {line}"
            frames.append(Frame(function, *map(int, found.groups())))
            function = None
        elif found := REGISTERS_LINE.search(line):
            assert kernels[-1] not in registers, f"registers of no kernel: {line}"
            registers[kernels[-1]] = int(found[1])
    assert set(kernels) == set(registers) <= {frame.function for frame in frames}, log
    return Compiled(architecture, tuple(frames), registers)


def find_nvrtc(repository: Path) -> Path | None:
    """Return the path of the NVRTC that `make test` puts aside."""
    for prefix in (Path(sys.prefix), repository / ".venv"):
        folder = prefix / "nvrtc" / VERSION / "nvidia" / "cuda_nvrtc" / "lib"
        if (path := folder / f"libnvrtc.so.{VERSION.partition('.')[0]}").is_file():
            return path
    return None


@pytest.fixture(scope="module")
def nvrtc(repository: Path) -> ctypes.CDLL:
    """NVRTC; where it is missing this skips, and fails in CI."""
    path = find_nvrtc(repository)
    if path is None:
        reason = f"NVRTC {VERSION} is not in .venv/nvrtc/{VERSION}: run `make test`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    library = ctypes.CDLL(str(path))
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    assert f"{major.value}.{minor.value}" == VERSION
    return library


def compile_log(nvrtc: ctypes.CDLL, source: str, architecture: str) -> str:
    """Return the program log of a compilation down to machine code, which must succeed."""
    program = ctypes.c_void_p()
    text = source.encode()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None)
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *map(str.encode, OPTIONS)]
        status = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        nbytes = ctypes.c_size_t()
        assert not nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(nbytes))
        log = ctypes.create_string_buffer(nbytes.value)
        assert not nvrtc.nvrtcGetProgramLog(program, log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, f"NVRTC refuses the kernels for {architecture}:\n{log.value.decode()}"
    return log.value.decode()


@pytest.fixture(scope="module")
def compiled(nvrtc: ctypes.CDLL) -> dict[str, Compiled]:
    """What has been compiled of the package, by architecture."""
    return {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(
    nvrtc: ctypes.CDLL, architecture: str, compiled: dict[str, Compiled]
) -> None:
    unit = parse_log(compile_log(nvrtc, kernel_source(), architecture), architecture)
    compiled[architecture] = unit
    assert set(unit.registers) == set(KERNEL.findall(kernel_source()))
    assert not unit.faults(), "\n".join(unit.faults())


def test_registers_are_reported(
    compiled: dict[str, Compiled], capsys: pytest.CaptureFixture[str]
) -> None:
    """Register counts are no verdict: the table is for whoever reads the run's output."""
    with capsys.disabled():
        print("", *table(compiled.values()), sep="\n")


def table(units: Iterable[Compiled]) -> list[str]:
    """Return the registers of each kernel, a column per architecture."""
    columns = {unit.architecture: unit.registers for unit in units}
    names = sorted({name for registers in columns.values() for name in registers})
    rows = [
        ["registers", *columns],
        *([name, *(str(r[name]) for r in columns.values())] for name in names),
    ]
    return [f"{name:<20}" + "".join(f"{cell:>8}" for cell in cells) for name, *cells in rows]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_planted_spills_and_stacks_are_found(nvrtc: ctypes.CDLL, architecture: str) -> None:
    unit = parse_log(compile_log(nvrtc, PLANTED, architecture), architecture)
    assert set(unit.registers) == {"gs_plain", "gs_calls", "gs_indexes", "gs_spills"}
    kept = {frame.function: frame for frame in unit.frames}
    assert kept["gs_plain"].is_empty
    assert kept["gs_indexes"].stack_nbytes >= 2048
    assert kept["gs_spills"].stores_nbytes and kept["gs_spills"].loads_nbytes
    (deep,) = (name for name in kept if "deep" in name)
    assert kept[deep].stack_nbytes
    faults = "\n".join(unit.faults())
    assert "gs_plain" not in faults
    for name in ("gs_indexes", "gs_spills", deep):
        assert f"{name} on {architecture}: " in faults


def test_a_log_that_says_nothing_of_a_kernel_is_refused() -> None:
    with pytest.raises(AssertionError):
        parse_log("ptxas info    : Compiling entry function 'gs_x' for 'sm_90'", "sm_90")
    with pytest.raises(AssertionError):
        parse_log("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", "sm_90")
