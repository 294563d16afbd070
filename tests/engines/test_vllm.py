"""A real vLLM on the CPU that serves while its weights follow published versions."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
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

PLAIN = "tests.engines.plain.PlainExtension"
_PROMPTS = ([1, 2, 3, 4, 5], [900, 17, 4, 256], list(range(40, 70)))


@contextmanager
def serving(folder: Path, extension: str = PLAIN, ranks: int = 1) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
        enable_prefix_caching=False,
        worker_extension_cls=extension,
        weight_transfer_config={"backend": "gpusync"} if extension == PLAIN else None,
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


def answers_of_fresh(folder: Path) -> list[Any]:
    """Return what a new ``LLM`` answers, in a process that is kept for the next one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with serving(folder) as llm:
        found = answers(llm)
    del llm
    cleanup_dist_env_and_memory()
    return found


@dataclass
class Live:
    """A model that serves, and the local checkpoint that follows it."""

    llm: Any
    root: Path
    base: Path
    publisher: gpusync.Publisher
    weights: models.Tensors
    answered: dict[int, list[Any]] = field(default_factory=dict)
    seeds: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def on(cls, llm: Any, base: Path) -> Live:
        publisher = gpusync.Publisher(base.parent / "source", base)
        live = cls(llm, base.parent, base, publisher, models.read(base))
        live.call("init_weight_transfer_engine", {"source_dir": live.source, **live.where})
        live.answered[0] = answers(llm)
        return live

    @property
    def source(self) -> str:
        return str(self.root / "source")

    @property
    def local(self) -> Path:
        return self.root / "local"

    @property
    def where(self) -> dict[str, str]:
        return {"checkpoint": str(self.local), "base_dir": str(self.base)}

    def publish(self) -> int:
        self.weights = models.trained(self.weights, next(self.seeds))
        return self.publisher.publish(self.weights.items())

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker; return what each returned."""
        results: list[Any] = self.llm.collective_rpc(method, args=args, kwargs=kwargs)
        return results

    def extend(self, version: int) -> list[Any]:
        """Update by the worker extension."""
        return self.call("gpusync_apply", self.source, version, **self.where)

    def transfer(self, version: int) -> None:
        """Update by vLLM's own calls for weight transfer; every other time each phase in an update of its own."""
        for phase in ("apply",) if version % 2 else ("prepare", "commit"):
            self.call("start_weight_update")
            self.call("update_weights", {"phase": phase, "target_version": version})
            self.call("finish_weight_update")

    def keep(self, version: int) -> None:
        """Note what is answered, and the local checkpoint, to be compared with a fresh load later."""
        assert set(self.call("gpusync_version")) == {version}
        self.answered[version] = answers(self.llm)
        assert self.answered[version] not in [
            self.answered[v] for v in self.answered if v < version
        ]
        shutil.copytree(self.local, self.root / f"local_{version}")

    def follow(self, update: Callable[[int], object]) -> None:
        """Follow five versions one by one, then three at once."""
        for _ in range(5):
            version = self.publish()
            update(version)
            self.keep(version)
        for _ in range(3):
            version = self.publish()
        update(version)
        self.keep(version)


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()  # what engines leave to the collector is not the next module's


def test_updates_while_it_lives_equal_fresh_loads(tmp_path: Path) -> None:
    base = models.make_checkpoint("llama", tmp_path / "base")
    with serving(base) as llm:
        live = Live.on(llm, base)
        assert live.call("gpusync_version") == [None]
        live.follow(live.extend)
        live.follow(live.transfer)
        refuse_a_corrupt_delta(live, live.extend)
        refuse_a_corrupt_delta(live, live.transfer)
        prepare_while_it_serves(live)
        errors_keep_their_class(live)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.plain"])  # vLLM, once
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(answers_of_fresh, base).result() == live.answered.pop(0)
        assert len(live.answered) == 15
        for version, found in live.answered.items():
            fresh = pool.submit(answers_of_fresh, tmp_path / f"local_{version}")
            assert fresh.result() == found, version


def refuse_a_corrupt_delta(live: Live, update: Callable[[int], object]) -> None:
    before = answers(live.llm)
    version = live.publish()
    folder = Path(live.source) / f"weight_v{version:06d}"
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    sound = shard.read_bytes()
    damaged = bytearray(sound)
    damaged[len(sound) // 2] ^= 0x40
    shard.write_bytes(damaged)
    with pytest.raises(Exception, match=r"(DigestMismatch|FrameFormat)Error: "):
        update(version)
    assert live.call("gpusync_version") == [version - 1]
    assert answers(live.llm) == before
    shard.write_bytes(sound)
    update(version)
    live.keep(version)


def prepare_while_it_serves(live: Live) -> None:
    before, version = answers(live.llm), live.publish()
    live.call("gpusync_prepare", live.source, version, **live.where, background=True)
    with pytest.raises(Exception, match=r"PlacementError: an update of this model is prepar"):
        live.call("gpusync_prepare", live.source, version, **live.where)
    while live.call("gpusync_phase") == [{"phase": "preparing"}]:
        time.sleep(0.01)
    assert answers(live.llm) == before
    live.call("gpusync_discard")
    live.call("gpusync_prepare", live.source, version, **live.where)
    (committed,) = live.call("gpusync_commit")
    (finished,) = live.call("gpusync_finish")
    assert (committed["to_version"], finished["disk_version"]) == (version, version)
    live.keep(version)


def errors_keep_their_class(live: Live) -> None:
    with pytest.raises(Exception, match="SourceNotReadyError: "):
        live.extend(99)
    with pytest.raises(Exception, match="DeviceError: there is no prepared update to commit"):
        live.call("gpusync_commit")
    with pytest.raises(Exception, match="unexpected keyword argument 'colour'"):
        live.call("gpusync_apply", live.source, 1, **live.where, colour="red")


def test_the_example_follows_its_trainer(repository: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(repository / "docs/examples/vllm_cpu.py"), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "served and local checkpoint are at version 3" in done.stdout.splitlines()


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
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    base = models.make_checkpoint("llama", tmp_path / "base")
    with serving(base, ranks=2) as llm:
        live = Live.on(llm, base)
        live.follow(live.extend)
        with pytest.raises(Exception, match="SourceNotReadyError: version 10 is not"):
            live.extend(10)
        with pytest.raises(Exception, match=r"TypeError: .*argument 'colour'"):
            live.call("gpusync_apply", live.source, 8, colour="red")
        # Answers of the failed calls are not taken for those of later ones.
        assert live.call("gpusync_version") == [8, 8]
        assert live.call("gpusync_phase") == [{"phase": "idle"}] * 2
        live.follow(live.transfer)
        version = live.publish()
        reports = live.extend(version)
        assert [report["to_version"] for report in reports] == [version, version]
        assert [report["write_back"] for report in reports] == ["sync", "none"]
        live.keep(version)
        with pytest.raises(Exception, match="SourceNotReadyError: "):
            live.extend(version + 1)
        assert answers(llm) == live.answered[version]
    for version in (8, 17):
        with serving(tmp_path / f"local_{version}", ranks=2) as fresh:
            assert answers(fresh) == live.answered[version], version
