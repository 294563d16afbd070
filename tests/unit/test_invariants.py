"""The invariants I1 to I7 of docs/ARCHITECTURE.md, each shown to hold."""

from __future__ import annotations

import json
import struct
import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import gpusync
from gpusync.errors import (
    DeviceError,
    DigestMismatchError,
    FormatError,
    GpuSyncError,
    OutOfScratchError,
    SourceNotReadyError,
    VersionConflictError,
)
from tests import live, wire
from tests.driver import check_at, model_at, open_chain, pull, refused, start_python, update


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    """A host at version 1."""
    stream = wire.Stream(tmp_path / "stream")
    stream.delta()
    pull(stream, 1)
    return stream


@pytest.mark.parametrize("name", ["a.weight", "s.scale", "d.weight", "b.lut", "c.weight", "o.byte"])
def test_i1_verify_before_commit(stream: wire.Stream, name: str) -> None:
    """One wrong digest among six, whichever it is: no byte of the module or the folder changes."""
    names = ("a.weight", "s.scale", "d.weight", "b.lut", "c.weight", "o.byte")
    stream.delta(names, bend=wire.Bend(digest={name: "0" * 32}))
    model = model_at(stream, 1)
    with refused(stream, DigestMismatchError, text=name.replace(".", r"\."), model=model):
        gpusync.prepare(model, open_chain(stream, 2), device="cpu")
    with refused(stream, DigestMismatchError, model=model):
        pull(stream, 2)
    assert gpusync.live_version(model) in (None, 1)


def test_i1_prepare_writes_nothing_and_discard_is_as_if_nothing_happened(
    stream: wire.Stream,
) -> None:
    stream.delta()
    model = model_at(stream, 1)
    before = wire.snapshot(stream.local)
    pending = gpusync.prepare(model, open_chain(stream, 2), device="cpu")
    assert live.bytes_of(model) == stream.states[1]
    assert wire.snapshot(stream.local) == before
    pending.discard()
    assert live.bytes_of(model) == stream.states[1]
    assert wire.snapshot(stream.local) == before
    update(stream, model, 2)
    assert live.bytes_of(model) == stream.states[2]
    check_at(stream, 2)


def test_i1_a_model_that_changed_since_prepare_is_noticed_before_the_first_store(
    stream: wire.Stream,
) -> None:
    names = ("a.weight", "c.weight")
    stream.delta(names)
    model = model_at(stream, 1)
    pending = gpusync.prepare(model, open_chain(stream, 2), device="cpu")
    old, new = (stream.states[version]["a.weight"] for version in (1, 2))
    at = next(at for at in range(len(old)) if old[at] != new[at])
    with torch.no_grad():
        model.get_parameter("a.weight").view(torch.uint8).reshape(-1)[at] ^= 0x10
    held = live.bytes_of(model)
    with pytest.raises(GpuSyncError):
        pending.commit()
    assert live.bytes_of(model) == held


