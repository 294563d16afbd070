"""Where a checkpoint's tensors go in one model: by name, or as the model's own loader copies them.

What is kept of a placement between updates: names and geometry, never storages. Placing a model anew from it gives
regions of the storages that the model has then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

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
        Tensor to its one copy, of all its bytes, into a live storage; those placed as the loader does.
    dropped, refused
        Tensors that have no place here, and those that cannot be updated in place, each with the reason.
    """

    entries: Mapping[str, TensorEntry | None] = field(default_factory=dict)
    copies: Mapping[str, Copy] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

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
        return Places(dict.fromkeys(self.entries), self.copies, self.dropped, self.refused)

    def less(self, reasons: Mapping[str, str]) -> Places:
        """Return these places with some of the copies refused."""
        copies = {name: copy for name, copy in self.copies.items() if name not in reasons}
        return Places(self.entries, copies, self.dropped, {**self.refused, **reasons})


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
    copies: dict[str, Copy] = {}
    for name, found in trace.copies.items():
        reason = _why_not_whole(found, entries[name].nbytes)
        if reason is None:
            copies[name] = found[0]
        else:
            reasons[name] = reason
    if not copies:
        raise refused(reasons or dict.fromkeys(entries, _NO_PLACE))
    return Places({}, copies, dict.fromkeys(trace.dropped, _NO_PLACE), reasons)


def _why_not_whole(copies: tuple[Copy, ...], nbytes: int) -> str | None:
    if len(copies) > 1:
        return f"the loader copies it to {len(copies)} places, and this release updates one"
    copy = copies[0]
    if len(copy.shape) > 1:
        return "the loader copies it in strides, and this release updates contiguous regions"
    if copy.nbytes != nbytes:
        return f"the loader copies {copy.nbytes} of its {nbytes} bytes, and this release updates whole tensors"
    return None


def _place_copies(model: torch.nn.Module, places: Places) -> Placement:
    live = live_tensors(model)
    names_of: dict[int, list[str]] = {}
    for name, tensor in live.items():
        if reachable(tensor) is None:
            names_of.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    regions: dict[str, Region] = {}
    reasons: dict[str, str] = {}
    for name, copy in places.copies.items():
        found = _bytes_at(live.get(copy.live_name), copy)
        if isinstance(found, str):
            reasons[name] = found
        else:
            regions[name] = Region(found, tuple(names_of[found.untyped_storage().data_ptr()]))
    reasons.update(partial_overlaps(regions))
    if reasons:
        raise refused(reasons)
    fed = {live_name for region in regions.values() for live_name in region.live_names}
    return Placement(regions, tuple(sorted(live.keys() - fed)))


def _bytes_at(tensor: torch.Tensor | None, copy: Copy) -> torch.Tensor | str:
    """Return the flat bytes that a copy goes to, or why they cannot be reached."""
    if tensor is None:
        return "its parameter is gone"
    reason = reachable(tensor)
    if reason is not None:
        return reason
    storage = tensor.untyped_storage()
    if storage.nbytes() < copy.live_offset + copy.nbytes:
        return "its storage was freed or offloaded"
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return data[copy.live_offset : copy.live_offset + copy.nbytes]
