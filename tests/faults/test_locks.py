"""File systems whose flock fails, or succeeds and keeps nobody out: noticed and refused, before anything is touched."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpusync
from gpusync import Publisher
from gpusync.cli.doctor import diagnose
from gpusync.errors import CheckpointError, CheckpointIOError, LockTimeoutError
from gpusync.folder.lock import FolderLock, lock_problem
from tests import live
from tests.crash.harness import DELTA, Scenes
from tests.driver import model_at, open_chain, refused
from tests.faults.layer import Real, System, SystemCall
from tests.support import as_arrays, make_checkpoint, tiny_llama_tensors


def locks(patch: pytest.MonkeyPatch, answer: Callable[[], None]) -> None:
    """Every flock of gpusync is answered so, and takes nothing."""

    def script(call: SystemCall, real: Real) -> Any:
        return answer() if call.name == "flock" else real(*call.arguments)

    System(patch, script)


def keeps_nobody_out() -> None:
    """It says yes."""


def says(number: int) -> Callable[[], None]:
    def answer() -> None:
        raise OSError(number, os.strerror(number))

    return answer


NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]
names = pytest.mark.parametrize("number", NO_LOCKS, ids=lambda number: errno.errorcode[number])


@names
def test_a_file_system_without_flock_is_refused_with_advice(scenes: Scenes, number: int) -> None:
    scene = scenes(DELTA)
    with pytest.MonkeyPatch.context() as patch:
        locks(patch, says(number))
        with refused(scene.stream, CheckpointIOError, text="file system of this host") as caught:
            scene.pull()
    assert caught.value.errno == number  # type: ignore[attr-defined]
    scene.check_old("refused")
    scene.pull()
    scene.check_new("locks are back")


def test_a_flock_that_keeps_nobody_out_is_refused_with_advice(scenes: Scenes) -> None:
    scene = scenes(DELTA)
    with pytest.MonkeyPatch.context() as patch:
        locks(patch, keeps_nobody_out)
        with refused(scene.stream, CheckpointError, text="keeps nobody out"):
            scene.pull()
        with pytest.raises(CheckpointError, match="keeps nobody out"):
            gpusync.verify(scene.local)
    scene.check_old("refused")
    scene.pull()
    scene.check_new("locks are back")


@pytest.mark.parametrize("answer", [keeps_nobody_out, says(errno.ENOLCK)], ids=["no-op", "ENOLCK"])
def test_a_live_model_is_untouched_where_its_folder_cannot_be_locked(
    scenes: Scenes, answer: Callable[[], None]
) -> None:
    scene = scenes(DELTA)
    model = model_at(scene.stream, 1)
    with open_chain(scene.stream, 2) as chain:
        with pytest.MonkeyPatch.context() as patch:
            locks(patch, answer)
            with refused(scene.stream, CheckpointError, model=model):
                gpusync.prepare(model, chain, device="cpu")
        update = gpusync.prepare(model, chain, device="cpu")
        update.commit()
        with pytest.MonkeyPatch.context() as patch:
            locks(patch, answer)
            with pytest.raises(CheckpointError) as caught:
                update.finish()
    assert (caught.value.live_version, caught.value.disk_version) == (2, 1)
    assert live.bytes_of(model) == scene.stream.states[2]
    scene.pull()
    scene.check_new("locks are back")


def test_a_lock_that_is_held_is_still_held_after_it_was_tried(tmp_path: Path) -> None:
    """The second descriptor comes and goes, and takes nothing with it."""
    with FolderLock(tmp_path, 0.0):
        with pytest.raises(LockTimeoutError), FolderLock(tmp_path, 0.0):
            pass
        with (
            open(tmp_path / ".weight_sync" / "lock") as theirs,
            pytest.raises(BlockingIOError),
        ):
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with FolderLock(tmp_path, 0.0):
        pass


def test_doctor_tries_the_lock_and_leaves_nothing(tmp_path: Path) -> None:
    assert lock_problem(tmp_path) is None
    with pytest.MonkeyPatch.context() as patch:
        locks(patch, keeps_nobody_out)
        found = diagnose((tmp_path,))
        assert any("keeps nobody out" in text for text in found.warnings)
    with pytest.MonkeyPatch.context() as patch:
        locks(patch, says(errno.ENOSYS))
        assert "flock fails there" in str(lock_problem(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert not any("flock" in text for text in diagnose((tmp_path,)).warnings)


def test_a_publisher_whose_lock_keeps_nobody_out_removes_nobodys_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it takes for a killed publisher's leavings may be another's that is at work."""
    tensors = tiny_llama_tensors()
    source, base = tmp_path / "published", make_checkpoint(tmp_path / "base", tensors)
    source.mkdir()
    theirs = source / f".gpusync-publish.{os.uname().nodename}.theirs"
    theirs.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        locks(patch, keeps_nobody_out)
        assert Publisher(source, base).publish(as_arrays(tensors)) == 1
    assert theirs.is_dir()
    assert "publish_lock_unsupported" in caplog.text
    assert Publisher(source, base).publish(as_arrays(tensors)) == 2
    assert not theirs.exists()
