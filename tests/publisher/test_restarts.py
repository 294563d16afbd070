"""Publishers that are started again, and what a failure or a kill at any file operation leaves."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from gpusync import Publisher, fsio
from gpusync.errors import (
    BaseMismatchError,
    CheckpointIOError,
    VersionConflictError,
)
from gpusync.format.index import MANIFEST_NAME
from tests.publisher.versions import open_version, visible
from tests.support import (
    INDEX,
    Tensors,
    as_arrays,
    bytes_of,
    make_checkpoint,
    move_one_ulp,
    publish_steps,
    read_checkpoint,
    read_tensors,
    replay,
    version_dir,
)

# ---- restarts and runs --------------------------------------------------------------------------------


def test_a_restarted_publisher_goes_on_with_the_same_run(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    for version in (1, 2, 3):
        assert Publisher(source_dir, base_dir).publish(as_arrays(states[version])) == version
    runs = {open_version(source_dir, version).manifest.run_id for version in (1, 2, 3)}
    assert len(runs) == 1
    assert replay(base_dir, source_dir, 3) == states[3]
    with pytest.raises(VersionConflictError) as caught:
        Publisher(source_dir, base_dir, run_id="other").publish(as_arrays(states[3]))
    assert (caught.value.expected, caught.value.got) == ("other", runs.pop())


def test_a_cleared_source_folder_is_a_new_run_and_never_the_same_one(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    publisher = Publisher(source_dir, base_dir, run_id="first")
    publisher.publish(as_arrays(states[1]))
    for path in sorted(version_dir(source_dir, 1).iterdir()):
        path.unlink()
    version_dir(source_dir, 1).rmdir()
    with pytest.raises(VersionConflictError, match="cleared"):
        publisher.publish(as_arrays(states[2]))
    with pytest.raises(VersionConflictError, match="gone"):
        Publisher(source_dir, base_dir, run_id="first").publish(as_arrays(states[2]))
    assert Publisher(source_dir, base_dir, run_id="second").publish(as_arrays(states[2])) == 1
    assert replay(base_dir, source_dir, 1) == states[2]
    assert open_version(source_dir, 1).manifest.run_id == "second"


def test_damaged_kept_tensors_are_never_published_from(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir, state_dir = tmp_path / "s", tmp_path / "state"
    Publisher(source_dir, base_dir, state_dir=state_dir).publish(as_arrays(states[1]))
    kept = state_dir / "version_000001" / "model.safetensors"
    assert read_checkpoint(kept.parent) == bytes_of(states[1])
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    publisher = Publisher(source_dir, base_dir, state_dir=state_dir)
    with pytest.raises(BaseMismatchError) as caught:
        publisher.publish(as_arrays(states[2]))
    assert caught.value.tensor == list(read_tensors(kept.parent))[-1]
    assert visible(source_dir) == ["weight_v000001"]

    make_checkpoint(tmp_path / "full", states[2])
    assert publisher.publish_full(tmp_path / "full") == 2
    assert publisher.publish(as_arrays(states[3])) == 3
    assert replay(base_dir, source_dir, 3) == states[3]


@pytest.mark.parametrize("damage", (b"", b"\0" * 40, b"{", b'{"version": 1, "digests": {}}'))
def test_a_damaged_state_file_is_refused_and_a_full_version_goes_on(
    tmp_path: Path, base_dir: Path, states: list[Tensors], damage: bytes
) -> None:
    source_dir, state_dir = tmp_path / "s", tmp_path / "state"
    Publisher(source_dir, base_dir, state_dir=state_dir).publish(as_arrays(states[1]))
    (state_dir / "version_000001" / "state.json").write_bytes(damage)
    (state_dir / "run.json").write_bytes(damage)
    publisher = Publisher(source_dir, base_dir, state_dir=state_dir)
    with pytest.raises(VersionConflictError):
        publisher.publish(as_arrays(states[2]))
    make_checkpoint(tmp_path / "full", states[2], shards=1)
    assert publisher.publish_full(tmp_path / "full") == 2
    assert Publisher(source_dir, base_dir, state_dir=state_dir).publish(as_arrays(states[3])) == 3
    assert replay(base_dir, source_dir, 3) == states[3]


# ---- faults at every file operation -------------------------------------------------------------------


class Killed(BaseException):
    """The process died: nothing after this touches a file."""


class Faults:
    """Fails the n-th file operation, once (``error``) or it and all after it (a kill)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: OSError | None) -> None:
        self.left = at
        self.error = error
        for name in fsio.WRITE_OPERATIONS:
            monkeypatch.setattr(fsio, name, self._wrap(getattr(fsio, name)))

    def _wrap(self, operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0 and self.error is not None:
                raise self.error
            if self.left <= 0 and self.error is None:
                raise Killed
            return operation(*args, **kwargs)

        return call

    @property
    def fired(self) -> bool:
        return self.left <= 0


@pytest.fixture
def small_stream(tmp_path: Path) -> tuple[Path, Path, list[Tensors]]:
    """Base and one published version of two tensors, with the states to come."""
    states: list[Tensors] = [{"a": ("U8", (9,), bytes(9)), "b": ("I32", (2,), bytes(8))}]
    for version in (1, 2, 3):
        states.append(move_one_ulp(states[-1], 0.5, seed=version))
    base_dir = make_checkpoint(tmp_path / "base", states[0])
    publish_steps(tmp_path / "s", base_dir, states[1:2])
    return base_dir, tmp_path / "s", states


def _copy_of(tmp_path: Path, number: int, source_dir: Path) -> Path:
    import shutil

    copy = tmp_path / f"try{number}" / "s"
    shutil.copytree(source_dir, copy)
    shutil.copytree(source_dir.with_name("s.publisher"), copy.with_name("s.publisher"))
    return copy


@pytest.mark.parametrize("kind", ("ENOSPC", "EIO", "kill"))
def test_a_fault_at_any_file_operation_leaves_old_or_new_and_the_run_goes_on(
    tmp_path: Path, small_stream: Any, kind: str
) -> None:
    base_dir, source_dir, states = small_stream
    number = 0
    while True:
        number += 1
        copy = _copy_of(tmp_path, number, source_dir)
        publisher = Publisher(copy, base_dir)
        error = None if kind == "kill" else OSError(getattr(errno, kind), "made by the test")
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, number, error)
            try:
                publisher.publish(as_arrays(states[2]))
            except CheckpointIOError as err:
                assert kind != "kill" and err.errno == getattr(errno, kind)
            except Killed:
                assert kind == "kill"
        if not faults.fired:
            break
        found = visible(copy)
        assert found in (["weight_v000001"], ["weight_v000001", "weight_v000002"])
        again = publisher if kind != "kill" else Publisher(copy, base_dir)
        if len(found) == 1:
            assert again.publish(as_arrays(states[2])) == 2
        assert again.publish(as_arrays(states[3])) == 3
        assert replay(base_dir, copy, 2) == states[2]
        assert replay(base_dir, copy, 3) == states[3]
        assert [path.name for path in copy.glob(".*tmp")] == []
        assert len(list(copy.with_name("s.publisher").glob("version_*"))) == 1
    assert number > 20


