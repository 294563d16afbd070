"""A real vLLM on the CPU that serves while its weights follow published versions."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import gpusync
from tests.engines import models

pytestmark = [
    pytest.mark.engine("vllm"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

_PROMPTS = ([1, 2, 3, 4, 5], [900, 17, 4, 256], list(range(40, 70)))


@contextmanager
def serving(
    folder: Path, extension: str = "tests.engines.plain.PlainExtension", ranks: int = 1
) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
        enable_prefix_caching=False,
        worker_extension_cls=extension,
        weight_transfer_config={"backend": "gpusync"} if "plain" in extension else None,
        disable_log_stats=True,
        tensor_parallel_size=ranks,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def answers(llm: Any) -> list[Any]:
    """Return tokens and their logprobs, greedily, for each prompt."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=3, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in _PROMPTS]
    outputs = [done.outputs[0] for done in llm.generate(prompts, greedy, use_tqdm=False)]
    return [
        (
            list(output.token_ids),
            [{token: found.logprob for token, found in step.items()} for step in output.logprobs],
        )
        for output in outputs
    ]


@dataclass
class Live:
    """A model that serves, and the local checkpoint that follows it."""

    llm: Any
    source: str
    local: Path
    base: Path

    @property
    def where(self) -> dict[str, str]:
        return {"checkpoint": str(self.local), "base_dir": str(self.base)}

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.call_all(method, *args, **kwargs)[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        results: list[Any] = self.llm.collective_rpc(method, args=args, kwargs=kwargs)
        return results

    def apply(self, version: int) -> Any:
        return self.call("gpusync_apply", self.source, version, **self.where)

    def transfer(self, version: int, *phases: str) -> None:
        """Update by vLLM's own calls for weight transfer, each phase in a session of its own."""
        for phase in phases:
            self.call("start_weight_update")
            self.call("update_weights", {"phase": phase, "target_version": version})
            self.call("finish_weight_update")


@dataclass
class Run:
    """What is published, and one model that follows by each mount."""

    root: Path
    publisher: gpusync.Publisher
    weights: models.Tensors
    extension: Live
    backend: Live
    answered: dict[int, list[Any]] = field(default_factory=dict)

    def publish(self) -> int:
        seed = len(self.answered)
        self.weights = models.trained(self.weights, seed + 100)
        return self.publisher.publish(self.weights.items())

    def keep(self, version: int, *followers: Live) -> None:
        """Note what is answered, and the local checkpoint, to be compared with a fresh load later."""
        for live in followers:
            assert live.call("gpusync_version") == version
            found = answers(live.llm)
            assert self.answered.setdefault(version, found) == found
        shutil.copytree(followers[-1].local, self.root / f"local_{version}")


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()  # what engines leave to the collector is not the next module's


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = tmp_path_factory.mktemp("run")
    base, source = models.make_checkpoint("llama", root / "base"), str(root / "source")
    publisher = gpusync.Publisher(source, base)
    with serving(base) as first, serving(base) as second:
        extension = Live(first, source, root / "by_extension", base)
        backend = Live(second, source, root / "by_backend", base)
        yield Run(root, publisher, models.read(base), extension, backend)


def test_updates_while_it_lives_equal_fresh_loads(run: Run) -> None:
    extension, backend = run.extension, run.backend
    at_first = answers(extension.llm)
    assert answers(extension.llm) == answers(backend.llm) == at_first
    assert extension.call("gpusync_version") is None
    backend.call(
        "init_weight_transfer_engine", {"source_dir": run.extension.source, **backend.where}
    )
    for number in range(1, 6):
        assert run.publish() == number
        report = extension.apply(number)
        assert (report["outcome"], report["to_version"]) == ("applied", number)
        assert report["disk_version"] == number
        backend.transfer(number, *(["apply"] if number % 2 else ["prepare", "commit"]))
        run.keep(number, extension, backend)
    chain = [run.publish() for _ in range(3)]
    assert extension.apply(chain[-1])["versions"] == chain
    backend.transfer(chain[-1], "apply")
    run.keep(8, extension, backend)

    refuse_a_corrupt_delta(run, extension)
    prepare_while_it_serves(run, extension)
    errors_keep_their_class(extension)

    assert len({str(found) for found in [at_first, *run.answered.values()]}) == 8
    for live in (extension, backend):
        live.llm.llm_engine.engine_core.shutdown()
    for version, found in run.answered.items():
        with serving(run.root / f"local_{version}") as fresh:
            assert answers(fresh) == found, version


def refuse_a_corrupt_delta(run: Run, live: Live) -> None:
    before = answers(live.llm)
    version = run.publish()
    folder = Path(live.source) / f"weight_v{version:06d}"
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    sound = shard.read_bytes()
    damaged = bytearray(sound)
    damaged[len(sound) // 2] ^= 0x40
    shard.write_bytes(damaged)
    with pytest.raises(Exception, match=r"(DigestMismatch|FrameFormat)Error: "):
        live.apply(version)
    assert live.call("gpusync_version") == version - 1
    assert answers(live.llm) == before
    shard.write_bytes(sound)
    live.apply(version)


def prepare_while_it_serves(run: Run, live: Live) -> None:
    before, version = answers(live.llm), run.publish()
    live.call("gpusync_prepare", live.source, version, **live.where, background=True)
    with pytest.raises(Exception, match=r"PlacementError: an update of this model is prepar"):
        live.call("gpusync_prepare", live.source, version, **live.where)
    while live.call("gpusync_phase")["phase"] == "preparing":
        time.sleep(0.01)
    assert answers(live.llm) == before
    live.call("gpusync_discard")
    live.call("gpusync_prepare", live.source, version, **live.where)
    assert live.call("gpusync_commit")["to_version"] == version
    assert live.call("gpusync_finish")["disk_version"] == version
    run.keep(version, live)


def errors_keep_their_class(live: Live) -> None:
    with pytest.raises(Exception, match="SourceNotReadyError: "):
        live.apply(99)
    with pytest.raises(Exception, match="DeviceError: there is no prepared update to commit"):
        live.call("gpusync_commit")
    with pytest.raises(Exception, match="unexpected keyword argument 'colour'"):
        live.call("gpusync_apply", live.source, 1, **live.where, colour="red")


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    base = models.make_checkpoint("llama", tmp_path / "base")
    with serving(base, "gpusync.engines.vllm.WorkerExtension") as llm:
        before = answers(llm)
        with pytest.raises(
            Exception, match="PlacementError: vLLM's CPU kernels read packed copies"
        ):
            llm.collective_rpc("gpusync_attach", args=(str(base),))
        assert answers(llm) == before


def test_two_ranks_follow_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    base = models.make_checkpoint("llama", tmp_path / "base")
    publisher = gpusync.Publisher(tmp_path / "source", base)
    weights, found = models.read(base), []
    for seed in (1, 2):
        weights = models.trained(weights, seed)
        publisher.publish(weights.items())
    with serving(base, ranks=2) as llm:
        live = Live(llm, str(tmp_path / "source"), tmp_path / "local", base)
        found.append(answers(llm))
        reports = live.call_all("gpusync_apply", live.source, 1, **live.where)
        assert [report["to_version"] for report in reports] == [1, 1]
        assert [report["write_back"] for report in reports] == ["sync", "none"]
        found.append(answers(llm))
        live.call("init_weight_transfer_engine", {"source_dir": live.source, **live.where})
        live.transfer(2, "prepare", "commit")
        found.append(answers(llm))
        assert live.call_all("gpusync_version") == [2, 2]
        with pytest.raises(Exception, match="SourceNotReadyError: "):
            live.apply(3)
        assert answers(llm) == found[2]
    assert found[0] != found[1] != found[2]
    with serving(tmp_path / "local", ranks=2) as fresh:
        assert answers(fresh) == found[2]
