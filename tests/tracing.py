"""What the tests of traces share: models with loaders, and the proof that a trace is right and has left no mark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gpusync.placement.tensors import DTYPE_NAMES
from gpusync.placement.trace import Copy, Trace, trace_load
from gpusync.types import TensorEntry

Weights = Iterable[tuple[str, torch.Tensor]]
Tensors = dict[str, torch.Tensor]

BF16 = torch.bfloat16
_CODES = {getattr(torch, name): code for code, name in DTYPE_NAMES.items() if hasattr(torch, name)}


def parameter(*shape: int, dtype: torch.dtype = BF16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


def entries_of(tensors: Tensors) -> dict[str, TensorEntry]:
    entries, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(name, _CODES[tensor.dtype], tuple(tensor.shape), begin, end)
        begin = end
    return entries


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """bf16 tensors of any bits, NaNs and all."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(
            BF16
        )
        for name, shape in shapes.items()
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def named(model: nn.Module) -> Tensors:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def contents(value: Any) -> Any:
    """What a container holds, by identity, containers inside included."""
    if isinstance(value, dict):
        return [(key, contents(part)) for key, part in value.items()]
    if isinstance(value, list):
        return [contents(part) for part in value]
    return frozenset(value) if isinstance(value, set) else id(value)


def picture(model: nn.Module) -> Any:
    """Everything that a trace must leave as it was."""
    return (
        [(name, contents(vars(module))) for name, module in model.named_modules()],
        [
            (name, id(t), t.data_ptr(), t.dtype, t.shape, t.stride(), contents(vars(t)))
            for name, t in named(model).items()
        ],
        [bytes(storage_bytes(t).tolist()) for t in named(model).values()],
    )


def apply_copies(model: nn.Module, trace: Trace, new: Tensors) -> None:
    live = named(model)
    for name, copies in trace.copies.items():
        for copy in copies:
            source = bits(new[name]).as_strided(copy.shape, copy.source_strides, copy.source_offset)
            target = storage_bytes(live[copy.live_name]).as_strided(
                copy.shape, copy.live_strides, copy.live_offset
            )
            target.copy_(source)


def check(make: Callable[[], nn.Module], shapes: dict[str, tuple[int, ...]]) -> Trace:
    """Trace a loaded model; what is not refused must then follow the copies exactly as a real load does."""
    old, new = random_tensors(shapes, 1), random_tensors(shapes, 2)
    model = make()
    model.load_weights((name, tensor.clone()) for name, tensor in old.items())  # type: ignore[operator]
    before = picture(model)
    trace = trace_load(model, entries_of(old), model.load_weights)  # type: ignore[arg-type]
    assert picture(model) == before
    assert {*trace.copies} | {*trace.dropped} | {*trace.refused} == {*shapes}
    assert len(trace.copies) + len(trace.dropped) + len(trace.refused) == len(shapes)
    for name, copies in trace.copies.items():
        for copy in copies:
            check_form(copy, name)
    apply_copies(model, trace, new)
    loaded = make()
    mixed = {name: (old if name in trace.refused else new)[name].clone() for name in shapes}
    loaded.load_weights(iter(mixed.items()))  # type: ignore[operator]
    for name, tensor in named(loaded).items():
        assert torch.equal(bits(tensor), bits(named(model)[name])), name
    return trace


def check_form(copy: Copy, name: str) -> None:
    assert copy.source == name
    assert len(copy.shape) == len(copy.source_strides) == len(copy.live_strides)
    assert copy.source_strides[-1] == copy.live_strides[-1] == 1
    assert list(copy.source_strides) == sorted(copy.source_strides, reverse=True)
    if copy.nbytes:
        assert 1 not in copy.shape
        assert copy.shape[-1] % copy.itemsize == 0


Load = Callable[["Awkward", str, torch.Tensor], object]


class Awkward(nn.Module):
    """Parameters a, b, c of 6x6 and long of 12x6; ``loads`` says what to do with each checkpoint tensor."""

    def __init__(self, loads: dict[str, Load], live_dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.loads = loads
        self.a, self.b, self.c = (parameter(6, 6, dtype=live_dtype) for _ in range(3))
        self.long = parameter(12, 6, dtype=live_dtype)
        self.inner = nn.Module()
        self.inner.register_buffer("scale", torch.zeros(6, dtype=live_dtype))
        self.pending: dict[str, torch.Tensor] = {}
        self.seen: list[str] = []
        self.cache: torch.Tensor | None = None

    def load_weights(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, w in weights:
                self.seen.append(name)
                self.loads[name](self, name, w)


def plain(target: str) -> Load:
    return lambda model, name, w: getattr(model, target).data.copy_(w)


def trace_of(loads: dict[str, Load], shape: tuple[int, ...] = (6, 6)) -> Trace:
    return check(lambda: Awkward(loads), dict.fromkeys(loads, shape))
