"""What the campaign of ``test_every_operation`` found, one test per cause, so that each stays mended."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpusync
from gpusync import fsio
from gpusync.errors import (
    BaseMismatchError,
    CheckpointError,
    CheckpointIOError,
    GpuSyncError,
    SourceNotReadyError,
)
from gpusync.publisher.publish import publish_checkpoint
from tests import wire
from tests.crash.harness import DELTA, SEED, Scenes, Victim, count_of_descriptors
from tests.driver import model_at, open_chain, refused
from tests.faults.campaign import check_new
from tests.faults.layer import Real, System, SystemCall
from tests.support import make_checkpoint, move_one_ulp, tiny_llama_tensors


def failing(
    patch: pytest.MonkeyPatch, name: str, ends: str, *, times: int = 1, after: int = 0
) -> list[SystemCall]:
    """Calls of this name on a path that ends so fail with EIO: so many, after so many that do not."""
    hits: list[SystemCall] = []
    seen = 0

    def script(call: SystemCall, real: Real) -> Any:
        nonlocal seen
        if call.name == name and str(call.path).endswith(ends):
            seen += 1
            if seen > after and len(hits) < times:
                hits.append(call)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*call.arguments)

    System(patch, script)
    return hits


def ending_early(patch: pytest.MonkeyPatch, ends: str, *, times: int = 1) -> list[SystemCall]:
    """The first reads of a path that ends so find nothing, although the file has its size."""
    hits: list[SystemCall] = []

    def script(call: SystemCall, real: Real) -> Any:
        if call.name == "preadv" and str(call.path).endswith(ends) and len(hits) < times:
            hits.append(call)
            return 0
        return real(*call.arguments)

    System(patch, script)
    return hits


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_side_file_that_ends_early_is_not_installed(scenes: Scenes, name: str) -> None:
    """It has no digest: half of a tokenizer used to be copied, and counted as the tokenizer."""
    scene = scenes(SEED)
    with pytest.MonkeyPatch.context() as patch:
        hits = ending_early(patch, f"base/{name}")
        with pytest.raises(SourceNotReadyError, match=name):
            scene.pull()
    assert hits
    scene.pull()
    scene.check_new("read in full")


def test_a_side_file_rewritten_while_it_is_copied_is_not_installed(scenes: Scenes) -> None:
    scene = scenes(SEED)
    path = scene.stream.base / "tokenizer.json"
    whole = path.read_text()

    def script(call: SystemCall, real: Real) -> Any:
        result = real(*call.arguments)
        if call.name == "preadv" and call.path == path:
            path.write_text(whole + " ")
        return result

    with pytest.MonkeyPatch.context() as patch:
        System(patch, script)
        with pytest.raises(SourceNotReadyError, match=r"tokenizer\.json"):
            scene.pull()
    path.write_text(whole)
    scene.pull()
    scene.check_new("at rest")


def test_the_index_of_a_seed_is_installed_as_it_was_validated(scenes: Scenes) -> None:
    """It used to be copied at the end, from whatever had taken its place by then."""
    scene = scenes(SEED)
    path = scene.stream.base / wire.INDEX
    whole = path.read_bytes()

    def script(call: SystemCall, real: Real) -> Any:
        result = real(*call.arguments)
        if call.name == "preadv" and call.path == path:
            path.write_bytes(b"{}")
        return result

    try:
        with pytest.MonkeyPatch.context() as patch:
            System(patch, script)
            scene.pull()
    finally:
        path.write_bytes(whole)
    scene.check_new("the index changed behind its reader")


@pytest.mark.parametrize("name", ["open", "fstat", "preadv"])
@pytest.mark.parametrize(
    "ends", ["staging/digests.json", f"spool/weight_v000002/{wire.INDEX}", "journal.json"]
)
def test_a_disk_error_in_recovery_never_throws_a_swap_away(
    scenes: Scenes, victim: Victim, monkeypatch: pytest.MonkeyPatch, ends: str, name: str
) -> None:
    """What finishes a rolling swap is only here: one EIO used to be taken for damage, and spool and journal went."""
    monkeypatch.setenv("GPUSYNC_SWAP", "rolling")
    scene = scenes(DELTA)
    victim.kill(scene.stream, 2, rename=1)
    scene.hide_versions()
    with pytest.MonkeyPatch.context() as patch:
        hits = failing(patch, name, ends)
        with pytest.raises(CheckpointIOError):
            scene.pull()
    assert hits
    scene.pull()
    scene.check_new("resumed when the disk was back")
    scene.show_versions()


def test_a_journal_that_reads_short_is_not_taken_for_a_damaged_one(
    scenes: Scenes, victim: Victim
) -> None:
    scene = scenes(DELTA)
    victim.kill(scene.stream, 2, rename=1)
    scene.hide_versions()
    with pytest.MonkeyPatch.context() as patch:
        hits = ending_early(patch, "journal.json")
        with pytest.raises(CheckpointIOError):
            scene.pull()
    assert hits
    scene.pull()
    scene.check_new("resumed when it read in full")
    scene.show_versions()


def test_a_rolling_swap_whose_spool_cannot_be_read_is_an_error_of_the_local_disk(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be SourceNotReadyError: wait for the publisher, it said, of a file on the local disk."""
    monkeypatch.setenv("GPUSYNC_SWAP", "rolling")
    scene = scenes(DELTA)
    opened = count_of_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, "listdir", "local/.weight_sync/spool")
        with pytest.raises(CheckpointIOError):
            scene.pull()
    assert count_of_descriptors() <= opened
    scene.pull()
    check_new(scene, "the disk was back")


