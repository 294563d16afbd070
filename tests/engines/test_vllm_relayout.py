"""Real vLLM classes whose experts the CPU backend packs after loading: relaid, and equal to a load of the new checkpoint."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpusync
from tests.engines import models
from tests.engines.test_vllm import Live, answers, serving
from tests.engines.vllm_ranks import Ranks, digest_of, worlds

pytestmark = [
    pytest.mark.engine("vllm"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(600),
]

_EXPERT = re.compile(r"\.experts\.\d+\.")
_ODD = {"moe_intermediate_size": 48}
"""Not what the kernel's blocks need: the packed parameters are padded, and larger than those that are loaded."""

_CASES = [
    pytest.param(1, "qwen3_moe", {}, {}, id="qwen3_moe-tp1"),
    pytest.param(1, "mixtral", {}, {}, id="mixtral-tp1"),
    pytest.param(1, "deepseek_v2", {}, {}, id="deepseek_v2-tp1"),
    pytest.param(2, "qwen3_moe", {}, {}, id="qwen3_moe-tp2"),
    pytest.param(2, "qwen3_moe", _ODD, {}, id="qwen3_moe-padded-tp2"),
    pytest.param(2, "qwen3_moe", {}, {"enable_expert_parallel": True}, id="qwen3_moe-ep2"),
    pytest.param(2, "mixtral", {}, {}, id="mixtral-tp2"),
]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    with worlds(models.make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("first"))) as ranks:
        yield ranks


@pytest.mark.parametrize(("size", "kind", "changes", "options"), _CASES)
def test_updates_equal_a_load(
    ranks_of: Callable[[int], Ranks],
    size: int,
    kind: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    ranks = ranks_of(size)
    base = models.make_checkpoint(kind, tmp_path / "base", **changes)
    old = models.read(base)
    experts = {name for name in old if _EXPERT.search(name)}
    derived = {name for name in old if ".kv_b_proj." in name}
    ranks.all("load", base, options)
    for report in ranks.all("attach", base, True):
        assert report["relaid"].keys() | report["dropped"].keys() == experts
        assert report["refused"].keys() == derived
        assert report["placed"].keys() == old.keys() - experts - derived
        live = {name.rsplit(".", 1)[1] for names in report["relaid"].values() for name in names}
        assert live == {"w13_weight", "w2_weight"}

    publisher = gpusync.Publisher(tmp_path / "source", base)
    states = [old]
    for seed in range(9):
        only = old.keys() - derived if seed % 2 == 0 else experts  # of every module, or of some
        if seed == 3:
            only = {min(experts)}
        states.append(models.trained(states[-1], seed, only=only))
        publisher.publish(states[-1].items())
    where = {"checkpoint": str(tmp_path / "local"), "base_dir": str(base)}
    back = () if derived else ([0], [9])  # what is refused has no way back to the base, either
    for versions in ([1, 2, 3, 4, 5], [8], *back):
        for seen in ranks.all("follow", str(tmp_path / "source"), versions, where):
            assert not seen["differing"], seen["differing"]
            assert seen["report"]["to_version"] == versions[-1]
            assert seen["local"] == digest_of(states[versions[-1]])


def test_experts_follow_while_vllm_serves(tmp_path: Path) -> None:
    base = models.make_checkpoint("qwen3_moe", tmp_path / "base")
    with serving(base) as llm:
        live = Live.on(llm, base)
        for _ in range(6):
            live.publish()
        found = [live.answered[0]]
        with pytest.raises(Exception, match=r"PlacementError: .*relayout=True"):
            live.extend(1)
        options = {**live.where, "relayout": True}
        (report,) = live.call("gpusync_apply", live.source, 1, **options)
        assert (report["to_version"], report["disk_version"]) == (1, 1)
        assert report["tensors_by_path"]["relaid"] == 48
        found.append(answers(llm))
        (report,) = live.call("gpusync_apply", live.source, 4, **options)
        assert report["versions"] == [2, 3, 4]
        found.append(answers(llm))
        start = {"source_dir": live.source, **live.where, "options": {"relayout": True}}
        live.call("init_weight_transfer_engine", start)
        live.transfer(5)
        found.append(answers(llm))
        live.call("gpusync_prepare", live.source, 6, **options, background=True)
        while live.call("gpusync_phase") == [{"phase": "preparing"}]:
            assert answers(llm) == found[3]
        live.call("gpusync_commit")
        live.call("gpusync_finish")
        found.append(answers(llm))
        assert live.call("gpusync_version") == [6]
    assert all(before != after for before, after in itertools.pairwise(found))
    assert digest_of(models.read(live.local)) == digest_of(live.weights)
    with serving(live.local) as fresh:
        assert answers(fresh) == found[-1]
    gc.collect()  # what engines leave to the collector is not the next module's
