"""Where a checkpoint's tensors go in one model: by name, or as the model's own loader copies them.

What is kept of a placement between updates: names and geometry, never storages. Placing a model anew from it gives
regions of the storages that the model has then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from gpusync.format.header import tensor_nbytes
from gpusync.placement.regions import (
    Placement,
    Region,
    byte_view,
    live_tensors,
    partial_overlaps,
    place_by_name,
    reachable,
    refused,
)
from gpusync.placement.slices import MAX_SLICES, Slice, count_slices, slices_of
from gpusync.placement.trace import Copy, trace_load
from gpusync.types import TensorEntry

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_NO_PLACE = "the loader copies it nowhere: not of this rank, stage or model"


Kind = tuple[str, tuple[int, ...]]
"""dtype and shape of a tensor in the checkpoint."""


@dataclass(frozen=True)
class Anchor:
    """A live tensor as it lay in its storage: ``offset`` in bytes."""

    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Anchor:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return cls(offset, tuple(tensor.stride()), tuple(tensor.shape), tensor.dtype)

    def is_alike(self, other: Anchor) -> bool:
        """Return whether only the place in the storage differs."""
        return replace(self, offset=0) == replace(other, offset=0)


@dataclass(frozen=True)
class Places:
    """The places of a checkpoint's tensors.

    Parameters
    ----------
    entries
        Tensor to its entry in the checkpoint, or None where that is not known; those placed by name.
    copies
        Tensor to its copies into live storages; those placed as the loader does.
    kinds
        Dtype and shape, in the checkpoint, of every tensor that has a place.
    anchors
        What the copies' geometry was found on: live name to where that tensor began in its storage, with its strides, dtype
        and shape; positions follow a tensor that moves within its storage.
    overlaps
        Pairs of those live names that shared bytes.
    ties
        Pairs of a live name that a tensor goes to, and one that none goes to and that shared its bytes: a head tied to an
        embedding, which would be left behind if it were untied.
    dropped, refused
        Tensors that have no place here, and those that cannot be updated in place, each with the reason.
    relaid
        Tensors that the engine rearranges after loading, each with its module.
    rearranged
        The live tensors that hold those, as they were when the model was attached.
    """

    entries: Mapping[str, TensorEntry | None] = field(default_factory=dict)
    copies: Mapping[str, tuple[Copy, ...]] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    anchors: Mapping[str, Anchor] = field(default_factory=dict)
    overlaps: frozenset[tuple[str, str]] = frozenset()
    ties: frozenset[tuple[str, str]] = frozenset()
    dropped: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    relaid: Mapping[str, str] = field(default_factory=dict)
    rearranged: Mapping[str, Anchor] = field(default_factory=dict)

    def is_whole(self, name: str, part: Slice) -> bool:
        """Return whether a slice is all of its tensor, contiguous."""
        return part.runs == 1 and part.nbytes == tensor_nbytes(*self.kinds[name])

    def live_names(self, names: Iterable[str]) -> set[str]:
        """Return the live tensors that copies of these tensors go to."""
        return {copy.live_name for name in names for copy in self.copies.get(name, ())}

    def place(self, model: torch.nn.Module) -> Placement:
        """Return the regions of the model's storages as they are now.

        Raises
        ------
        PlacementError
            A tensor has no place any more, with a reason for each.
        """
        _refuse_untied(live_tensors(model), self.ties)
        placed = _place_copies(model, self) if self.copies else place_by_name(model, self.entries)
        return _with_rearranged(model, placed, self.rearranged) if self.rearranged else placed

    def anchored(self, model: torch.nn.Module, entries: Mapping[str, TensorEntry]) -> Places:
        """Return these places with what later placements are held against: the model and checkpoint as they are now."""
        live = live_tensors(model)
        used = {copy.live_name for copies in self.copies.values() for copy in copies}
        placed = self.copies.keys() | self.entries.keys()
        return replace(
            self,
            kinds={name: (entries[name].dtype, entries[name].shape) for name in placed},
            anchors={name: Anchor.of(live[name]) for name in used},
            overlaps=find_overlaps({name: live[name] for name in used}),
            ties=_find_ties(live, used | self.entries.keys()),
        )

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

    The model is left as it is. A place is not a proof: see :func:`gpusync.live.attaching.prove`.

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
    dropped = dict.fromkeys(trace.dropped, _NO_PLACE)
    held = {copy.live_name for found in copies.values() for copy in found}
    for name in dropped.keys() & (live_tensors(model).keys() - held):
        del dropped[name]
        reasons[name] = (
            "the loader did not copy it in the trace, and the model has a tensor of its name"
        )
    return Places({}, copies, dropped=dropped, refused=reasons).anchored(model, entries)


def _place_copies(model: torch.nn.Module, places: Places) -> Placement:
    live = live_tensors(model)
    names_of: dict[int, list[str]] = {}
    for name, tensor in live.items():
        if reachable(tensor) is None:
            names_of.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    regions: dict[str, Region] = {}
    slices: dict[str, tuple[Slice, ...]] = {}
    reasons = _retied(live, places)
    for name, copies in places.copies.items():
        parts: list[Slice] = []
        for copy in copies:
            found = _found(live.get(copy.live_name), copy, places)
            if isinstance(found, str):
                reasons[name] = found
                break
            here, data = found
            parts += slices_of(here, data, tuple(names_of[data.data_ptr()]))
        if name not in reasons and len({part.device for part in parts}) > 1:
            reasons[name] = "it lies on several devices"
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


def _with_rearranged(
    model: torch.nn.Module, placed: Placement, rearranged: Mapping[str, Anchor]
) -> Placement:
    """Add the regions of live tensors that are rearranged after loading."""
    live = live_tensors(model)
    regions: dict[str, Region] = {}
    reasons: dict[str, str] = {}
    taken = {data.untyped_storage().data_ptr() for data in placed.memory()}
    for name, before in rearranged.items():
        found = _rearranged_bytes(live.get(name), before)
        if isinstance(found, str):
            reasons[name] = found
            continue
        address = found.untyped_storage().data_ptr()
        if found.numel() and address in taken:
            reasons[name] = "it shares its storage, and is rearranged after loading"
        taken.add(address)
        names = tuple(other for other, tensor in live.items() if tensor is live[name])
        regions[name] = Region(found, names)
    if reasons:
        raise refused(reasons)
    placed = replace(placed, relaid=regions)
    return replace(placed, unmanaged=tuple(sorted(live.keys() - placed.live_names())))


def _rearranged_bytes(tensor: torch.Tensor | None, before: Anchor) -> torch.Tensor | str:
    """Return the flat bytes of a rearranged live tensor, or why they cannot be reached."""
    if tensor is None:
        return "its parameter is gone"
    reason = reachable(tensor)
    if reason is not None:
        return reason
    if not before.is_alike(Anchor.of(tensor)):
        return "it has another shape, layout or dtype than when the model was attached"
    if not tensor.is_contiguous():
        return "not contiguous in memory"
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < end:
        return "its storage was freed or offloaded"
    return byte_view(tensor)


def _retied(live: Mapping[str, torch.Tensor], places: Places) -> dict[str, str]:
    """Return a reason for each live tensor that has come to share bytes with another, or does so no more."""
    used = {name: live[name] for name in places.anchors if name in live}
    changed = find_overlaps(used) ^ places.overlaps
    return {
        name: f"it has been tied to, or untied from, {other} since the model was attached; attach it again"
        for pair in changed
        for name, other in (pair, pair[::-1])
        if name in live and other in live
    }


def _find_ties(
    live: Mapping[str, torch.Tensor], fed: Collection[str]
) -> frozenset[tuple[str, str]]:
    """Return the pairs of a name that is fed, and one that is not and shares its bytes."""
    pairs = find_overlaps(live)
    either_way = pairs | {(other, name) for name, other in pairs}
    return frozenset(pair for pair in either_way if pair[0] in fed and pair[1] not in fed)


def _refuse_untied(live: Mapping[str, torch.Tensor], ties: Collection[tuple[str, str]]) -> None:
    """Refuse a model in which a name has lost the tie that fed it; one that is gone altogether is no harm."""
    reasons = {
        other: f"it has been untied from {name} since the model was attached, and no tensor goes to it; attach it again"
        for name, other in ties
        if name in live
        and other in live
        and not find_overlaps({name: live[name], other: live[other]})
    }
    if reasons:
        raise refused(reasons)


def find_overlaps(tensors: Mapping[str, torch.Tensor]) -> frozenset[tuple[str, str]]:
    """Return the pairs of names, sorted, whose tensors' spans in one storage meet."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + span_nbytes(tensor), name)
        for name, tensor in tensors.items()
        if tensor.numel() and reachable(tensor) is None
    )
    found: set[tuple[str, str]] = set()
    open_ones: list[tuple[int, str]] = []
    for begin, end, name in spans:
        open_ones = [(other_end, other) for other_end, other in open_ones if other_end > begin]
        found |= {(min(name, other), max(name, other)) for _, other in open_ones}
        open_ones.append((end, name))
    return frozenset(found)


def span_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last, which must not be empty."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size()


def _found(
    tensor: torch.Tensor | None, copy: Copy, places: Places
) -> tuple[Copy, torch.Tensor] | str:
    """Return a copy where its live tensor is now, with the flat bytes of the storage, or why it cannot be reached."""
    if tensor is None:
        return "its parameter is gone"
    reason = reachable(tensor)
    if reason is not None:
        return reason
    before, now = places.anchors[copy.live_name], Anchor.of(tensor)
    if not before.is_alike(now):
        return "its parameter has another shape, layout or dtype than when the model was attached"
    here = replace(copy, live_offset=copy.live_offset - before.offset + now.offset)
    storage = tensor.untyped_storage()
    reach = sum((size - 1) * step for size, step in zip(here.shape, here.live_strides, strict=True))
    if copy.nbytes and storage.nbytes() < here.live_offset + reach + 1:
        return "its storage was freed or offloaded"
    return here, torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
