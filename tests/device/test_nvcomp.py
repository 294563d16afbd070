"""The binding of nvCOMP: decodes, statuses and refusals of the stand-in; host calls of the real libraries."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from gpusync.device.nvcomp import (
    MAX_FRAME_NBYTES,
    MAX_FRAMES,
    DecodeArrays,
    Nvcomp,
    describe_status,
    find_nvcomp,
)
from gpusync.device.runtime import Runtime
from gpusync.errors import DecodeError, MissingDependencyError
from gpusync.testing import EmulatedRuntime, Order, build, build_nvcomp_stand_in
from tests.conftest import REPOSITORY
from tests.device.nvcomp_faults import Fault, faulty, own_stand_in
from tests.device.support import download, upload
from tests.unit.strategies import compress, flushed, skippable

GUARD = 64
REAL = ("5.3", "6.0")
LIBRARIES = [f"{kind} {version}" for kind in ("stand-in", "real") for version in REAL]
SKEWED = np.random.default_rng(0).geometric(0.2, 140_001).clip(0, 99).astype(np.uint8).tobytes()
CONTENTS = [bytes(1), b"a" * 1000, SKEWED, b"\0\1" * 99_999]


def real_library(version: str) -> Path:
    """A real libnvcomp, which `make test` puts aside: two of them cannot be installed in one environment."""
    soname = f"libnvcomp.so.{version[0]}"
    for prefix in (Path(sys.prefix), REPOSITORY / ".venv"):
        path = prefix / "nvcomp" / version / "nvidia" / "libnvcomp" / "lib64" / soname
        if path.is_file():
            return path
    reason = f"nvCOMP {version} is not in .venv/nvcomp/{version}: run `make test`"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class Library:
    """A library to make host calls to: none that a test makes gets as far as a GPU."""

    path: Path
    version: str
    real: bool

    @property
    def passed(self) -> int:
        """The status of a call whose arguments are right; a real library then finds no driver."""
        return 1000 if self.real else 0


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    """Both ABIs, of the stand-in and for real."""
    kind, version = str(request.param).split()
    if kind == "real":
        return Library(real_library(version), version, True)
    request.getfixturevalue("needs_compiler")
    path = build_nvcomp_stand_in(flags=[f"-DSTAND_IN_MAJOR={version[0]}"])
    return Library(path, version, False)


@pytest.fixture
def without_driver(library: Library) -> None:
    """Skip where right arguments would send a real library on to a device with this host's addresses."""
    if library.real and torch.cuda.is_available():
        pytest.skip("a CUDA device is here, and the call would go through")


@pytest.fixture(params=REAL)
def stand_in(request: pytest.FixtureRequest, needs_compiler: None) -> Nvcomp:
    """The stand-in with the ABI of either version."""
    return Nvcomp(build_nvcomp_stand_in(flags=[f"-DSTAND_IN_MAJOR={request.param[0]}"]))


@dataclass(frozen=True)
class Decoded:
    """What a decode has left."""

    statuses: list[int]
    sizes: list[int]
    outputs: list[bytes]
    guards_intact: bool


def decode(
    runtime: Runtime,
    nvcomp: Nvcomp,
    frames: Sequence[bytes],
    capacities: Sequence[int],
    *,
    temp_shift: int = 0,
    temp_short: int = 0,
) -> Decoded:
    """Decode frames that lie one behind the other, into outputs with guards between."""
    count = len(frames)
    frame_nbytes = np.array([len(frame) for frame in frames], np.uint64)
    rooms = np.array(capacities, np.uint64)
    joined = upload(runtime, np.frombuffer(b"".join(frames) + bytes(GUARD), np.uint8), shift=1)
    begins = np.cumsum(rooms + np.uint64(GUARD)) - rooms
    outputs = upload(runtime, np.full(int(begins[-1] + rooms[-1]) + GUARD, 0x5A, np.uint8))
    inputs = [np.uint64(joined.data_ptr()) + np.cumsum(frame_nbytes) - frame_nbytes, frame_nbytes]
    inputs += [rooms, np.uint64(outputs.data_ptr()) + begins, np.zeros(2 * count, np.uint64)]
    table = upload(runtime, np.concatenate(inputs))
    temp_nbytes = nvcomp.decode_temp_nbytes(count, int(rooms.max()), int(rooms.sum()))
    temp = runtime.empty(temp_nbytes + 8)[temp_shift : temp_shift + temp_nbytes - temp_short]
    nvcomp.decode(runtime.stream(), DecodeArrays.within(table.data_ptr(), count), temp)

    written = download(runtime, table)[DecodeArrays.INPUT_NBYTES_PER_FRAME * count :]
    found = download(runtime, outputs)
    parts = [
        found[begin : begin + room] for begin, room in zip(begins.tolist(), capacities, strict=True)
    ]
    outside = np.ones(found.size, bool)
    for begin, room in zip(begins.tolist(), capacities, strict=True):
        outside[begin : begin + room] = False
    return Decoded(
        written[8 * count : 12 * count].view(np.int32).tolist(),
        written[: 8 * count].view(np.uint64).tolist(),
        [part.tobytes() for part in parts],
        bool((found[outside] == 0x5A).all()),
    )


