"""Real vLLM model classes on the CPU: what is placed, and that an update equals a load of the new checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gpusync
from tests.engines import models

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed; see `make test-engines`"
    ),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]

_EXPERTS = re.compile(r"\.experts\.\d+\.")
_REFUSED = {
    "qwen3_moe": lambda name: bool(_EXPERTS.search(name)),
    "mixtral": lambda name: bool(_EXPERTS.search(name)),
    "deepseek_v2": lambda name: bool(_EXPERTS.search(name)) or ".kv_b_proj." in name,
}
"""The CPU backend packs experts in place; MLA reads matrices derived from kv_b_proj. Everything else is placed."""


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one process, in which vLLM's layers can be built."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    import tests.engines.plain  # noqa: F401

    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.synchronize = lambda *device: None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Of a mixture of experts: only then is there a group for experts.
    folder = models.make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("first"))
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend="gloo",
        )
        initialize_model_parallel(tensor_model_parallel_size=1)
        yield


def load(folder: Path) -> tuple[torch.nn.Module, Any]:
    """Return the model as vLLM's loader leaves it, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
    ).create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    }


@pytest.mark.parametrize("kind", models.KINDS)
def test_an_update_equals_a_load(kind: str, tmp_path: Path, one_rank: None) -> None:
    from gpusync.engines.vllm import VllmMount

    base = models.make_checkpoint(kind, tmp_path / "base")
    old = models.read(base)
    model, config = load(base)
    mount = VllmMount(lambda: model, config)
    assert mount.why_not() is None
    before = bits(model)
    report = gpusync.attach(model, base, load_weights=mount.load_weights)
    assert bits(model) == before
    print(json.dumps({"kind": kind, **report.to_dict()}))
    expected = _REFUSED.get(kind, lambda name: False)
    assert report.refused.keys() == {name for name in old if expected(name)}
    assert not report.dropped

    source = tmp_path / "source"
    publisher = gpusync.Publisher(source, base)
    new = models.trained(old, 1, only=report.placed)
    publisher.publish(new.items())
    chain = gpusync.open_chain(source, 1, base_dir=base)
    done = gpusync.apply_to_model(model, chain, load_weights=mount.load_weights)
    assert (done.outcome, done.to_version) == ("applied", 1)
    truth = shutil.copytree(base, tmp_path / "truth")
    for path in truth.glob("*.safetensors"):
        save_file({name: new[name] for name in models.read(truth)}, path, {"format": "pt"})
    assert bits(model) == bits(load(truth)[0])

    if report.refused:
        publisher.publish(models.trained(new, 2, only=report.refused).items())
        with pytest.raises(gpusync.PlacementError) as caught:
            gpusync.apply_to_model(model, gpusync.open_chain(source, 2, base_dir=base))
        assert {*caught.value.reasons} == {*report.refused}
        assert gpusync.live_version(model) == 1
