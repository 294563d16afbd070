"""What nvCOMP does with frames that a CPU's libzstd made: sizes, odd forms, short outputs, our stream, pinned input."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import xxhash
import zstandard
from gpu_decoding import SLACK_NBYTES, DecodeBatch, cut_into_frames, cut_sizes
from gpu_isolate import Tell, run_isolated
from gpu_lab import KIB, Bytes, Lab, Task, make_delta, name_nbytes
from gpu_regions import Regions

from gpusync.device.nvcomp import describe_status
from gpusync.format.encode import compress_single


def run_decoding(task: Task) -> None:
    """Decode single frames of every size, ask for scratch, shorten outputs, and use our own stream."""
    lab = Lab(task.device)
    check_scratch(task, lab)
    for nbytes in task.sizes.whole_frames:
        if task.left < nbytes / 100e6:
            task.skip(f"a single frame of {name_nbytes(nbytes)}")
            continue
        check_whole_frame(task, lab, nbytes)
    check_short_output(task, lab)
    check_own_stream(task, lab)
    check_pinned_input(task, lab)


def check_whole_frame(task: Task, lab: Lab, nbytes: int) -> None:
    """One frame, decoded once: the bytes, and how long it took."""
    content = make_delta(nbytes, 0.01, 1)
    batch = DecodeBatch(lab, [compress_single(content.data)], [nbytes], guard_nbytes=256)
    seconds = lab.time(batch.decode)
    results = batch.results()
    right = results.all_good and lab.same(batch.content(0), lab.upload(content))
    task.check(
        f"a single frame of {name_nbytes(nbytes)} decodes to its bytes",
        right and int(results.sizes[0]) == nbytes,
        f"status {int(results.statuses[0])}, size {int(results.sizes[0])}, {nbytes / seconds / 1e9:.3f} GB/s in this one run, {task.device}",
    )


def check_scratch(task: Task, lab: Lab) -> None:
    """The library's scratch against 3 * total + 3468 * max(2 * frames, total // 65536)."""
    unlike = []
    for frames, largest in (
        (1, 1 << 16),
        (1000, 1 << 16),
        (64, 1 << 20),
        (12, 1 << 24),
        (1, 1 << 30),
    ):
        total = frames * largest
        got = lab.nvcomp.decode_temp_nbytes(frames, largest, total)
        formula = 3 * total + 3468 * max(2 * frames, total // 65536)
        if got != formula:
            unlike.append(f"{frames} x {largest}: {got}, formula {formula}")
    task.check("scratch is what the formula says", not unlike, "; ".join(unlike) or "5 shapes")
    library = ctypes.CDLL(lab.nvcomp.path)
    ask = getattr(library, "nvcompBatchedZstdDecompressGetTempSizeSync", None)
    if ask is None:
        task.fact("GetTempSizeSync", "this library has none")
        return
    content = make_delta(64 * 64 * KIB, 0.01, 2)
    batch = DecodeBatch(lab, cut_into_frames(content, 64 * KIB), cut_sizes(content.size, 64 * KIB))
    task.fact("GetTempSizeSync, 64 frames of 64 KiB", _ask_temp_sync(lab, ask, batch))


class _Options(ctypes.Structure):
    """nvcompBatchedZstdDecompressOpts_t, by value (zstd.h)."""

    _fields_ = (("backend", ctypes.c_int), ("reserved", ctypes.c_uint8 * 60))


def _ask_temp_sync(lab: Lab, ask: Callable[..., int], batch: DecodeBatch) -> str:
    """Ask what the library wants after it has read the frames (zstd.h: it waits for the stream)."""
    pointer, size, temp = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t()
    ask.argtypes = [pointer, pointer, size, size, ctypes.POINTER(size), size]  # type: ignore[attr-defined]
    ask.argtypes += [_Options, pointer, pointer]  # type: ignore[attr-defined]
    arrays = batch.arrays
    status = lab.stream.call(
        lambda handle: ask(
            arrays.in_addresses,
            arrays.in_nbytes,
            batch.count,
            64 * KIB,
            ctypes.byref(temp),
            batch.content_nbytes,
            _Options(),
            arrays.statuses,
            handle,
        )
    )
    asked = batch.temp.numel()
    return f"{describe_status(status) if status else temp.value}, without reading them {asked}"


def check_short_output(task: Task, lab: Lab) -> None:
    """An output one byte too short must say so (status 12), and nothing behind it may change."""
    contents = [make_delta(100_000, 0.01, seed) for seed in range(3)]
    frames = [compress_single(content.data) for content in contents]
    batch = DecodeBatch(lab, frames, [100_000, 99_999, 100_000], guard_nbytes=256)
    batch.decode()
    results = batch.results()
    task.check(
        "a short output gives status 12",
        results.statuses.tolist() == [0, 12, 0],
        f"statuses {results.statuses.tolist()}, sizes {results.sizes.tolist()}",
    )
    task.check("the bytes around a short output are as they were", results.guards_intact)
    beside = [lab.same(batch.content(i), lab.upload(contents[i])) for i in (0, 2)]
    task.check("the frames beside a short output are right", all(beside))


def check_own_stream(task: Task, lab: Lab) -> None:
    """Frames decoded, and their output digested with live bytes, in one queue without a wait between."""
    nbytes = 4 * 64 * KIB + 64 * KIB - 2
    live = np.random.default_rng(5).integers(0, 256, nbytes, np.uint8)
    delta = make_delta(nbytes, 0.01, 6)
    batch = DecodeBatch(lab, cut_into_frames(delta, 64 * KIB), cut_sizes(nbytes, 64 * KIB))
    regions = Regions(lab, lab.upload(live), batch.output, [nbytes])
    batch.decode()
    regions.digest()
    lab.stream.synchronize()
    expected = xxhash.xxh3_128_intdigest(live ^ delta)
    task.check(
        "kernels behind a decode in our stream see its output", regions.digests() == [expected]
    )


def check_pinned_input(task: Task, lab: Lab) -> None:
    """Frames read in place from page-locked memory, against frames copied first."""
    content = make_delta(task.sizes.single_nbytes, 0.01, 7)
    frames, sizes = cut_into_frames(content, 64 * KIB), cut_sizes(content.size, 64 * KIB)
    expected = lab.upload(content)
    for in_place in (True, False):
        batch = DecodeBatch(lab, frames, sizes, in_place=in_place)

        def work(batch: DecodeBatch = batch) -> None:
            batch.copy_in()
            batch.decode()

        work()
        name = "pinned input read in place" if in_place else "input copied first"
        task.check(f"{name}: right", batch.results().all_good and lab.same(batch.output, expected))
        timing = lab.measure(work, task.sizes, together=1)
        task.row("input", case=name, **timing.cells(content.size))


# ---- frames that are odd, and frames that are broken: each in a process of its own -----------------------


def run_odd_frames(task: Task) -> None:
    """Report what comes of frames that the device path never hands over unwalked; none may hang the next ones."""
    content = make_delta(200_000, 0.01, 11)
    valid = valid_forms(content)
    expect_right = {name for name in valid if name != "checksum, wrong"}
    outcome = run_isolated(
        lambda tell: _decode_each(task.device, valid, content, expect_right, tell),
        task.sizes.corrupt_seconds + 10,
        task.tell,
        nested=True,
    )
    if outcome.state != "done":
        task.check("valid frames of odd forms", False, f"{outcome.state}: {outcome.reason}")
    for name, frame in broken_forms(content).items():
        if task.left < task.sizes.corrupt_seconds + 1:
            task.skip(name)
            continue

        def work(tell: Tell, name: str = name, frame: bytes = frame) -> None:
            _decode_each(task.device, {name: frame}, content, set(), tell)

        outcome = run_isolated(work, task.sizes.corrupt_seconds, task.tell, nested=True)
        if outcome.state != "done":
            task.fact(name, f"{outcome.state}: {outcome.reason}")


def valid_forms(content: Bytes) -> dict[str, bytes]:
    """Return frames that RFC 8878 allows, with one whose checksum is wrong."""
    data = content.tobytes()
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, enable_ldm=True)
    unsized = zstandard.ZstdCompressor(level=3).compressobj()
    long = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    checked = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)
    return {
        "checksum, right": checked,
        "checksum, wrong": checked[:-1] + bytes([checked[-1] ^ 0x40]),
        "no content size": unsized.compress(data) + unsized.flush(),
        "long distance matching, window of 2^27": long.compress(data) + long.flush(),
        "level 19": zstandard.ZstdCompressor(level=19).compress(data),
        "empty content": zstandard.ZstdCompressor(level=3).compress(b""),
    }


