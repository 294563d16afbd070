"""Live models: which version each holds, where its tensors are, and who may change them.

A model's state is kept beside it, weakly: it goes when the model goes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gpusync.errors import ModelPoisonedError, PlacementError
from gpusync.folder.marker import Marker
from gpusync.placement.places import Places
from gpusync.placement.regions import Placement, Spans
from gpusync.placement.relayout import Relaid


@dataclass
class LiveState:
    """What is known of one live model.

    Parameters
    ----------
    identity
        Version, fingerprint and history of the bytes in the model.
    places
        Where a checkpoint's tensors go in the model; None until its names are known (a chain without checkpoint or base
        names only what changes).
    spans
        Addresses of the regions as they were last seen. Not the storages: an engine may free them.
    relaid
        What is known of modules that the engine rearranges after loading; None where there are none.
    """

    identity: Marker
    places: Places | None = None
    spans: Spans = field(default_factory=dict)
    poisoned: bool = False
    relaid: Relaid | None = None


class Lease:
    """The right to prove, read for an update, or change one model's weights; it ends with its holder."""

    def __init__(self) -> None:
        self.given_back = False
        self._extents: Sequence[tuple[int, int]] = ()

    def give_back(self) -> None:
        """Let the next one have it. Giving back again is fine."""
        self.given_back = True

    def cover(self, placement: Placement) -> None:
        """Hold these weights against other models that share some of them, too.

        Two updates stored at once into the same words would each be checked against the other's half.

        Raises
        ------
        PlacementError
            An update of a model that shares weights with this one is being prepared, or is prepared.
        """
        extents = placement.extents()
        with _leases_lock:
            for other in _leases_held():
                if other is not self and _meet(extents, other._extents):
                    raise PlacementError(
                        "an update of another model that shares weights with this one is prepared; commit or discard "
                        "it first"
                    )
            self._extents = extents


def _meet(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    """Return whether two sets of address ranges, each sorted and disjoint, have an address in common."""
    left, right = 0, 0
    while left < len(some) and right < len(others):
        if some[left][1] <= others[right][0]:
            left += 1
        elif others[right][1] <= some[left][0]:
            right += 1
        else:
            return True
    return False


def _leases_held() -> list[Lease]:
    return [lease for lease in _leases_made if not lease.given_back]


_states: weakref.WeakKeyDictionary[torch.nn.Module, LiveState] = weakref.WeakKeyDictionary()
_leases: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Lease]] = (
    weakref.WeakKeyDictionary()
)
_leases_made: weakref.WeakSet[Lease] = weakref.WeakSet()
_leases_lock = threading.Lock()


def take_lease(model: torch.nn.Module) -> Lease:
    """Return the lease on a model's weights.

    Raises
    ------
    PlacementError
        An update of the model is being prepared, or is prepared.
    """
    with _leases_lock:
        ref = _leases.get(model)
        held = ref() if ref is not None else None
        if held is not None and not held.given_back:
            raise PlacementError("an update of this model is prepared; commit or discard it first")
        lease = Lease()
        _leases[model] = weakref.ref(lease)
        _leases_made.add(lease)
        return lease


def live_version(model: torch.nn.Module) -> int | None:
    """Return the version in a model's live parameters; None before it was attached, or once it is poisoned."""
    state = _states.get(model)
    return None if state is None or state.poisoned else state.identity.version


def keep_state(model: torch.nn.Module, state: LiveState) -> None:
    """Let this be what is known of a model."""
    _states[model] = state


def known_state(model: torch.nn.Module) -> LiveState | None:
    """Return a model's state, poisoned or not; None before it was attached."""
    return _states.get(model)


def forget_state(model: torch.nn.Module) -> None:
    """Take note that a model's weights were replaced: its next update proves it anew. A poisoned one stays so."""
    state = _states.get(model)
    if state is not None and not state.poisoned:
        del _states[model]


def state_of(model: torch.nn.Module) -> LiveState | None:
    """Return a model's state, None before it was attached.

    Raises
    ------
    ModelPoisonedError
        An earlier commit left the model in an unknown state.
    """
    state = _states.get(model)
    if state is not None and state.poisoned:
        raise ModelPoisonedError("this model's live weights are in an unknown state")
    return state
