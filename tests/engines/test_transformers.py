"""Real transformers models: parameters named as in the checkpoint, fused experts and renamed modules, updated in place."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gpusync
from gpusync.errors import PlacementError
from tests.engines import models

pytestmark = [
    pytest.mark.engine("transformers"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]

_FUSED = ("qwen3_moe", "mixtral")
_KINDS = ("llama", "llama_tied", "qwen2", "qwen3", "gemma3", "gpt2", "phi3", *_FUSED)
_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")


def load(folder: Path) -> torch.nn.Module:
    """Return the model as ``from_pretrained`` leaves it."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(1000, (2, 16), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens).logits
    return found


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    """Return the bytes of all parameters and buffers."""
    return {
        name: value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    }


def publish(base: Path, source: Path, versions: int) -> list[models.Tensors]:
    """Publish deltas on a checkpoint; return the tensors of each version, the base's first."""
    publisher = gpusync.Publisher(source, base)
    states = [models.read(base)]
    for version in range(1, versions + 1):
        states.append(models.trained(states[-1], version))
        publisher.publish(states[-1].items())
    return states


def checkpoint_of(base: Path, tensors: models.Tensors, folder: Path) -> Path:
    shutil.copytree(base, folder)
    for path in folder.glob("*.safetensors"):
        save_file({name: tensors[name] for name in load_file(path)}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", _KINDS)
def test_updates_equal_a_fresh_load(kind: str, tmp_path: Path) -> None:
    base = models.make_checkpoint(kind, tmp_path / "base")
    model = load(base)
    before, pointers = bits(model), {n: p.data_ptr() for n, p in model.named_parameters()}
    names = models.read(base).keys()
    assert any(map(_EXPERT.search, names)) == (kind in _FUSED), "experts are on disk one by one"
    assert (names <= {n for n, _ in model.named_parameters(remove_duplicate=False)}) == (
        kind not in _FUSED
    )

    report = gpusync.attach(model, base)
    assert not report.refused and report.placed.keys() == names
    assert bits(model) == before

    states = publish(base, tmp_path / "source", 4)
    for version in (1, 4):
        chain = gpusync.open_chain(tmp_path / "source", version, base_dir=base)
        report = gpusync.apply_to_model(model, chain)
        assert (report.outcome, report.to_version) == ("applied", version)
        fresh = load(checkpoint_of(base, states[version], tmp_path / f"truth{version}"))
        assert bits(model) == bits(fresh)
        assert torch.equal(logits(model), logits(fresh))
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "qwen3_moe", "mixtral"])
def test_parameters_that_are_maps_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """An update of them changes the model's private pages, never the file."""
    base = models.make_checkpoint(kind, tmp_path / "base")
    model = load(base)
    (path,) = base.glob("*.safetensors")
    maps = load_file(path)
    model.load_state_dict(maps, assign=True, strict=False)
    mapped = {p.data_ptr() for p in model.parameters()} & {t.data_ptr() for t in maps.values()}
    assert len(mapped) >= 10
    model.tie_weights()
    file = hashlib.sha256(path.read_bytes()).hexdigest()
    assert not gpusync.attach(model, base).refused
    states = publish(base, tmp_path / "source", 1)
    gpusync.apply_to_model(model, gpusync.open_chain(tmp_path / "source", 1, base_dir=base))
    fresh = load(checkpoint_of(base, states[1], tmp_path / "truth"))
    assert torch.equal(logits(model), logits(fresh))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == file


def test_the_backbone_alone_drops_a_prefix(tmp_path: Path) -> None:
    """AutoModel has the parameters of ``model.`` without it; the head has no place there."""
    from transformers import AutoModel

    base = models.make_checkpoint("mixtral", tmp_path / "base")
    model = AutoModel.from_pretrained(base, dtype=torch.bfloat16)
    report = gpusync.attach(model, base)
    assert report.refused.keys() == {"lm_head.weight"}
    placed = report.placed["model.layers.1.block_sparse_moe.gate.weight"]
    assert placed == ("layers.1.mlp.gate.weight",)


def test_a_router_that_is_kept_in_float32_is_refused_alone(tmp_path: Path) -> None:
    """As newer releases of transformers do by themselves."""

    def load_as_kept(folder: Path) -> torch.nn.Module:
        model = load(folder)
        model.get_submodule("model.layers.1.mlp.gate").float()
        return model

    base = models.make_checkpoint("deepseek_v2", tmp_path / "base")
    model = load_as_kept(base)
    report = gpusync.attach(model, base)
    assert report.refused.keys() == {"model.layers.1.mlp.gate.weight"}
    assert "cast" in report.refused["model.layers.1.mlp.gate.weight"]
    publisher = gpusync.Publisher(tmp_path / "source", base)
    new = models.trained(models.read(base), 1, only=report.placed)
    publisher.publish(new.items())
    gpusync.apply_to_model(model, gpusync.open_chain(tmp_path / "source", 1, base_dir=base))
    fresh = load_as_kept(checkpoint_of(base, new, tmp_path / "truth"))
    assert bits(model) == bits(fresh)
    publisher.publish(models.trained(new, 2).items())
    with pytest.raises(PlacementError, match=r"layers\.1\.mlp\.gate\.weight"):
        gpusync.apply_to_model(model, gpusync.open_chain(tmp_path / "source", 2, base_dir=base))
    assert bits(model) == bits(fresh)


def test_what_a_load_casts_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = models.make_checkpoint("qwen3_moe", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with pytest.raises(PlacementError) as caught:
        gpusync.attach(model, base)
    assert caught.value.reasons.keys() == models.read(base).keys()
    assert all("cast" in reason for reason in caught.value.reasons.values())


def test_swapped_halves_of_one_layer_never_take_a_wrong_byte(tmp_path: Path) -> None:
    """As a kernel may want them: bytes still say where each tensor lies."""
    base = models.make_checkpoint("qwen3_moe", tmp_path / "base")
    model = load(base)
    stack = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    half = stack.shape[1] // 2
    with torch.no_grad():
        stack.copy_(stack.roll(half, dims=1))
    assert not gpusync.attach(model, base).refused
    states = publish(base, tmp_path / "source", 1)
    gpusync.apply_to_model(model, gpusync.open_chain(tmp_path / "source", 1, base_dir=base))
    fresh = load(checkpoint_of(base, states[1], tmp_path / "truth"))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(stack, fresh.get_parameter(name).roll(half, dims=1))
