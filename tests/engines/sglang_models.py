"""What is called in SGLang's ranks: models by its own loader, and updates of them."""

from __future__ import annotations

from typing import Any

import torch

import gpusync
from gpusync.engines.sglang_follower import SglangMount

_live: dict[str, torch.nn.Module] = {}


def fresh(folder: str) -> torch.nn.Module:
    """Return a checkpoint's model as SGLang's loader leaves it on this rank."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import get_model_loader

    config = ModelConfig(folder, dtype="bfloat16")
    loader = get_model_loader(LoadConfig(load_format="auto"), config)
    model: torch.nn.Module = loader.load_model(
        model_config=config, device_config=DeviceConfig("cpu")
    )
    return model


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    """Return the bytes of every parameter and buffer."""
    return {
        name: value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    }


def load(base: str) -> None:
    """Load the model that lives on, from a checkpoint."""
    _live["model"] = fresh(base)


def attach(base: str) -> dict[str, Any]:
    model = _live["model"]
    before, derived = bits(model), _derived(model)
    report = gpusync.attach(model, base, load_weights=SglangMount(model).load_weights)
    assert bits(model) == before and _derived(model) == derived
    return report.to_dict()


def _derived(model: torch.nn.Module) -> dict[str, tuple[int, bytes]]:
    """Return address and bytes of what MLA reads instead of a parameter."""
    return {
        name: (module.w_kc.data_ptr(), module.w_kc.contiguous().view(torch.uint8).numpy().tobytes())
        for name, module in model.named_modules()
        if getattr(module, "w_kc", None) is not None
    }


def update(source: str, base: str, version: int, truth: str) -> dict[str, Any]:
    """Bring the model to a version, all ranks together, and compare it with a load of the version's checkpoint."""
    model = _live["model"]
    mount = SglangMount(model)
    chain = gpusync.open_chain(source, version, base_dir=base)
    report = gpusync.apply_to_model(
        model, chain, load_weights=mount.load_weights, group=mount.group()
    )
    expected, found = bits(fresh(truth)), bits(model)
    assert found.keys() == expected.keys()
    differ = [name for name in expected if found[name] != expected[name]]
    assert not differ, differ
    return report.to_dict()


def refused(source: str, base: str, version: int) -> dict[str, str]:
    """Return the reasons by tensor why an update is refused; nothing may change."""
    model = _live["model"]
    mount = SglangMount(model)
    before, stood = bits(model), gpusync.live_version(model)
    try:
        chain = gpusync.open_chain(source, version, base_dir=base)
        gpusync.apply_to_model(model, chain, load_weights=mount.load_weights, group=mount.group())
    except gpusync.PlacementError as err:
        assert bits(model) == before and gpusync.live_version(model) == stood
        return dict(err.reasons)
    raise AssertionError("it was not refused")


def swap_halves(layer: int) -> None:
    """Exchange gate and up in one layer's experts, in place and of the same shape, as a kernel's preparation does."""
    (experts,) = [
        module
        for name, module in _live["model"].named_modules()
        if name.startswith(f"model.layers.{layer}.") and hasattr(module, "w13_weight")
    ]
    fused: torch.Tensor = experts.w13_weight.data
    fused.copy_(fused.roll(fused.shape[1] // 2, dims=1))