def broken_forms(content: Bytes) -> dict[str, bytes]:
    """Return what the host's walk refuses, or cannot see."""
    data = content.tobytes()
    frame = compress_single(data)
    half = compress_single(data[:100_000])

    def flipped(place: int) -> bytes:
        broken = bytearray(frame)
        broken[place] ^= 0x10
        return bytes(broken)

    return {
        "two frames in a chunk": half + compress_single(data[100_000:]),
        "a skippable frame before the frame": b"\x50\x2a\x4d\x18\x04\0\0\0skip" + frame,
        "truncated by half": frame[: len(frame) // 2],
        "truncated by one byte": frame[:-1],
        "a bit flipped in the content size": flipped(5),
        "a bit flipped in a block header": flipped(9),
        "a bit flipped in the middle": flipped(len(frame) // 2),
        "a bit flipped near the end": flipped(len(frame) - 3),
    }


def _decode_each(
    device: str,
    frames: dict[str, bytes],
    content: Bytes,
    expect_right: set[str],
    tell: Tell,
) -> None:
    """Decode one frame after the other in this process, and tell what each left."""
    lab = Lab(device)
    for name, frame in frames.items():
        expected = np.empty(0, np.uint8) if name == "empty content" else content
        # The slack behind the input keeps a decoder that reads too far within memory that is ours.
        batch = DecodeBatch(lab, [frame], [expected.size], guard_nbytes=SLACK_NBYTES)
        batch.decode()
        results = batch.results()
        same = np.array_equal(lab.download(batch.content(0)), expected)
        status, size = int(results.statuses[0]), int(results.sizes[0])
        right = status == 0 and size == expected.size and same and results.guards_intact
        said = (
            f"{describe_status(status) if status else 'status 0'}, size {size} of {expected.size}, "
            f"bytes {'right' if same else 'WRONG'}, guards {'intact' if results.guards_intact else 'WRITTEN'}"
        )
        ok = right if name in expect_right else None
        tell({"kind": "check", "device": device, "name": name, "ok": ok, "detail": said})
