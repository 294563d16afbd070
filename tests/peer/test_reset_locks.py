"""Seeding, pruning, file safety, and who may write the folder."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn

import gpusync
from gpusync import fsio
from gpusync.errors import (
    CheckpointError,
    CheckpointIOError,
    GpuSyncError,
    LockTimeoutError,
)
from tests import live, wire
from tests.driver import Call, Trace, check_at, model_at, pull, refused, start_python, update

# ---- seeding ---------------------------------------------------------------------------------------------


def test_a_reset_copies_top_level_files_only(stream: wire.Stream) -> None:
    (stream.base / "original").mkdir()
    (stream.base / "original" / "consolidated.pth").write_bytes(b"x")
    (stream.base / "chat_template.jinja").write_text("{{ x }}")
    pull(stream, 0)
    names = {path.name for path in stream.local.iterdir()}
    assert names == {
        ".weight_sync", "config.json", "tokenizer.json", "chat_template.jinja",
        wire.INDEX, wire.FIRST, wire.SECOND,
    }  # fmt: skip
    assert (stream.local / "chat_template.jinja").read_text() == "{{ x }}"


def test_files_that_the_new_full_version_does_not_have_are_pruned(stream: wire.Stream) -> None:
    (stream.base / "pytorch_model.bin").write_bytes(b"old weights")
    pull(stream, 0)
    (stream.local / "my_notes.txt").write_text("kept")
    stream.full()
    (stream.folder(1) / "generation_config.json").write_text("{}")
    pull(stream, 1)
    check_at(stream, 1)
    names = {path.name for path in stream.local.iterdir()}
    assert {"model.safetensors", "generation_config.json", "config.json"} <= names
    assert not names & {wire.INDEX, wire.FIRST, wire.SECOND}, "stale weight files were left"
    header, _ = wire.raw_header(stream.local / "model.safetensors")
    assert header["__metadata__"] == {"format": "pt"}


def test_a_side_file_with_the_name_of_our_folder_neither_replaces_nor_wedges_it(
    stream: wire.Stream,
) -> None:
    stream.delta()
    pull(stream, 1)
    stream.full()
    (stream.folder(2) / ".weight_sync").write_text("a file, not a folder")
    before = wire.snapshot(stream.local)
    try:
        pull(stream, 2)
    except GpuSyncError:
        assert wire.snapshot(stream.local) == before
        (stream.folder(2) / ".weight_sync").unlink()
        pull(stream, 2)
    check_at(stream, 2)
    assert gpusync.verify(stream.local).ok


@pytest.mark.parametrize("name", ["extra.json", wire.FIRST, "model.safetensors"])
def test_a_folder_in_the_way_of_a_new_file_is_met_before_the_marker_goes(
    stream: wire.Stream, name: str
) -> None:
    stream.delta()
    pull(stream, 1)
    stream.full(single=name == "model.safetensors")
    (stream.folder(2) / "extra.json").write_text("{}")
    if (stream.local / name).exists():
        shutil.rmtree(stream.local)
        pull(stream, 0)
        (stream.local / name).unlink()
    (stream.local / name).mkdir()
    (stream.local / name / "something").write_text("of the operator's")
    with refused(stream, CheckpointError, text=name):
        pull(stream, 2)
    shutil.rmtree(stream.local / name)
    pull(stream, 2)
    check_at(stream, 2)


@pytest.mark.parametrize("name", ["digests.json", "journal.json", "state.json", "lock", "reserve"])
def test_a_side_file_with_the_name_of_one_of_our_own_is_only_a_side_file(
    stream: wire.Stream, name: str
) -> None:
    (stream.base / name).write_text('{"mine": 4715}')
    stream.delta()
    pull(stream, 1)
    check_at(stream, 1)
    assert (stream.local / name).read_text() == '{"mine": 4715}'
    report = gpusync.verify(stream.local)
    assert (report.ok, report.evidence) == (True, "table")


def test_progress_of_a_seed_grows_to_its_total(stream: wire.Stream) -> None:
    stream.delta()
    events: list[gpusync.Progress] = []
    pull(stream, 1, progress=events.append)
    copied = [event for event in events if event.stage == "materialize" and event.total_bytes]
    assert copied
    done = [event.done_bytes for event in copied]
    assert done == sorted(done)
    assert done[-1] == copied[-1].total_bytes > 0


def test_a_progress_callback_that_raises_stops_the_pull_at_a_safe_point(
    stream: wire.Stream,
) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    before = wire.snapshot(stream.local)

    class StopIt(Exception):
        pass

    def stop(event: gpusync.Progress) -> None:
        if event.stage == "materialize":
            raise StopIt

    with pytest.raises(StopIt):
        pull(stream, 2, progress=stop)
    assert wire.snapshot(stream.local) == before
    pull(stream, 2)
    check_at(stream, 2)


def test_a_base_whose_shard_is_cut_short_seeds_nothing(stream: wire.Stream) -> None:
    shard = stream.base / wire.SECOND
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with refused(stream, GpuSyncError, text=wire.SECOND):
        pull(stream, 0)
    assert wire.marker_version(stream.local) is None
    shard.write_bytes(data)
    pull(stream, 0)
    check_at(stream, 0)


def test_a_missing_base_is_named(stream: wire.Stream) -> None:
    shutil.rmtree(stream.base)
    with refused(stream, GpuSyncError, text="base"):
        pull(stream, 0)


def test_a_read_that_ends_early_while_the_base_is_copied_is_not_a_checkpoint(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fsio.pread_into
    _, start = wire.raw_header(stream.base / wire.FIRST)

    def short(fd: int, buffer: memoryview, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path == str(stream.base / wire.FIRST) and offset + len(buffer) > start + 100:
            return real(fd, buffer[: len(buffer) // 2], offset)
        return real(fd, buffer, offset)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "pread_into", short)
        with refused(stream, GpuSyncError):
            pull(stream, 0)
    pull(stream, 0)
    check_at(stream, 0)


def test_a_platform_without_posix_fadvise_pulls_too(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    monkeypatch.delattr(os, "posix_fadvise")
    pull(stream, 1)
    check_at(stream, 1)


# ---- local and base --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["same", "dots", "link", "link to base", "bind of parts"])
def test_a_local_folder_that_is_the_base_is_refused(stream: wire.Stream, how: str) -> None:
    stream.delta()
    link = stream.root / "link"
    link.symlink_to("base" if how != "link to base" else stream.base)
    local = {
        "same": stream.base,
        "dots": stream.base / ".." / "base",
        "link": link,
        "link to base": link,
        "bind of parts": Path(f"{stream.base}/."),
    }[how]
    before = wire.tree_sha256(stream.base)
    for target in (0, 1):
        with pytest.raises(CheckpointError):
            gpusync.pull(local, stream.base, stream.source, target)
        with pytest.raises(CheckpointError):
            gpusync.pull(stream.base, local, stream.source, target)
    assert wire.tree_sha256(stream.base) == before
    assert not (stream.base / ".weight_sync").exists()


@pytest.mark.parametrize("kind", ["hard link", "symbolic link"])
@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_the_base_is_never_written_through_a_link(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, kind: str, swap: str
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    stream.delta()
    stream.delta()
    stream.local.mkdir()
    for path in stream.base.iterdir():
        if kind == "hard link":
            os.link(path, stream.local / path.name)
        else:
            (stream.local / path.name).symlink_to(path)
    wire.write_marker(stream.local, json.dumps({"version": "000000"}))
    before = wire.tree_sha256(stream.base)
    for version in (1, 2):
        pull(stream, version)
        check_at(stream, version)
        assert wire.tree_sha256(stream.base) == before
    pull(stream, 0)
    check_at(stream, 0)
    assert wire.tree_sha256(stream.base) == before


def test_a_read_only_source_and_base_are_enough(stream: wire.Stream) -> None:
    stream.delta()
    stream.full()
    folders = [stream.base, stream.source, *stream.source.iterdir()]
    for folder in folders:
        for path in folder.iterdir():
            if path.is_file():
                path.chmod(0o444)
        folder.chmod(0o555)
    before = wire.tree_sha256(stream.root)
    try:
        pull(stream, 1)
        check_at(stream, 1)
        pull(stream, 2)
        check_at(stream, 2)
        pull(stream, 0)
        check_at(stream, 0)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    after = wire.tree_sha256(stream.root)
    assert {name: after[name] for name in before} == before


def test_a_base_of_links_into_a_blob_store_is_read(stream: wire.Stream) -> None:
    """The layout of a Hugging Face cache: every file of the snapshot is a link."""
    blobs = stream.root / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(stream.base.iterdir())):
        path.rename(blobs / f"{number:040x}")
        path.symlink_to(f"../blobs/{number:040x}")
    before = wire.tree_sha256(blobs)
    stream.delta()
    pull(stream, 1)
    check_at(stream, 1)
    pull(stream, 0)
    check_at(stream, 0)
    assert not [path for path in stream.local.iterdir() if path.is_symlink()]
    assert wire.tree_sha256(blobs) == before


def test_a_local_folder_behind_a_link_is_written_where_the_link_points(stream: wire.Stream) -> None:
    real = stream.root / "disk"
    real.mkdir()
    stream.local.symlink_to(real)
    stream.delta()
    pull(stream, 0)
    pull(stream, 1)
    check_at(stream, 1, real)
    assert stream.local.is_symlink()


# ---- mapped readers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_a_mapping_in_this_process_sees_no_change(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    pull(stream, 0)
    stream.delta()
    stream.delta(encoding="overwrite")
    stream.full()
    maps = {}
    for path in stream.local.glob("*.safetensors"):
        with open(path, "rb") as file:
            maps[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    copies = {name: bytes(mapped) for name, mapped in maps.items()}
    for target in (1, 2, 3, 0):
        pull(stream, target)
        check_at(stream, target)
        assert {name: bytes(mapped) for name, mapped in maps.items()} == copies


READER = """
import hashlib, mmap, pathlib, select, sys
maps = []
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    with open(path, "rb") as file:
        maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
