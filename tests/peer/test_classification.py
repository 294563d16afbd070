"""What counts as "not there yet", what as broken, and what an operator is told."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

import gpusync
from gpusync.errors import FormatError, GpuSyncError, SourceNotReadyError
from tests import wire
from tests.driver import Call, Trace, check_at, model_at, open_chain, pull, refused, update


def second_shard(stream: wire.Stream, version: int) -> Path:
    return sorted(stream.folder(version).glob("*.safetensors"))[1]


@pytest.fixture
def two(stream: wire.Stream) -> wire.Stream:
    """A host at version 1, and a good version 2 to bend."""
    stream.delta()
    pull(stream, 1)
    stream.delta()
    return stream


def recovers(stream: wire.Stream) -> None:
    """The version is whole now: it is applied on the local files, without a reseed."""
    report = pull(stream, 2)
    check_at(stream, 2)
    assert (report.outcome, report.seed, report.tensors_healed) == ("applied", "local", ())


# ---- not there yet ---------------------------------------------------------------------------------------


def test_a_missing_version_folder_is_retryable_and_touches_nothing(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.hide(2)
    trace = Trace(monkeypatch)
    with refused(two, SourceNotReadyError) as caught:
        pull(two, 2)
    assert caught.value.version == 2
    assert not [call for call in trace.of("open_regular", two.base) if call.path.suffix != ".json"]
    two.show(2)
    recovers(two)


def test_a_missing_index_is_retryable(two: wire.Stream) -> None:
    index = two.folder(2) / wire.INDEX
    data = index.read_bytes()
    index.unlink()
    with refused(two, SourceNotReadyError, text="index"):
        pull(two, 2)
    index.write_bytes(data)
    recovers(two)


@pytest.mark.parametrize("data", [b"", bytes(400)], ids=["empty", "zeros"])
def test_an_index_that_shows_its_size_before_its_bytes_is_retryable(
    two: wire.Stream, data: bytes
) -> None:
    index = two.folder(2) / wire.INDEX
    good = index.read_bytes()
    index.write_bytes(data)
    with refused(two, SourceNotReadyError):
        pull(two, 2)
    index.write_bytes(good)
    recovers(two)


def test_a_missing_shard_is_retryable_and_named(two: wire.Stream) -> None:
    shard = second_shard(two, 2)
    data = shard.read_bytes()
    shard.unlink()
    with refused(two, SourceNotReadyError, text=shard.name):
        pull(two, 2)
    shard.write_bytes(data)
    recovers(two)


@pytest.mark.parametrize("cut", ["0", "4", "8", "in header", "at data", "in blob", "last byte"])
def test_a_shard_shorter_than_its_header_demands_is_retryable(two: wire.Stream, cut: str) -> None:
    shard = second_shard(two, 2)
    data = shard.read_bytes()
    _, start = wire.raw_header(shard)
    keep = {
        "0": 0,
        "4": 4,
        "8": 8,
        "in header": 8 + (start - 8) // 2,
        "at data": start,
        "in blob": start + (len(data) - start) // 2,
        "last byte": len(data) - 1,
    }[cut]
    shard.write_bytes(data[:keep])
    with refused(two, SourceNotReadyError, text=shard.name):
        pull(two, 2)
    shard.write_bytes(data)
    recovers(two)


@pytest.mark.parametrize("what", ["shard", "header", "blob"])
def test_zeros_where_bytes_should_be_are_retryable(two: wire.Stream, what: str) -> None:
    shard = second_shard(two, 2)
    data = shard.read_bytes()
    _, start = wire.raw_header(shard)
    zeros = {
        "shard": bytes(len(data)),
        "header": data[:8] + bytes(start - 8) + data[start:],
        "blob": data[:start] + bytes(len(data) - start),
    }[what]
    shard.write_bytes(zeros)
    with refused(two, SourceNotReadyError):
        pull(two, 2)
    shard.write_bytes(data)
    recovers(two)


def test_a_live_module_is_untouched_by_a_version_that_is_not_there(two: wire.Stream) -> None:
    model = model_at(two, 1)
    second_shard(two, 2).unlink()
    with refused(two, SourceNotReadyError, model=model):
        update(two, model, 2)


def test_a_version_that_becomes_visible_in_time_is_waited_for(two: wire.Stream) -> None:
    two.hide(2)
    timer = threading.Timer(0.4, two.show, [2])
    timer.start()
    try:
        pull(two, 2, visibility_timeout_seconds=20.0)
    finally:
        timer.join()
    check_at(two, 2)


def test_the_wait_for_a_version_ends(two: wire.Stream) -> None:
    two.hide(2)
    with refused(two, SourceNotReadyError):
        pull(two, 2, visibility_timeout_seconds=0.2)
    with pytest.raises(SourceNotReadyError):
        open_chain(two, 2, visibility_timeout_seconds=0.2)


# ---- delta or full ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True])
def test_shards_without_an_index_are_never_taken_for_a_checkpoint(
    stream: wire.Stream, fresh: bool
) -> None:
    if not fresh:
        pull(stream, 0)
    stream.delta()
    (stream.folder(1) / wire.INDEX).unlink()
    with refused(stream, SourceNotReadyError):
        pull(stream, 1)


def test_one_delta_shard_named_like_a_full_checkpoint_is_not_one(stream: wire.Stream) -> None:
    """A lone model.safetensors counts as full, but these are blobs: not the tensors that the host serves."""
    pull(stream, 0)
    stream.delta(shards=1)
    (shard,) = stream.folder(1).glob("*.safetensors")
    shard.rename(shard.with_name("model.safetensors"))
    (stream.folder(1) / wire.INDEX).unlink()
    model = model_at(stream, 0)
    with pytest.raises(GpuSyncError):
        update(stream, model, 1)
    check_at(stream, 0)


def test_a_full_version_with_two_shards_and_an_index_is_read(stream: wire.Stream) -> None:
    stream.full(single=False)
    pull(stream, 1)
    check_at(stream, 1)


def test_a_full_version_whose_index_lists_an_absent_shard_is_retryable(stream: wire.Stream) -> None:
    pull(stream, 0)
    stream.full(single=False)
    (stream.folder(1) / wire.SECOND).unlink()
    with refused(stream, SourceNotReadyError, text=wire.SECOND):
        pull(stream, 1)


def test_lone_model_safetensors_beside_other_shards_is_not_a_full_version(
    stream: wire.Stream,
) -> None:
    pull(stream, 0)
    stream.full()
    shutil.copy(stream.folder(1) / "model.safetensors", stream.folder(1) / "other.safetensors")
    with refused(stream, SourceNotReadyError):
        pull(stream, 1)


# ---- links, pipes ----------------------------------------------------------------------------------------------


def test_a_shard_that_is_a_link_inside_the_source_is_read(stream: wire.Stream) -> None:
    stream.delta()
    shard = second_shard(stream, 1)
    store = stream.source / "objects"
    store.mkdir()
    shard.rename(store / "blob.safetensors")
    shard.symlink_to("../objects/blob.safetensors")
    pull(stream, 1)
    check_at(stream, 1)


@pytest.mark.parametrize("what", ["shard", "index", "folder"])
def test_a_link_that_leaves_the_source_is_refused(two: wire.Stream, what: str) -> None:
    path = {
        "shard": second_shard(two, 2),
        "index": two.folder(2) / wire.INDEX,
        "folder": two.folder(2),
    }[what]
    outside = two.root / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with refused(two, FormatError):
        pull(two, 2)


@pytest.mark.parametrize("name", ["config.json", "extra.json"])
def test_a_side_file_that_is_a_link_out_of_the_source_is_refused(
    two: wire.Stream, name: str
) -> None:
    """Otherwise a publisher could have any file of this host copied into the folder that it serves from."""
    two.full()
    outside = two.root / "outside"
    outside.write_text('{"secret": 4714}')
    (two.folder(3) / name).unlink(missing_ok=True)
    (two.folder(3) / name).symlink_to(outside)
    with refused(two, FormatError, text=name):
        pull(two, 3)


def test_a_side_file_that_is_a_link_inside_the_source_is_copied(two: wire.Stream) -> None:
    two.full()
    (two.source / "shared.json").write_text('{"shared": 1}')
    (two.folder(3) / "extra.json").symlink_to("../shared.json")
    pull(two, 3)
    check_at(two, 3)
    assert (two.local / "extra.json").read_text() == '{"shared": 1}'
    assert not (two.local / "extra.json").is_symlink()


def test_a_full_version_without_a_single_tensor_is_refused(two: wire.Stream) -> None:
    two.full()
    (two.folder(3) / "model.safetensors").write_bytes(wire.pack([], {"format": "pt"}))
    with refused(two, FormatError):
        pull(two, 3)


def test_a_version_that_is_a_file_is_refused(two: wire.Stream) -> None:
    shutil.rmtree(two.folder(2))
    two.folder(2).write_bytes(b"not a folder")
    with refused(two, GpuSyncError, text="weight_v000002"):
        pull(two, 2)


@pytest.mark.parametrize("what", ["shard", "index"])
def test_a_fifo_is_refused_without_blocking(two: wire.Stream, what: str) -> None:
    path = second_shard(two, 2) if what == "shard" else two.folder(2) / wire.INDEX
    path.unlink()
    os.mkfifo(path)
    with refused(two, GpuSyncError):
        pull(two, 2)


# ---- what the operator is told --------------------------------------------------------------------------------


def test_the_error_says_which_versions_are_visible_and_what_latest_points_at(
    two: wire.Stream,
) -> None:
    (two.source / "latest").write_text("run7/weight_v000009\n")
    with refused(two, SourceNotReadyError, text="run7/weight_v000009") as caught:
        pull(two, 9)
    text = str(caught.value)
    assert "version 9" in text
    assert "1..2" in text or "1, 2" in text
    assert str(two.source) in text


def test_the_error_says_what_the_version_folder_holds(two: wire.Stream) -> None:
    (two.folder(2) / wire.INDEX).unlink()
    with refused(two, SourceNotReadyError, text=second_shard(two, 2).name):
        pull(two, 2)


def test_a_source_folder_that_is_not_mounted_is_retryable(two: wire.Stream) -> None:
    two.source.rename(two.root / "unmounted")
    with refused(two, SourceNotReadyError, text="published"):
        pull(two, 2)


# ---- read faults, and a source that moves while it is read ---------------------------------------------------


def reads_of(stream: wire.Stream, call: Call) -> bool:
    return call.operation == "pread_into" and call.within(stream.folder(2))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("what", [".json", ".safetensors"])
def test_a_source_that_cannot_be_read_leaves_the_old_version(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    def fail(call: Call) -> None:
        if reads_of(two, call) and call.path.suffix == what:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        Trace(patch, fail)
        with refused(two, SourceNotReadyError):
            pull(two, 2)
    recovers(two)


def test_a_source_that_fails_only_in_its_blobs_leaves_the_old_version_and_the_live_module(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = {path.name: wire.raw_header(path)[1] for path in two.folder(2).glob("*.safetensors")}
    model = model_at(two, 1)

    def fail(call: Call) -> None:
        if reads_of(two, call) and call.offset >= starts.get(call.path.name, 1 << 60):
            raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        Trace(patch, fail)
        with refused(two, SourceNotReadyError):
            pull(two, 2)
        with refused(two, SourceNotReadyError, model=model):
            update(two, model, 2)
    recovers(two)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_read_that_fails_once_is_tried_again(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failed: list[Call] = []

    def fail(call: Call) -> None:
        if reads_of(two, call) and call.path.suffix == ".safetensors" and not failed:
            failed.append(call)
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        Trace(patch, fail)
        recovers(two)
    assert failed


def test_a_version_deleted_while_it_is_read_ends_old_or_new(two: wire.Stream) -> None:
    gone: list[int] = []

    def prune(event: gpusync.Progress) -> None:
        if event.stage == "materialize" and not gone:
            gone.append(1)
            shutil.rmtree(two.folder(2))

    before = wire.snapshot(two.local)
    try:
        pull(two, 2, progress=prune)
    except SourceNotReadyError:
        assert wire.snapshot(two.local) == before
    else:
        check_at(two, 2)
    assert gone, "no progress was reported before the blobs were read"


def test_a_version_replaced_while_it_is_read_is_never_mixed(two: wire.Stream) -> None:
    right = dict(two.states[2])
    done: list[int] = []

    def replace(event: gpusync.Progress) -> None:
        if event.stage == "materialize" and not done:
            done.append(1)
            two.republish(2, ("c.weight", "a.weight"))

    before = wire.snapshot(two.local)
    try:
        pull(two, 2, progress=replace)
    except GpuSyncError:
        assert wire.snapshot(two.local) == before
    else:
        assert wire.read_tensors(two.local) in (right, two.states[2])
    assert done


def test_a_full_version_rewritten_in_place_while_it_is_read_is_never_mixed(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full versions carry no digests, and here the headers are equal: only the file itself shows the change."""
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    two.full()
    right = two.states[3]
    path = two.folder(3) / "model.safetensors"
    _, start = wire.raw_header(path)
    done: list[int] = []

    def rewrite(event: gpusync.Progress) -> None:
        if event.stage == "materialize" and event.done_bytes and not done:
            done.append(1)
            with open(path, "r+b") as file:
                file.seek(start)
                rest = file.read()
                file.seek(start)
                file.write(bytes(byte ^ 255 for byte in rest))

    before = wire.snapshot(two.local)
    flipped = {name: bytes(byte ^ 255 for byte in data) for name, data in right.items()}
    try:
        pull(two, 3, progress=rewrite)
    except GpuSyncError:
        assert wire.snapshot(two.local) == before
    else:
        assert wire.read_tensors(two.local) in (right, flipped)
    assert done


def test_the_whole_chain_is_validated_before_the_first_byte_is_written(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours never holds all blobs; what it has before it writes is every index and header, checked."""
    pull(stream, 0)
    stream.delta()
    stream.delta()
    stream.delta()
    second_shard(stream, 3).unlink()
    trace = Trace(monkeypatch)
    with refused(stream, SourceNotReadyError):
        pull(stream, 3)
    assert not [call for call in trace.of("create") if call.path.suffix == ".safetensors"]


def test_a_chain_is_validated_when_it_is_opened(stream: wire.Stream) -> None:
    pull(stream, 0)
    stream.delta()
    stream.delta(bend=wire.Bend(index=lambda index: json.dumps(index).encode()[:-9]))
    with refused(stream, FormatError):
        open_chain(stream, 2)
