"""What vLLM does to mixture-of-experts layers after loading them, done again in scratch memory.

vLLM's layer-wise reload knows, for every layer, the tensors that its loader fills: their metadata is taken from there. The
reload itself is not run: it works on the live layers. A hollow copy of the layer gets the scratch tensors, and its quant
method processes them as after a first load; later ones skip what the experts' kernels do themselves (vLLM 0.32 packs for the
CPU only the first time).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gpusync.errors import PlacementError

_METHOD = "UnquantizedFusedMoEMethod"
"""The quant methods whose processing is known to leave its result in the layer's parameters, and nothing elsewhere."""

_ELSEWHERE = ("MOONEP", "OOT", "TPU")
"""Backends of that method that keep tensors elsewhere, or process them out of sight."""


class VllmRelayout:
    """The relayout of a vLLM model; see :class:`gpusync.placement.relayout.Relayout`."""

    def __init__(self, get_model: Callable[[], torch.nn.Module]) -> None:
        self._get_model = get_model

    def modules(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {
            name: {leaf: _as_loaded(tensor, layer) for leaf, tensor in recorded.items()}
            for name, layer in self._get_model().named_modules()
            if _is_known(layer) and (recorded := _recorded(layer))
        }

    def process(self, module: str, loaded: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        layer: Any = self._get_model().get_submodule(module)
        if not _is_known(layer):
            raise PlacementError(f"{module} has been replaced since the model was attached")
        recorded = _recorded(layer)
        hollow = _hollow(layer)
        names = set(loaded)
        for leaf in names:
            tensor = loaded.pop(leaf)
            tensor.__class__ = recorded[leaf].__class__
            tensor.__dict__.update(recorded[leaf].__dict__)
            members = hollow._buffers if leaf in hollow._buffers else hollow._parameters
            members[leaf] = tensor
        method = _first_time(layer.quant_method)
        hollow._modules.pop("quant_method", None)
        hollow.__dict__["quant_method"] = method
        hollow.moe_config = method.moe
        method.process_weights_after_loading(hollow)
        made = {**hollow._parameters, **{n: b for n, b in hollow._buffers.items() if n in names}}
        return {leaf: tensor.data for leaf, tensor in made.items() if tensor is not None}


def _is_known(layer: torch.nn.Module) -> bool:
    method: Any = getattr(layer, "quant_method", None)
    return (
        type(method).__name__ == _METHOD
        and getattr(method, "moe_kernel", None) is not None
        and getattr(getattr(method, "unquantized_backend", None), "name", "OOT") not in _ELSEWHERE
    )


def _recorded(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that the loader fills, on the meta device, as vLLM noted them when it built the layer."""
    try:
        layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    except ImportError:
        return {}  # a vLLM without layer-wise reload
    info = layerwise.LAYERWISE_INFO.get(layer)
    parameters, buffers = info.restore_metadata if info is not None else ({}, {})
    return {**parameters, **buffers}


def _as_loaded(tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """Return a noted tensor with its loader, which vLLM cuts from the layer so as to keep no layer alive."""
    sanitize = importlib.import_module("vllm.model_executor.model_loader.reload.sanitize")
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    found.__class__ = tensor.__class__
    found.__dict__.update(tensor.__dict__)
    restored: torch.Tensor = sanitize.restore_layer_refs(found, layer)
    return restored


def _hollow(module: Any) -> Any:
    """Return a copy of one module that shares what it refers to, but for its tensors: it has none but copies of its buffers."""
    hollow = object.__new__(type(module))
    vars(hollow).update(vars(module))
    buffers = {
        name: buffer.clone() if buffer is not None else None
        for name, buffer in module._buffers.items()
    }
    vars(hollow).update(
        _parameters={},
        _buffers=buffers,
        _modules=dict(module._modules),
        _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
    )
    return hollow


def _first_time(method: Any) -> Any:
    """Return a copy of a layer's quant method that has not processed anything yet.

    It takes the experts of the live one's kernel instead of building a kernel, which may talk to other ranks.
    """
    first = _hollow(method)
    first.moe = copy.copy(method.moe)
    first.moe_kernel = None
    experts = copy.copy(method.moe_kernel.fused_experts)

    def take_experts(layer: Any) -> None:
        first.moe_kernel = SimpleNamespace(fused_experts=experts)

    first._init_moe_kernel = take_experts
    return first
