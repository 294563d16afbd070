"""The kept tensors of a publisher: written over those before the last ones, and over nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusync import Publisher, fsio
from gpusync.errors import ChainError, CheckpointIOError, VersionConflictError
from tests.support import (
    Tensors,
    as_arrays,
    bytes_of,
    make_checkpoint,
    move_one_ulp,
    read_checkpoint,
    replay,
)


class Run:
    """Versions of a small model, published one by one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.states: list[Tensors] = [
            {"a": ("U8", (9000,), bytes(9000)), "b": ("I32", (), b"abcd")}
        ]
        self.base = make_checkpoint(root / "base", self.states[0])
        self.source, self.kept = root / "s", root / "kept"
        self.publisher = self.restarted()

    def restarted(self, run_id: str | None = None) -> Publisher:
        self.publisher = Publisher(self.source, self.base, state_dir=self.kept, run_id=run_id)
        return self.publisher

    def publish(self, times: int = 1) -> None:
        for _ in range(times):
            self.states.append(move_one_ulp(self.states[-1], 0.2, seed=len(self.states)))
            assert self.publisher.publish(as_arrays(self.states[-1])) == len(self.states) - 1
            self.check()

    def check(self) -> None:
        version = len(self.states) - 1
        assert replay(self.base, self.source, version) == self.states[-1]
        assert read_checkpoint(self.folder(version)) == bytes_of(self.states[-1])
        with_state = [path.parent.name for path in self.kept.glob("*/state.json")]
        assert with_state == [self.folder(version).name]

    def folder(self, version: int) -> Path:
        return self.kept / f"version_{version:06d}"

    def file(self, version: int) -> Path:
        return self.folder(version) / "model.safetensors"

    @property
    def spare(self) -> Path:
        return self.kept / "spare" / "model.safetensors"

    def names(self) -> list[str]:
        return sorted(path.name for path in self.kept.iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_next_tensors_are_written_over_those_before_the_last(run: Run) -> None:
    run.publish()
    assert run.names() == ["run.json", "version_000001"]
    inodes = [run.file(1).stat().st_ino]
    for version in (2, 3, 4):
        run.publish()
        assert run.names() == ["run.json", "spare", f"version_{version:06d}"]
        inodes.append(run.file(version).stat().st_ino)
    assert inodes == inodes[:2] * 2 and inodes[0] != inodes[1]


def test_no_state_stands_beside_tensors_that_are_written_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a byte of the tensors in force changed: they are what a publish that fails goes back to."""
    run.publish(2)
    in_force = run.file(2).read_bytes()
    pwrite, written = fsio.pwrite, []

    def checked(fd: int, buffer: memoryview, offset: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.name == "model.safetensors":
            assert not (path.parent / "state.json").exists()
            written.append(path)
        pwrite(fd, buffer, offset)
        if path.name == "model.safetensors":
            assert run.file(2).read_bytes() == in_force

    monkeypatch.setattr(fsio, "pwrite", checked)
    run.publish()
    assert set(written) == {run.file(3)}


def test_a_publish_that_fails_half_way_leaves_the_state_in_force_and_its_file_to_be_used_again(
    run: Run,
) -> None:
    run.publish(2)
    inode = run.spare.stat().st_ino
    first = as_arrays(run.states[-1])[0]
    for _ in range(2):
        with pytest.raises(ChainError, match="were not given"):
            run.publisher.publish([first])
        assert read_checkpoint(run.folder(2)) == bytes_of(run.states[2])
        assert not (run.folder(3) / "state.json").exists()
    run.restarted()
    run.publish()
    assert run.file(3).stat().st_ino == inode


def _other_size(run: Run) -> None:
    os.truncate(run.spare, 100)


def _has_a_second_name(run: Run) -> None:
    os.link(run.spare, run.root / "theirs")


def _is_a_link(run: Run) -> None:
    run.spare.rename(run.root / "theirs")
    run.spare.symlink_to(run.root / "theirs")


def _is_a_folder(run: Run) -> None:
    run.spare.unlink()
    run.spare.mkdir()


def _is_empty(run: Run) -> None:
    run.spare.unlink()


def _is_a_file(run: Run) -> None:
    shutil.rmtree(run.spare.parent)
    run.spare.parent.write_bytes(b"")


@pytest.mark.parametrize(
    "bend", [_other_size, _has_a_second_name, _is_a_link, _is_a_folder, _is_empty, _is_a_file]
)
def test_what_is_not_a_file_of_ours_of_that_size_is_not_written_over(
    run: Run, bend: Callable[[Run], None]
) -> None:
    run.publish(2)
    spare = run.spare.read_bytes()
    bend(run)
    run.publish()
    theirs = run.root / "theirs"
    assert not theirs.exists() or theirs.read_bytes() == spare
    run.publish(2)


def test_another_set_of_tensors_after_a_full_version_takes_another_file(run: Run) -> None:
    run.publish(2)
    run.states.append({"c": ("U8", (5000,), bytes(5000))})
    full = make_checkpoint(run.root / "full", run.states[-1])
    assert run.publisher.publish_full(full) == 3
    assert run.names() == ["run.json", "spare"]
    run.publish(3)


def test_nothing_of_another_model_of_the_same_size_is_left_in_its_file(run: Run) -> None:
    run.publish(2)
    file = run.file(2).stat()
    other: Tensors = {"c": ("U8", (9000,), b"\1" * 9000), "d": ("F32", (), b"efgh")}
    run.states.append(other)
    assert run.publisher.publish_full(make_checkpoint(run.root / "full", other)) == 3
    run.publish()
    assert run.file(4).stat().st_ino == file.st_ino
    assert run.file(4).stat().st_size == file.st_size
    run.publish()


def test_states_that_killed_publishers_left_are_cleared_before_the_next_takes_disk(
    run: Run,
) -> None:
    run.publish(2)
    shutil.copytree(run.folder(2), run.folder(1))  # killed before it came to remove them
    shutil.copytree(run.folder(2), run.folder(3))
    shutil.copytree(run.folder(2), run.kept / "rebuilt_000001")
    seen: list[list[str]] = []

    def tensors() -> Iterator[tuple[str, Any]]:
        seen.append(run.names())
        yield from as_arrays(run.states[-1])

    run.publisher.publish(tensors())
    assert seen == [["run.json", "version_000002", "version_000003"]]
    run.states.append(run.states[-1])
    run.check()


def test_a_source_that_is_not_mounted_costs_no_state(run: Run) -> None:
    run.restarted(run_id="r")
    run.publish()
    run.source.rename(run.root / "unmounted")
    with pytest.raises(VersionConflictError, match="Check the mount"):
        run.restarted(run_id="r").publish(as_arrays(run.states[-1]))
    shutil.rmtree(run.source)
    (run.root / "unmounted").rename(run.source)
    run.restarted(run_id="r")
    run.publish()


def test_a_full_disk_is_met_before_the_first_byte(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(fsio, "allocate", full)
            with pytest.raises(CheckpointIOError) as caught:
                run.publisher.publish(as_arrays(run.states[-1]))
        assert caught.value.errno == errno.ENOSPC
        run.publish()
