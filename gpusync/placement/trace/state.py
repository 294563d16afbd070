"""What a trace must leave as it was: the attributes of modules and parameters, and the storages behind the parameters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpusync.placement.trace.storages import storage_key

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Where a tensor's values are. Holding the storage keeps it alive, whoever lets go of it."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Kept:
    container: Any
    content: Any


class State:
    """A picture of modules and live tensors.

    Covers the ``__dict__`` of every module and of every live tensor, and the plain dicts, lists and sets inside them; not the
    inside of other objects that a module refers to.

    Parameters
    ----------
    modules
        All modules of the model; none where only its tensors are known.
    tensors
        Live tensors by name; they must have storages.
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors.values()}
        self._geometries = {number: _geometry(tensor) for number, tensor in self._tensors.items()}
        self._kept: list[_Kept] = []
        seen: set[int] = set()
        todo: list[Any] = [vars(module) for module in modules]
        todo.extend(
            vars(tensor) for tensor in self._tensors.values() if hasattr(tensor, "__dict__")
        )
        while todo:
            container = todo.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            self._kept.append(_Kept(container, container.copy() if container else ()))
            values = container.values() if isinstance(container, dict) else container
            todo.extend(value for value in values if type(value) in _CONTAINERS)

    def undo(self) -> set[int]:
        """Put everything back.

        Returns
        -------
        set of int
            Keys of the live storages that a tensor or a module had let go of.
        """
        rebound: set[int] = set()
        for kept in self._kept:
            if _same(kept.container, kept.content):
                continue
            for tensor in _lost(kept.container, kept.content):
                if id(tensor) in self._tensors:
                    rebound.add(self._geometries[id(tensor)].storage._cdata)
            _restore(kept.container, kept.content)
        for number, tensor in self._tensors.items():
            was = self._geometries[number]
            if _is_as(tensor, was):
                continue
            rebound.add(was.storage._cdata)
            tensor.data = torch.empty(0, dtype=was.dtype, device=was.storage.device).set_(
                was.storage, was.offset, was.shape, was.strides
            )
            tensor.requires_grad_(was.requires_grad)
        return rebound


def _geometry(tensor: torch.Tensor) -> _Geometry:
    return _Geometry(
        tensor.untyped_storage(),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.requires_grad,
    )


def _is_as(tensor: torch.Tensor, was: _Geometry) -> bool:
    return (
        storage_key(tensor) == was.storage._cdata
        and tensor.dtype == was.dtype
        and tuple(tensor.shape) == was.shape
        and tuple(tensor.stride()) == was.strides
        and tensor.storage_offset() == was.offset
        and tensor.requires_grad == was.requires_grad
    )


def _same(container: Any, content: Any) -> bool:
    """Identity, not equality: tensors have no plain equality, and an equal object is another object."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(
            key == old_key and value is old
            for (key, value), (old_key, old) in zip(
                container.items(), content.items() if content else (), strict=True
            )
        )
    if isinstance(container, set):
        return bool(container == set(content))
    return all(value is old for value, old in zip(container, content, strict=True))


def _lost(container: Any, content: Any) -> list[torch.Tensor]:
    """Return the tensors that a container no longer holds where it did."""
    if isinstance(container, set) or not content:
        return []
    if isinstance(container, dict):
        pairs = [(container.get(key), old) for key, old in content.items()]
    else:
        pairs = [
            (container[at] if at < len(container) else None, old) for at, old in enumerate(content)
        ]
    return [old for value, old in pairs if value is not old and isinstance(old, torch.Tensor)]


def _restore(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
