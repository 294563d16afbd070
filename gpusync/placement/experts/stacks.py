"""Tensors that the model stacks: ``prefix.N.kind.weight`` of all N, in rows of parameters of one module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gpusync.placement.experts.spots import (
    Found,
    Read,
    Spot,
    Spots,
    ambiguous,
    cut,
    dtype_fits,
    misfit,
)
from gpusync.types import TensorEntry

GENERIC = ("weight", "bias")
"""Last parts of names that say nothing without the part before them."""

Key = tuple[str, ...]
"""What names a stack on both sides: the last part of its name, and the numbers before it."""


@dataclass(frozen=True)
class _Member:
    """A tensor's name as one of a stack's: ``prefix.number.kind``, with or without a generic last part."""

    prefix: str
    number: int
    kind: str
    key: Key


@dataclass(frozen=True)
class _Candidate:
    """A member, and the runs that hold its bytes."""

    member: _Member
    spots: Sequence[Spot]


def place_stacked(
    wanted: Mapping[str, TensorEntry], free: Mapping[str, torch.Tensor], read: Read, found: Found
) -> dict[str, TensorEntry]:
    """Place the tensors that parameters stack, and return those that none could stack.

    Parameters
    ----------
    wanted
        Tensors of names that the model does not have.
    free
        Parameters of names that the checkpoint does not have.
    found
        Takes the places and reasons.
    """
    stacks: dict[Key, list[str]] = {}
    for live_name in free:
        *path, _ = live_name.split(".")
        if path:
            stacks.setdefault((path[-1], *numbers_of(path[:-1])), []).append(live_name)
    rest: dict[str, TensorEntry] = {}
    known: dict[tuple[Key, str, tuple[int, ...]], Spots] = {}
    groups: dict[str, dict[str, _Candidate]] = {}
    for name, entry in wanted.items():
        member = _member(name)
        near = {live: free[live] for live in stacks.get(member.key, ())} if member else {}
        fitting = {live: tensor for live, tensor in near.items() if _stacks(tensor, entry)}
        if member is None or not fitting:
            rest[name] = entry
            if near:
                found.refuse(name, misfit(entry, near))
            continue
        what = (member.key, entry.dtype, entry.shape)
        if what not in known:
            known[what] = Spots(fitting, entry.shape)
        spots = known[what].holding(entry, read)
        if spots:
            groups.setdefault(member.prefix, {})[name] = _Candidate(member, spots)
        else:
            found.refuse(
                name,
                f"no contiguous run of {known[what]} holds its bytes: transposed, interleaved, or changed",
            )
    for group in groups.values():
        _settle(group, found)
    return rest


def numbers_of(parts: Iterable[str]) -> tuple[str, ...]:
    """Return the parts of a name that are numbers."""
    return tuple(part for part in parts if part.isdecimal())


def _settle(group: Mapping[str, _Candidate], found: Found) -> None:
    """Place the tensors of one stack: those that one run holds, then those whose row and part these show."""
    sure = {name: each.spots[0] for name, each in group.items() if len(each.spots) == 1}
    claims = Counter((spot.live_name, spot.row, spot.part) for spot in sure.values())
    rows: dict[int, set[tuple[str, int]]] = {}
    parts: dict[str, set[tuple[int, int]]] = {}
    for name, spot in sure.items():
        found.place(name, spot)
        if claims[spot.live_name, spot.row, spot.part] == 1:
            member = group[name].member
            rows.setdefault(member.number, set()).add(_row_of(spot))
            parts.setdefault(member.kind, set()).add((spot.part, spot.parts))
    for name in group.keys() - sure.keys():
        member, left = group[name].member, group[name].spots
        if member.number in rows:
            left = [spot for spot in left if rows[member.number] == {_row_of(spot)}]
        if len(left) > 1 and member.kind in parts:
            left = [spot for spot in left if parts[member.kind] == {(spot.part, spot.parts)}]
        if len(left) == 1:
            found.place(name, left[0])
        else:
            found.refuse(name, ambiguous(group[name].spots))


def _row_of(spot: Spot) -> tuple[str, int]:
    """Return which row of which module's parameters a run lies in."""
    return spot.live_name.rpartition(".")[0], spot.row


def _member(name: str) -> _Member | None:
    """Read a tensor's name as one of a stack, by the last number in it."""
    parts = name.split(".")
    at = max((at for at, part in enumerate(parts) if part.isdecimal()), default=0)
    if not 0 < at < len(parts) - 1 or parts[at - 1].isdecimal():
        return None
    prefix, kind = parts[:at], parts[at + 1 :]
    if len(kind) > 1 and kind[-1] in GENERIC:
        kind = kind[:-1]
    key = (prefix[-1], *numbers_of(prefix))
    return _Member(".".join(prefix), int(parts[at]), ".".join(kind), key)


def _stacks(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    """Return whether a parameter has the dtype of a tensor, and its shape behind one dimension more."""
    shape = tuple(tensor.shape)
    return (
        len(shape) == len(entry.shape) + 1
        and cut(shape, entry.shape) is not None
        and dtype_fits(tensor, entry)
    )
