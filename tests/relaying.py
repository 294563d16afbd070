"""A model whose experts an engine rearranges after loading, and the ways in which it may."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from tests import live, wire

HIDDEN, INNER, EXPERTS, LAYERS = 32, 12, 3, 2

Tensors = dict[str, torch.Tensor]


def _row(name: str, file: str, *shape: int) -> wire.Row:
    return wire.Row(file, name, "BF16", shape, 2 * math.prod(shape))


ROWS = (
    _row("embed", wire.FIRST, 40, HIDDEN),
    _row("norm", wire.SECOND, HIDDEN),
    *(
        _row(f"layers.{layer}.experts.{expert}.{part}", file, *shape)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for part, file, shape in (
            ("gate", wire.FIRST, (INNER, HIDDEN)),
            ("up", wire.SECOND, (INNER, HIDDEN)),
            ("down", wire.SECOND, (HIDDEN, INNER)),
        )
    ),
)


def swap(loaded: Tensors) -> Tensors:
    """The halves of w13 change places; w2 stays as it is."""
    gate, up = loaded["w13"].chunk(2, dim=1)
    return {"w13": torch.cat([up, gate], dim=1), "w2": loaded["w2"]}


def shuffle(loaded: Tensors) -> Tensors:
    """Blocks and pairs change places, in the same shape."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        blocks = tensor.reshape(EXPERTS, -1, 4, tensor.shape[2] // 2, 2)
        return blocks.permute(0, 3, 1, 2, 4).contiguous().reshape(tensor.shape)

    return {name: one(tensor) for name, tensor in loaded.items()}


def pad(loaded: Tensors) -> Tensors:
    """The inner dimension grows to a multiple of 16, with zeros."""
    size = -(-INNER // 16) * 16
    w13 = loaded["w13"].new_zeros(EXPERTS, 2 * size, HIDDEN)
    w13[:, :INNER] = loaded["w13"][:, :INNER]
    w13[:, size : size + INNER] = loaded["w13"][:, INNER:]
    w2 = loaded["w2"].new_zeros(EXPERTS, HIDDEN, size)
    w2[:, :, :INNER] = loaded["w2"]
    return {"w13": w13, "w2": w2}


def pack(loaded: Tensors) -> Tensors:
    """Bytes of both tensors in words of another type, padded."""
    return {
        name: torch.nn.functional.pad(tensor.reshape(EXPERTS, -1).view(torch.int32), (0, 5))
        for name, tensor in loaded.items()
    }


def quiet(loaded: Tensors) -> Tensors:
    """Swapped halves, by a kernel that keeps no payload of a NaN."""
    swapped = swap(loaded)
    return {name: torch.where(t.isnan(), torch.nan, t) for name, t in swapped.items()}


PURE: dict[str, Callable[[Tensors], Tensors]] = {
    "swap": swap,
    "shuffle": shuffle,
    "pad": pad,
    "pack": pack,
    "quiet": quiet,
}


def halve(loaded: Tensors) -> Tensors:
    return {name: tensor * 0.5 for name, tensor in swap(loaded).items()}


def quantise(loaded: Tensors) -> Tensors:
    return {name: t.to(torch.float8_e5m2) for name, t in swap(loaded).items()}


def cast(loaded: Tensors) -> Tensors:
    return {name: tensor.float() for name, tensor in loaded.items()}


def round_off(loaded: Tensors) -> Tensors:
    return {name: (t.view(torch.int16) & ~1).view(t.dtype) | t for name, t in loaded.items()}


def merge_scales(loaded: Tensors) -> Tensors:
    """Everything in terms of the largest value, in the same shape and dtype."""
    return {name: (t.float() / t.float().abs().amax()).to(t.dtype) for name, t in loaded.items()}


def negate(loaded: Tensors) -> Tensors:
    """Moves bits, but not zeros to zeros."""
    return {name: ~t.view(torch.int16) for name, t in loaded.items()}


IMPURE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "halve": (halve, "no pure relayout"),
    "quantise": (quantise, "no pure relayout|cast"),
    "cast": (cast, "cast"),
    "merge_scales": (merge_scales, "no pure relayout"),
    "negate": (negate, "no pure relayout"),
}


class Experts(nn.Module):
    """Two stacked parameters, with room for what the loader fills."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in empty(torch.device("cpu")).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load(self, expert: int, part: str, weight: torch.Tensor) -> None:
        if part == "down":
            self.w2.data[expert].copy_(weight)
        else:
            begin = 0 if part == "gate" else INNER
            self.w13.data[expert].narrow(0, begin, INNER).copy_(weight)


def empty(device: torch.device) -> Tensors:
    bf16 = torch.bfloat16
    return {
        "w13": torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=bf16, device=device),
        "w2": torch.empty(EXPERTS, HIDDEN, INNER, dtype=bf16, device=device),
    }


class Model(nn.Module):
    """As an engine leaves it: loaded, then rearranged."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(40, HIDDEN, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.bfloat16))
        self.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for layer in self.layers:
            layer.add_module("experts", Experts())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            path = name.split(".")
            if len(path) == 1:
                getattr(self, name).data.copy_(weight)
            else:
                self.layers[int(path[1])].experts.load(int(path[3]), path[4], weight)  # type: ignore[operator, union-attr]


class EngineRelayout:
    """What rearranges the experts, as an engine offers it; see :class:`gpusync.placement.relayout.Relayout`."""

    def __init__(self, process: Callable[[Tensors], Tensors]) -> None:
        self._process = process
        self.processed: list[str] = []

    def modules(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {f"layers.{n}.experts": empty(torch.device("meta")) for n in range(LAYERS)}

    def process(self, module: str, loaded: Tensors) -> Mapping[str, torch.Tensor]:
        self.processed.append(module)
        return self._process(loaded)


def loaded_model(state: wire.State, process: Callable[[Tensors], Tensors]) -> Model:
    """Return what a fresh load of these bytes gives."""
    model = Model()
    model.load_weights(
        (row.name, live.tensor_of(state[row.name], row.dtype, row.shape)) for row in ROWS
    )
    for layer in model.layers:
        experts = layer.experts
        made = process({name: tensor.data for name, tensor in experts.named_parameters()})  # type: ignore[union-attr]
        for name, tensor in made.items():
            setattr(experts, name, nn.Parameter(tensor.clone(), requires_grad=False))
    return model
