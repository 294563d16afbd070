"""Storages: what tells tensors of the same memory from others."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpusync.placement.trace.geometry import span_nbytes


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors over one storage share and no two storages that are alive; 0 where there is none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0  # sparse and the like


class StorageRef:
    """A weak reference to a storage. While it is there the storage's key is given to no other, even if its bytes are gone."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def expired(self) -> bool:
        """Return whether no tensor holds the storage any more."""
        return bool(self._ref.expired())  # type: ignore[no-untyped-call]


class LiveStorage:
    """The memory behind one or more live tensors.

    Attributes
    ----------
    first_name
        The name under which the storage was found first.
    address, nbytes
        Of the whole storage; addresses of all devices and of the host are one space.
    reason
        Why nothing can be placed here; None where it can.
    """

    def __init__(self, name: str, tensor: torch.Tensor, reason: str | None) -> None:
        self._storage = tensor.untyped_storage()  # kept alive during the trace
        self.first_name = name
        self.nbytes = self._storage.nbytes()
        self.reason = reason
        self.address = 0 if self.reason else self._storage.data_ptr()
        self._names: dict[tuple[int, int], str] = {}
        self._spans: list[tuple[int, int]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor over the storage. Of several over the same bytes (tied) the first gives the name."""
        itemsize = tensor.element_size()
        begin = int(tensor.storage_offset()) * itemsize
        span = (begin, begin + itemsize * span_nbytes(tensor.shape, tensor.stride()))
        if span not in self._names:
            self._names[span] = name
            insort(self._spans, span)

    def name_at(self, begin: int, end: int) -> str:
        """Return the name whose tensor spans some bytes of the storage, the first name where none does."""
        for at in range(bisect_right(self._spans, (begin, sys.maxsize)) - 1, -1, -1):
            if end <= self._spans[at][1]:
                return self._names[self._spans[at]]
        return self.first_name


def live_storages(
    tensors: Mapping[str, torch.Tensor], attributes: Mapping[str, torch.Tensor]
) -> dict[int, LiveStorage]:
    """Return the storages of a model by key; those without memory of their own (sparse) are left out.

    Parameters
    ----------
    tensors
        Parameters and buffers.
    attributes
        Other tensors of the model. A loader's writes to them are stopped as well, but nothing is placed there.
    """
    found: dict[int, LiveStorage] = {}
    for name, tensor in tensors.items():
        key = storage_key(tensor)
        if key:
            if key not in found:
                found[key] = LiveStorage(name, tensor, _why_not(tensor))
            found[key].add(name, tensor)
    for name, tensor in attributes.items():
        key = storage_key(tensor)
        if key and key not in found:
            found[key] = LiveStorage(name, tensor, "neither a parameter nor a buffer")
    return found


def _why_not(tensor: torch.Tensor) -> str | None:
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__} has no bytes of its own"
    if tensor.is_quantized:
        return "a quantized tensor, whose bytes are not its values"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"on {tensor.device}, whose memory gpusync cannot reach"
    return None
