"""Tensors that the model keeps whole under another name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from gpusync.placement.experts.spots import Found, Read, Spots, ambiguous, dtype_fits, misfit
from gpusync.placement.experts.stacks import GENERIC, numbers_of
from gpusync.types import TensorEntry

_Likeness = tuple[int, int]
"""How many last parts two names share, and how many anywhere."""


def place_renamed(
    wanted: Mapping[str, TensorEntry], free: Mapping[str, torch.Tensor], read: Read, found: Found
) -> None:
    """Place tensors on parameters of the likest names, where these are likest the other way too; bytes decide between several.

    Parameters
    ----------
    wanted
        Tensors of names that the model does not have, and that it does not stack.
    free
        Parameters of names that the checkpoint does not have.
    found
        Takes the places and reasons; a reason that is there already stays.
    """
    lives: dict[tuple[str, ...], list[str]] = {}
    for live_name in free:
        lives.setdefault(_key(live_name), []).append(live_name)
    likeness: dict[str, dict[str, _Likeness]] = {}
    likest: dict[str, _Likeness] = {}
    for name, entry in wanted.items():
        near = {live: free[live] for live in lives.get(_key(name), ())}
        likeness[name] = {
            live: _likeness(name, live)
            for live, tensor in near.items()
            if dtype_fits(tensor, entry) and tuple(tensor.shape) == entry.shape
        }
        for live, score in likeness[name].items():
            likest[live] = max(score, likest.get(live, score))
        if near and not likeness[name]:
            found.refuse(name, misfit(entry, near))
    for name, scores in likeness.items():
        best = max(scores.values(), default=None)
        chosen = {live: free[live] for live in scores if scores[live] == best == likest[live]}
        if chosen:
            _place_on(wanted[name], chosen, read, found)
        else:
            found.refuse(
                name, "no parameter of that name, nor one that holds it renamed or stacked"
            )


def _place_on(
    entry: TensorEntry, chosen: Mapping[str, torch.Tensor], read: Read, found: Found
) -> None:
    spots = Spots(chosen, entry.shape)
    holding = spots.holding(entry, read)
    if len(holding) == 1:
        found.place(entry.name, holding[0])
    elif holding:
        found.refuse(entry.name, ambiguous(holding))
    else:
        found.refuse(entry.name, f"its bytes are not those of {spots}")


def _key(name: str) -> tuple[str, ...]:
    """Return what a rename leaves as it is: the last parts of a name, and its numbers."""
    parts = name.split(".")
    last = parts[-2:] if parts[-1] in GENERIC else parts[-1:]
    return (*last, "", *numbers_of(parts))


def _likeness(name: str, live_name: str) -> _Likeness:
    ours, theirs = name.split("."), live_name.split(".")
    suffix = 0
    for left, right in zip(reversed(ours), reversed(theirs), strict=False):
        if left != right:
            break
        suffix += 1
    return suffix, sum((Counter(ours) & Counter(theirs)).values())
