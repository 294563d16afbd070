"""SGLang's own updaters with gpusync's plugin: what is applied, what is refused, and what the engine says then."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpusync
from gpusync.engines import sglang
from tests.engines.sglang_ranks import Ranks, ranks
from tests.engines.test_sglang_classes import Run

pytestmark = [
    pytest.mark.engine("sglang"),
    pytest.mark.timeout(900),
]

HERE = "tests.engines.sglang_engine"


class Served:
    """A published run, and the engine of all ranks that follows it."""

    def __init__(self, started: Ranks, root: Path) -> None:
        self.run = Run("llama", root)
        self.local = root / "local"
        self._started = started
        self.all("start", str(self.run.base))

    def all(self, function: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._started.call(f"{HERE}:{function}", *args, **kwargs)

    def one(self, function: str, *args: Any, **kwargs: Any) -> Any:
        return self.all(function, *args, **kwargs)[0]

    def request(self, version: int | None = None, **values: Any) -> str:
        where = {"source_dir": self.run.source, "base_dir": str(self.run.base)}
        if version is not None:
            values["target_version"] = version
        return json.dumps({**where, **values})

    def pull(self, version: int) -> None:
        gpusync.pull(self.local, self.run.base, self.run.source, version)

    def expect(self, answer: Any, version: int, truth: str) -> None:
        """Expect an update that went well."""
        assert answer.success, answer.message
        assert answer.message.startswith(f"version {version} is live, after ")
        assert (answer.live_version, answer.served_version) == (version, str(version))
        assert answer.flushes == 1 and not answer.is_as_before
        assert self.one("equals", truth)


def expect_refusal(answer: Any, *, says: str, served: str) -> None:
    assert not answer.success and says in answer.message, answer.message
    assert answer.is_as_before and answer.served_version == served and answer.flushes == 0


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(1) as started:
        hooked = started.call(f"{HERE}:load_plugins", str(tmp_path_factory.mktemp("site")))
        assert [name.rpartition(".")[2] for name in hooked[0]] == [
            "release_memory_occupation",
            "resume_memory_occupation",
            "begin_weight_update",
            "load_weights_from_distributed",
            "update_weights_from_disk",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        ]
        yield started


@pytest.fixture
def served(one: Ranks, tmp_path: Path) -> Served:
    one.call(f"{HERE}:override", enable_weights_cpu_backup=False)
    return Served(one, tmp_path)


def damage(folder: Path) -> tuple[Path, bytes]:
    """Flip one bit of the largest shard, and return it with its sound bytes."""
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    sound = shard.read_bytes()
    damaged = bytearray(sound)
    damaged[len(sound) // 2] ^= 0x40
    shard.write_bytes(damaged)
    return shard, sound


def test_published_versions_by_their_folder(served: Served) -> None:
    for number in (1, 2, 3, 4, 5):
        truth = served.run.publish()
        path = f"{served.run.source}/weight_v{number:06d}"
        # The base is where the engine was launched from; here that is no folder.
        refused = served.one("from_disk", path, "gpusync", str(number))
        if number == 1:
            expect_refusal(refused, says="PlacementError: ", served="default")
        answer = served.one("from_disk", served.request(number), "gpusync", str(number))
        if number == 1:
            served.expect(answer, number, truth)
        else:
            served.expect(refused, number, truth)
            assert answer.message == f"version {number} is live already"
    for _ in range(3):
        truth = served.run.publish()
    served.expect(served.one("from_disk", served.request(8), "gpusync", "8"), 8, truth)
    expect_refusal(
        served.one("from_disk", served.request(7), "gpusync", "7"),
        says="ChainError: the live weights are at a later version",
        served="8",
    )


def test_a_pulled_checkpoint_makes_the_weights_follow(served: Served, one: Ranks) -> None:
    """What slime's and miles's trainers do, unchanged: pull, then update from the local checkpoint."""
    one.call(f"{HERE}:setting", served.run.source)
    try:
        for number in (1, 2):
            truth = served.run.publish()
            served.pull(number)
            answer = served.one("from_disk", str(served.local), version=str(number))
            served.expect(answer, number, truth)
            assert answer.message.endswith(f"; the local checkpoint is at {number}")
        # SGLang's own loading, asked for by its format, is noticed and proven.
        served.run.publish()
        served.pull(3)
        answer = served.one("from_disk", str(served.local), "safetensors", "3")
        assert answer.success and answer.message == "Succeeded to update model weights."
        assert answer.live_version == 3
        truth = served.run.publish()
        served.pull(4)
        served.expect(served.one("from_disk", str(served.local), version="4"), 4, truth)
    finally:
        one.call(f"{HERE}:setting", "")


def test_the_local_checkpoint_follows(served: Served) -> None:
    served.run.publish()
    truth = served.run.publish()
    request = served.request(2, checkpoint=str(served.local))
    answer = served.one("from_disk", request, "gpusync", "2")
    served.expect(answer, 2, truth)
    assert answer.message.endswith("; the local checkpoint is at 2")
    assert served.one("equals", str(served.local))


def test_a_corrupt_delta_changes_nothing(served: Served) -> None:
    truth = served.run.publish()
    served.expect(served.one("from_disk", served.request(1), "gpusync", "1"), 1, truth)
    truth = served.run.publish()
    shard, sound = damage(Path(served.run.source) / "weight_v000002")
    answer = served.one("from_disk", served.request(2), "gpusync", "2")
    expect_refusal(answer, says="publish this version again", served="1")
    assert answer.live_version == 1
    shard.write_bytes(sound)
    served.expect(served.one("from_disk", served.request(2), "gpusync", "2"), 2, truth)


def test_prepare_then_commit(served: Served) -> None:
    truth = served.run.publish()
    attached = served.one("from_disk", served.request(phase="attach"), "gpusync")
    assert attached.success and attached.message.startswith("version 0 is proven: ")
    step = served.request(1, phase="prepare", background=True)
    prepared = served.one("from_disk", step, "gpusync")
    assert prepared.success and prepared.is_as_before and prepared.live_version == 0
    expect_refusal(
        served.one("from_disk", served.request(1), "gpusync", "1"),
        says="PlacementError: an update of this model is prepar",
        served="default",
    )
    commit = served.one("from_disk", served.request(phase="commit"), "gpusync", "1")
    served.expect(commit, 1, truth)
    expect_refusal(
        served.one("from_disk", served.request(phase="commit"), "gpusync", "2"),
        says="DeviceError: there is no prepared update to commit",
        served="1",
    )


@pytest.mark.parametrize("between", ["release", "tensors", "disk", "begin", "discard"])
def test_what_comes_between_discards_the_prepared_update(between: str, served: Served) -> None:
    served.run.publish()
    prepare = served.request(1, phase="prepare")
    assert served.one("from_disk", prepare, "gpusync").success
    if between == "release":
        served.one("memory", "release", ["weights"])
        released = served.one("from_disk", served.request(1), "gpusync", "1")
        expect_refusal(released, says="/resume_memory_occupation first", served="default")
        served.one("memory", "resume", ["weights"])
    elif between == "tensors":
        tensors = [(name, tensor) for name, tensor in list(served.run.weights.items())[:1]]
        assert served.one("from_tensors", tensors, None).success
    elif between == "disk":
        assert served.one("from_disk", str(served.run.base)).success
    elif between == "begin":
        served.one("by_message", {"phase": "discard"})
    else:
        served.one("from_disk", served.request(phase="discard"), "gpusync")
    commit = served.one("from_disk", served.request(phase="commit"), "gpusync", "1")
    expect_refusal(commit, says="there is no prepared update to commit", served="default")


def test_weights_are_proven_again_after_another_load(served: Served) -> None:
    truth = served.run.publish()
    served.expect(served.one("from_disk", served.request(1), "gpusync", "1"), 1, truth)
    elsewhere = shutil.copytree(truth, served.local.with_name("elsewhere"))
    assert served.one("from_disk", str(elsewhere), version="x").success
    assert served.one("live_version") is None
    truth = served.run.publish()
    answer = served.one("from_disk", served.request(2), "gpusync", "2")
    expect_refusal(answer, says="PlacementError: ", served="x")  # they are not the base's
    served.pull(1)
    request = served.request(2, checkpoint=str(served.local))
    served.expect(served.one("from_disk", request, "gpusync", "2"), 2, truth)


def test_a_release_with_a_backup_keeps_what_was_proven(served: Served) -> None:
    served.run.publish()
    assert served.one("from_disk", served.request(1), "gpusync", "1").success
    for backed_up, stands in ((True, 1), (False, None)):
        served.one("override", enable_weights_cpu_backup=backed_up)
        served.one("memory", "release")
        served.one("memory", "resume")
        assert served.one("live_version") == stands


def test_the_custom_weight_loader(served: Served) -> None:
    truth = served.run.publish()
    values = json.loads(served.request(1))
    answer = served.one("by_message", values, "1")
    assert answer.success and (answer.live_version, answer.served_version) == (1, "1")
    assert served.one("equals", truth)
    truth = served.run.publish()
    shard, sound = damage(Path(served.run.source) / "weight_v000002")
    answer = served.one("by_message", {**values, "target_version": 2}, "2")
    expect_refusal(answer, says="publish this version again", served="1")
    shard.write_bytes(sound)
    weights = [(name, tensor) for name, tensor in list(served.run.weights.items())[:1]]
    answer = served.one("from_tensors", weights, sglang_loader(), "2")
    expect_refusal(answer, says="DeviceError: a message to gpusync is one tensor", served="1")
    assert served.one("by_message", {**values, "target_version": 2}, "2").live_version == 2
    assert served.one("equals", truth)


def sglang_loader() -> str:
    return f"{sglang.load.__module__}.{sglang.load.__name__}"


def test_the_receiver(served: Served) -> None:
    first = served.run.publish()
    where = json.loads(served.request())
    assert served.one("by_receiver", where, {"target_version": 1}) == [""]
    assert served.one("live_version") == 1 and served.one("equals", first)
    truth = served.run.publish()
    shard, sound = damage(Path(served.run.source) / "weight_v000002")
    said = served.one("by_receiver", where, {"target_version": 2}, None, ["x"])
    assert "Error: " in said[0]
    assert said[1].startswith("DeviceError: a request to apply an update needs target_version")
    assert said[2].startswith("DeviceError: a payload is no JSON object")
    assert served.one("equals", first)
    shard.write_bytes(sound)
    steps = ({"target_version": 2, "phase": "prepare"}, {"phase": "commit"})
    assert served.one("by_receiver", where, *steps) == ["", ""]
    assert served.one("live_version") == 2 and served.one("equals", truth)


def test_experts_that_move_are_refused(served: Served) -> None:
    served.run.publish()
    served.one("override", enable_eplb=True)
    try:
        answer = served.one("from_disk", served.request(1), "gpusync", "1")
        expect_refusal(answer, says="serve without --enable-eplb", served="default")
    finally:
        served.one("override", enable_eplb=False)


def test_paths_that_say_nothing_are_refused(served: Served, tmp_path: Path) -> None:
    for path, says in (
        (str(served.run.base), "DeviceError: model_path is no JSON request"),
        ("{", "DeviceError: a request is not JSON"),
        (f"{served.run.source}/weight_v000009", "SourceNotReadyError: "),
    ):
        expect_refusal(served.one("from_disk", path, "gpusync", "1"), says=says, served="default")


def test_a_poisoned_model_ends_the_engine(served: Served) -> None:
    served.run.publish()
    assert served.one("from_disk", served.request(1), "gpusync", "1").success
    assert served.one("poison", served.request(1)) == "ModelPoisonedError"


def test_two_ranks_vote(tmp_path: Path) -> None:
    """A rank that cannot open the chain says so: a call has half of the time that a silent one is waited for."""
    with ranks(2) as started:
        started.call(f"{HERE}:load_plugins", str(tmp_path / "site"))
        served = Served(started, tmp_path)
        truth = served.run.publish()
        request = served.request(1, checkpoint=str(served.local))
        for answer in served.all("from_disk", request, "gpusync", "1"):
            served.expect(answer, 1, truth)
        truth = served.run.publish()
        request = served.request(2, checkpoint=str(served.local))
        for fault in ("opening", "preparing"):
            started.call(f"{HERE}:break_one", 1, fault)
            for answer in served.all("from_disk", request, "gpusync", "2"):
                expect_refusal(answer, says=f"broken while {fault}", served="1")
        for answer in served.all("from_disk", request, "gpusync", "2"):
            served.expect(answer, 2, truth)
        assert served.one("equals", str(served.local))


def test_pull_takes_the_place_of_sglangs(tmp_path: Path) -> None:
    with ranks(1) as started:
        (said,) = started.call(f"{HERE}:with_a_pull_of_its_own", str(tmp_path), "/published")
    assert said.split() == [f"{HERE}", "gpusync.engines.sglang"]


def test_pull_is_called_as_sglang_calls_it(tmp_path: Path) -> None:
    theirs = ["local_checkpoint_dir", "base_dir", "source_dir", "target_version", "pre_read_hook"]
    assert list(inspect.signature(sglang.pull).parameters) == theirs
    run = Run("llama_tied", tmp_path)
    run.publish()
    local = tmp_path / "local"
    for _ in range(2):  # every rank of a host calls
        sglang.pull(
            local_checkpoint_dir=str(local),
            base_dir=str(run.base),
            source_dir=run.source,
            target_version=1,
            pre_read_hook=None,
        )
    marker = json.loads((local / ".weight_sync" / "state.json").read_text())
    assert marker["version"] == "000001"
    with pytest.raises(gpusync.SourceNotReadyError):
        sglang.pull(str(local), str(run.base), run.source, 2)
