"""Mishaps found by reading the code against what a host can do to it: each one was wrong once."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpusync
from gpusync import fsio
from gpusync.errors import (
    CheckpointError,
    CheckpointIOError,
    ModelPoisonedError,
    PlacementError,
    SourceNotReadyError,
    VersionConflictError,
)
from gpusync.folder.files import FileChangedError, OpenFiles
from gpusync.folder.lock import FolderLock
from gpusync.folder.marker import Marker, parse_marker, sealed
from gpusync.folding import fold
from gpusync.live import attaching
from gpusync.live import update as update_module
from gpusync.local import advance
from gpusync.local.checkpoint import FolderPaths
from gpusync.local.swap import Journal, read_journal, recover
from gpusync.placement.regions import place_by_name
from tests import live, wire
from tests.driver import check_at, model_at, open_chain, pull


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    return wire.Stream(tmp_path / "stream")


# ---- live tensors --------------------------------------------------------------------------------------


def test_a_tensor_whose_storage_was_freed_is_refused_and_never_read() -> None:
    model = nn.Linear(4, 4)
    model.weight.data.untyped_storage().resize_(0)
    with pytest.raises(PlacementError, match="freed or offloaded"):
        place_by_name(model, {"weight": None})


def test_an_uninitialized_parameter_is_refused() -> None:
    with pytest.raises(PlacementError, match="not initialized"):
        place_by_name(nn.LazyLinear(4), {"weight": None})


def test_a_sparse_buffer_is_in_nobodys_way() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.eye(3).to_sparse())
    assert set(place_by_name(model, {"weight": None}).unmanaged) == {"bias", "mask"}
    with pytest.raises(PlacementError, match="no bytes of its own"):
        place_by_name(model, {"mask": None})


# ---- open files ----------------------------------------------------------------------------------------


def test_a_file_that_replaced_an_open_one_is_the_one_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"old bytes")
    buffer = memoryview(bytearray(9))
    with OpenFiles(4, 0) as files:
        old = files.stamp(path)
        files.read_into(path, buffer, 0, old)
        (tmp_path / "new").write_bytes(b"new bytes")
        os.replace(tmp_path / "new", path)
        new = files.stamp(path)
        assert new != old
        files.read_into(path, buffer, 0, new)
        assert bytes(buffer) == b"new bytes"
        with pytest.raises(FileChangedError):
            files.read_into(path, buffer, 0, old)


def test_a_stamp_that_an_open_file_does_not_have_opens_it_afresh(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"old bytes")
    buffer = memoryview(bytearray(9))
    with OpenFiles(4, 0) as files, OpenFiles(4, 0) as others:
        files.read_into(path, buffer, 0, files.stamp(path))
        (tmp_path / "new").write_bytes(b"new bytes")
        os.replace(tmp_path / "new", path)
        files.read_into(path, buffer, 0, others.stamp(path))
        assert bytes(buffer) == b"new bytes"


# ---- folding -------------------------------------------------------------------------------------------


def test_a_window_that_needs_a_decoder_of_its_own_late_in_a_blob_starts_the_lists_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests and the change list of a live tensor must not count the pieces before it twice."""
    nbytes, small = 4 << 20, 256 << 10
    layout = (wire.Row(wire.FIRST, "big.weight", "U8", (nbytes,), nbytes),)
    stream = wire.Stream(tmp_path / "stream", layout)
    new = stream.changed(["big.weight"], stream.states[0], nbytes)
    payload = wire.encode("xor", stream.states[0]["big.weight"], new["big.weight"])
    cuts = [*range(0, 3 << 20, small), 3 << 20, len(payload)]
    blob = b"".join(wire.compress(payload[a:b]) for a, b in itertools.pairwise(cuts))
    stream.delta(new=new, bend=wire.Bend(blob={"big.weight": blob}))
    monkeypatch.setattr(fold, "_SHARED_WINDOW", small)
    chain = open_chain(stream, 1, checkpoint=None)
    model = model_at(stream, 0)
    report = gpusync.apply_to_model(model, chain, write_back="none")
    assert live.bytes_of(model) == new
    assert report.change_list_bytes == nbytes // 2 * 8  # index, XOR, room for the live word


# ---- marker, journal, lock -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b'{"version": Infinity}',
        b'{"version": 1e999}',
        b'{"version": "1", "x": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'"abc"',
    ],
)
def test_no_marker_raises(raw: bytes) -> None:
    assert parse_marker(raw).state in ("damaged", "foreign")


@pytest.mark.parametrize("bend", [{"run_id": 7}, {"base": 7}, {"id": None}, {"history": [1]}])
def test_a_sealed_marker_with_other_fields_is_damaged(bend: dict[str, Any]) -> None:
    document = {**Marker(3, id="x").to_json(), **bend}
    del document["seal"]
    assert parse_marker(json.dumps(sealed(document)).encode()).state == "damaged"


@pytest.mark.parametrize("raw", [b'"text"', b"7", b"[]", b'{"after": {"version": "000001"}}'])
def test_a_damaged_journal_is_no_journal(tmp_path: Path, raw: bytes) -> None:
    paths = FolderPaths(tmp_path)
    fsio.make_dir(paths.state)
    paths.journal.write_bytes(raw)
    assert read_journal(paths) is None