# ---- on every device ---------------------------------------------------------------------------------


def test_frames_are_decoded_at_any_address(runtime: Runtime) -> None:
    frames = [compress(content) for content in CONTENTS]
    sizes = [len(content) for content in CONTENTS]
    done = decode(runtime, Nvcomp(runtime.nvcomp_library()), frames, sizes)
    assert done == Decoded([0] * 4, sizes, CONTENTS, True)


def test_frames_without_content_size_are_decoded_into_what_room_there_is(runtime: Runtime) -> None:
    frames = [flushed(content, 30_000) for content in CONTENTS]
    sizes = [len(content) for content in CONTENTS]
    done = decode(runtime, Nvcomp(runtime.nvcomp_library()), frames, [n + 9 for n in sizes])
    assert (done.statuses, done.sizes) == ([0] * 4, sizes)
    assert [out[:size] for out, size in zip(done.outputs, sizes, strict=True)] == CONTENTS
    assert done.guards_intact


def test_a_short_output_is_a_status_of_its_frame_alone(runtime: Runtime) -> None:
    frames = [compress(content) for content in CONTENTS]
    sizes = [len(content) for content in CONTENTS]
    rooms = [sizes[0], sizes[1] - 1, sizes[2], sizes[3] - 1]
    done = decode(runtime, Nvcomp(runtime.nvcomp_library()), frames, rooms)
    assert done.statuses == [0, 12, 0, 12]
    assert done.outputs[0::2] == CONTENTS[0::2]
    assert done.guards_intact


def test_no_frames_are_no_work(runtime: Runtime) -> None:
    nvcomp = Nvcomp(runtime.nvcomp_library())
    nvcomp.decode(runtime.stream(), DecodeArrays(0, 0, 0, 0, 0, 0, 0), runtime.empty(8))


def test_scratch_at_an_odd_address_is_refused(runtime: Runtime) -> None:
    nvcomp = Nvcomp(runtime.nvcomp_library())
    with pytest.raises(DecodeError, match=r"alignment \(17\)") as caught:
        decode(runtime, nvcomp, [compress(b"abc")], [3], temp_shift=4)
    assert (caught.value.expected, caught.value.got) == (0, 17)


# ---- the stand-in ------------------------------------------------------------------------------------


def test_both_abis_decode(stand_in: Nvcomp) -> None:
    frames = [compress(content) for content in CONTENTS]
    sizes = [len(content) for content in CONTENTS]
    done = decode(EmulatedRuntime(), stand_in, frames, sizes)
    assert done == Decoded([0] * 4, sizes, CONTENTS, True)


WHOLE = compress(CONTENTS[2])
CHECKED = compress(CONTENTS[2], write_checksum=True)


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (WHOLE[:-1], 12),
        (WHOLE[:3], 12),
        (b"", 12),
        (b"junk" + WHOLE[4:], 12),
        (WHOLE + b"\0", 12),
        (WHOLE + WHOLE, 12),
        (WHOLE + skippable(b"abc"), 12),
        (skippable(b"abc"), 12),
        (skippable(b"abc") + WHOLE, 12),
        # After magic, descriptor and 4 bytes of content size come the first block's header and its literals' header.
        (WHOLE[:9] + bytes([WHOLE[9] | 6]) + WHOLE[10:], 12),  # a reserved type of block
        (WHOLE[:12] + b"\xff" + WHOLE[13:], 12),  # literals by a tree that has not been sent
        (CHECKED[:-1] + bytes([CHECKED[-1] ^ 1]), 0),  # checksums are the caller's to look out for
    ],
)
def test_what_is_not_one_whole_frame_is_a_status(
    stand_in: Nvcomp, frame: bytes, status: int
) -> None:
    good = compress(CONTENTS[1])
    rooms = [len(CONTENTS[1]), len(CONTENTS[2]), len(CONTENTS[1])]
    done = decode(EmulatedRuntime(), stand_in, [good, frame, good], rooms)
    assert done.statuses == [0, status, 0]
    assert done.sizes[1] == (0 if status else len(CONTENTS[2]))
    assert done.outputs[0] == done.outputs[2] == CONTENTS[1]
    assert done.guards_intact