def test_files_are_durable_before_names_and_the_index_is_last(
    tmp_path: Path, base_dir: Path, states: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, str]] = []
    names: dict[int, str] = {}

    def note(name: str) -> None:
        operation = getattr(fsio, name)

        def call(*args: Any) -> Any:
            result = operation(*args)
            if name == "create":
                names[result] = Path(args[0]).name
            path = args[1] if name == "rename" else args[0]
            target = names.get(path) if isinstance(path, int) else path.name
            log.append((name, str(target)))
            return result

        monkeypatch.setattr(fsio, name, call)

    for name in ("create", "fsync", "fsync_dir", "rename"):
        note(name)
    Publisher(tmp_path / "s", base_dir).publish(as_arrays(states[1]))
    made = [target for name, target in log if name == "create"]
    synced = [target for name, target in log if name == "fsync"]
    assert made.index(MANIFEST_NAME) < made.index(INDEX)
    assert made.index(INDEX) == max(made.index(name) for name in (MANIFEST_NAME, INDEX, "shard-0"))
    visible_at = log.index(("rename", "weight_v000001"))
    assert log[visible_at - 1][0] == "fsync_dir"
    assert log[visible_at + 1] == ("fsync_dir", "s")
    for name in ("shard-0", MANIFEST_NAME, INDEX, "state.json.tmp"):
        assert name in synced
        assert log.index(("fsync", name)) < visible_at