# Kills a forked child at each write operation of a pull in turn, heals what it left from the local disk alone if the swap
# had begun, and once more with the publisher there.
KILL_EVERYWHERE = """
import json, os, pathlib, shutil, sys
import gpusync
from gpusync import fsio
from gpusync.errors import SourceNotReadyError
from tests import wire

fsio.fsync = fsio.fsync_dir = lambda _: None  # a kill loses nothing that was written
root, base, source, target = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
states = [wire.read_tensors(root / name) for name in ("old", "new")]
gpusync.pull

def child(local, at):
    left = at
    for name in fsio.WRITE_OPERATIONS:
        def wrapper(*arguments, _real=getattr(fsio, name)):
            nonlocal left
            if left == 0:
                os._exit(9)
            left -= 1
            return _real(*arguments)
        setattr(fsio, name, wrapper)
    gpusync.pull(local, base, source, target)
    os._exit(0)

kills, ends = 0, {"old": 0, "new": 0, "none": 0}
while True:
    local = root / "victim"
    shutil.rmtree(local, ignore_errors=True)
    shutil.copytree(root / "old", local)
    pid = os.fork()
    if pid == 0:
        try:
            child(local, kills)
        finally:
            os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        break
    assert code == 9, f"the pull failed by itself at operation {kills}: exit code {code}"
    marker = wire.marker_version(local)
    have = wire.read_tensors(local)
    torn = [name for name in have if have[name] not in (states[0][name], states[1][name])]
    assert not torn, f"killed at operation {kills}: {torn} are neither old nor new"
    if marker is not None:
        assert have == states[marker == target], f"killed at {kills}: the marker says {marker}"
    elif have != states[0] and have != states[1]:
        assert not (local / "config.json").exists(), f"killed at {kills}: a mixed folder can be loaded"
    ends["none" if marker is None else "new" if marker == target else "old"] += 1
    try:
        gpusync.pull(local, base, root / "pruned", target)
        assert marker != 1, f"killed at {kills}: nothing published, and yet not at the old version"
        assert wire.read_tensors(local) == states[1], f"killed at {kills}: not resumed from the disk"
    except SourceNotReadyError:
        assert marker == 1, f"killed at {kills}: the swap had begun and needs the publisher"
        assert wire.read_tensors(local) == states[0] and wire.marker_version(local) == 1
        assert (local / "config.json").exists(), f"killed at {kills}: config.json is gone"
    report = gpusync.pull(local, base, source, target)
    assert wire.read_tensors(local) == states[1], f"killed at operation {kills}: not healed"
    assert wire.marker_version(local) == target and (local / "config.json").exists()
    assert gpusync.verify(local).ok
    kills += 1
print(json.dumps({"kills": kills, **ends}))
"""


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_i2_old_or_new_never_torn(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    stream.delta(("a.weight", "c.weight"))
    old, new = stream.root / "old", stream.root / "new"
    stream.local.rename(old)
    gpusync.pull(new, stream.base, stream.source, 2)
    process = start_python(KILL_EVERYWHERE, stream.root, stream.base, stream.source, 2)
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    counts = json.loads(out)
    assert counts["kills"] >= 15
    assert counts["old"] and counts["none"] and counts["new"]


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_i2_files_are_replaced_never_written_in_place(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    stream.delta(("a.weight", "c.weight"))
    with ExitStack() as stack:
        paths = sorted(stream.local.glob("*.safetensors"))
        files = [stack.enter_context(open(path, "rb")) for path in paths]
        before = [path.read_bytes() for path in paths]
        pull(stream, 2)
        pull(stream, 0)
        assert [file.read() for file in files] == before


def header_of(entry: dict[str, object], nbytes: int = 64) -> bytes:
    raw = json.dumps({"__metadata__": {"a.weight": "0" * 32}, "a.weight": entry}).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(range(1, nbytes + 1))


FOREIGN = {
    "header length 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "header length 2^40": struct.pack("<Q", 1 << 40) + b"{}",
    "header length 99,999,999": struct.pack("<Q", 99_999_999) + b"{}",
    "range of 2^60": header_of({"dtype": "U8", "shape": [1 << 60], "data_offsets": [0, 1 << 60]}),
    "range before 0": header_of({"dtype": "U8", "shape": [64], "data_offsets": [-64, 64]}),
    "range of 1e308": header_of({"dtype": "U8", "shape": [64], "data_offsets": [0, 1e308]}),
    "shape overflows": header_of(
        {"dtype": "U8", "shape": [1 << 32, 1 << 32, 64], "data_offsets": [0, 64]}
    ),
    "unknown dtype": header_of({"dtype": "Q8", "shape": [64], "data_offsets": [0, 64]}),
    "deep nesting": struct.pack("<Q", 200_000) + b"[" * 200_000,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_i3_foreign_headers_are_checked_before_they_are_used(
    stream: wire.Stream, name: str
) -> None:
    stream.delta(("a.weight",), bend=wire.Bend(shard=lambda file, data: FOREIGN[name]))
    check_refused_in_little_memory(stream)


def frame(window: int, content: int | None, blocks: bytes) -> bytes:
    """A zstd frame by hand: 8 bytes of content size or none, a window byte, and these blocks."""
    descriptor = 0 if content is None else 0xC0
    size = b"" if content is None else struct.pack("<Q", content)
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor, window]) + size + blocks


def block(kind: int, nbytes: int, body: bytes = b"", *, last: bool = True) -> bytes:
    return struct.pack("<I", last | kind << 1 | nbytes << 3)[:3] + body


BLOBS = {
    "content size 2^62": frame(0x50, 1 << 62, block(0, 4, b"abcd")),
    "window 2 GiB": frame(21 << 3, None, block(1, 4096, b"x")),
    "run of 128 KiB blocks": frame(
        0x50, None, block(1, 1 << 17, b"x", last=False) * 100_000 + block(1, 1, b"x")
    ),
    "10^6 empty blocks": frame(0x50, None, block(0, 0, last=False) * 1_000_000 + block(0, 0)),
    "10^6 empty frames": frame(0x00, None, block(0, 0)) * 1_000_000,
    "10^6 skippable frames": struct.pack("<II", 0x184D2A50, 0) * 1_000_000,
    "skippable frame of 4 GiB": struct.pack("<II", 0x184D2A50, 0xFFFFFFFF) + b"abc",
    "reserved block": frame(0x50, None, block(3, 4, b"abcd")),
    "legacy magic": b"\x27\xb5\x2f\xfd" + bytes(range(1, 50)),
}


@pytest.mark.parametrize("name", BLOBS)
def test_i3_foreign_frames_are_checked_before_they_are_used(stream: wire.Stream, name: str) -> None:
    stream.delta(("a.weight",), bend=wire.Bend(blob={"a.weight": BLOBS[name]}))
    check_refused_in_little_memory(stream)


@pytest.mark.parametrize(
    ("encoding", "payload"),
    [
        ("overwrite", struct.pack("<I", 0xFFFFFFFF) + bytes(40)),
        ("xor_sparse", struct.pack("<Q", 1 << 60) + bytes(40)),
        ("xor_sparse", struct.pack("<Q", (1 << 64) - 1) + bytes(40)),
        ("xor", bytes(64 << 20)),
        ("overwrite", struct.pack("<I", 4096) + bytes(64 << 20)),
        ("xor_sparse", struct.pack("<Q", 4096) + bytes(64 << 20)),
        ("xor_rows", b"\1" + bytes(64 << 20)),
        ("xor_rows", b"\0" + b"\xff" * 16 + bytes(64 << 20)),
    ],
    ids=[
        "count 2^32",
        "count 2^60",
        "count 2^64",
        "64 MiB xor",
        "64 MiB overwrite",
        "64 MiB sparse",
        "64 MiB of words",
        "64 MiB of rows",
    ],
)
def test_i3_foreign_payloads_are_checked_before_they_are_used(
    stream: wire.Stream, encoding: str, payload: bytes
) -> None:
    stream.delta((), encoding=encoding, bend=wire.Bend(payload={"a.weight": payload}))
    del payload
    check_refused_in_little_memory(stream)


def check_refused_in_little_memory(stream: wire.Stream) -> None:
    model = model_at(stream, 1)
    for again in (False, True):
        if again:
            tracemalloc.start()
        try:
            with refused(stream, GpuSyncError, model=model) as caught:
                update(stream, model, 2)
            with refused(stream, GpuSyncError):
                pull(stream, 2)
            peak = tracemalloc.get_traced_memory()[1] if again else 0
        finally:
            tracemalloc.stop()
        assert isinstance(caught.value, FormatError | SourceNotReadyError), caught.value
        assert peak < 24 << 20, f"{peak} bytes were allocated for foreign sizes"


def test_i3_shard_names_are_checked_before_a_path_is_formed(stream: wire.Stream) -> None:
    names = (
        "../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", ".", "", "a\0.safetensors",
        "C:\\x.safetensors", "..\\x.safetensors", "a\u2215b.safetensors", "\uff0fx.safetensors",
        "x" * 300 + ".safetensors", "config.json", 7, None, ["x.safetensors"],
    )  # fmt: skip
    for name in names:
        stream.delta(
            ("a.weight",),
            version=2,
            base=1,
            bend=wire.Bend(
                index=lambda index, name=name: {**index, "weight_map": {"a.weight": name}}
            ),
        )
        with refused(stream, FormatError):
            pull(stream, 2)


def test_i4_exactly_once(stream: wire.Stream) -> None:
    """XOR twice is no XOR: a chain that was applied, by whatever way, is not applied again."""
    stream.delta()
    model = model_at(stream, 1)
    chain = open_chain(stream, 2)
    pending = gpusync.prepare(model, chain, device="cpu")
    pending.commit()
    with pytest.raises(GpuSyncError):
        pending.commit()
    pending.finish()
    assert live.bytes_of(model) == stream.states[2]
    assert gpusync.apply_to_model(model, open_chain(stream, 2)).outcome == "unchanged"
    try:
        gpusync.apply_to_model(model, chain)
    except GpuSyncError:
        pass
    assert live.bytes_of(model) == stream.states[2]
    check_at(stream, 2)
    assert pull(stream, 2).outcome == "unchanged"
    check_at(stream, 2)


def test_i4_a_module_ahead_of_or_behind_its_folder_gets_each_delta_once(
    stream: wire.Stream,
) -> None:
    model = model_at(stream, 1)
    stream.delta()
    update(stream, model, 2, write_back="none")
    assert live.bytes_of(model) == stream.states[2]
    check_at(stream, 1)
    pull(stream, 2)
    assert gpusync.apply_to_model(model, open_chain(stream, 2), device="cpu").to_version == 2
    assert live.bytes_of(model) == stream.states[2]
    stream.delta()
    pull(stream, 3)
    stream.delta()
    update(stream, model, 4)
    assert live.bytes_of(model) == stream.states[4]
    check_at(stream, 4)


def test_i4_a_chain_of_another_run_is_not_applied_to_a_live_model(
    stream: wire.Stream, tmp_path: Path
) -> None:
    model = model_at(stream, 1)
    update(stream, model, 1)
    stream.republish(1)
    stream.delta()
    with pytest.raises(GpuSyncError):
        update(stream, model, 2)
    assert gpusync.live_version(model) == 1


def test_i4_a_republished_version_below_a_live_model_is_noticed_without_a_folder(
    stream: wire.Stream,
) -> None:
    """The next delta touches only tensors on which both publications agree, so that no digest can tell."""
    model = model_at(stream, 0)
    chain = gpusync.open_chain(stream.source, 1, base_dir=stream.base)
    gpusync.apply_to_model(model, chain, device="cpu")
    stream.republish(1)
    stream.delta(("c.weight",))
    held = live.bytes_of(model)
    with pytest.raises(VersionConflictError):
        chain = gpusync.open_chain(stream.source, 2, base_dir=stream.base)
        gpusync.apply_to_model(model, chain, device="cpu")
    assert live.bytes_of(model) == held
    assert gpusync.live_version(model) == 1


def test_i5_same_bytes_everywhere(stream: wire.Stream) -> None:
    """Disk, live module, one by one and folded, every encoding: the same bytes as the writer's own."""
    for encoding in ("xor", "overwrite", "xor_sparse", "xor_rows"):
        stream.delta(("a.weight", "d.weight", "s.scale", "o.byte", "b.lut"), encoding=encoding)
    stream.full()
    stream.delta()
    one_by_one, folded = model_at(stream, 1), model_at(stream, 1)
    straight = open_chain(stream, 7)
    gpusync.apply_to_model(folded, straight, device="cpu", write_back="none")
    for version in range(2, 8):
        update(stream, one_by_one, version)
        assert live.bytes_of(one_by_one) == stream.states[version]
        check_at(stream, version)
    assert live.bytes_of(folded) == stream.states[7]
    fresh = stream.root / "fresh"
    gpusync.pull(fresh, stream.base, stream.source, 7)
    check_at(stream, 7, fresh)


def test_i6_bounded_memory(stream: wire.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = {name: bytes(byte ^ 0xA5 for byte in data) for name, data in stream.states[1].items()}
    stream.delta(new=dense)
    model = model_at(stream, 1)
    monkeypatch.setenv("GPUSYNC_CHANGE_LIST_BYTES", "1024")
    with refused(stream, OutOfScratchError, model=model) as caught:
        update(stream, model, 2)
    assert caught.value.needed_bytes > caught.value.budget_bytes  # type: ignore[attr-defined]
    assert caught.value.budget_bytes == 1024  # type: ignore[attr-defined]
    assert f"needed_bytes {caught.value.needed_bytes}, budget_bytes 1024]" in str(caught.value)  # type: ignore[attr-defined]
    monkeypatch.delenv("GPUSYNC_CHANGE_LIST_BYTES")
    report = update(stream, model, 2)
    assert 0 < report.change_list_bytes < 1 << 20
    assert live.bytes_of(model) == stream.states[2]
    check_at(stream, 2)


def test_i6_few_changes_make_a_small_change_list(stream: wire.Stream) -> None:
    stream.delta(("a.weight",))
    model = model_at(stream, 1)
    report = update(stream, model, 2)
    assert 0 < report.change_list_bytes < 1024


def test_i7_no_silent_substitute(stream: wire.Stream) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device: asking for one is no substitute here")
    stream.delta()
    model = model_at(stream, 1)
    with refused(stream, DeviceError, model=model):
        gpusync.apply_to_model(model, open_chain(stream, 2), device="cuda")
    report = gpusync.apply_to_model(model, open_chain(stream, 2), device="auto")
    assert report.device == "cpu"
    assert "cpu" in " ".join([*report.reasons.values(), *report.notes]).lower()
    assert live.bytes_of(model) == stream.states[2]


def test_i7_an_unknown_device_is_refused(stream: wire.Stream) -> None:
    stream.delta()
    model = model_at(stream, 1)
    with refused(stream, GpuSyncError, model=model):
        gpusync.apply_to_model(model, open_chain(stream, 2), device="tpu")
