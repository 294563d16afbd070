"""What a publisher refuses, and what stops it: nothing is published then."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusync import Publisher, fsio
from gpusync.config import Settings
from gpusync.errors import (
    ChainError,
    CheckpointError,
    VersionConflictError,
)
from gpusync.publisher.publication import publish_lock, worker_threads
from gpusync.publisher.publish import publish_checkpoint
from tests.publisher.versions import visible
from tests.support import (
    Tensors,
    as_arrays,
    make_checkpoint,
    publish_steps,
    replay,
    snapshot,
    version_dir,
)


def _without(tensors: Tensors, name: str) -> list[tuple[str, np.ndarray]]:
    return [pair for pair in as_arrays(tensors) if pair[0] != name]


@pytest.mark.parametrize(
    ("bend", "word"),
    [
        (lambda t: _without(t, "model.norm.weight"), "not given"),
        (lambda t: [*as_arrays(t), ("lm_head.weight", np.zeros(3, np.uint16))], "not in"),
        (lambda t: [*as_arrays(t), as_arrays(t)[0]], "twice"),
        (
            lambda t: [
                *_without(t, "model.norm.weight"),
                ("model.norm.weight", np.zeros((2, 12), "u2")),
            ],
            "dtype and shape",
        ),
        (
            lambda t: [
                *_without(t, "model.norm.weight"),
                ("model.norm.weight", np.zeros(24, "f2")),
            ],
            "dtype and shape",
        ),
        (
            lambda t: [*_without(t, "model.norm.weight"), ("model.norm.weight", torch.zeros(24))],
            "dtype and shape",
        ),
        (
            lambda t: [
                *_without(t, "model.norm.weight"),
                ("model.norm.weight", torch.zeros(24, device="meta", dtype=torch.bfloat16)),
            ],
            "no dense bytes",
        ),
        (lambda t: [*_without(t, "model.norm.weight"), ("model.norm.weight", [1.0])], "neither"),
    ],
    ids=["missing", "unknown", "twice", "shape", "dtype", "torch dtype", "meta", "list"],
)
def test_another_set_of_tensors_is_refused(
    tmp_path: Path, base_dir: Path, states: list[Tensors], bend: Any, word: str
) -> None:
    publisher = Publisher(tmp_path / "s", base_dir)
    with pytest.raises(ChainError, match=word) as caught:
        publisher.publish(bend(states[1]))
    assert caught.value.tensor is not None
    assert visible(tmp_path / "s") == []
    assert publisher.publish(as_arrays(states[1])) == 1
    assert replay(base_dir, tmp_path / "s", 1) == states[1]


def test_an_error_of_the_iterable_reaches_the_caller_and_publishes_nothing(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    def gather() -> Iterator[tuple[str, np.ndarray]]:
        yield as_arrays(states[1])[0]
        raise TimeoutError("a rank is gone")

    with pytest.raises(TimeoutError, match="a rank is gone"):
        Publisher(tmp_path / "s", base_dir).publish(gather())
    assert visible(tmp_path / "s") == []
    assert [path.name for path in (tmp_path / "s").glob(".*tmp")] == []


@pytest.mark.parametrize(
    "option",
    [{"encoding": "delta"}, {"checksum": "md5"}, {"framing": "both"}, {"frame_bytes": 4096}],
    ids=lambda option: next(iter(option)),
)
def test_unknown_options_are_refused_before_any_work(tmp_path: Path, option: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Publisher(tmp_path / "s", tmp_path / "base", **option)
    assert not (tmp_path / "s").exists()


def test_a_base_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for base_dir in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(CheckpointError, match=str(base_dir)):
            Publisher(tmp_path / "s", base_dir).publish([])
    assert visible(tmp_path / "s") == []


def test_a_version_of_another_publisher_stops_this_one(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    first = Publisher(source_dir, base_dir)
    first.publish(as_arrays(states[1]))
    make_checkpoint(tmp_path / "one", states[1])
    make_checkpoint(tmp_path / "two", states[2])
    publish_checkpoint(tmp_path / "one", tmp_path / "two", source_dir)
    with pytest.raises(VersionConflictError) as caught:
        first.publish(as_arrays(states[3]))
    assert (caught.value.expected, caught.value.got) == (1, 2)
    with pytest.raises(VersionConflictError, match="Publish a full version"):
        Publisher(source_dir, base_dir).publish(as_arrays(states[3]))
    assert len(visible(source_dir)) == 2


def test_a_publisher_at_work_keeps_others_out(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    with (
        publish_lock(source_dir),
        pytest.raises(VersionConflictError, match="another publisher is at work"),
    ):
        Publisher(source_dir, base_dir).publish(as_arrays(states[1]))
    assert Publisher(source_dir, base_dir).publish(as_arrays(states[1])) == 1


def test_no_thread_is_at_work_any_more_after_an_interrupt_while_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutdown, interrupts = ThreadPoolExecutor.shutdown, [KeyboardInterrupt]

    def interrupted(pool: ThreadPoolExecutor, *args: Any, **options: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        shutdown(pool, *args, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt), worker_threads(Settings(threads=1)) as pool:
        pool.submit(work)
        dropped = pool.submit(work)
        assert begun.wait(60)
    assert ended.is_set() and dropped.cancelled()


def test_a_file_system_without_locks_is_published_to_with_a_warning(
    tmp_path: Path, base_dir: Path, states: list[Tensors], monkeypatch: Any, caplog: Any
) -> None:
    def no_locks(fd: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fsio, "try_flock", no_locks)
    publish_steps(tmp_path / "s", base_dir, [states[1]])
    assert replay(base_dir, tmp_path / "s", 1) == states[1]
    assert "publish_lock_unsupported" in caplog.text


def test_losing_the_race_for_a_version_leaves_the_winner_alone(
    tmp_path: Path, base_dir: Path, states: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another host, where the lock may exclude nobody: its folder appears just before our rename."""
    source_dir = tmp_path / "s"
    rename = fsio.rename

    def race(old: Path, new: Path) -> None:
        if new.name == "weight_v000001":
            new.mkdir()
            (new / "theirs").write_bytes(b"1")
        rename(old, new)

    monkeypatch.setattr(fsio, "rename", race)
    with pytest.raises(VersionConflictError) as caught:
        Publisher(source_dir, base_dir).publish(as_arrays(states[1]))
    assert caught.value.version == 1
    assert snapshot(source_dir / "weight_v000001") == {"theirs": b"1"}
    assert [path.name for path in source_dir.glob(".*tmp")] == []


def test_an_unfinished_version_is_not_built_upon(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    publish_steps(source_dir, base_dir, [states[1]])
    folder = version_dir(source_dir, 2)
    folder.mkdir()
    (folder / "model-00000-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(VersionConflictError, match="not whole") as caught:
        Publisher(source_dir, base_dir).publish(as_arrays(states[2]))
    assert caught.value.version == 2
