"""Placement: where each checkpoint tensor lives in a model.

Here the identity placement: a parameter or buffer of the tensor's own name, dtype and shape, contiguous in the memory of
the host or of a CUDA device, whose storage holds the tensor's bytes. Names that share a storage (tied weights) share one region.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_not
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpusync.errors import PlacementError
from gpusync.placement.slices import Slice
from gpusync.placement.tensors import DTYPE_NAMES
from gpusync.types import TensorEntry

_REASONS_SHOWN = 5

Spans = Mapping[tuple[str, int], tuple[int, int]]
"""Address and size of each tensor's region, or of its slices by number: what may be kept of a placement without keeping
the storages."""

RELAID = -1
"""The number of a region that is relaid; the name is the live tensor's."""


@dataclass(frozen=True)
class Region:
    """Live bytes of one or more checkpoint tensors.

    ``data`` is a flat uint8 view of the live storage, on whatever device it is; the model owns the storage, and writing
    to it changes the model.
    """

    data: torch.Tensor
    live_names: tuple[str, ...]

    @property
    def address(self) -> int:
        """Where the region begins; addresses of all devices and of the host are one space."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes, where they are host memory."""
        array: NDArray[np.uint8] = self.data.numpy()
        return array

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return some of the bytes: a view of host memory, a copy of device memory by the thread's current stream."""
        array: NDArray[np.uint8] = self.data[offset : offset + nbytes].cpu().numpy()
        return array


@dataclass(frozen=True)
class Placement:
    """Where checkpoint tensors live: whole in one region, or in slices.

    ``relaid`` gives the regions of live tensors, by their own names, that an engine rearranges after loading. ``unmanaged``
    are live names without any of these.
    """

    regions: Mapping[str, Region]
    unmanaged: tuple[str, ...]
    slices: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    relaid: Mapping[str, Region] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Live bytes placed, shared storages once; without those that are relaid."""
        whole = {region.address: region.nbytes for region in self.regions.values()}
        return sum(whole.values()) + sum(part.nbytes for part in self._parts())

    def spans(self) -> Spans:
        """Return address and size of each tensor's region or slices, to notice parameters that move or are resized."""
        spans = {
            (name, 0): (region.address, region.nbytes) for name, region in self.regions.items()
        }
        for name, parts in self.slices.items():
            spans |= {
                (name, number): (part.address, part.nbytes) for number, part in enumerate(parts)
            }
        for name, region in self.relaid.items():
            spans[name, RELAID] = (region.address, region.nbytes)
        return spans

    def extents(self) -> list[tuple[int, int]]:
        """Return, for each live storage, the addresses from its first placed byte to behind its last; sorted."""
        found: dict[int, tuple[int, int]] = {}
        regions = [*self.regions.values(), *self.relaid.values()]
        spans = [(region.data, region.address, region.nbytes) for region in regions]
        spans += [(part.data, part.address, part.extent_nbytes) for part in self._parts()]
        for data, begin, nbytes in spans:
            if nbytes:
                storage = data.untyped_storage().data_ptr()
                first, end = found.get(storage, (begin, begin))
                found[storage] = min(first, begin), max(end, begin + nbytes)
        return sorted(found.values())

    def live_names(self) -> set[str]:
        """Return the parameters and buffers that hold placed or relaid bytes."""
        regions = itertools.chain(self.regions.values(), self.relaid.values())
        whole = {name for region in regions for name in region.live_names}
        return whole | {name for part in self._parts() for name in part.live_names}

    def devices(self) -> set[torch.device]:
        whole = {region.device for region in self.regions.values()}
        return whole | {part.device for part in self._parts()}

    def memory(self) -> Iterator[torch.Tensor]:
        """Yield a flat tensor over the live storage of each region and slice."""
        yield from (region.data for region in self.regions.values())
        yield from (part.data for part in self._parts())

    def _parts(self) -> Iterator[Slice]:
        return itertools.chain.from_iterable(self.slices.values())


def place_by_name(model: torch.nn.Module, wanted: Mapping[str, TensorEntry | None]) -> Placement:
    """Place checkpoint tensors on the parameters and buffers of the same names.

    Parameters
    ----------
    wanted
        Tensor name to its entry in the checkpoint; None where no checkpoint tells dtype and shape.

    Raises
    ------
    PlacementError
        With a reason for every tensor that is not a plain byte image; nothing was touched.
    """
    live = live_tensors(model)
    reasons: dict[str, str] = {}
    regions: dict[str, Region] = {}
    for name, entry in wanted.items():
        reason = _why_not(live.get(name), entry)
        if reason is not None:
            reasons[name] = reason
    names_at: dict[int, list[str]] = {}
    for name, tensor in live.items():
        if _is_plain(tensor):
            names_at.setdefault(tensor.data_ptr(), []).append(name)
    for name in wanted.keys() - reasons.keys():
        address = live[name].data_ptr()
        regions[name] = Region(byte_view(live[name]), tuple(names_at[address]))
    reasons.update(partial_overlaps(regions))
    if reasons:
        raise refused(reasons)
    fed = {live_name for region in regions.values() for live_name in region.live_names}
    return Placement(regions, tuple(sorted(live.keys() - fed)))


