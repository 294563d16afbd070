"""Live models: which version each holds, where its tensors are, and the proof of both.

A model's state is kept beside it, weakly: it goes when the model goes.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpusync.chain import Chain
from gpusync.config import Settings
from gpusync.digest import fingerprint
from gpusync.errors import FormatError, ModelPoisonedError, PlacementError, SourceNotReadyError
from gpusync.files import OpenFiles
from gpusync.fold import Bytes, Fold, run_parallel
from gpusync.layout import Layout, absolute_path, read_layout
from gpusync.marker import Marker, MarkerState, read_marker
from gpusync.materialize import NOTHING_TO_FOLD, plan_tensor
from gpusync.placement import (
    Placement,
    Region,
    Spans,
    moved,
    place_by_name,
    refused,
    wait_for_writes,
)
from gpusync.types import AttachReport

_ATTACH_ATTEMPTS = 3


@dataclass
class LiveState:
    """What is known of one live model.

    Parameters
    ----------
    identity
        Version, fingerprint and history of the bytes in the model.
    spans
        Where each tensor was last seen; None until a checkpoint's names are known (a chain without checkpoint or base names
        only what changes). Not the storages: an engine may free them.
    """

    identity: Marker
    spans: Spans | None = None
    poisoned: bool = False


class Lease:
    """The right to prove, read for an update, or change one model's weights; it ends with its holder."""

    def __init__(self) -> None:
        self.given_back = False

    def give_back(self) -> None:
        """Let the next one have it. Giving back again is fine."""
        self.given_back = True


_states: weakref.WeakKeyDictionary[torch.nn.Module, LiveState] = weakref.WeakKeyDictionary()
_leases: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Lease]] = (
    weakref.WeakKeyDictionary()
)
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
        return lease


def live_version(model: torch.nn.Module) -> int | None:
    """Return the version in a model's live parameters; None before it was attached, or once it is poisoned."""
    state = _states.get(model)
    return None if state is None or state.poisoned else state.identity.version


def known_state(model: torch.nn.Module) -> LiveState | None:
    """Return a model's state, poisoned or not; None before it was attached."""
    return _states.get(model)


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


def attach(
    model: torch.nn.Module,
    checkpoint_dir: str | os.PathLike[str],
    *,
    load_weights: Any = None,
    version: int | None = None,
    relayout: bool = False,
) -> AttachReport:
    """Place a checkpoint's tensors in a live model, and prove by bytes that the model holds that checkpoint.

    Parameters
    ----------
    model
        A module whose parameters and buffers are named as in the checkpoint.
    checkpoint_dir
        The checkpoint that the model was loaded from: the base, or a local checkpoint with its marker.
    load_weights
        The model's own loader, to derive the placement from; not supported in this release.
    version
        The version that the checkpoint is; default its marker's, else 0.
    relayout
        Accept relaid parameters; there are none in a plain module.

    Raises
    ------
    PlacementError
        A tensor has no place, or its live bytes are not the checkpoint's; with a reason per tensor.
    SourceNotReadyError, FormatError
        The folder is not a readable checkpoint.
    """
    refuse_tracing(load_weights)
    start = time.monotonic()
    folder = absolute_path(checkpoint_dir, SourceNotReadyError, "checkpoint_dir")
    state_of(model)
    lease = take_lease(model)
    try:
        state, placement = _attach(model, folder, version)
    finally:
        lease.give_back()
    return AttachReport(
        version=state.identity.version,
        placed={name: region.live_names for name, region in placement.regions.items()},
        placed_bytes=placement.nbytes,
        unmanaged=placement.unmanaged,
        seconds=time.monotonic() - start,
    )


def attach_first(model: torch.nn.Module, chain: Chain) -> LiveState:
    """Attach a model at its first update: to the local checkpoint it was loaded from, else to the base.

    The caller holds the lease. Without either the model is taken to hold version 0; then the digests of what changes are the only proof.

    Raises
    ------
    PlacementError
        The model holds neither.
    """
    failures = []
    for folder in (chain.checkpoint, chain.base_dir):
        if folder is None or (folder == chain.checkpoint and read_marker(folder).marker is None):
            continue
        try:
            return _attach(model, folder, None)[0]
        except (PlacementError, SourceNotReadyError, FormatError) as err:
            failures.append(err)
    if failures:
        raise failures[-1]
    state = _states[model] = LiveState(Marker(0))
    return state