def test_a_journal_that_cannot_be_read_is_not_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = FolderPaths(tmp_path)
    fsio.make_dir(paths.staging)
    Journal(None, Marker(1).advanced(), ()).write(paths)
    real = fsio.pread_into

    def fail(fd: int, buffer: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(paths.journal):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffer, offset)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "pread_into", fail)
        with pytest.raises(CheckpointIOError):
            recover(paths)
    assert read_journal(paths) is not None
    assert paths.staging.exists()


FORKED_WHILE_LOCKED = """
import os, pathlib, sys, time
from gpusync.folder.lock import FolderLock
folder = pathlib.Path(sys.argv[1])
with FolderLock(folder, 0.0):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
try:
    with FolderLock(folder, 0.0):
        print("free")
finally:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""


def test_a_process_forked_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED_WHILE_LOCKED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "free", done.stderr
    with FolderLock(tmp_path, 0.0):
        pass


# ---- live updates --------------------------------------------------------------------------------------


@pytest.fixture
def two(stream: wire.Stream) -> wire.Stream:
    """A host at version 1, with version 2 published."""
    stream.delta()
    pull(stream, 1)
    stream.delta()
    return stream


def test_a_second_prepare_is_refused_while_the_first_still_reads(two: wire.Stream) -> None:
    model = model_at(two, 1)
    refusals = []

    def again(event: gpusync.Progress) -> None:
        if event.stage == "decode" and not refusals:
            with pytest.raises(PlacementError, match="is prepared") as caught:
                gpusync.prepare(model, open_chain(two, 2), write_back="none")
            refusals.append(caught.value)
            with pytest.raises(PlacementError, match="is prepared"):
                gpusync.attach(model, two.local)

    report = gpusync.apply_to_model(model, open_chain(two, 2), write_back="none", progress=again)
    assert refusals and report.to_version == 2
    assert live.bytes_of(model) == two.states[2]


def test_a_prepare_that_failed_gives_the_model_back(two: wire.Stream) -> None:
    model = model_at(two, 1)

    def fail(event: gpusync.Progress) -> None:
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError) as kept:  # holds the frames that held the lease
        gpusync.prepare(model, open_chain(two, 2), progress=fail)
    gpusync.apply_to_model(model, open_chain(two, 2))
    assert kept.value.args == ("enough",)
    check_at(two, 2)


def test_attach_does_not_take_the_marker_of_the_swap_that_came_between(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards were read at version 1; the marker says 2 by the time they are proven."""
    model = model_at(two, 1)
    real = attaching.prove

    def prove(*arguments: Any) -> dict[str, str]:
        found = real(*arguments)
        pull(two, 2)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(attaching, "prove", prove)
        with pytest.raises(PlacementError, match="live bytes differ"):
            gpusync.attach(model, two.local)
    assert gpusync.live_version(model) is None


@pytest.mark.parametrize("held", [0, 1])
def test_a_first_update_names_the_tensor_that_is_wrong_and_the_folder_it_is_wrong_against(
    two: wire.Stream, held: int
) -> None:
    """Against the folder of the other version all that was published differs: true, and no help."""
    pull(two, 1)
    folder = (two.base, two.local)[held]
    model = model_at(two, held)
    with torch.no_grad():
        model.get_parameter("a.weight").zero_()
    with pytest.raises(PlacementError) as caught:
        gpusync.apply_to_model(model, open_chain(two, 2))
    assert list(caught.value.reasons) == ["a.weight"]
    assert f" {folder} at byte" in caught.value.reasons["a.weight"]


def test_a_refused_commit_does_not_wait_for_the_folder(two: wire.Stream) -> None:
    model = model_at(two, 1)
    update = gpusync.prepare(model, open_chain(two, 2))
    with torch.no_grad():
        model.get_parameter("a.weight").zero_()
    start = time.monotonic()
    with FolderLock(two.local, 0.0), pytest.raises(PlacementError, match="changed since"):
        update.commit()
    assert time.monotonic() - start < 5


