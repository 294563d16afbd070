"""Mishaps found by reading the code against what a host can do to it: each one was wrong once."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpusync
from gpusync import fold, fsio
from gpusync.checkpoint import FolderPaths
from gpusync.errors import CheckpointIOError, PlacementError
from gpusync.files import FileChangedError, OpenFiles
from gpusync.lock import FolderLock
from gpusync.marker import Marker, _seal, parse_marker
from gpusync.placement import place_by_name
from gpusync.swap import Journal, read_journal, recover
from tests import live, wire
from tests.driver import model_at, open_chain


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
    assert report.change_list_bytes == nbytes // 2 * 6


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
    document["seal"] = _seal({key: document[key] for key in document if key != "seal"})
    assert parse_marker(json.dumps(document).encode()).state == "damaged"


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
from gpusync.lock import FolderLock
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
