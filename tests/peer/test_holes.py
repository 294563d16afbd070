"""The worst holes found in other receivers of this format, each closed."""

from __future__ import annotations

import errno
import json

import pytest

import gpusync
from gpusync.errors import (
    CheckpointError,
    DigestMismatchError,
    FormatError,
    FrameFormatError,
    SourceNotReadyError,
)
from tests import live, wire
from tests.driver import (
    Call,
    Trace,
    check_at,
    model_at,
    open_chain,
    pull,
    refused,
    start_python,
    update,
)

WRONG = "0" * 32


def test_hole_1_shards_before_their_index_do_not_destroy_the_checkpoint(
    stream: wire.Stream,
) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    index = stream.folder(2) / wire.INDEX
    data = index.read_bytes()
    index.unlink()
    with refused(stream, SourceNotReadyError):
        pull(stream, 2)
    check_at(stream, 1)
    index.write_bytes(data)
    pull(stream, 2)
    check_at(stream, 2)


def test_hole_2_a_missing_blob_never_advances_the_marker(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    for shard in stream.folder(2).glob("*.safetensors"):
        shard.unlink()
    with refused(stream, SourceNotReadyError):
        pull(stream, 2)
    check_at(stream, 1)


def test_hole_3_a_retry_after_a_mismatch_never_applies_a_shard_twice(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta(("a.weight", "c.weight"), bend=wire.Bend(digest={"c.weight": WRONG}))
    for _ in range(3):
        with refused(stream, DigestMismatchError):
            pull(stream, 2)
    for shard in stream.folder(2).glob("*.safetensors"):
        right = wire.digest("xxh3-128", stream.states[2]["c.weight"])
        shard.write_bytes(shard.read_bytes().replace(WRONG.encode(), right.encode()))
    pull(stream, 2)
    check_at(stream, 2)


KILLED = """
import os, sys, gpusync
from gpusync import fsio
real, left = fsio.rename, int(sys.argv[5])
def rename(old, new):
    global left
    if str(new).endswith(".safetensors") and os.path.dirname(new) == sys.argv[1]:
        left -= 1
        if left < 0:
            os._exit(9)
    real(old, new)
fsio.rename = rename
gpusync.pull(*sys.argv[1:4], int(sys.argv[4]))
"""


@pytest.mark.parametrize("target", [2, 0])
@pytest.mark.parametrize("after", [0, 1])
def test_hole_3_a_kill_between_two_renames_leaves_no_marker_and_heals(
    stream: wire.Stream, target: int, after: int
) -> None:
    stream.delta(("a.weight", "c.weight"))
    pull(stream, 1)
    stream.delta(("a.weight", "c.weight"))
    arguments = (stream.local, stream.base, stream.source, target, after)
    process = start_python(KILLED, *arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 9, errors
    assert not (stream.local / wire.MARKER).exists(), "a half-renamed folder has a valid marker"
    assert not (stream.local / "config.json").exists(), "an engine can load a mixed folder"
    pull(stream, 2)
    check_at(stream, 2)
    assert (stream.local / "config.json").exists()
    assert gpusync.verify(stream.local).ok


@pytest.mark.parametrize("text", ["", '{"versi', "\x00" * 20])
def test_hole_4_a_truncated_marker_does_not_wedge_later_pulls(
    stream: wire.Stream, text: str
) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    wire.write_marker(stream.local, text)
    pull(stream, 2)
    check_at(stream, 2)
    stream.delta()
    assert pull(stream, 3).seed == "local"
    check_at(stream, 3)


@pytest.mark.parametrize("start", ["fresh", "at 0", "at 2", "at 2, nothing published"])
def test_hole_5_target_0_means_the_base_from_everywhere(stream: wire.Stream, start: str) -> None:
    stream.delta()
    stream.full()
    if start == "at 0":
        pull(stream, 0)
    elif start != "fresh":
        pull(stream, 2)
    if start.endswith("published"):
        stream.hide(1)
        stream.hide(2)
    pull(stream, 0)
    check_at(stream, 0)


def test_hole_6_a_fold_is_fsynced_before_its_marker(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(stream, 0)
    for _ in range(3):
        stream.delta()
    trace = Trace(monkeypatch)
    pull(stream, 3)
    check_at(stream, 3)
    operations = [(call.operation, call.to or call.path) for call in trace.calls]
    marker = max(
        at for at, row in enumerate(operations) if row == ("rename", stream.local / wire.MARKER)
    )
    staged = {
        call.path
        for call in trace.of("rename")
        if call.to and call.to.suffix == ".safetensors" and call.to.parent == stream.local
    }
    synced = {path for name, path in operations[:marker] if name == "fsync"}
    assert staged and staged <= synced


def test_hole_7_a_fold_does_not_skip_an_unknown_tensor(stream: wire.Stream) -> None:
    pull(stream, 0)
    model = model_at(stream, 0)
    stream.delta()
    stream.delta(bend=wire.Bend(extra={"zz.weight": wire.compress(b"\1\2\3\4")}))
    stream.delta()
    with refused(stream, FormatError, text=r"zz\.weight", model=model):
        update(stream, model, 3)
    with refused(stream, FormatError, text=r"zz\.weight"):
        pull(stream, 3)


def test_hole_7_a_fold_takes_a_change_of_checksum_format(stream: wire.Stream) -> None:
    pull(stream, 0)
    stream.delta(("a.weight",), checksum="adler32")
    stream.delta(("b.lut",), checksum="xxh3-128")
    pull(stream, 2)
    check_at(stream, 2)


@pytest.mark.parametrize("change", [-1, 1, 64])
@pytest.mark.parametrize("chain", [1, 2])
def test_hole_7_short_and_long_frames_are_refused_alone_and_in_a_fold(
    stream: wire.Stream, change: int, chain: int
) -> None:
    pull(stream, 0)
    new = stream.changed(("a.weight",), stream.states[0])
    flips = wire.xor(stream.states[0]["a.weight"], new["a.weight"])
    payload = flips[:change] if change < 0 else flips + bytes(change)
    stream.delta(new=new, bend=wire.Bend(payload={"a.weight": payload}))
    if chain == 2:
        stream.delta(("a.weight",))
    with refused(stream, FrameFormatError, text=r"a\.weight"):
        pull(stream, chain)


def test_hole_7_overwrite_positions_are_checked_before_the_first_write(
    stream: wire.Stream,
) -> None:
    pull(stream, 0)
    model = model_at(stream, 0)
    payload = (2).to_bytes(4, "little") + (0).to_bytes(4, "little") + (4096).to_bytes(4, "little")
    stream.delta(
        ("b.lut",), encoding="overwrite", bend=wire.Bend(payload={"a.weight": payload + b"xy"})
    )
    with refused(stream, FrameFormatError, text=r"a\.weight"):
        pull(stream, 1)
    with refused(stream, FrameFormatError, model=model):
        update(stream, model, 1)


def test_hole_7_overwrite_cannot_address_4_gib_and_says_so(stream: wire.Stream) -> None:
    """The local file is sparse and 4 GiB long; the refusal comes before anyone reads or stages it."""
    nbytes = 1 << 32
    header = json.dumps({"big": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    raw = header.encode() + b" " * (-len(header) % 8)
    local = stream.local
    local.mkdir()
    with open(local / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + nbytes)
    (local / "config.json").write_text("{}")
    wire.write_marker(local, '{"version": "000000"}')
    payload = (1).to_bytes(4, "little") + (7).to_bytes(4, "little") + b"x"
    extra = {"big": wire.compress(payload)}
    stream.delta((), encoding="overwrite", bend=wire.Bend(extra=extra))
    before = (local / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(FormatError, match="big"):
        pull(stream, 1)
    assert (local / "model.safetensors").stat().st_mtime_ns == before
    assert (local / "model.safetensors").stat().st_blocks * 512 < 1 << 20
    assert wire.marker_version(local) == 0


def test_hole_8_a_failed_write_back_says_where_each_side_stands_and_the_next_update_catches_up(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    pull(stream, 1)
    model = model_at(stream, 1)
    stream.delta()
    before = wire.snapshot(stream.local)
    pending = gpusync.prepare(model, open_chain(stream, 2), device="cpu")
    pending.commit()
    assert live.bytes_of(model) == stream.states[2]

    def fail(call: Call) -> None:
        if call.operation in ("fsync", "fsync_dir", "rename", "unlink") and call.within(
            stream.local
        ):
            raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        Trace(patch, fail)
        with pytest.raises(CheckpointError) as caught:
            pending.finish()
    assert (caught.value.live_version, caught.value.disk_version) == (2, 1)
    assert gpusync.live_version(model) == 2
    assert live.bytes_of(model) == stream.states[2]
    assert wire.snapshot(stream.local) == before
    stream.delta()
    report = update(stream, model, 3)
    assert (report.from_version, report.to_version, report.disk_version) == (2, 3, 3)
    assert live.bytes_of(model) == stream.states[3]
    check_at(stream, 3)


def test_hole_9_the_pause_reads_no_file_and_prepare_leaves_the_live_model_alone(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    pull(stream, 1)
    model = model_at(stream, 1)
    stream.delta()
    trace = Trace(monkeypatch)
    pending = gpusync.prepare(model, open_chain(stream, 2), device="cpu", write_back="none")
    assert live.bytes_of(model) == stream.states[1]
    assert gpusync.live_version(model) == 1
    trace.calls.clear()
    pending.commit()
    assert trace.calls == [], "commit touched the file system"
    assert live.bytes_of(model) == stream.states[2]
    pending.finish()
    check_at(stream, 1)


@pytest.mark.parametrize("bad", ["frame", "digest"])
def test_hole_10_a_bad_publication_costs_no_reseed(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    stream.delta()
    pull(stream, 1)
    new = stream.changed(("a.weight",), stream.states[1])
    bend = wire.Bend(blob={"a.weight": b"\x28\xb5\x2f\xfd" + b"\xff" * 30})
    stream.delta(new=new, bend=bend if bad == "frame" else wire.Bend(digest={"a.weight": WRONG}))
    starts = {path: wire.raw_header(path)[1] for path in stream.base.glob("*.safetensors")}
    trace = Trace(monkeypatch)
    with refused(stream, FormatError if bad == "frame" else DigestMismatchError):
        pull(stream, 2)
    read = [
        call
        for call in trace.of("pread_into", stream.base)
        if call.offset >= starts.get(call.path, 1 << 60)
    ]
    assert not read, "tensors of the base were read for a publication that cannot be applied"


def test_hole_10_bad_bytes_and_bad_publications_are_told_apart(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    wire.flip_tensor_byte(stream.local, "a.weight")
    stream.delta(("a.weight",))
    assert pull(stream, 2).tensors_healed == ("a.weight",)
    stream.delta(("a.weight",), bend=wire.Bend(digest={"a.weight": WRONG}))
    with refused(stream, DigestMismatchError) as caught:
        pull(stream, 3)
    assert not isinstance(caught.value, CheckpointError)