@contextmanager
def reading(device: torch.device) -> Iterator[None]:
    """Have this thread's reads of a device's memory in a stream of their own, not behind the engine's work."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def wait_for_writes(placement: Placement) -> None:
    """Wait for what this thread's current streams hold: a loader may have queued its last copies there."""
    for device in placement.devices():
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name, tied ones under each of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as a flat uint8 tensor over the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def refused(reasons: Mapping[str, str]) -> PlacementError:
    """Return the error that names the refused tensors."""
    shown = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items())[:_REASONS_SHOWN])
    more = len(reasons) - _REASONS_SHOWN
    return PlacementError(
        f"{len(reasons)} tensor(s) cannot be updated in place, use pull and the engine's reload: {shown}"
        + (f"; and {more} more" if more > 0 else ""),
        tensor=min(reasons),
        reasons=dict(reasons),
    )


def _why_not(tensor: torch.Tensor | None, entry: TensorEntry | None) -> str | None:
    """Return why a live tensor is not a plain byte image of its entry, None where it is."""
    if tensor is None:
        return "no parameter or buffer of that name"
    reason = reachable(tensor)
    if reason is not None:
        return reason
    if not tensor.is_contiguous():
        return "not contiguous in memory"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazy view, whose bytes are not its values"
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < end:
        return "its storage was freed or offloaded"
    if entry is None:
        return None
    expected = getattr(torch, DTYPE_NAMES.get(entry.dtype, ""), None)
    if expected is None:
        return f"dtype {entry.dtype} has no torch equivalent here"
    if tensor.dtype != expected:
        return f"cast: {tensor.dtype} live, {entry.dtype} in the checkpoint"
    if tuple(tensor.shape) != entry.shape:
        return f"shape {list(tensor.shape)} live, {list(entry.shape)} in the checkpoint"
    return None


def reachable(tensor: torch.Tensor) -> str | None:
    """Return why a live tensor's bytes cannot be reached, None where they can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialized yet"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"on {tensor.device}, whose memory gpusync cannot reach"
    if not _is_plain(tensor):
        return f"a {type(tensor).__name__} of layout {tensor.layout} has no bytes of its own"
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor whose values are the bytes of one storage.

    A subclass that dispatches its own operations (DTensor, quantized wrappers) may keep its values anywhere.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return False
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout == torch.strided and not tensor.is_quantized and not dispatches


def partial_overlaps(regions: Mapping[str, Region]) -> dict[str, str]:
    """Regions may be the same storage (tied), never part of one another."""
    reasons: dict[str, str] = {}
    spans = sorted(
        (
            (region.address, region.address + region.nbytes, name)
            for name, region in regions.items()
        ),
    )
    previous: tuple[int, int, str] | None = None
    for span in spans:
        begin, end, name = span
        if begin == end:
            continue
        if previous is not None and begin < previous[1] and (begin, end) != previous[:2]:
            reasons[name] = f"shares only part of its storage with {previous[2]}"
        if previous is None or end > previous[1]:
            previous = span
    return reasons


def moved(before: Spans, now: Placement) -> list[str]:
    """Return the tensors whose storage is not where it was, or not of the size it was."""
    are = now.spans()
    return sorted(
        {name for name, number in before if before[name, number] != are.get((name, number))}
    )


class Anchors:
    """A placement's live tensors, to be found again in the pause: placing anew takes a millisecond for 30 tensors.

    Parameters
    ----------
    model, placement
        None: nothing is held.
    """

    def __init__(self, model: torch.nn.Module | None, placement: Placement | None) -> None:
        self._modules: list[torch.nn.Module] = []
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor, int, int]] = []
        if model is None or placement is None:
            return
        self._modules = _below(model)
        placed = placement.live_names()
        for prefix, module in model.named_modules(remove_duplicate=False):
            for members in (module._parameters, module._buffers):
                for leaf, tensor in members.items():
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    if tensor is not None and name in placed:
                        anchor = (members, leaf, tensor, tensor.data_ptr(), tensor.nbytes)
                        self._tensors.append(anchor)

    def hold(self, model: torch.nn.Module) -> bool:
        """Return whether every tensor is the same object, at its address, in a model of the same modules."""
        modules = _below(model)
        if len(modules) != len(self._modules) or any(map(is_not, modules, self._modules)):
            return False
        return all(
            members.get(leaf) is tensor
            and tensor.data_ptr() == address
            and tensor.nbytes == nbytes
            and tensor.untyped_storage().nbytes() >= nbytes
            for members, leaf, tensor, address, nbytes in self._tensors
        )


def _below(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return all modules but the model itself, which nobody here keeps alive."""
    return list(model.modules())[1:]
