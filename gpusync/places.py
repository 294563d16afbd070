"""Where a checkpoint's tensors go in one model: by name, or as the model's own loader copies them.

What is kept of a placement between updates: names and geometry, never storages. Placing a model anew from it gives
regions of the storages that the model has then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from gpusync.placement import (
    Placement,
    Region,
    live_tensors,
    partial_overlaps,
    place_by_name,
    reachable,
    refused,
)
from gpusync.slices import MAX_SLICES, Slice, count_slices, slices_of
from gpusync.trace import Copy, trace_load
from gpusync.types import TensorEntry

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_NO_PLACE = "the loader copies it nowhere: not of this rank, stage or model"


@dataclass(frozen=True)
class Places:
    """The places of a checkpoint's tensors.

    Parameters
    ----------
    entries
        Tensor to its entry in the checkpoint, or None where that is not known; those placed by name.
    copies
        Tensor to its copies into live storages; those placed as the loader does.
    nbytes
        Sizes of the tensors in ``copies``.
    dropped, refused
        Tensors that have no place here, and those that cannot be updated in place, each with the reason.
    """

    entries: Mapping[str, TensorEntry | None] = field(default_factory=dict)
    copies: Mapping[str, tuple[Copy, ...]] = field(default_factory=dict)
    nbytes: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def is_whole(self, name: str, part: Slice) -> bool:
        """Return whether a slice is all of its tensor, contiguous."""
        return part.runs == 1 and part.nbytes == self.nbytes[name]

    def place(self, model: torch.nn.Module) -> Placement:
        """Return the regions of the model's storages as they are now.

        Raises
        ------
        PlacementError
            A tensor has no place any more, with a reason for each.
        """
        if not self.copies:
            return place_by_name(model, self.entries)
        return _place_copies(model, self)

    def without_shapes(self) -> Places:
        """Return these places for a model that was proven: only where its tensors are is looked at again."""
        return replace(self, entries=dict.fromkeys(self.entries))

    def less(self, reasons: Mapping[str, str]) -> Places:
        """Return these places with some of the copies refused."""
        copies = {name: found for name, found in self.copies.items() if name not in reasons}
        return replace(self, copies=copies, refused={**self.refused, **reasons})


def trace_places(
    model: torch.nn.Module, entries: Mapping[str, TensorEntry], load_weights: LoadWeights
) -> Places:
    """Derive the places of all tensors from what the model's own loader would do with them.

    The model is left as it is. A place is not a proof: see :func:`gpusync.attaching.prove`.

    Raises
    ------
    PlacementError
        No tensor can be updated in place.
    """
    trace = trace_load(model, entries, load_weights)
    reasons = dict(trace.refused)
    copies: dict[str, tuple[Copy, ...]] = {}
    for name, found in trace.copies.items():
        if sum(map(count_slices, found)) > MAX_SLICES:
            reasons[name] = f"the loader copies it in more than {MAX_SLICES} strided parts"
        else:
            copies[name] = found
    if not copies:
        raise refused(reasons or dict.fromkeys(entries, _NO_PLACE))
    nbytes = {name: entries[name].nbytes for name in copies}
    return Places({}, copies, nbytes, dict.fromkeys(trace.dropped, _NO_PLACE), reasons)


def _place_copies(model: torch.nn.Module, places: Places) -> Placement:
    live = live_tensors(model)
    names_of: dict[int, list[str]] = {}
    for name, tensor in live.items():
        if reachable(tensor) is None:
            names_of.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    regions: dict[str, Region] = {}
    slices: dict[str, tuple[Slice, ...]] = {}
    reasons: dict[str, str] = {}
    for name, copies in places.copies.items():
        parts: list[Slice] = []
        for copy in copies:
            data = _storage_of(live.get(copy.live_name), copy)
            if isinstance(data, str):
                reasons[name] = data
                break
            live_names = tuple(names_of[data.data_ptr()])
            parts += slices_of(copy, data, live_names)
        if name in reasons:
            continue
        if len(parts) == 1 and places.is_whole(name, parts[0]):
            part = parts[0]
            region = part.data[part.live_begin : part.live_begin + part.nbytes]
            regions[name] = Region(region, part.live_names)
        else:
            slices[name] = tuple(parts)
    reasons.update(partial_overlaps(regions))
    if reasons:
        raise refused(reasons)
    placed = Placement(regions, (), slices)
    return replace(placed, unmanaged=tuple(sorted(live.keys() - placed.live_names())))


def _storage_of(tensor: torch.Tensor | None, copy: Copy) -> torch.Tensor | str:
    """Return the flat bytes of the storage that a copy goes to, or why they cannot be reached."""
    if tensor is None:
        return "its parameter is gone"
    reason = reachable(tensor)
    if reason is not None:
        return reason
    storage = tensor.untyped_storage()
    reach = sum((size - 1) * step for size, step in zip(copy.shape, copy.live_strides, strict=True))
    if copy.nbytes and storage.nbytes() < copy.live_offset + reach + 1:
        return "its storage was freed or offloaded"
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
