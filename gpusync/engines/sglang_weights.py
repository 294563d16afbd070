"""When SGLang's weights are not plain parameters of one model: what is refused, and what the operator changes."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import torch

from gpusync.errors import PlacementError

_CACHE_SCALE = re.compile(r"[._](k|v|kv|q|prob|output)_scale$")
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"


def option(name: str) -> Any:
    """Return one of SGLang's server arguments as it is in effect; None where this SGLang has it not."""
    context = _module("sglang.srt.runtime_context")
    if context is not None and hasattr(context, "get_context"):
        try:
            return context.get_context().config_leaf(name)
        except (AttributeError, ValueError):  # not published yet, or no such argument
            return None
    arguments = getattr(_module("sglang.srt.server_args"), "get_global_server_args", None)
    return getattr(arguments(), name, None) if arguments is not None else None


def launch_path() -> str | None:
    """Return the model path that SGLang was launched with."""
    context = _module("sglang.srt.runtime_context")
    if context is not None and hasattr(context, "get_server_args"):
        try:
            path: str | None = context.get_server_args().model_path
        except (AttributeError, ValueError, RuntimeError):
            return None
        return path
    launched: str | None = option("model_path")
    return launched


def why_not(model: torch.nn.Module) -> str | None:
    """Return why a model's weights cannot be updated in place now, and what to change; None where they can."""
    return _why_not_configured() or _why_frozen() or _why_derived(model) or _why_wrapped(model)


def check_derived(model: torch.nn.Module, name: str) -> None:
    """Raise at a checkpoint tensor that SGLang keeps derived copies of.

    MLA splits ``kv_b_proj`` after loading into ``w_kc`` and ``w_vc``, which its attention reads instead. The scales of a
    quantised KV cache become numbers.
    """
    if _CACHE_SCALE.search(name):
        raise PlacementError(
            "SGLang keeps scales of the KV cache outside its parameters; reload the model for updates that change it"
        )
    if ".kv_b_proj." in f".{name}." and any(
        hasattr(module, "kv_b_proj") and hasattr(module, "w_kc") for module in model.modules()
    ):
        raise PlacementError(
            "MLA attention reads w_kc and w_vc, derived from it; reload the model for updates that change it"
        )


def _why_not_configured() -> str | None:
    if (option("pp_size") or 1) > 1:
        return (
            "SGLang's pipeline stages take an update one after the other, so they cannot agree on it; serve with "
            "--pp-size 1"
        )
    if option("speculative_algorithm") not in (None, "NGRAM"):
        return (
            "a draft model shares the embedding or the head with this one, or is in the same checkpoint, and is not "
            "updated in place; serve without --speculative-algorithm"
        )
    if option("enable_eplb") or option("elastic_ep_backend"):
        return (
            "experts are moved between ranks, and a placement would not hold; serve without --enable-eplb and "
            "--elastic-ep-backend"
        )
    if option("enable_lora") or option("lora_paths"):
        return (
            "LoRA wraps the layers, and their weights are not proven; serve without --enable-lora and --lora-paths, "
            "or merge the adapter"
        )
    if (option("cpu_offload_gb") or 0) > 0 or (option("offload_group_size") or 0) > 0:
        return "weights are offloaded to the host; serve without --cpu-offload-gb and --offload-group-size"
    if option("weight_cache_mode") not in (None, "off"):
        return (
            "the weights are a weight cache's, shared with other engines; serve with "
            "--weight-cache-mode off"
        )
    return None


def _why_frozen() -> str | None:
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and getattr(inductor, "freezing", False):
        return (
            "compiled graphs hold the weights as constants; serve without TORCHINDUCTOR_FREEZING=1"
        )
    return None


def _why_derived(model: torch.nn.Module) -> str | None:
    """Return SGLang's own reason why its derived copies of weights do not survive an update."""
    updater = _module(_UPDATER)
    check = getattr(updater, "_unsupported_derived_weight_cache_error", None)
    reason: str | None = check(model) if check is not None else None
    return reason


def _why_wrapped(model: torch.nn.Module) -> str | None:
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_backend"):
            return f"{name} is wrapped for LoRA, and its weights are not proven; serve without --enable-lora"
    return None


def _module(name: str) -> Any:
    """Return a module of the SGLang that runs here; None where this release has it not, or none runs."""
    if name not in sys.modules and "sglang" in sys.modules:
        try:
            return importlib.import_module(name)
        except ImportError:
            return None
    return sys.modules.get(name)