def test_a_version_whose_index_is_replaced_before_it_is_spooled_is_refused(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool must hold what the dry pass proved; shards alone used to be looked at again."""
    monkeypatch.setenv("GPUSYNC_SWAP", "rolling")
    scene = scenes(DELTA)
    path = scene.stream.folder(2) / wire.INDEX
    whole = path.read_bytes()

    def replace(event: gpusync.Progress) -> None:
        if event.stage == "verify":
            path.write_bytes(whole + b" ")

    try:
        with refused(scene.stream, GpuSyncError):
            scene.pull(progress=replace)
    finally:
        path.write_bytes(whole)
    scene.pull()
    scene.check_new("the version is back")


@pytest.mark.parametrize("case", [SEED], ids=["base"])
def test_a_base_that_cannot_be_looked_at_again_is_not_called_rewritten(
    scenes: Scenes, case: Any
) -> None:
    scene = scenes(case)
    with pytest.MonkeyPatch.context() as patch:
        # The healed mode bits are read by name, too: it is the last look that fails.
        hits = failing(patch, "stat", "base/model-00003-of-00004.safetensors", times=2)
        with pytest.raises(SourceNotReadyError):
            scene.pull()
    assert hits
    scene.pull()
    scene.check_new("the base is back")


def test_a_model_is_not_refused_for_a_checkpoint_that_cannot_be_read(scenes: Scenes) -> None:
    """It used to be held against the base instead, and the answer was PlacementError."""
    scene = scenes(DELTA)
    model = model_at(scene.stream, 1)
    opened = count_of_descriptors()
    with open_chain(scene.stream, 2) as chain, pytest.MonkeyPatch.context() as patch:
        failing(patch, "listdir", "stream/local")
        with pytest.raises(CheckpointError):
            gpusync.prepare(model, chain, device="cpu")
    assert count_of_descriptors() <= opened


def test_a_chain_that_is_refused_leaves_nothing_open_while_its_error_is_kept(
    scenes: Scenes,
) -> None:
    scene = scenes(DELTA)
    opened = count_of_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, "lstat", "weight_v000002/model-00001-of-00002.safetensors")
        with pytest.raises(SourceNotReadyError) as kept:
            open_chain(scene.stream, 2)
    assert count_of_descriptors() <= opened, kept


@pytest.mark.parametrize(("function", "call"), [("open_regular", "fstat"), ("create", "fchmod")])
def test_an_open_that_fails_half_way_leaves_no_descriptor(
    tmp_path: Path, function: str, call: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    opened = count_of_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, call, "file")
        with pytest.raises(OSError):
            getattr(fsio, function)(path)
    assert count_of_descriptors() == opened


def test_a_line_that_is_written_in_parts_is_appended_whole(tmp_path: Path) -> None:
    def script(call: SystemCall, real: Real) -> Any:
        if call.name == "write":
            fd, data = call.arguments
            return real(fd, data[:3])
        return real(*call.arguments)

    with pytest.MonkeyPatch.context() as patch:
        System(patch, script)
        fsio.append(tmp_path / "lines", b"the whole line\n")
        fsio.append(tmp_path / "lines", b"and the next\n")
    assert (tmp_path / "lines").read_bytes() == b"the whole line\nand the next\n"


# ---- publishing ---------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_listed_never_lets_a_wrong_base_pass(fast_path: Path) -> None:
    """An empty delta has no digests, so the version before it is asked: one EIO used to mean that there is none."""
    states = [tiny_llama_tensors(3)]
    states.append(move_one_ulp(states[0], 0.1, seed=1))
    folders = [make_checkpoint(fast_path / str(n), state) for n, state in enumerate(states)]
    shared = fast_path / "s"
    publish_checkpoint(folders[0], folders[1], shared)
    publish_checkpoint(folders[1], folders[1], shared)
    listings = _fail_at_every_listing(lambda: publish_checkpoint(folders[0], folders[1], shared))
    assert listings > 3
    with pytest.raises(BaseMismatchError):
        publish_checkpoint(folders[0], folders[1], shared)


def test_a_run_keeps_its_name_where_the_version_before_cannot_be_listed(fast_path: Path) -> None:
    """After a full version the delta before it says the run: one EIO used to start a new one."""
    base = make_checkpoint(fast_path / "base", tiny_llama_tensors(3))
    shared = fast_path / "s"
    first = publish_checkpoint(base, base, shared).run_id
    publish_checkpoint(base, base, shared, full=True)
    assert _fail_at_every_listing(lambda: publish_checkpoint(base, base, shared)) > 3
    assert publish_checkpoint(base, base, shared).run_id == first


def _fail_at_every_listing(publish: Callable[[], object]) -> int:
    """Each listing of the shared folder, until the version is built, fails a publish; return how many there are."""
    number = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            hits = failing(patch, "listdir", "/s", after=number)
            try:
                publish()
            except CheckpointIOError:
                assert hits
            except BaseMismatchError:
                return number
            else:
                assert not hits, f"listing {number} failed, and nobody noticed"
                return number
        number += 1


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json"])
def test_a_full_version_of_a_file_that_is_rewritten_meanwhile_is_not_published(
    fast_path: Path, name: str
) -> None:
    """Full versions carry no digests, so nobody would have noticed."""
    base = make_checkpoint(fast_path / "base", tiny_llama_tensors(3))
    path, shared = base / name, fast_path / "s"
    whole = path.read_bytes()
    reads = 0

    def script(call: SystemCall, real: Real) -> Any:
        nonlocal reads
        result = real(*call.arguments)
        if call.name == "preadv" and call.path == path:
            reads += 1
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        System(patch, script)
        with pytest.raises(CheckpointError, match="rewritten"):
            publish_checkpoint(base, base, shared, full=True)
    assert reads
    assert not (shared / "weight_v000001").exists()
    path.write_bytes(whole)
    assert publish_checkpoint(base, base, shared, full=True).version == 1


def test_a_publish_that_fails_leaves_nothing_open_while_its_error_is_kept(fast_path: Path) -> None:
    base = make_checkpoint(fast_path / "base", tiny_llama_tensors(3))
    opened = count_of_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, "pwrite", "model-00001-of-00002.safetensors")
        with pytest.raises(CheckpointIOError) as kept:
            publish_checkpoint(base, base, fast_path / "s", full=True)
    assert count_of_descriptors() <= opened, kept
