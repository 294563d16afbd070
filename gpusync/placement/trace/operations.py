"""What operators of torch do to their arguments, by their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from gpusync.placement.trace.geometry import Walk, normal_walk

aten = torch.ops.aten

COPY = aten.copy_.default
MOVES = {aten._to_copy.default, aten.clone.default}
"""The same values in other memory, where the dtype stays."""

RESHAPES = {aten.view.default, aten._unsafe_view.default}
RESIZES = {"resize_", "resize_as_", "set_", "_resize_output_"}
FACTORIES = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
}
"""Operations whose result has the shape of their argument, but not its values."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operator's schema says; ``written`` are the positions and names of the arguments it writes."""

    name: str
    written: tuple[tuple[int, str], ...]
    is_view: bool
    is_metadata_only: bool
    returns_written: bool
    is_composite: bool


@lru_cache(maxsize=4096)
def operation_of(func: Any) -> Operation:
    schema = func._schema
    written = tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    returned = [value.alias_info for value in schema.returns]
    return Operation(
        name=func.overloadpacket.__name__,
        written=written,
        is_view=any(alias is not None and not alias.is_write for alias in returned),
        is_metadata_only=torch.Tag.inplace_view in func.tags,
        returns_written=all(alias is not None and alias.is_write for alias in returned),
        is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ),
    )


def plain_walk(target: torch.Tensor, source: torch.Tensor) -> Walk | str:
    """Return how ``target.copy_(source)`` moves bytes, or why it does more than that."""
    if source.dtype != target.dtype:
        return f"cast from {source.dtype} to {target.dtype}"
    if source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg():
        return "a lazy view, whose bytes are not its values"
    if source.shape != target.shape:
        if source.numel() != target.numel() and target.numel() != 0:
            return f"broadcast from {list(source.shape)} to {list(target.shape)}"
        source = source.expand(target.shape)
    return normal_walk(
        target.element_size(), tuple(target.shape), tuple(source.stride()), tuple(target.stride())
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def on_meta(value: Any) -> Any:
    """Return arguments with every tensor that has bytes replaced by one of its form that has none."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(on_meta(part) for part in value)
    if isinstance(value, dict):
        return {key: on_meta(part) for key, part in value.items()}
    return value


def placed_on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is None:
        return kwargs
    rest = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    return {**rest, "device": torch.device("meta")}
