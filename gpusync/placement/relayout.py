"""Relayouts: modules whose tensors an engine rearranges after loading, and how to have it do so again in scratch memory.

Nothing here knows an engine. An engine offers a :class:`Relayout`; whether what it does is a pure relayout is for
:mod:`gpusync.live.relaid` to find out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpusync.placement.places import Anchor, Kind, Places
from gpusync.placement.slices import Slice, slices_of
from gpusync.placement.trace import Copy
from gpusync.types import Digest, TensorEntry

Loaded = dict[str, torch.Tensor]
"""The tensors of one module by their names in it."""

_ELSEWHERE = "it is copied to places outside its module, which is rearranged after loading"


class Relayout(Protocol):
    """What an engine does to its modules after loading them, done again in scratch memory.

    Neither method touches the live model; ``process`` is called while it serves, from whatever thread prepares an update.
    """

    def modules(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return the modules that may be rearranged: name in the model to the tensors that the loader fills.

        Those are tensors on the meta device, by their names in the module, of the class and with the attributes that the
        loader looks at.
        """

    def process(self, module: str, loaded: Loaded) -> Mapping[str, torch.Tensor]:
        """Return what the engine makes of a module's loaded tensors, by their names in the module.

        ``loaded`` is given away: its tensors may be overwritten or returned. Whatever the engine raises means that it cannot.
        """


def engine_relayout(relayout: bool | Relayout) -> Relayout | None:
    """Return the engine's relayout, None where relaid parameters are not wanted, or there is no engine."""
    return None if isinstance(relayout, bool) else relayout


@dataclass(frozen=True)
class RelaidModule:
    """A module whose live tensors are a rearrangement of what the loader fills.

    Parameters
    ----------
    name
        Of the module in the model.
    copies
        Checkpoint tensor to its copies; ``live_name`` is a loaded tensor's name in the module, offsets count from that
        tensor's first byte.
    loaded
        The tensors that the loader fills.
    kinds
        Dtype and shape of the checkpoint tensors.
    live
        Name in the model of each live tensor that holds them, by its name in the module; known once it is proven.
    """

    name: str
    copies: Mapping[str, tuple[Copy, ...]]
    loaded: Mapping[str, Anchor]
    kinds: Mapping[str, Kind]
    live: Mapping[str, str] = field(default_factory=dict)

    def scratch(self) -> Loaded:
        """Return the tensors that the loader fills, zeroed, on the host."""
        return {leaf: _zeros(anchor) for leaf, anchor in self.loaded.items()}

    def name_of(self, leaf: str) -> str:
        """Return the name in the model of one of the module's tensors."""
        return name_in(self.name, leaf)

    @property
    def loaded_nbytes(self) -> int:
        return sum(_storage_nbytes(anchor) for anchor in self.loaded.values())


@dataclass(frozen=True)
class Relaid:
    """What is known of a model's relaid modules.

    Parameters
    ----------
    modules
        By name.
    live
        Live tensor to the xxh3-128 of its bytes: as proven at attach, or as the last commit left them.
    tensors
        Checkpoint tensor to the xxh3-128 of its bytes in the version that is live.
    """

    modules: Mapping[str, RelaidModule]
    live: Mapping[str, Digest]
    tensors: Mapping[str, Digest]

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return each checkpoint tensor with the live tensors of its module."""
        return {
            name: tuple(module.live.values())
            for module in self.modules.values()
            for name in module.copies
        }


class ScratchSink:
    """Puts a checkpoint tensor where the loader would, in scratch tensors."""

    def __init__(self, copies: Iterable[Copy], scratch: Loaded) -> None:
        self._parts: list[Slice] = []
        for copy in copies:
            self._parts += slices_of(copy, flat_bytes(scratch[copy.live_name]), ())

    def write(self, piece: NDArray[np.uint8], offset: int) -> None:
        for part in self._parts:
            part.fill(piece, offset)


def name_in(module: str, leaf: str) -> str:
    """Return the name in the model of a module's tensor."""
    return f"{module}.{leaf}".lstrip(".")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage as flat bytes over the same memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def reshaped(model: torch.nn.Module, offered: Mapping[str, Mapping[str, torch.Tensor]]) -> set[str]:
    """Return the modules whose live tensors have another shape, layout or dtype than the loader fills."""
    found = set()
    for name, loaded in offered.items():
        module = model.get_submodule(name)
        for leaf, tensor in loaded.items():
            live = _member(module, leaf)
            if live is None or not Anchor.of(live).is_alike(Anchor.of(tensor)):
                found.add(name)
    return found


