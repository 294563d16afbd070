"""What a pull takes from its process: descriptors and memory, whatever is published; and what it does to readers."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gpusync
from gpusync import fsio
from gpusync.errors import GpuSyncError
from tests import wire
from tests.crash.frugal import anonymous_bytes
from tests.crash.harness import (
    CHANGED,
    DELTA,
    DELTAS,
    FULL,
    LAYOUT,
    RESET,
    SEED,
    Case,
    Scenes,
    Victim,
    files_of,
    open_descriptors,
)
from tests.driver import REPOSITORY, Call, Trace, check_at, start_python

MIB = 1 << 20
DESCRIPTORS = 256
"""What a process may have open by default on some systems."""


# ---- descriptors ------------------------------------------------------------------------------------


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = open_descriptors()
    yield
    left = list(open_descriptors())
    for name in before:
        if name in left:
            left.remove(name)
    assert not left, "descriptors were left open"


@pytest.mark.parametrize("swap", ["staged", "rolling"])
@pytest.mark.parametrize("case", [DELTAS, SEED, RESET, FULL], ids=lambda case: case.name)
def test_a_pull_leaves_no_descriptor_open(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch, case: Case, swap: str
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    scene = scenes(case)
    with no_descriptor_left():
        scene.pull()
        scene.pull()
        gpusync.verify(scene.local)


def test_a_refused_pull_leaves_no_descriptor_open(fast_path: Path) -> None:
    stream = wire.Stream(fast_path / "stream", LAYOUT)
    stream.delta(CHANGED)
    gpusync.pull(stream.local, stream.base, stream.source, 1)
    stream.delta(CHANGED, bend=wire.Bend(digest={"t3.1": "0" * 32}))
    with no_descriptor_left():
        for target in (2, 3):
            with pytest.raises(GpuSyncError):
                gpusync.pull(stream.local, stream.base, stream.source, target)


def test_taking_over_another_receivers_folder_leaves_no_descriptor_open(fast_path: Path) -> None:
    stream = wire.Stream(fast_path / "stream", LAYOUT)
    for _ in range(3):
        stream.delta(CHANGED)
    with no_descriptor_left():
        for version in (1, 2):
            stream.foreign_local(version)
            gpusync.verify(stream.local, source_dir=stream.source, base_dir=stream.base)
            gpusync.pull(stream.local, stream.base, stream.source, 3)


def test_healing_leaves_no_descriptor_open(fast_path: Path) -> None:
    stream = wire.Stream(fast_path / "stream", LAYOUT)
    for _ in range(3):
        stream.delta(CHANGED)
    with no_descriptor_left():
        gpusync.pull(stream.local, stream.base, stream.source, 1)
        wire.flip_tensor_byte(stream.local, "t2.0")
        report = gpusync.pull(stream.local, stream.base, stream.source, 2)
        assert report.tensors_healed == ("t2.0",)
        wire.flip_tensor_byte(stream.local, "t2.0")
        assert gpusync.verify(
            stream.local, repair=True, source_dir=stream.source, base_dir=stream.base
        ).repaired == ("t2.0",)


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_an_error_at_every_operation_leaves_no_descriptor_open(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    """Each file operation fails in turn with EMFILE: a typed error, old or resumable, nothing left open.

    Rolling reads the same files in the same way; there only what writes is made to fail.
    """
    counted = fsio.OPERATIONS if swap == "staged" else fsio.WRITE_OPERATIONS
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    scene = scenes(DELTA)
    leaks, untyped = [], []
    number = 0
    while True:
        scene.restore()
        before = len(os.listdir("/proc/self/fd"))
        failed, error = fail_at(number, counted, scene.pull)
        if failed is None:
            break
        when = f"operation {number}, {failed.operation} of {failed.path.name}"
        if error is not None and not isinstance(error, GpuSyncError):
            untyped.append(f"{when}: {type(error).__name__}")
        del error
        if len(os.listdir("/proc/self/fd")) > before and len(open_descriptors()) > before - 1:
            leaks.append(when)
        scene.check_no_file_is_torn(when)
        scene.pull()
        assert files_of(scene.local) == scene.new, when
        scene.check_nothing_is_left(when)
        number += 1
    assert number > 100
    assert not leaks, f"{len(leaks)} left descriptors open: {leaks}"
    assert not untyped, f"{len(untyped)} errors have no type of ours: {untyped}"


def fail_at(
    number: int, counted: Sequence[str], pull: Callable[[], object]
) -> tuple[Call | None, Exception | None]:
    """Pull with one operation failing; return that operation, None where the pull ended before, and the error."""
    left = number
    failed: Call | None = None

    def before(call: Call) -> None:
        nonlocal left, failed
        left -= call.operation in counted
        if left == -1 and failed is None:
            failed = call
            raise OSError(errno.EMFILE, "too many open files", str(call.path))

    with pytest.MonkeyPatch.context() as patch:
        Trace(patch, before)
        try:
            pull()
        except (GpuSyncError, OSError) as err:
            return failed, err.with_traceback(None)
    return failed, None


def test_pulls_in_many_threads_leave_no_descriptor_open(fast_path: Path) -> None:
    """Eight threads, eight folders and two of them refused: as in a server, again and again."""
    stream = wire.Stream(fast_path / "stream", LAYOUT)
    for _ in range(3):
        stream.delta(CHANGED)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        local = fast_path / f"local_{number}"
        try:
            for target in (1, 2, 3, 0):
                gpusync.pull(local, stream.base, stream.source, target)
                if number < 2:
                    with pytest.raises(GpuSyncError):
                        gpusync.pull(local, stream.base, stream.source, 9)
                check_at(stream, target, local)
        except BaseException as err:
            errors.append(err)

    with no_descriptor_left():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors


def pull_frugally(
    stream: wire.Stream, target: int, *, descriptors: int = DESCRIPTORS, threads: int
) -> dict[str, Any]:
    """Pull in a process with few descriptors and watch what it takes."""
    code = "from tests.crash.frugal import main; main()"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUSYNC_THREADS", str(threads))
        process = start_python(code, stream.local, stream.base, stream.source, target, descriptors)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(out)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def long_chain(fast_root: Path) -> Iterator[wire.Stream]:
    """64 versions, in turn of each encoding, of eight tensors of 1 MiB."""
    layout = tuple(
        wire.Row(f"model-{n % 2 + 1:05d}-of-00002.safetensors", f"t{n}", "U8", (MIB,), MIB)
        for n in range(8)
    )
    stream = wire.Stream(fast_root / "long", layout)
    for version in range(64):
        encoding = ("xor", "overwrite", "xor_sparse", "xor")[version % 4]
        stream.delta([row.name for row in layout], encoding=encoding)
        if stream.last > 1:
            stream.states.pop(stream.last - 1)
    yield stream
    shutil.rmtree(stream.root)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_chain_of_64_versions_takes_few_descriptors_and_little_memory(
    long_chain: wire.Stream, threads: int
) -> None:
    shutil.rmtree(long_chain.local, ignore_errors=True)
    took = pull_frugally(long_chain, 64, threads=threads)
    assert took["end"] == "applied"
    check_at(long_chain, 64)
    assert took["descriptors"] <= 200
    assert took["anonymous_bytes"] < 256 * MIB


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_500_shards_of_20_tensors_take_few_descriptors_and_little_memory(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    shards, each = (500, 20) if swap == "staged" else (100, 5)
    layout = tuple(
        wire.Row(f"model-{s:05d}-of-{shards:05d}.safetensors", f"l{s}.t{t}", "U8", (64,), 64)
        for s in range(1, shards + 1)
        for t in range(each)
    )
    stream = wire.Stream(fast_path / "wide", layout)
    stream.delta([row.name for row in layout], shards=shards)
    gpusync.pull(stream.local, stream.base, stream.source, 0)
    took = pull_frugally(stream, 1, threads=8)
    assert took["end"] == "applied"
    check_at(stream, 1)
    assert took["descriptors"] <= 200
    assert took["anonymous_bytes"] < 128 * MIB


# ---- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse", "xor_rows"])
def test_update_after_update_takes_no_more_memory(fast_path: Path, encoding: str) -> None:
    """What a pull takes it gives back: blobs, their decoders and windows do not pile up in a host that lives on."""
    layout = tuple(wire.Row("model.safetensors", f"t{n}", "U8", (MIB,), MIB) for n in range(16))
    stream = wire.Stream(fast_path / "stream", layout)
    for _ in range(6):
        stream.delta([row.name for row in layout], encoding=encoding)
    held = []
    for version in range(1, 7):
        gpusync.pull(stream.local, stream.base, stream.source, version)
        gc.collect()
        held.append(anonymous_bytes())
    grown = held[-1] - held[1]  # the first pulls fill this thread's and the allocator's caches
    assert grown < 4 * MIB, f"four updates of 16 MiB left {grown >> 10} KiB behind"


WINDOW = 64 * MIB
RUN_NBYTES = 128 << 10


def run_of(byte: bytes, nbytes: int, *, last_type: int = 1) -> bytes:
    """A zstd frame by hand: a 64 MiB window, no content size, RLE blocks; ``last_type`` 3 is reserved."""
    window_log = WINDOW.bit_length() - 1
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, (window_log - 10) << 3])
    blocks = nbytes // RUN_NBYTES
    for number in range(blocks):
        last = number == blocks - 1
        kind = last_type if last else 1
        frame += struct.pack("<I", last | kind << 1 | RUN_NBYTES << 3)[:3] + byte
    return frame


@pytest.mark.parametrize("bad", [False, True], ids=["valid", "broken at the end"])
def test_large_windows_in_many_tensors_at_once_stay_under_512_mb(
    fast_path: Path, bad: bool
) -> None:
    count = 10 if bad else 4
    layout = tuple(
        wire.Row("model.safetensors", f"t{n}", "U8", (WINDOW,), WINDOW) for n in range(count)
    )
    stream = wire.Stream.__new__(wire.Stream)
    stream.root, stream.layout, stream.last = fast_path, layout, 0
    stream.base, stream.source, stream.local = (fast_path / n for n in ("base", "pub", "local"))
    stream.states = {}
    write_zeros(stream.base, layout)
    publish_runs(stream, run_of(b"x", WINDOW, last_type=3 if bad else 1))
    took = pull_frugally(stream, 1, threads=count)
    assert took["end"].startswith("FrameFormatError" if bad else "applied"), took["end"]
    assert took["anonymous_bytes"] < 512_000_000
    if bad:
        assert files_of(stream.local) == {}
    else:
        with open(stream.local / "model.safetensors", "rb") as file:
            file.seek(-WINDOW * count, 2)
            assert file.read(WINDOW) == b"x" * WINDOW


def write_zeros(folder: Path, layout: tuple[wire.Row, ...]) -> None:
    """Write a checkpoint of zeros as one sparse file."""
    folder.mkdir()
    offsets = [at * WINDOW for at in range(len(layout) + 1)]
    header = {
        row.name: {"dtype": "U8", "shape": [WINDOW], "data_offsets": offsets[at : at + 2]}
        for at, row in enumerate(layout)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(file.tell() + offsets[-1])
    (folder / "config.json").write_text("{}")


def publish_runs(stream: wire.Stream, blob: bytes) -> None:
    """Publish version 1: every tensor gets this blob."""
    new = wire.digest("xxh3-128", b"x" * WINDOW)
    names = [row.name for row in stream.layout]
    folder = stream.folder(1)
    folder.mkdir(parents=True)
    rows = [(name, "U8", (len(blob),), blob) for name in names]
    (folder / "model.safetensors").write_bytes(wire.pack(rows, dict.fromkeys(names, new)))
    metadata = {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / wire.INDEX).write_text(json.dumps(index))


# ---- readers ----------------------------------------------------------------------------------------


def test_an_engine_that_has_the_files_mapped_never_sees_a_change(
    fast_path: Path, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, during and after pulls of every kind, a kill and its recovery: no map changes, none ends early."""
    stream = wire.Stream(fast_path / "stream", LAYOUT)
    for _ in range(5):
        stream.delta(CHANGED)
    stream.full()
    stream.delta(CHANGED)

    def pull(target: int, **options: Any) -> None:
        gpusync.pull(stream.local, stream.base, stream.source, target, **options)

    pull(1)
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.reader", str(stream.local)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert reader.stdout is not None and reader.stdout.readline() == "mapped\n"
    for round_ in range(3):
        monkeypatch.setenv("GPUSYNC_SWAP", "staged")
        pull(2)
        monkeypatch.setenv("GPUSYNC_SWAP", "rolling")
        pull(3, durable=False)
        victim.kill(stream, 4, rename=1 + round_ % 2, local=stream.local)
        pull(4)
        monkeypatch.setenv("GPUSYNC_SWAP", "staged")
        pull(5)
        pull(7)
        check_at(stream, 7)
        pull(0)
        pull(1)
    out, errors = reader.communicate("", timeout=30)
    assert reader.returncode == 0, errors
    counts = json.loads(out)
    assert counts["mapped"] > 20 and counts["reads"] > 200, counts


def test_links_to_old_files_keep_their_bytes(scenes: Scenes) -> None:
    """A hard link to a shard (a snapshot, or the base itself) is never written through, staged or rolling."""
    for swap in ("staged", "rolling"):
        scene = scenes(DELTA)
        links = scene.local.parent / f"links_{swap}"
        links.mkdir()
        for path in scene.local.glob("*.safetensors"):
            (links / path.name).hardlink_to(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GPUSYNC_SWAP", swap)
            assert scene.pull().swap == swap
        assert {p.name: p.read_bytes() for p in links.iterdir()} == {
            name: data for name, data in scene.old.items() if name.endswith(".safetensors")
        }
        shutil.rmtree(links)
