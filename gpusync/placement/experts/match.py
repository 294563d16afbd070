"""Places of a checkpoint's tensors in a plain module: by name, stacked, or renamed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpusync.errors import PlacementError
from gpusync.placement.experts.renames import place_renamed
from gpusync.placement.experts.spots import Found, Read, Spot
from gpusync.placement.experts.stacks import place_stacked
from gpusync.placement.places import Places
from gpusync.placement.regions import (
    Region,
    live_tensors,
    partial_overlaps,
    place_by_name,
    reachable,
    refused,
)
from gpusync.types import TensorEntry


def match_slices(model: torch.nn.Module, entries: Mapping[str, TensorEntry], read: Read) -> Places:
    """Find where a checkpoint's tensors lie in a model that renames them, or stacks them into larger parameters.

    A tensor of a parameter's own name is there, whole. Any other is looked for as one contiguous run in the parameters that
    its name allows: those that stack ``prefix.N.rest`` of all N along a first dimension, alone or two to a row, else one
    with the same last parts and numbers (a rename). What is transposed, interleaved, cast or padded is refused.

    A place is not a proof, since most bytes were not looked at: see :func:`gpusync.live.attaching.prove`.

    Parameters
    ----------
    model
        Read only; device memory by the thread's current stream, which is waited for.
    entries
        The checkpoint's tensors.
    read
        Reads bytes of them: a few of each that is not there by name, and all of those that a few do not tell apart.

    Returns
    -------
    Places
        One copy of all its bytes for every placed tensor, and a reason for every other. No two tensors share bytes, unless
        the model ties the parameters of their names.

    Raises
    ------
    PlacementError
        No tensor has a place.
    """
    live = live_tensors(model)
    found = _by_name(model, {name: entry for name, entry in entries.items() if name in live})
    fed = {spot.data.data_ptr() for spot in found.spots.values()}
    free = {
        name: tensor
        for name, tensor in live.items()
        if name not in entries and _is_byte_image(tensor) and tensor.data_ptr() not in fed
    }
    missing = {name: entry for name, entry in entries.items() if name not in live}
    rest = place_stacked(missing, free, read, found)
    place_renamed(rest, free, read, found)
    _refuse_shared(found)
    if not found.spots:
        raise refused(found.reasons)
    copies = {
        name: (spot.copy(name, live[spot.live_name].element_size()),)
        for name, spot in found.spots.items()
    }
    return Places(copies=copies, refused=found.reasons).anchored(model, entries)


def _by_name(model: torch.nn.Module, wanted: Mapping[str, TensorEntry]) -> Found:
    """Place tensors on the parameters of their own names."""
    found = Found()
    while True:
        left = {name: entry for name, entry in wanted.items() if name not in found.reasons}
        try:
            regions = place_by_name(model, left).regions
        except PlacementError as err:
            found.reasons.update(err.reasons)
            continue
        found.spots.update({name: Spot(name, region.data) for name, region in regions.items()})
        return found


def _refuse_shared(found: Found) -> None:
    """Refuse the tensors that would share bytes, other than under names that the model ties."""
    claimed: dict[tuple[str, int], list[str]] = {}
    for name, spot in found.spots.items():
        if spot.data.numel():
            claimed.setdefault((spot.live_name, spot.data.data_ptr()), []).append(name)
    for (live_name, _), names in claimed.items():
        for name in names if len(names) > 1 else ():
            other = next(other for other in names if other != name)
            found.refuse(name, f"the run of {live_name} that holds its bytes holds {other}'s too")
    regions = {name: Region(spot.data, (spot.live_name,)) for name, spot in found.spots.items()}
    for name, reason in partial_overlaps(regions).items():
        found.refuse(name, reason)


def _is_byte_image(tensor: torch.Tensor) -> bool:
    """Return whether a parameter's values are contiguous bytes that are there."""
    if reachable(tensor) is not None or not tensor.is_contiguous():
        return False
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return not tensor.is_conj() and not tensor.is_neg() and end <= tensor.untyped_storage().nbytes()