@contextmanager
def standing_in(
    model: torch.nn.Module,
    offered: Mapping[str, Mapping[str, torch.Tensor]],
    names: Collection[str],
) -> Iterator[None]:
    """Let a loader find tensors as it fills them in some modules, for a trace; their memory is never touched."""
    kept = []
    try:
        for name in names:
            module = model.get_submodule(name)
            kept.append((module, dict(module._parameters), dict(module._buffers)))
            for leaf, tensor in offered[name].items():
                members = module._buffers if leaf in module._buffers else module._parameters
                members[leaf] = _stand_in(tensor)  # type: ignore[assignment]
        yield
    finally:
        for module, parameters, buffers in kept:
            _restore(module._parameters, parameters)
            _restore(module._buffers, buffers)


def take_out(
    places: Places,
    offered: Mapping[str, Mapping[str, torch.Tensor]],
    names: Collection[str],
    entries: Mapping[str, TensorEntry],
) -> tuple[Places, list[RelaidModule]]:
    """Take the tensors of some modules out of their places; those that other places share are refused."""
    feeding: dict[str, list[str]] = {}
    for tensor, copies in places.copies.items():
        for live_name in {copy.live_name for copy in copies}:
            feeding.setdefault(live_name, []).append(tensor)
    modules = []
    gone: set[str] = set()
    refused: dict[str, str] = {}
    for name in names:
        leaf_of = {name_in(name, leaf): leaf for leaf in offered[name]}
        tensors = dict.fromkeys(t for live_name in leaf_of for t in feeding.get(live_name, ()))
        gone |= tensors.keys()
        if any(copy.live_name not in leaf_of for t in tensors for copy in places.copies[t]):
            refused |= dict.fromkeys(tensors, _ELSEWHERE)
        elif tensors:
            modules.append(_module(name, offered[name], leaf_of, tensors, places, entries))
    left = {tensor: copies for tensor, copies in places.copies.items() if tensor not in gone}
    return replace(places, copies=left, refused={**places.refused, **refused}), modules


def _module(
    name: str,
    loaded: Mapping[str, torch.Tensor],
    leaf_of: Mapping[str, str],
    tensors: Iterable[str],
    places: Places,
    entries: Mapping[str, TensorEntry],
) -> RelaidModule:
    copies = {
        tensor: tuple(
            replace(
                copy,
                live_name=leaf_of[copy.live_name],
                live_offset=copy.live_offset - places.anchors[copy.live_name].offset,
            )
            for copy in places.copies[tensor]
        )
        for tensor in tensors
    }
    kinds = {tensor: (entries[tensor].dtype, entries[tensor].shape) for tensor in copies}
    anchors = {leaf: replace(Anchor.of(tensor), offset=0) for leaf, tensor in loaded.items()}
    return RelaidModule(name, copies, anchors, kinds)


def _member(module: torch.nn.Module, leaf: str) -> torch.Tensor | None:
    found = module._parameters.get(leaf)
    return found if found is not None else module._buffers.get(leaf)


def _restore(members: dict[str, Any], kept: dict[str, Any]) -> None:
    members.clear()
    members.update(kept)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as this one without bytes, with memory that nothing has touched yet."""
    stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    stand_in.__class__ = tensor.__class__
    stand_in.__dict__ = dict(tensor.__dict__)
    return stand_in


def _storage_nbytes(anchor: Anchor) -> int:
    return int(
        torch.empty_strided(anchor.shape, anchor.strides, dtype=anchor.dtype, device="meta")
        .untyped_storage()
        .nbytes()
    )


def _zeros(anchor: Anchor) -> torch.Tensor:
    tensor = torch.empty_strided(anchor.shape, anchor.strides, dtype=anchor.dtype)
    flat_bytes(tensor).zero_()
    return tensor
