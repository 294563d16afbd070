"""The difference of two checkpoint folders, full versions, and how much memory publishing takes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusync import Publisher
from gpusync.errors import (
    BaseMismatchError,
    ChainError,
    CheckpointError,
)
from gpusync.publisher.publish import publish_checkpoint
from gpusync.types import Progress
from tests.publisher.versions import open_version, visible
from tests.support import (
    INDEX,
    Tensors,
    as_arrays,
    make_checkpoint,
    move_one_ulp,
    publish_steps,
    replay,
    snapshot,
    version_dir,
)

# ---- from checkpoint folders --------------------------------------------------------------------------


def test_publish_checkpoint_writes_the_difference_of_two_folders(
    tmp_path: Path, states: list[Tensors]
) -> None:
    folders = [
        make_checkpoint(tmp_path / str(number), state, shards=number % 2 + 1)
        for number, state in enumerate(states)
    ]
    for version in (1, 2, 3):
        report = publish_checkpoint(folders[version - 1], folders[version], tmp_path / "s")
        assert (report.version, report.base_version, report.kind) == (version, version - 1, "delta")
        assert open_version(tmp_path / "s", version).manifest.run_id == report.run_id
    assert replay(folders[0], tmp_path / "s", 3) == states[3]


def test_both_ways_of_publishing_write_the_same_version(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    publish_steps(tmp_path / "p", base_dir, states[1:2], run_id="r")
    make_checkpoint(tmp_path / "new", states[1])
    publish_checkpoint(base_dir, tmp_path / "new", tmp_path / "c", run_id="r")
    assert snapshot(version_dir(tmp_path / "p", 1)) == snapshot(version_dir(tmp_path / "c", 1))


def test_a_base_that_is_not_the_last_published_version_is_refused(
    tmp_path: Path, states: list[Tensors]
) -> None:
    folders = [make_checkpoint(tmp_path / str(n), state) for n, state in enumerate(states)]
    publish_checkpoint(folders[0], folders[1], tmp_path / "s")
    for wrong in (0, 2):
        with pytest.raises(BaseMismatchError) as caught:
            publish_checkpoint(folders[wrong], folders[3], tmp_path / "s")
        assert caught.value.tensor in states[0]
        assert caught.value.expected != caught.value.got
    assert visible(tmp_path / "s") == ["weight_v000001"]
    publish_checkpoint(folders[1], folders[1], tmp_path / "s")
    with pytest.raises(BaseMismatchError):  # through the empty delta, to the one before
        publish_checkpoint(folders[2], folders[3], tmp_path / "s")
    assert publish_checkpoint(folders[1], folders[2], tmp_path / "s").version == 3


def test_another_tensor_set_dtype_or_shape_takes_a_full_version(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    norm = states[0]["model.norm.weight"]
    bent: list[Tensors] = [
        {**states[1], "extra": ("U8", (1,), b"1")},
        {name: tensor for name, tensor in states[1].items() if name != "model.norm.weight"},
        {**states[1], "model.norm.weight": ("F16", norm[1], norm[2])},
        {**states[1], "model.norm.weight": ("BF16", (2, 12), norm[2])},
    ]
    for number, tensors in enumerate(bent):
        new_dir = make_checkpoint(tmp_path / f"new{number}", tensors)
        with pytest.raises(ChainError, match="--full") as caught:
            publish_checkpoint(base_dir, new_dir, tmp_path / "s")
        assert caught.value.tensor in ("extra", "model.norm.weight")
    assert visible(tmp_path / "s") == []


@pytest.mark.parametrize("shards", (1, 2))
def test_a_full_version_is_a_copy_of_the_folder(
    tmp_path: Path, states: list[Tensors], shards: int
) -> None:
    new_dir = make_checkpoint(tmp_path / "new", states[1], shards=shards)
    (new_dir / "tokenizer.json").write_text("{}")
    (new_dir / "stray.safetensors").write_bytes(b"not in the index") if shards == 2 else None
    (new_dir / ".weight_sync").mkdir()
    (new_dir / ".weight_sync" / "state.json").write_text("{}")
    (new_dir / ".hidden").write_text("")
    report = publish_checkpoint(tmp_path / "unread", new_dir, tmp_path / "s", full=True)
    assert (report.kind, report.version, report.base_version) == ("full", 1, None)
    expected = {
        name: data
        for name, data in snapshot(new_dir).items()
        if not name.startswith((".", "stray"))
    }
    assert snapshot(version_dir(tmp_path / "s", 1)) == expected
    assert open_version(tmp_path / "s", 1).kind == "full"


def test_a_delta_on_a_full_version_is_checked_against_its_bytes(
    tmp_path: Path, states: list[Tensors]
) -> None:
    folders = [make_checkpoint(tmp_path / str(n), state) for n, state in enumerate(states)]
    first = publish_checkpoint(folders[0], folders[1], tmp_path / "s")
    full = publish_checkpoint(folders[1], folders[2], tmp_path / "s", full=True)
    with pytest.raises(BaseMismatchError):
        publish_checkpoint(folders[1], folders[3], tmp_path / "s")
    last = publish_checkpoint(folders[2], folders[3], tmp_path / "s")
    assert [first.run_id] * 2 == [full.run_id, last.run_id]
    assert replay(folders[0], tmp_path / "s", 3) == states[3]


def test_publisher_goes_on_from_a_full_version_with_other_tensors(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    other: Tensors = {"new.weight": ("U8", (300,), bytes(300)), "scale": ("F32", (), bytes(4))}
    publisher = Publisher(tmp_path / "s", base_dir)
    publisher.publish(as_arrays(states[1]))
    assert publisher.publish_full(make_checkpoint(tmp_path / "other", other)) == 2
    assert not list((tmp_path / "s.publisher").glob("version_*"))
    moved = move_one_ulp(other, 0.1)
    assert publisher.publish(as_arrays(moved)) == 3
    assert replay(base_dir, tmp_path / "s", 3) == moved


def test_folders_that_are_no_whole_checkpoint_are_refused(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    cut = make_checkpoint(tmp_path / "cut", states[1])
    shard = sorted(cut.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    for new_dir in (cut, tmp_path / "absent"):
        for full in (False, True):
            with pytest.raises(CheckpointError):
                publish_checkpoint(base_dir, new_dir, tmp_path / "s", full=full)
    relabelled = make_checkpoint(tmp_path / "relabelled", states[1])
    index = json.loads((relabelled / INDEX).read_bytes())
    index["metadata"]["version"] = "000009"
    (relabelled / INDEX).write_text(json.dumps(index))
    with pytest.raises(ChainError, match=r"metadata\.version"):
        publish_checkpoint(base_dir, relabelled, tmp_path / "s", full=True)
    assert visible(tmp_path / "s") == []


@pytest.mark.parametrize("full", (False, True))
def test_progress_counts_to_its_total_and_may_stop_the_work(
    tmp_path: Path, base_dir: Path, states: list[Tensors], full: bool
) -> None:
    new_dir = make_checkpoint(tmp_path / "new", states[1])
    events: list[Progress] = []

    def stop(event: Progress) -> None:
        raise BrokenPipeError("stop here")

    with pytest.raises(BrokenPipeError, match="stop here"):
        publish_checkpoint(base_dir, new_dir, tmp_path / "s", full=full, progress=stop)
    assert visible(tmp_path / "s") == []
    publish_checkpoint(base_dir, new_dir, tmp_path / "s", full=full, progress=events.append)
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total_bytes > 0
    assert {event.stage for event in events} == {"publish"}


# ---- memory -------------------------------------------------------------------------------------------

BIG = 32 << 20
PARTS = 3


@pytest.fixture
def big_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two checkpoints of PARTS tensors of BIG bytes; two threads, so that only the tensors are large."""
    monkeypatch.setenv("GPUSYNC_THREADS", "2")
    old: Tensors = {f"t{i}": ("U8", (BIG,), bytes([i]) * BIG) for i in range(PARTS)}
    make_checkpoint(tmp_path / "old", old)
    make_checkpoint(tmp_path / "new", move_one_ulp(old, 0.001))
    return tmp_path / "old", tmp_path / "new"


