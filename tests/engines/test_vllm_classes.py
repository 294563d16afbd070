"""Real vLLM model classes, whole and sharded: what is placed, and that updates equal a load of the new checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpusync
from tests.engines import models
from tests.engines.vllm_ranks import Ranks, digest_of, worlds

pytestmark = [
    pytest.mark.engine("vllm"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(600),
]

_EXPERT = re.compile(r"\.experts\.\d+\.")
_REFUSED = {
    "qwen3_moe": _EXPERT,
    "mixtral": _EXPERT,
    "deepseek_v2": re.compile(rf"{_EXPERT.pattern}|\.kv_b_proj\."),
}
"""The CPU backend packs experts in place; MLA reads matrices derived from kv_b_proj. Everything else is placed."""

_SHARDED = {2: ("llama", "llama_tied", "qwen3_moe"), 4: ("llama", "llama_tied", "qwen3")}
_CASES = [
    *(pytest.param(1, kind, {}, id=f"{kind}-tp1") for kind in models.KINDS),
    pytest.param(2, "qwen3_moe", {"enable_expert_parallel": True}, id="qwen3_moe-ep2"),
    *(pytest.param(n, kind, {}, id=f"{kind}-tp{n}") for n in _SHARDED for kind in _SHARDED[n]),
]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    with worlds(models.make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("first"))) as ranks:
        yield ranks


@dataclass
class Run:
    """Versions published on a checkpoint: five deltas, and three more for a chain."""

    base: Path
    source: str
    publisher: gpusync.Publisher
    states: list[models.Tensors]
    where: dict[str, str]

    @classmethod
    def on(cls, base: Path, *, only: set[str]) -> Run:
        root = base.parent
        publisher = gpusync.Publisher(root / "source", base)
        states = [models.read(base)]
        for seed in range(8):
            states.append(models.trained(states[-1], seed, only=only))
            publisher.publish(states[-1].items())
        where = {"checkpoint": str(root / "local"), "base_dir": str(base)}
        return cls(base, str(root / "source"), publisher, states, where)

    def publish_change_of(self, names: set[str]) -> int:
        return self.publisher.publish(models.trained(self.states[-1], 99, only=names).items())


@pytest.mark.parametrize(("size", "kind", "options"), _CASES)
def test_updates_equal_a_load(
    ranks_of: Callable[[int], Ranks],
    size: int,
    kind: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    ranks = ranks_of(size)
    base = models.make_checkpoint(kind, tmp_path / "base")
    names = models.read(base).keys()
    ranks.all("load", base, options)
    assert not any(ranks.all("why_not"))
    reports = ranks.all("attach", base, False)
    refused = refused_names(reports, names, apart=bool(options))
    pattern = _REFUSED.get(kind)
    assert refused == {name for name in names if pattern is not None and pattern.search(name)}
    if kind == "deepseek_v2":
        (report,) = reports
        assert {n for n, why in report["refused"].items() if "MLA" in why} == {
            n for n in names if "kv_b_proj" in n
        }

    run = Run.on(base, only=names - refused)
    for versions in ([1, 2, 3, 4, 5], [8]):
        for seen in ranks.all("follow", run.source, versions, run.where):
            assert not seen["differing"]
            assert seen["report"]["to_version"] == seen["report"]["target_version"] == versions[-1]
            assert seen["report"]["versions"] == (versions[-1:] if versions[-1] == 5 else [6, 7, 8])
            assert seen["local"] == digest_of(run.states[versions[-1]])

    if refused:
        one = {min(refused)}
        for seen in ranks.all("refusal", run.source, run.publish_change_of(one), run.where):
            assert seen["error"] == "PlacementError" and min(one) in seen["text"]


_FREEZING = {"inductor_compile_config": {"freezing": True}}
_AUTOTUNE = {"inductor_compile_config": {"max_autotune": True}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, None),
        ({"enforce_eager": False}, None),
        ({"cpu_offload_gb": 1}, "serve without --cpu-offload-gb"),
        ({"offload_group_size": 2}, "--offload-group-size"),
        ({"enable_lora": True}, "serve without --enable-lora"),
        ({"load_format": "ipc_cache"}, "serve without --load-format ipc_cache"),
        ({"quantization": "fp8_per_block"}, "serve without --quantization fp8_per_block"),
        ({"compilation_config": _FREEZING}, "without freezing in inductor_compile_config"),
        ({"compilation_config": _AUTOTUNE}, None),
        ({"compilation_config": _AUTOTUNE, "enforce_eager": False}, "or with --enforce-eager"),
    ],
)
def test_what_vllm_is_served_with_and_refused_for(
    ranks_of: Callable[[int], Ranks], options: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    base = models.make_checkpoint("llama", tmp_path / "base")
    (why,) = ranks_of(1).all("why_not_served", base, options)
    assert why is None if says is None else says in why


def test_states_of_vllm_that_are_refused(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    base = models.make_checkpoint("llama", tmp_path / "base")
    ranks = ranks_of(1)
    ranks.all("load", base, {})
    (why,) = ranks.all("why_not_asleep", base, "weights")
    assert "wake_up(tags=['weights']) first" in why
    assert ranks.all("why_not_asleep", base, "kv_cache") == [None]
    (why,) = ranks.all("why_not_wrapped", base)
    assert "layers.0.mlp.gate_up_proj is wrapped" in why and "without --enable-lora" in why
    assert ranks.all("why_not") == [None]


def test_layers_of_a_quantised_checkpoint_are_refused_one_by_one(
    ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """vLLM repacks them for its kernels here, and its loader takes them no longer; all else is updated."""
    base = models.make_fp8_checkpoint(tmp_path / "base")
    names = models.read(base).keys()
    ranks = ranks_of(1)
    ranks.all("load", base, {})
    assert ranks.all("why_not") == [None]
    (report,) = ranks.all("attach", base, False)
    quantised = {name for name in names if "_proj." in name}
    assert report["refused"].keys() <= quantised and report["placed"].keys() >= names - quantised
    assert {name for name in report["refused"] if "qkv" in name or "gate" in name}
    run = Run.on(base, only=set(report["placed"]))
    (seen,) = ranks.all("follow", run.source, [1, 8], run.where)
    assert not seen["differing"] and seen["local"] == digest_of(run.states[8])
    one = {min(report["refused"])}
    (seen,) = ranks.all("refusal", run.source, run.publish_change_of(one), run.where)
    assert seen["error"] == "PlacementError" and "pull and the engine's reload" in seen["text"]


def refused_names(reports: list[dict[str, Any]], names: Any, *, apart: bool) -> set[str]:
    """Return what any rank refuses. Each rank says of every tensor what becomes of it; none is lost on all of them.

    ``apart``: experts lie on one rank each, and the others have no part in them.
    """
    refused: set[str] = set()
    for report in reports:
        parts = [report[part].keys() for part in ("placed", "dropped", "refused")]
        assert set().union(*parts) == names and sum(map(len, parts)) == len(names)
        refused |= report["refused"].keys()
    for name in names:
        has_part = [report for report in reports if name not in report["dropped"]]
        assert len(has_part) == (1 if apart and _EXPERT.search(name) else len(reports)), name
    return refused
