"""Real SGLang model classes on the CPU: what is placed, and that an update equals a load of the new checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

import gpusync
from tests.engines import models
from tests.engines.sglang_ranks import Ranks, ranks

pytestmark = [
    pytest.mark.engine("sglang"),
    pytest.mark.timeout(900),
]

HERE = "tests.engines.sglang_models"
_DEEPSEEK = {
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "deepseek_yarn",
        "rope_type": "deepseek_yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "scoring_func": "softmax",
    "topk_method": "greedy",
}
"""What SGLang's class asks of a configuration beyond transformers' own."""

_EXPERTS = re.compile(r"\.experts\.\d+\.")


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with ranks(1) as started:
        yield started


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def two_of_experts() -> Iterator[Ranks]:
    with ranks(2, ep_size=2) as started:
        yield started


class Run:
    """A published run of one architecture, and a checkpoint of each of its versions."""

    def __init__(self, kind: str, root: Path) -> None:
        self._root = root
        self.base = models.make_checkpoint(kind, root / "base")
        self.source = str(root / "source")
        self._publisher = gpusync.Publisher(self.source, self.base)
        self.weights = models.read(self.base)
        self.version = 0

    def publish(self, only: object = None) -> str:
        """Publish a version, and return a checkpoint of it."""
        self.version += 1
        self.weights = models.trained(self.weights, self.version, only=only)
        assert self._publisher.publish(self.weights.items()) == self.version
        return self.checkpoint(self.weights)

    def checkpoint(self, weights: models.Tensors) -> str:
        folder = self._root / f"truth_{self.version}"
        folder.mkdir()
        for path in self.base.iterdir():
            if path.suffix == ".json" and "index" not in path.name:
                (folder / path.name).write_bytes(path.read_bytes())
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return str(folder)


def follow(started: Ranks, run: Run) -> None:
    """Five updates, and a chain of three as one."""
    base = str(run.base)
    for _ in range(5):
        truth = run.publish()
        for report in started.call(f"{HERE}:update", run.source, base, run.version, truth):
            assert (report["outcome"], report["to_version"]) == ("applied", run.version)
            assert report["changed_bytes"] > 0
    for _ in range(3):
        truth = run.publish()
    for report in started.call(f"{HERE}:update", run.source, base, run.version, truth):
        assert report["versions"] == (6, 7, 8)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe"])
def test_updates_equal_loads(kind: str, tmp_path: Path, one: Ranks) -> None:
    run = Run(kind, tmp_path)
    one.call(f"{HERE}:load", str(run.base))
    (report,) = one.call(f"{HERE}:attach", str(run.base))
    assert report["placed"].keys() == run.weights.keys()
    assert not report["refused"] and not report["dropped"]
    follow(one, run)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe"])
def test_updates_of_two_ranks_equal_loads(kind: str, tmp_path: Path, two: Ranks) -> None:
    run = Run(kind, tmp_path)
    two.call(f"{HERE}:load", str(run.base))
    for report in two.call(f"{HERE}:attach", str(run.base)):
        assert report["placed"].keys() == run.weights.keys() and not report["refused"]
    follow(two, run)


def test_each_rank_has_its_experts(tmp_path: Path, two_of_experts: Ranks) -> None:
    run = Run("qwen3_moe", tmp_path)
    experts = {name for name in run.weights if _EXPERTS.search(name)}
    two_of_experts.call(f"{HERE}:load", str(run.base))
    first, second = two_of_experts.call(f"{HERE}:attach", str(run.base))
    assert not first["refused"] and not second["refused"]
    assert first["dropped"].keys() | second["dropped"].keys() == experts
    assert not first["dropped"].keys() & second["dropped"].keys()
    assert first["placed"].keys() - second["placed"].keys() == {*second["dropped"]}
    follow(two_of_experts, run)


def test_swapped_halves_are_refused_by_name(tmp_path: Path, one: Ranks) -> None:
    run = Run("qwen3_moe", tmp_path)
    base = str(run.base)
    swapped = {
        name
        for name in run.weights
        if re.search(r"layers\.0\.mlp\.experts\.\d+\.(gate|up)_proj", name)
    }
    assert len(swapped) == 16
    one.call(f"{HERE}:load", base)
    one.call(f"{HERE}:swap_halves", 0)
    run.publish()
    (reasons,) = one.call(f"{HERE}:refused", run.source, base, 1)
    assert reasons.keys() == swapped
    assert all("live bytes differ from" in why for why in reasons.values())

    (report,) = one.call(f"{HERE}:attach", base)
    assert report["refused"].keys() == swapped
    (reasons,) = one.call(f"{HERE}:refused", run.source, base, 1)
    assert reasons.keys() == swapped


def test_what_mla_derives_is_refused_by_name(tmp_path: Path, one: Ranks) -> None:
    run = Run("deepseek_v2", tmp_path)
    config = json.loads((run.base / "config.json").read_text())
    del config["rope_parameters"]
    (run.base / "config.json").write_text(json.dumps({**config, **_DEEPSEEK}))
    derived = {name for name in run.weights if ".kv_b_proj." in name}
    one.call(f"{HERE}:load", str(run.base))
    (report,) = one.call(f"{HERE}:attach", str(run.base))
    assert report["refused"].keys() == derived and len(derived) == 2
    assert report["placed"].keys() == run.weights.keys() - derived
    truth = run.publish(only=report["placed"])
    one.call(f"{HERE}:update", run.source, str(run.base), 1, truth)
    run.publish(only=derived)
    (reasons,) = one.call(f"{HERE}:refused", run.source, str(run.base), 2)
    assert reasons.keys() == derived
    assert all("reads w_kc and w_vc, derived from it" in why for why in reasons.values())