look = lambda: hashlib.sha256(b"".join(bytes(mapped) for mapped in maps)).hexdigest()
first, looks = look(), 0
print("mapped", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    looks += 1
    if look() != first:
        sys.exit("the mapped bytes changed")
print(looks if look() == first else "changed", flush=True)
"""


def test_another_process_that_maps_the_files_sees_no_change_and_no_sigbus(
    stream: wire.Stream,
) -> None:
    pull(stream, 0)
    for _ in range(3):
        stream.delta()
    stream.full()
    reader = start_python(READER, stream.local)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "mapped\n"
    for target in (1, 3, 4, 0):
        pull(stream, target)
        check_at(stream, target)
    out, errors = reader.communicate("stop\n", timeout=30)
    assert reader.returncode == 0, errors
    assert int(out) >= 1


def test_a_module_whose_parameters_map_the_files_stays_right(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    model = nn.Module()
    for path in sorted(stream.local.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            live.place(model, name, tensor)
    for _ in range(3):
        stream.delta(("a.weight", "b.lut", "c.weight"))
    update(stream, model, 2)
    assert live.bytes_of(model) == stream.states[2]
    check_at(stream, 2)
    pull(stream, 3)
    assert live.bytes_of(model) == stream.states[2]
    update(stream, model, 3)
    assert live.bytes_of(model) == stream.states[3]
    update(stream, model, 4)
    assert live.bytes_of(model) == stream.states[4]
    check_at(stream, 4)


# ---- the marker ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("valid", ['{"version": "000001"}', '{"version": 1}'])
def test_a_folder_of_another_receiver_is_taken_over(stream: wire.Stream, valid: str) -> None:
    stream.delta()
    stream.delta()
    stream.foreign_local(1)
    wire.write_marker(stream.local, valid)
    report = pull(stream, 2)
    check_at(stream, 2)
    assert (report.from_version, report.seed, report.versions) == (1, "local", (2,))


def test_a_folder_handed_to_another_receiver_and_back_is_taken_at_its_word(
    stream: wire.Stream,
) -> None:
    stream.delta()
    pull(stream, 1)
    text = json.loads((stream.local / wire.MARKER).read_text())
    assert int(text["version"]) == 1
    assert isinstance(text["version"], str), "SGLang's receiver reads a string"
    stream.delta()
    stream.delta()
    stream.write_checkpoint(stream.local, stream.states[2])
    wire.write_marker(stream.local, '{"version": "000002"}')
    report = pull(stream, 3)
    check_at(stream, 3)
    assert (report.from_version, report.versions, report.tensors_healed) == (2, (3,), ())
    assert gpusync.verify(stream.local).ok


@pytest.mark.parametrize(
    "text",
    ["", '{"version": "0000', "not json", "[1]", '{"version": "000001", "valid": false}', "{}",
     '{"version": "x"}', '{"version": -1}', "null", "\x00\x00\x00", '{"version": "000001"}' * 2],
)  # fmt: skip
def test_a_damaged_marker_is_healed_by_the_next_pull(stream: wire.Stream, text: str) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    wire.flip_tensor_byte(stream.local, "c.weight")
    (stream.local / wire.MARKER).write_text(text)
    pull(stream, 2)
    check_at(stream, 2)
    assert gpusync.verify(stream.local).ok


@pytest.mark.parametrize(
    "text",
    [
        '{"version": "000001", "valid": false}',
        '{"version": "000001", "valid": true, "durability": "process", "run_id": "another"}',
        "",
        "{}",
    ],
)
def test_a_folder_that_nothing_vouches_for_is_not_built_on(stream: wire.Stream, text: str) -> None:
    """Version 1 is gone, so nothing could prove these bytes; a plain marker would be taken at its word."""
    stream.delta()
    stream.delta()
    stream.foreign_local(1)
    wire.flip_tensor_byte(stream.local, "c.weight")
    stream.hide(1)
    wire.write_marker(stream.local, text)
    with refused(stream, GpuSyncError, text=r"\b1\b"):
        pull(stream, 2)
    stream.show(1)
    pull(stream, 2)
    check_at(stream, 2)


def test_a_marker_of_ours_that_another_receiver_edited_is_theirs(stream: wire.Stream) -> None:
    """They bump the version and keep the other keys, whose fingerprint and history are then of other bytes."""
    stream.delta()
    pull(stream, 1)
    stream.delta()
    stream.delta()
    stream.write_checkpoint(stream.local, stream.states[2])
    marker = json.loads((stream.local / wire.MARKER).read_text())
    wire.write_marker(stream.local, json.dumps({**marker, "version": "000002"}))
    report = pull(stream, 3)
    check_at(stream, 3)
    assert (report.from_version, report.versions, report.tensors_healed) == (2, (3,), ())
    assert gpusync.verify(stream.local).ok


def test_a_damaged_marker_is_healed_at_the_same_target_too(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    wire.flip_tensor_byte(stream.local, "a.weight")
    (stream.local / wire.MARKER).write_text("")
    assert pull(stream, 1).outcome == "applied"
    check_at(stream, 1)


def test_an_absent_marker_means_reseed(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    wire.flip_tensor_byte(stream.local, "c.weight")
    (stream.local / wire.MARKER).unlink()
    report = pull(stream, 1)
    check_at(stream, 1)
    assert report.from_version is None
    assert report.seed == "base"


# ---- space and faults of the local disk ------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["allocate", "pwrite", "fsync", "create"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_a_local_disk_that_fails_while_staging_keeps_the_old_version(
    stream: wire.Stream,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    number: int,
    swap: str,
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    stream.delta()
    pull(stream, 1)
    stream.delta(("a.weight", "c.weight"))
    hits: list[Call] = []

    def fail(call: Call) -> None:
        if call.operation == operation and call.within(stream.local) and not hits:
            hits.append(call)
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        Trace(patch, fail)
        with refused(stream, CheckpointIOError) as caught:
            pull(stream, 2)
    assert hits, f"a pull never calls fsio.{operation}"
    assert caught.value.errno == number  # type: ignore[attr-defined]
    assert gpusync.verify(stream.local).ok
    pull(stream, 2)
    check_at(stream, 2)


def test_a_failed_pull_leaves_no_staged_copy_on_a_full_disk(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta(("a.weight", "c.weight"))

    def used() -> int:
        files = (stream.local / ".weight_sync").rglob("*.safetensors")
        return sum(path.stat().st_size for path in files)

    def fail(call: Call) -> None:
        if call.operation == "fsync" and call.path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, "no space left")

    before = used()
    with monkeypatch.context() as patch:
        Trace(patch, fail)
        with refused(stream, CheckpointIOError):
            pull(stream, 2)
    assert used() == before


@pytest.mark.parametrize("where", ["header", "data"])
@pytest.mark.parametrize("side", ["local", "base"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_is_an_error_and_no_rot(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, side: str, where: str, number: int
) -> None:
    """A reseed of the whole folder is not the answer to a disk, or a permission, that an operator can mend."""
    stream.delta()
    pull(stream, 1)
    stream.delta()
    folder = stream.local if side == "local" else stream.base
    _, start = wire.raw_header(folder / wire.FIRST)

    def fail(call: Call) -> None:
        ours = call.operation == "pread_into" and call.path == folder / wire.FIRST
        if ours and (where == "header") == (call.offset < start):
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        Trace(patch, fail)
        with refused(stream, CheckpointIOError if side == "local" else GpuSyncError):
            pull(stream, 2 if side == "local" else 0)
    pull(stream, 2)
    check_at(stream, 2)


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_an_error_at_any_operation_leaves_a_folder_that_the_next_pull_brings_on(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    """ENOSPC at the n-th write operation, for every n until a pull meets none."""
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    stream.delta()
    pull(stream, 1)
    stream.delta(("a.weight", "c.weight"))
    saved = stream.root / "saved"
    shutil.copytree(stream.local, saved)
    for failing in range(500):
        shutil.rmtree(stream.local)
        shutil.copytree(saved, stream.local)
        seen = 0

        def fail(call: Call, failing: int = failing) -> None:
            nonlocal seen
            if call.operation not in fsio.WRITE_OPERATIONS:
                return
            seen += 1
            if seen == failing + 1:
                raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            Trace(patch, fail)
            try:
                pull(stream, 2)
            except CheckpointError as err:
                assert isinstance(err, CheckpointIOError), err
        if seen <= failing:
            break
        have = wire.read_tensors(stream.local)
        for name, data in have.items():
            assert data in (stream.states[1][name], stream.states[2][name]), (failing, name)
        if (stream.local / wire.MARKER).exists():
            assert have == stream.states[wire.marker_version(stream.local) or 0], failing
        else:
            mixed = have not in (stream.states[1], stream.states[2])
            assert not mixed or not (stream.local / "config.json").exists(), failing
        pull(stream, 2, durable=False)
        check_at(stream, 2)
        assert (stream.local / "config.json").exists()
    assert 15 <= failing < 499


def test_a_folder_that_cannot_be_made_is_named(stream: wire.Stream) -> None:
    stream.delta()
    stream.local.write_text("a file stands here")
    with pytest.raises(CheckpointError, match="local"):
        pull(stream, 1)
    assert stream.local.read_text() == "a file stands here"


# ---- the lock ---------------------------------------------------------------------------------------------------

PULL = """
import json, os, sys, time, gpusync
gpusync.pull
print("ready", flush=True)
sys.stdin.readline()
report = gpusync.pull(*sys.argv[1:4], int(sys.argv[4]))
print(json.dumps({"outcome": report.outcome, "to": report.to_version}))
"""


def test_four_processes_pull_at_once_and_one_does_the_work(stream: wire.Stream) -> None:
    for _ in range(3):
        stream.delta()
    arguments = (stream.local, stream.base, stream.source, 3)
    processes = [start_python(PULL, *arguments) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    rows = []
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        rows.append(json.loads(out))
    assert sorted(row["outcome"] for row in rows) == ["applied"] + ["unchanged"] * 3
    assert {row["to"] for row in rows} == {3}
    check_at(stream, 3)


def test_threads_with_different_targets_end_at_the_highest(stream: wire.Stream) -> None:
    pull(stream, 0)
    for _ in range(4):
        stream.delta()
    failures: list[BaseException] = []

    def run(target: int) -> None:
        try:
            pull(stream, target)
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=run, args=[target]) for target in (4, 1, 3, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    check_at(stream, 4)
    assert gpusync.verify(stream.local).ok


HOLD = """
import sys, gpusync
def hold(event):
    if event.stage == "materialize":
        print("holding", flush=True)
        sys.stdin.readline()
gpusync.pull(*sys.argv[1:4], int(sys.argv[4]), progress=hold)
"""


def test_a_stuck_holder_gives_a_lock_timeout_that_names_its_pid(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    holder = start_python(HOLD, stream.local, stream.base, stream.source, 2)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        with refused(stream, LockTimeoutError, text=str(holder.pid)) as caught:
            pull(stream, 2, lock_timeout_seconds=0.2)
        assert caught.value.pid == holder.pid  # type: ignore[attr-defined]
    finally:
        holder.kill()
        holder.communicate()
    pull(stream, 2, lock_timeout_seconds=5.0)
    check_at(stream, 2)


def test_another_receivers_flock_is_respected(stream: wire.Stream) -> None:
    stream.delta()
    stream.foreign_local(0)
    with open(stream.local / ".weight_sync" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refused(stream, LockTimeoutError):
            pull(stream, 1, lock_timeout_seconds=0.2)
        timer = threading.Timer(0.3, fcntl.flock, [lock, fcntl.LOCK_UN])
        begun = time.monotonic()
        timer.start()
        pull(stream, 1, lock_timeout_seconds=20.0)
        assert time.monotonic() - begun >= 0.25
        timer.join()
    check_at(stream, 1)


def test_a_lock_file_that_a_dead_process_left_is_no_lock(stream: wire.Stream) -> None:
    stream.delta()
    stream.foreign_local(0)
    (stream.local / ".weight_sync" / "lock").write_text("1\n")
    pull(stream, 1, lock_timeout_seconds=0.5)
    check_at(stream, 1)


def test_the_marker_is_the_last_file_that_a_seed_writes(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    trace = Trace(monkeypatch)
    pull(stream, 1)
    onto = [call.to for call in trace.of("rename") if call.to is not None]
    marker = stream.local / wire.MARKER
    placed = [path for path in onto if path.parent == stream.local]
    assert {wire.FIRST, wire.SECOND, "config.json"} <= {path.name for path in placed}
    assert max(onto.index(path) for path in placed) < onto.index(marker)


def test_a_local_folder_that_only_holds_a_live_model_is_not_needed(stream: wire.Stream) -> None:
    """Disk-less hosts: a module without a checkpoint follows the stream, and no folder appears."""
    stream.delta()
    model = model_at(stream, 0)
    chain = gpusync.open_chain(stream.source, 1, base_dir=stream.base)
    gpusync.apply_to_model(model, chain, device="cpu")
    assert live.bytes_of(model) == stream.states[1]
    assert not stream.local.exists()