def test_a_frame_with_a_dictionary_is_a_status(stand_in: Nvcomp) -> None:
    samples = [b"%d %d" % (n, n * n) * 20 for n in range(200)]
    dictionary = zstandard.train_dictionary(4096, samples)
    frame = compress(samples[0], dict_data=dictionary)
    assert decode(EmulatedRuntime(), stand_in, [frame], [len(samples[0])]).statuses == [12]


def test_scratch_below_what_was_asked_for_is_refused(stand_in: Nvcomp) -> None:
    with pytest.raises(DecodeError, match=r"invalid value \(10\)"):
        decode(EmulatedRuntime(), stand_in, [compress(b"abc")], [3], temp_short=1)


def test_a_refusal_on_a_late_queue_is_raised_at_the_next_wait(stand_in: Nvcomp) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(EmulatedRuntime(Order()), stand_in, [compress(b"abc")], [3], temp_shift=4)
    assert caught.value.got == 17


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize(
    ("fault", "intact", "status", "extra"),
    [
        (Fault.AFTER_OUTPUT, False, 0, 0),
        (Fault.BEFORE_OUTPUT, False, 0, 0),
        (Fault.STATUS, True, 12, 0),
        (Fault.WRONG_SIZE, True, 0, 1),
    ],
)
def test_faults_can_be_made_and_seen(
    tmp_path: Path, fault: Fault, intact: bool, status: int, extra: int
) -> None:
    library = own_stand_in(tmp_path)
    with faulty(library, fault):
        done = decode(EmulatedRuntime(), Nvcomp(library), [compress(b"ab")] * 2, [2, 2])
    assert (done.guards_intact, done.statuses) == (intact, [0, status])
    assert done.sizes == [2, 2 + extra]


# ---- host calls of every library ---------------------------------------------------------------------


def test_the_version_is_told(library: Library) -> None:
    assert Nvcomp(library.path).version == f"{library.version}.0"


def test_the_scratch_is_what_was_measured(library: Library) -> None:
    nvcomp = Nvcomp(library.path)
    rng = np.random.default_rng(0)
    for _ in range(500):
        count = int(2 ** rng.uniform(0, 20))
        total = int(2 ** rng.uniform(0, 36))
        largest = min(total, MAX_FRAME_NBYTES)
        expected = 3 * total + 3468 * max(2 * count, total // 65536)
        assert nvcomp.decode_temp_nbytes(count, largest, total) == expected
    assert nvcomp.decode_temp_nbytes(0, 0, 0) == 0


def test_frames_and_batches_over_the_limits_are_refused(library: Library) -> None:
    nvcomp = Nvcomp(library.path)
    assert nvcomp.decode_temp_nbytes(1, MAX_FRAME_NBYTES, MAX_FRAME_NBYTES) == 6556086897
    assert nvcomp.decode_temp_nbytes(MAX_FRAMES, 1, 1) == 3468 * 2 * MAX_FRAMES + 3
    for bounds, most in (
        ((1, MAX_FRAME_NBYTES + 1, 1 << 31), MAX_FRAME_NBYTES),
        ((MAX_FRAMES + 1, 1, 1 << 31), MAX_FRAMES),
        ((-1, 1, 1), MAX_FRAMES),
    ):
        with pytest.raises(DecodeError) as caught:
            nvcomp.decode_temp_nbytes(*bounds)
        assert caught.value.expected == most


class Options(ctypes.Structure):
    """nvcomp/zstd.h, on its own: the probes below do not go through the binding."""

    _fields_ = (("backend", ctypes.c_int32), ("reserved", ctypes.c_char * 60))


class Alignments(ctypes.Structure):
    _fields_ = (("input", ctypes.c_size_t), ("output", ctypes.c_size_t), ("temp", ctypes.c_size_t))


def probe(library: Library, changed: dict[str, int]) -> int:
    """Return what DecompressAsync says to a call that is right but for some arguments.

    All memory is zeros. An address is changed by 1, 4 or 8 bytes, or set to 0; other arguments are replaced.
    """
    memory = np.zeros(1 << 16, np.uint8)
    at = memory.ctypes.data + -memory.ctypes.data % 256
    call = {
        **{"in": at, "in_nbytes": at + 256, "capacities": at + 512, "actual": at + 768, "n": 1},
        **{"temp": at + 4096, "temp_nbytes": 8192, "out": at + 1024, "backend": 0},
        **{"statuses": at + 1280, "stream": 0},
    }
    addresses = {name for name, value in call.items() if value >= at}
    for name, value in changed.items():
        call[name] = call[name] + value if value and name in addresses else value
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function = ctypes.CDLL(str(library.path)).nvcompBatchedZstdDecompressAsync
    function.argtypes = [pointer] * 4 + [size, pointer, size, pointer, Options, pointer, pointer]
    options = Options(call["backend"])
    before, after = list(call)[:8], list(call)[9:]
    status = function(*(call[name] for name in before), options, *(call[name] for name in after))
    return int(status)


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        *(({name: 0}, 10) for name in ("in", "capacities", "actual", "temp", "out")),
        *(({"backend": backend}, 10) for backend in (-1, 1, 3)),
        *(({name: 4}, 17) for name in ("in", "capacities", "actual", "temp", "out")),
        ({"statuses": 1}, 17),
        ({"n": 1 << 31}, 21),
        # which refusal comes first
        ({"in": 0, "temp": 4}, 10),
        ({"backend": 1, "temp": 4}, 10),
        ({"n": 1 << 31, "temp": 4}, 17),
        ({"n": 1 << 31, "in": 0}, 10),
    ],
)
def test_wrong_arguments_have_their_statuses(
    library: Library, changed: dict[str, int], status: int
) -> None:
    assert probe(library, changed) == status