def _peak(work: Any) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("encoding", "framing"), [("xor", "seekable"), ("xor", "single"), ("overwrite", "single")]
)
def test_from_folders_no_tensor_is_in_memory_as_a_whole(
    tmp_path: Path, big_folders: tuple[Path, Path], encoding: str, framing: str
) -> None:
    old_dir, new_dir = big_folders
    peak = _peak(
        lambda: publish_checkpoint(
            old_dir, new_dir, tmp_path / "s", encoding=encoding, framing=framing
        )
    )
    assert peak < BIG


@pytest.mark.parametrize("owned", (False, True))
def test_from_tensors_one_new_tensor_is_in_memory_and_no_old_one(
    tmp_path: Path, big_folders: tuple[Path, Path], owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each tensor has to be copied (``owned``: as from a GPU), those in flight stay within their cap too."""
    monkeypatch.setattr("gpusync.publisher.diff.IN_FLIGHT_NBYTES", BIG // 2)

    def gather() -> Iterator[tuple[str, np.ndarray]]:
        for number in range(PARTS):
            array = np.full(BIG * (2 if owned else 1), number + 1, np.uint8)
            yield f"t{number}", array[::2] if owned else array
            del array

    publisher = Publisher(tmp_path / "s", big_folders[0])
    peak = _peak(lambda: publisher.publish(gather()))
    given = 2 * BIG if owned else BIG
    assert peak < given + (BIG if owned else 0) + BIG