def test_an_interrupt_after_the_last_store_poisons_the_model(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists are live and the identity is not: an update on top must never start."""
    model = model_at(two, 1)
    update = gpusync.prepare(model, open_chain(two, 2))
    real = update_module.commit_parts

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(update_module, "commit_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        update.commit()
    assert gpusync.live_version(model) is None
    with pytest.raises(ModelPoisonedError):
        gpusync.prepare(model, open_chain(two, 2))


def test_a_parameter_that_shrank_in_place_is_refused_as_such(two: wire.Stream) -> None:
    model = model_at(two, 1)
    gpusync.attach(model, two.local)
    weight = model.get_parameter("a.weight")
    weight.data = weight.data[:16]
    with pytest.raises(PlacementError, match="shape"):
        gpusync.prepare(model, open_chain(two, 2))


@pytest.mark.parametrize("how", ["reset", "deleted"])
def test_finish_looks_again_at_a_folder_that_stood_at_the_target(
    two: wire.Stream, how: str
) -> None:
    model = model_at(two, 1)
    gpusync.attach(model, two.local)
    pull(two, 2)
    update = gpusync.prepare(model, open_chain(two, 2))
    update.commit()
    if how == "reset":
        pull(two, 0)
    else:
        shutil.rmtree(two.local)
    assert update.finish().disk_version == 2
    check_at(two, 2)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO])
def test_finish_keeps_the_cause_and_says_where_both_sides_stand(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """A marker that cannot be read at all leaves finish nothing but to say so."""
    model = model_at(two, 1)
    update = gpusync.prepare(model, open_chain(two, 2))
    update.commit()
    real = fsio.open_regular

    def fail(path: Path) -> int:
        if path.name == "state.json":
            raise OSError(error, os.strerror(error))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "open_regular", fail)
        with pytest.raises(CheckpointIOError) as caught:
            update.finish()
    assert isinstance(caught.value.__cause__, OSError)
    assert (caught.value.live_version, caught.value.disk_version) == (2, None)
    assert caught.value.to_dict()["live_version"] == 2
    assert pickle.loads(pickle.dumps(caught.value)).live_version == 2
    assert update.finish().disk_version == 2
    check_at(two, 2)


# ---- the disk side -------------------------------------------------------------------------------------


def test_a_stale_copy_that_the_index_does_not_name_stays_out_of_the_table(
    tmp_path: Path,
) -> None:
    """Two shards of the base hold a tensor of one name; the table must be about the one that is updated."""
    layout = (
        wire.Row(wire.FIRST, "a.weight", "U8", (64,), 64),
        wire.Row(wire.SECOND, "b.weight", "U8", (1 << 20,), 1 << 20),
    )
    stream = wire.Stream(tmp_path / "stream", layout)
    state = stream.states[0]
    rows = [
        ("a.weight", "U8", (64,), state["a.weight"]),
        ("b.weight", "U8", (8,), b"outdated"),
    ]
    (stream.base / wire.FIRST).write_bytes(wire.pack(rows, {"format": "pt"}))
    for _ in range(3):
        stream.delta(["a.weight"])
        report = pull(stream, stream.last)
        assert report.tensors_healed == ()
        assert gpusync.verify(stream.local).ok
    stream.delta(["b.weight"])
    pull(stream, stream.last)
    assert gpusync.verify(stream.local).ok
    assert b"outdated" in (stream.local / wire.FIRST).read_bytes()


def test_a_source_that_goes_bad_under_the_last_look_is_the_sources_error(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = open_chain(two, 2)
    for file in two.folder(2).glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    real = fsio.lstat

    def fail(path: Path) -> os.stat_result:
        if path == two.folder(2) / wire.INDEX:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path)

    known = chain.version(2)
    with monkeypatch.context() as patch:
        patch.setattr(fsio, "lstat", fail)
        with pytest.raises(SourceNotReadyError) as caught:
            chain.source.check_unchanged([known])
    assert caught.value.version == 2


def test_a_delta_replaced_while_it_is_spooled_is_noticed_before_the_marker_goes(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", "rolling")
    real = advance.spool_versions

    def spool(*arguments: Any) -> None:
        two.republish(2, ("a.weight", "s.scale", "b.lut"))
        real(*arguments)

    before = wire.snapshot(two.local)
    with monkeypatch.context() as patch:
        patch.setattr(advance, "spool_versions", spool)
        with pytest.raises(VersionConflictError):
            pull(two, 2)
    assert wire.snapshot(two.local) == before


@pytest.mark.parametrize("odd", ["x\0y", "x\ud800y"])
def test_a_path_that_no_file_system_has_is_refused_by_whoever_it_was_for(
    two: wire.Stream, odd: str
) -> None:
    with pytest.raises(CheckpointError):
        gpusync.pull(odd, two.base, two.source, 2)
    with pytest.raises(CheckpointError):
        gpusync.verify(odd)
    with pytest.raises(CheckpointError):
        gpusync.open_chain(two.source, 2, checkpoint=odd)
    with pytest.raises(SourceNotReadyError):
        gpusync.pull(two.local, odd, two.source, 2)
    with pytest.raises(SourceNotReadyError):
        gpusync.pull(two.local, two.base, odd, 2)
    with pytest.raises(SourceNotReadyError):
        gpusync.attach(model_at(two, 1), odd)


@pytest.mark.parametrize("target", [10**18, 10**5000], ids=["18 digits", "5000"])
def test_a_target_that_no_folder_can_name_is_not_ready(two: wire.Stream, target: int) -> None:
    with pytest.raises(SourceNotReadyError, match="versions end"):
        pull(two, target)


def test_a_marker_holds_whatever_version_a_folder_can_name() -> None:
    version = 10**18 - 1
    found = parse_marker(json.dumps(Marker(version, id="x").to_json()).encode())
    assert found.state == "ours" and found.marker == Marker(version, id="x")


def test_a_base_on_a_mount_that_went_stale_is_the_sources_error(
    two: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stale(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path) == str(two.base):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        with pytest.raises(SourceNotReadyError, match="base"):
            pull(two, 2)
    pull(two, 2)
    check_at(two, 2)
