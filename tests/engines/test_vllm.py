"""A real vLLM on the CPU that serves while its weights follow published versions."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gpusync
from tests.engines import models

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed; see `make test-engines`"
    ),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

_PROMPTS = ([1, 2, 3, 4, 5], [900, 17, 4, 256], list(range(40, 70)))


@contextmanager
def serving(folder: Path, extension: str = "tests.engines.plain.PlainExtension") -> Iterator[Any]:
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
    """A model that serves, what is published for it, and what it answered at each version."""

    llm: Any
    root: Path
    publisher: gpusync.Publisher
    weights: models.Tensors
    at: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return str(self.root / "source")

    @property
    def where(self) -> dict[str, str]:
        return {"checkpoint": str(self.root / "local"), "base_dir": str(self.root / "base")}

    def publish(self, **options: Any) -> int:
        self.weights = models.trained(self.weights, len(self.at) + 100, **options)
        return self.publisher.publish(self.weights.items())

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        (result,) = self.llm.collective_rpc(method, args=args, kwargs=kwargs)
        return result

    def apply(self, version: int) -> Any:
        return self.call("gpusync_apply", self.source, version, **self.where)

    def keep(self, version: int) -> None:
        """Note what it answers, and the local checkpoint, to be compared with a fresh load later."""
        assert self.call("gpusync_version") == version
        self.at[version] = answers(self.llm)
        shutil.copytree(self.root / "local", self.root / f"local_{version}")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("live")
    base = models.make_checkpoint("llama", root / "base")
    publisher = gpusync.Publisher(root / "source", base)
    with serving(base) as llm:
        yield Live(llm, root, publisher, models.read(base))


def test_updates_while_it_lives_equal_fresh_loads(live: Live) -> None:
    at_first = answers(live.llm)
    assert answers(live.llm) == at_first
    assert live.call("gpusync_version") is None
    for number in range(1, 6):
        assert live.publish() == number
        report = live.apply(number)
        assert (report["outcome"], report["to_version"]) == ("applied", number)
        assert report["disk_version"] == number
        live.keep(number)
    chain = [live.publish() for _ in range(3)]
    assert live.apply(chain[-1])["versions"] == chain
    live.keep(8)

    refuse_a_corrupt_delta(live)
    follow_by_weight_transfer(live)
    prepare_while_it_serves(live)
    errors_keep_their_class(live)

    assert len({str(found) for found in [at_first, *live.at.values()]}) == len(live.at) + 1
    live.llm.llm_engine.engine_core.shutdown()
    for version, found in live.at.items():
        with serving(live.root / f"local_{version}") as fresh:
            assert answers(fresh) == found, version


def refuse_a_corrupt_delta(live: Live) -> None:
    before = answers(live.llm)
    version = live.publish()
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
    live.keep(version)


def follow_by_weight_transfer(live: Live) -> None:
    live.call("init_weight_transfer_engine", {"source_dir": live.source, **live.where})
    version = live.publish()
    live.call("start_weight_update")
    live.call("update_weights", {"target_version": version})
    live.call("finish_weight_update")
    live.keep(version)

    version = live.publish()
    live.call("start_weight_update")
    live.call("update_weights", {"phase": "prepare", "target_version": version})
    live.call("finish_weight_update")
    assert live.call("gpusync_version") == version - 1
    live.call("start_weight_update")
    live.call("update_weights", {"phase": "commit"})
    live.call("finish_weight_update")
    live.keep(version)


def prepare_while_it_serves(live: Live) -> None:
    before, version = answers(live.llm), live.publish()
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
    live.keep(version)


def errors_keep_their_class(live: Live) -> None:
    with pytest.raises(Exception, match="SourceNotReadyError: "):
        live.apply(99)
    with pytest.raises(Exception, match="DeviceError: there is no prepared update to commit"):
        live.call("gpusync_commit")
    with pytest.raises(Exception, match="unexpected keyword argument 'colour'"):
        live.call("gpusync_apply", live.source, 99, colour="red")


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    base = models.make_checkpoint("llama", tmp_path / "base")
    with serving(base, "gpusync.engines.vllm.WorkerExtension") as llm:
        before = answers(llm)
        with pytest.raises(
            Exception, match="PlacementError: vLLM's CPU kernels read packed copies"
        ):
            llm.collective_rpc("gpusync_attach", args=(str(base),))
        assert answers(llm) == before
