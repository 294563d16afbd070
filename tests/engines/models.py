"""Tiny checkpoints of the architectures that are served, with random weights, and new weights for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
_MOE = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_COMMON, "tie_word_embeddings": False}),
    "llama_tied": ("Llama", {**_COMMON, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**_COMMON, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_COMMON, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", {**_COMMON, "head_dim": 32}),
    "gpt2": (
        "GPT2",
        {"n_embd": 256, "n_layer": 2, "n_head": 8, "vocab_size": 1000, "n_positions": 512},
    ),
    "phi3": ("Phi3", {**_COMMON, "pad_token_id": 0}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_COMMON,
            **_MOE,
            "head_dim": 32,
            "num_experts": 8,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("Mixtral", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_COMMON,
            **_MOE,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
        },
    ),
}
_TEXT_CONFIG = {"Gemma3": "Gemma3TextConfig"}
_HEAD = {"GPT2": "GPT2LMHeadModel"}

KINDS = tuple(_KINDS)
FP8_BLOCK = 128

Tensors = dict[str, torch.Tensor]


def make_checkpoint(kind: str, folder: Path, **changes: Any) -> Path:
    """Write a bf16 checkpoint of an architecture, the same bytes each time; ``changes`` are of its configuration."""
    import transformers

    family, values = _KINDS[kind]
    config = getattr(transformers, _TEXT_CONFIG.get(family, f"{family}Config"))(
        **{**values, **changes}
    )
    config.dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    model = getattr(transformers, _HEAD.get(family, f"{family}ForCausalLM"))(config)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    return folder


def make_fp8_checkpoint(folder: Path) -> Path:
    """Write a Llama checkpoint whose linear layers are quantised by blocks, as published ones are."""
    make_checkpoint("llama", folder, num_key_value_heads=4)  # whole blocks for each of q, k, v
    weights: Tensors = {}
    for name, tensor in read(folder).items():
        if "_proj." not in name:
            weights[name] = tensor
            continue
        rows, columns = (size // FP8_BLOCK for size in tensor.shape)
        blocks = tensor.float().reshape(rows, FP8_BLOCK, columns, FP8_BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        quantised = (blocks / scale[:, None, :, None]).reshape(tensor.shape)
        weights[name] = quantised.to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    block = [FP8_BLOCK, FP8_BLOCK]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> Tensors:
    """Return every tensor of a checkpoint."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def trained(tensors: Tensors, seed: int, *, share: float = 0.03, only: object = None) -> Tensors:
    """Return new weights: a share of the elements a little larger. ``only``: the names that change, default all."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in tensors.items():
        if only is not None and name not in only:  # type: ignore[operator]
            new[name] = tensor.clone()
            continue
        moved = torch.rand(tensor.shape, generator=generator) < share
        step = torch.randn(tensor.shape, generator=generator) * 0.02
        changed = (tensor.float() * 1.01 + step).to(tensor.dtype)
        new[name] = tensor.clone()
        new[name].view(torch.uint8).reshape(*tensor.shape, -1)[moved] = changed.view(
            torch.uint8
        ).reshape(*tensor.shape, -1)[moved]
    return new
