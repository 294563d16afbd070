"""Nothing is allocated, opened or waited for before it was judged: memory-capped children, and names that are no files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusync.errors import CheckpointError, FormatError, GpuSyncError, SourceNotReadyError
from tests import driver, wire
from tests.fuzz.publication import bind_socket, make_device
from tests.unit.strategies import MAGIC, RLE, block, compress, frame, header, skippable

MIB = 1 << 20

# Pulls in a child that may allocate so many bytes more than it holds when it begins, and says how it ended.
PULL = """
import pathlib, resource, sys
import gpusync, gpusync.local.pull
root, target, cap = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
held = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + cap, held + cap))
try:
    gpusync.pull(root / "local", root / "base", root / "published", target)
    print("ok")
except gpusync.GpuSyncError as err:
    print(type(err).__name__, err)
"""


def pull_capped(stream: wire.Stream, target: int, cap: int = 128 * MIB) -> str:
    """Pull in a child; return what it said. Running out of memory is a traceback, and fails."""
    done = subprocess.run(
        [sys.executable, "-c", PULL, str(stream.root), str(target), str(cap)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=driver.REPOSITORY,
        # One thread, whose stack and decoder are all that is allocated beside what is judged.
        env={**os.environ, "PYTHONPATH": str(driver.REPOSITORY), "GPUSYNC_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    """A local folder at version 1; version 2 is for the test to publish."""
    made = wire.Stream(tmp_path)
    made.delta()
    driver.pull(made, 1)
    return made


def sparse_file(path: Path, start: bytes, nbytes: int) -> None:
    """Write a file that begins with ``start`` and is ``nbytes`` long, of which the disk holds only the start."""
    path.unlink(missing_ok=True)
    path.write_bytes(start)
    os.truncate(path, nbytes)


def shard_of(stream: wire.Stream) -> Path:
    return min(stream.folder(2).glob("*.safetensors"))


def bomb(stream: wire.Stream, blob: bytes, encoding: str = "xor") -> None:
    stream.delta(encoding=encoding, bend=wire.Bend(blob={"b.lut": blob}))


def rows(dtype: str, shape: list[int], nbytes: int) -> bytes:
    """A header of one tensor of a mapped name."""
    return header(
        {
            "__metadata__": {},
            "a.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]},
        }
    )


BOMBS: dict[str, Callable[[wire.Stream], None]] = {
    "header longer than its file": lambda s: shard_of(s).write_bytes(
        struct.pack("<Q", 100_000_000) + b"{}"
    ),
    "header over the cap": lambda s: sparse_file(
        shard_of(s), struct.pack("<Q", 100_000_001), 1 << 40
    ),
    "header of 2^63": lambda s: sparse_file(shard_of(s), struct.pack("<Q", 1 << 63), 1 << 40),
    "index over the cap": lambda s: sparse_file(s.folder(2) / wire.INDEX, b"{", 1 << 40),
    "shape that overflows": lambda s: shard_of(s).write_bytes(rows("U8", [1 << 40, 1 << 40], 0)),
    "shape that wraps to 0": lambda s: shard_of(s).write_bytes(rows("F64", [1 << 61], 0)),
    "shape of a terabyte": lambda s: shard_of(s).write_bytes(rows("U8", [1 << 40], 1 << 40)),
    "tensor past the end": lambda s: shard_of(s).write_bytes(
        rows("U8", [(1 << 64) - 1], (1 << 64) - 1)
    ),
    "deep index": lambda s: (s.folder(2) / wire.INDEX).write_bytes(b'{"metadata":' * 2_000_000),
    "deep header": lambda s: shard_of(s).write_bytes(header(b"[" * 8_000_000)),
    "huge integer": lambda s: shard_of(s).write_bytes(
        header(
            b'{"a.weight":{"dtype":"U8","shape":[' + b"9" * 8_000_000 + b'],"data_offsets":[0,1]}}'
        )
    ),
    "content size of 2^63": lambda s: bomb(
        s, frame([block()], descriptor=0xC0, fields=struct.pack("<Q", 1 << 63))
    ),
    "content in one segment of 2^40": lambda s: bomb(
        s, frame([block()], descriptor=0xE0, window=None, fields=struct.pack("<Q", 1 << 40))
    ),
    "window of 2 GiB": lambda s: bomb(s, frame([block(b"x")], window=0xA8)),
    "a million RLE blocks": lambda s: bomb(
        s, frame([block(b"\0", last=False, kind=RLE, nbytes=1 << 17)] * 1_000_000 + [block()])
    ),
    "a million empty frames": lambda s: bomb(s, frame([block()]) * 1_000_000),
    "a million skippable frames": lambda s: bomb(
        s, skippable() * 1_000_000 + compress(bytes(2049))
    ),
    "frames in a frame": lambda s: bomb(s, compress(compress(bytes(1 << 26)))),
    "content beyond the tensor": lambda s: bomb(s, compress(bytes(1 << 28))),
    "content of no size beyond the tensor": lambda s: bomb(
        s, compress(bytes(1 << 28), write_content_size=False)
    ),
    "overwrite of 2^32 - 1": lambda s: bomb(s, compress(b"\xff" * 4 + bytes(1 << 27)), "overwrite"),
    "sparse of 2^64 - 1": lambda s: bomb(s, compress(b"\xff" * 8 + bytes(1 << 27)), "xor_sparse"),
    "magic alone": lambda s: bomb(s, MAGIC),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_bounded_memory(stream: wire.Stream, name: str) -> None:
    if "content" in name or "RLE" in name or "frames" in name or name in (
        "window of 2 GiB", "magic alone", "overwrite of 2^32 - 1", "sparse of 2^64 - 1",
    ):  # fmt: skip
        BOMBS[name](stream)
    else:
        stream.delta()
        BOMBS[name](stream)
    before = wire.snapshot(stream.local)
    assert pull_capped(stream, 2).partition(" ")[0] in (
        "FrameFormatError",
        "HeaderFormatError",
        "IndexFormatError",
        "SourceNotReadyError",
    )
    assert wire.snapshot(stream.local) == before


def test_the_cap_of_these_tests_is_one_that_a_bomb_would_break(stream: wire.Stream) -> None:
    stream.delta()
    assert pull_capped(stream, 2) == "ok"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PULL.replace("try:", "bytearray(200 << 20)\ntry:", 1),
            str(stream.root),
            "2",
            str(128 * MIB),
        ],
        capture_output=True,
        text=True,
        cwd=driver.REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(driver.REPOSITORY)},
    )
    assert "MemoryError" in done.stderr


JSON_BOMBS = {
    "arrays": b"[],",
    "objects": b"{},",
    "texts": '"\u0101",'.encode(),
    "numbers": b"0.5,",
}


@pytest.mark.parametrize("name", JSON_BOMBS)
def test_json_costs_at_most_32_bytes_of_memory_for_each_of_its_own(
    stream: wire.Stream, name: str
) -> None:
    """What Python makes of text before anyone can look at it: the cap on the text is the cap on this."""
    stream.delta()
    part = JSON_BOMBS[name]
    raw = header(b'{"a.weight":[' + part * (4 * MIB // len(part)) + b"0]}")
    shard_of(stream).write_bytes(raw)
    said = pull_capped(stream, 2, 32 * len(raw) + 64 * MIB)
    assert said.startswith("HeaderFormatError")


# ---- names that are no regular files ----------------------------------------------------------------


def _folder(path: Path) -> None:
    (path / "deeper").mkdir(parents=True)


KINDS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": bind_socket,
    "device": make_device,
    "folder": _folder,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link out": lambda path: path.symlink_to("/etc/hostname"),
}


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    KINDS[kind](path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [wire.INDEX, "a shard", "gpusync.manifest.json"])
def test_what_is_no_file_in_a_version_is_refused_without_opening_it(
    stream: wire.Stream, kind: str, name: str
) -> None:
    named = {"gpusync_manifest": "0" * 32} if "manifest" in name else {}
    stream.delta(bend=wire.Bend(metadata=named))
    put(shard_of(stream) if name == "a shard" else stream.folder(2) / name, kind)
    with driver.refused(stream, GpuSyncError) as caught:
        driver.pull(stream, 2)
    assert isinstance(caught.value, (FormatError, SourceNotReadyError))


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_that_is_no_folder_is_refused(stream: wire.Stream, kind: str) -> None:
    if kind == "folder":
        pytest.skip("a folder is what it should be")
    put(stream.folder(2), kind)
    with driver.refused(stream, GpuSyncError) as caught:
        driver.pull(stream, 2)
    assert isinstance(caught.value, (FormatError, SourceNotReadyError))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "state.json",
        "journal.json",
        "digests.json",
        "lock",
        "rolled.jsonl",
        "staging",
        "spool",
        "reserve",
    ],
)
def test_what_is_no_file_in_the_state_folder_neither_hangs_nor_harms(
    stream: wire.Stream, kind: str, name: str
) -> None:
    """A pull gets past it, or says what is in its way; weights stay whole."""
    stream.delta()
    put(stream.local / ".weight_sync" / name, kind)
    weights = {path.name: path.read_bytes() for path in stream.local.glob("*.safetensors")}
    try:
        driver.pull(stream, 2)
    except CheckpointError as err:
        assert name in str(err) or ".weight_sync" in str(err) or str(stream.local) in str(err)
        assert {
            path.name: path.read_bytes() for path in stream.local.glob("*.safetensors")
        } == weights
        return
    driver.check_at(stream, 2)


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "dangling link", "link to itself"])
def test_odd_files_beside_the_weights_are_left_alone(stream: wire.Stream, kind: str) -> None:
    stream.delta()
    put(stream.local / "notes", kind)
    put(stream.base / "notes", kind)
    driver.pull(stream, 2)
    driver.check_at(stream, 2)
    assert os.path.lexists(stream.local / "notes")


@pytest.mark.parametrize(
    "kind", ["fifo", "socket", "device", "dangling link", "link to a device", "link out"]
)
def test_a_full_version_with_an_odd_shard_is_refused(tmp_path: Path, kind: str) -> None:
    stream = wire.Stream(tmp_path)
    stream.full(single=False)
    put(stream.folder(1) / wire.SECOND, kind)
    with pytest.raises(GpuSyncError) as caught:
        driver.pull(stream, 1)
    assert isinstance(caught.value, (FormatError, SourceNotReadyError))
    assert not list(stream.local.glob("*.safetensors"))


def test_a_shard_hard_linked_to_the_base_is_never_written_through(stream: wire.Stream) -> None:
    base = {path.name: path.read_bytes() for path in stream.base.iterdir()}
    for path in stream.local.glob("*.safetensors"):
        data = path.read_bytes()
        path.unlink()
        os.link(stream.base / path.name, path)
        assert (
            data
        )  # the local bytes were version 1's; now they are the base's, which the table tells
    stream.delta()
    driver.pull(stream, 2)
    driver.check_at(stream, 2)
    assert {path.name: path.read_bytes() for path in stream.base.iterdir()} == base


# ---- weight_map names -------------------------------------------------------------------------------

TRICKS = (
    "../base/" + wire.FIRST, "/etc/hostname", "a/" + wire.FIRST, "..", ".", "", "\0.safetensors", "C:\\x.safetensors",
    "a\\b.safetensors", "\uff0e\uff0e\uff0fx.safetensors", "a\u2215b.safetensors", "a\u2044b.safetensors", "x.safetensors\n",
    "x.safetensors/", " \u202e.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors", "x.bin", "CON", "~/x.safetensors",
    "%2e%2e%2fx.safetensors/..", "x.safetensors\0", 7, None, [], {"a": 1}, True,
)  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS, ids=repr)
def test_a_shard_name_is_one_plain_component(stream: wire.Stream, trick: object) -> None:
    def bend(index: dict[str, object]) -> dict[str, object]:
        rows = index["weight_map"]
        assert isinstance(rows, dict)
        return {**index, "weight_map": {**rows, "b.lut": trick}}

    stream.delta(bend=wire.Bend(index=bend))
    base = wire.tree_sha256(stream.base)
    with driver.refused(stream, FormatError):
        driver.pull(stream, 2)
    assert wire.tree_sha256(stream.base) == base
    json.dumps(trick)
