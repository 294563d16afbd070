"""When vLLM's weights are not plain parameters: what is refused, and what the operator changes."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from gpusync.errors import PlacementError

_CACHE_SCALE = re.compile(r"[._](q|k|v|kv|prob|output)_scale$")


def why_not(model: torch.nn.Module, vllm_config: Any) -> str | None:
    """Return why a model's weights cannot be updated in place now, and what to change; None where they can."""
    return (
        _why_not_configured(vllm_config)
        or _why_quantised(vllm_config)
        or _why_frozen(vllm_config)
        or _why_asleep()
        or _why_wrapped(model)
        or _why_packed(model)
    )


def check_derived(model: torch.nn.Module, name: str) -> None:
    """Raise at a checkpoint tensor that vLLM keeps derived copies of.

    MLA absorbs ``kv_b_proj`` into other matrices after loading (``W_UK_T``, ``W_UV``), or drops it for packed ones: its parameter
    may hold the checkpoint's bytes, and the attention reads the copies. The scales of a quantised KV cache become numbers, and their
    parameters go.
    """
    if _CACHE_SCALE.search(name):
        raise PlacementError(
            "vLLM keeps scales of the KV cache outside its parameters; reload the model for updates that change it"
        )
    if ".kv_b_proj." in f".{name}." and any(
        hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading")
        for module in model.modules()
    ):
        raise PlacementError(
            "MLA attention reads matrices derived from it; reload the model for updates that change it"
        )


def _why_not_configured(vllm_config: Any) -> str | None:
    if _at(vllm_config, "parallel_config.enable_eplb"):
        return (
            "EPLB moves experts between ranks, and a placement would not hold; serve without "
            "--enable-eplb"
        )
    if _at(vllm_config, "lora_config") is not None:
        return (
            "LoRA wraps the layers, and their weights are not proven; serve without --enable-lora, "
            "or merge the adapter"
        )
    if (
        _at(vllm_config, "offload_config.uva.cpu_offload_gb")
        or _at(vllm_config, "offload_config.prefetch.offload_group_size")
        or _at(vllm_config, "cache_config.cpu_offload_gb")
    ):
        return "weights are offloaded to the host; serve without --cpu-offload-gb and --offload-group-size"
    if _at(vllm_config, "load_config.load_format") == "ipc_cache":
        return (
            "the weights are those of the cache of `vllm preload`, which other engines read; serve without "
            "--load-format ipc_cache"
        )
    return None


def _why_quantised(vllm_config: Any) -> str | None:
    """Tell weights that are quantised while they are loaded from those of a checkpoint that is quantised itself.

    The latter's bytes may be live as they are, or repacked: the proof at attach says so, layer by layer.
    """
    if _at(vllm_config, "quant_config") is None:
        return None
    for path in ("quantization_config", "text_config.quantization_config", "compression_config"):
        if _at(vllm_config, f"model_config.hf_config.{path}") is not None:
            return None
    return (
        "the weights are quantised while they are loaded, and no byte of the checkpoint is live; serve without "
        f"--quantization {_at(vllm_config, 'model_config.quantization')}, or publish a run of quantised weights"
    )


def _why_frozen(vllm_config: Any) -> str | None:
    inductor = sys.modules.get("torch._inductor.config")
    own = _at(vllm_config, "compilation_config.inductor_compile_config") or {}
    on_cpu = _at(vllm_config, "device_config.device_type") == "cpu"
    if getattr(inductor, "freezing", False) or own.get("freezing"):
        return (
            "compiled graphs hold the weights as constants; serve without TORCHINDUCTOR_FREEZING=1, and without "
            "freezing in inductor_compile_config"
        )
    if on_cpu and own.get("max_autotune") and not _at(vllm_config, "model_config.enforce_eager"):
        return (
            "max_autotune makes vLLM compile for the CPU with the weights as constants; serve without it in "
            "inductor_compile_config, or with --enforce-eager"
        )
    return None


def _why_asleep() -> str | None:
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = getattr(getattr(module, "CuMemAllocator", None), "instance", None)
    for data in list(getattr(allocator, "pointer_to_data", {}).values()):
        if data.tag == "weights" and (
            getattr(data, "is_asleep", False) or data.cpu_backup_tensor is not None
        ):
            return "the weights are asleep; wake_up(tags=['weights']) first"
    return None


def _why_wrapped(model: torch.nn.Module) -> str | None:
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_a_stacked"):
            return f"{name} is wrapped for LoRA, and its weights are not proven; serve without --enable-lora"
    return None


def _why_packed(model: torch.nn.Module) -> str | None:
    """A CPU build's ``cpu_linear`` that closes over something reads a packed copy instead of the parameter."""
    packed = [
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None)
    ]
    if not packed:
        return None
    return (
        f"vLLM's CPU kernels read packed copies of the weights of {len(packed)} layers ({packed[0]}, ...), "
        "which no update of a parameter reaches; pull, and load the model from the local checkpoint"
    )


def _at(value: Any, path: str) -> Any:
    """Return an attribute of attributes; None where this vLLM has it not."""
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