def current_placement(
    model: torch.nn.Module, state: LiveState, chain: Chain, names: set[str]
) -> Placement:
    """Return where the tensors are now, re-proving the model if its parameters moved.

    Raises
    ------
    PlacementError
        A tensor has no place any more, or moved and is not provably the same.
    """
    if state.spans is None:
        return place_by_name(model, dict.fromkeys(names))
    now = place_by_name(model, dict.fromkeys(state.spans))
    gone = moved(state.spans, state.spans, now)
    if gone:
        _prove_again(model, state, chain, gone)
        now = place_by_name(model, dict.fromkeys(state.spans))
    state.spans = now.spans()
    return now


def prove(placement: Placement, layout: Layout, files: OpenFiles, settings: Settings) -> None:
    """Compare every placed region with the checkpoint's bytes.

    Raises
    ------
    PlacementError
        Naming the tensors whose live bytes differ.
    """
    fold = Fold(settings.piece_bytes, settings.workers)

    def one(item: tuple[str, Region]) -> tuple[str, int | None]:
        name, region = item
        plan = plan_tensor(name, layout, NOTHING_TO_FOLD, files, known={}, from_local=False)
        sink = _CompareSink(region)
        with region.reading():
            fold.run(plan.nbytes, plan.origin, (), sink, ())
        return name, sink.first_difference

    wait_for_writes(placement)
    items = sorted(placement.regions.items(), key=lambda item: item[1].nbytes, reverse=True)
    found = dict(run_parallel(one, items, settings.workers))
    reasons = {
        name: f"live bytes differ from {layout.folder} at byte {offset} of the tensor"
        for name, offset in found.items()
        if offset is not None
    }
    if reasons:
        raise refused(reasons)


def refuse_tracing(load_weights: Any) -> None:
    """Placement through a model's own loader comes with the engines.

    Raises
    ------
    PlacementError
        A loader was given.
    """
    if load_weights is not None:
        raise PlacementError(
            "placement through load_weights is not part of this release; leave it out for a module whose "
            "parameters are named as in the checkpoint"
        )


class _CompareSink:
    """Notes the first byte at which a tensor differs from live memory."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.first_difference: int | None = None

    def write(self, piece: Bytes, offset: int) -> None:
        if self.first_difference is not None:
            return
        live = self._region.read(offset, piece.size)
        if not np.array_equal(piece, live):
            self.first_difference = offset + int(np.flatnonzero(piece != live)[0])


def _attach(
    model: torch.nn.Module, folder: Path, version: int | None
) -> tuple[LiveState, Placement]:
    """Prove a model against a folder that stands still meanwhile.

    Shards of one version under the marker of the next would give the model an identity that its bytes do not have.
    """
    for attempt in range(1, _ATTACH_ATTEMPTS + 1):
        found = read_marker(folder)
        try:
            state, placement = _proven(model, folder, found, version)
        except (PlacementError, SourceNotReadyError, FormatError):
            if attempt == _ATTACH_ATTEMPTS or read_marker(folder) == found:
                raise
            continue
        if read_marker(folder) == found:
            _states[model] = state
            return state, placement
    raise SourceNotReadyError(
        "the checkpoint was swapped each time it was read; attach again", file=str(folder)
    )


def _proven(
    model: torch.nn.Module, folder: Path, found: MarkerState, version: int | None
) -> tuple[LiveState, Placement]:
    settings = Settings.from_env()
    with OpenFiles(settings.max_open_files, settings.source_retries) as files:
        layout = read_layout(folder, files, settings)
        placement = place_by_name(model, layout.entries())
        prove(placement, layout, files, settings)
    return LiveState(_identity(found, layout, version), placement.spans()), placement


def _identity(found: MarkerState, layout: Layout, version: int | None) -> Marker:
    if (
        found.state == "ours"
        and found.marker is not None
        and version in (None, found.marker.version)
    ):
        return found.marker
    if version is None:
        version = found.marker.version if found.marker is not None else 0
    headers = {name: shard.header.raw for name, shard in layout.shards.items()}
    base = fingerprint(layout.index_raw, headers) if version == 0 else None
    return Marker(version, fingerprint=base)


def _prove_again(model: torch.nn.Module, state: LiveState, chain: Chain, gone: list[str]) -> None:
    """Re-derive and re-prove a model whose parameters moved, against a checkpoint of its own version."""
    folder = chain.base_dir if state.identity.version == 0 else chain.checkpoint
    found = read_marker(folder).marker if folder is not None else None
    same = state.identity.version == 0 or (
        found is not None and found.version == state.identity.version
    )
    if folder is None or not same:
        raise refused(
            {name: "its storage moved, and no checkpoint of its version proves it" for name in gone}
        )
    settings = chain.settings
    layout = read_layout(folder, chain.source.files, settings)
    prove(place_by_name(model, layout.entries()), layout, chain.source.files, settings)