@pytest.mark.usefixtures("without_driver")
def test_right_arguments_pass(library: Library) -> None:
    for changed in ({}, {"backend": 2}, {"in": 8}, {"temp": 0, "temp_nbytes": 0, "n": 0}):
        assert probe(library, changed) == library.passed, changed


@pytest.mark.usefixtures("without_driver")
def test_statuses_may_be_left_out_before_6(library: Library) -> None:
    expected = 10 if library.version == "6.0" else library.passed
    assert probe(library, {"statuses": 0}) == expected


def test_alignments(library: Library) -> None:
    ask = ctypes.CDLL(str(library.path)).nvcompBatchedZstdDecompressGetRequiredAlignments
    ask.argtypes = [Options, ctypes.POINTER(Alignments)]
    found = Alignments()
    assert ask(Options(), ctypes.byref(found)) == 0
    assert (found.input, found.output, found.temp) == (1, 1, 8)
    assert ask(Options(1), ctypes.byref(found)) == 10


# ---- finding and loading -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", REAL)
def test_the_installed_library_is_found(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    path = real_library(version)
    monkeypatch.setattr(sys, "path", [str(path.parents[3])])
    assert find_nvcomp() == path
    assert Nvcomp(find_nvcomp()).version == f"{version}.0"


def test_none_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingDependencyError, match="pip install nvidia-libnvcomp-cu13"):
        find_nvcomp()


def test_a_distribution_of_another_major_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "nvidia_libnvcomp_cu13-9.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: nvidia-libnvcomp-cu13\nVersion: 9.1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingDependencyError, match=r"nvidia-libnvcomp-cu13 9\.1"):
        find_nvcomp()


PROPERTIES = "int nvcompGetProperties(unsigned* p) {{ p[0] = {}; p[1] = 0; return 0; }}"
ASKS = """
struct opts {{ char bytes[64]; }};
int nvcompBatchedZstdDecompressGetTempSize(void) {{ return 0; }}
int nvcompBatchedZstdDecompressAsync(void) {{ return 0; }}
int nvcompBatchedZstdDecompressGetRequiredAlignments(struct opts o, unsigned long* a)
{{ a[0] = 1; a[1] = {}; a[2] = 8; return {}; }}
"""


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int nothing;", "cannot be loaded"),
        (PROPERTIES.format(5200), r"not supported.*expected 5\.3.*got 5\.2\.0"),
        (PROPERTIES.format(7000), r"not supported.*got 7\.0\.0"),
        (PROPERTIES.format(6000), "lacks a function"),
        (PROPERTIES.format(6000) + ASKS.format(16, 0), "other alignments"),
        (PROPERTIES.format(6000) + ASKS.format(1, 10), r"invalid value \(10\)"),
    ],
)
def test_a_library_that_cannot_be_used_is_refused(text: str, message: str) -> None:
    with pytest.raises(MissingDependencyError, match=message):
        Nvcomp(build(text, "other", c=True))


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    for name, content in (("absent.so", None), ("text.so", b"no library")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(MissingDependencyError, match="cannot be loaded") as caught:
            Nvcomp(tmp_path / name)
        assert caught.value.file == str(tmp_path / name)


def test_statuses_in_words() -> None:
    assert describe_status(12) == "cannot decompress (12)"
    assert describe_status(99) == "unknown status (99)"
