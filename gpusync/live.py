"""Live models: which version each holds, where its tensors are, and the proof of both.

A model's state is kept beside it, weakly: it goes when the model goes.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass, field
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
from gpusync.layout import Layout, read_layout
from gpusync.marker import Marker, read_marker
from gpusync.materialize import NOTHING_TO_FOLD, plan_tensor
from gpusync.placement import Placement, Region, moved, place_by_name, refused
from gpusync.types import AttachReport


@dataclass
class LiveState:
    """What is known of one live model.

    Parameters
    ----------
    identity
        Version, fingerprint and history of the bytes in the model.
    placement
        None until a checkpoint's names are known (a chain without checkpoint or base names only what changes).
    active
        The update that holds the lease on the weights, if it is still alive.
    """

    identity: Marker
    placement: Placement | None = None
    poisoned: bool = False
    active: weakref.ref[Any] | None = field(default=None)


_states: weakref.WeakKeyDictionary[torch.nn.Module, LiveState] = weakref.WeakKeyDictionary()


def live_version(model: torch.nn.Module) -> int | None:
    """Return the version in a model's live parameters; None before it was attached, or once it is poisoned."""
    state = _states.get(model)
    return None if state is None or state.poisoned else state.identity.version


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
    folder = Path(os.path.abspath(checkpoint_dir))
    settings = Settings.from_env()
    with OpenFiles(settings.max_open_files, settings.source_retries) as files:
        layout = read_layout(folder, files, settings)
        placement = place_by_name(model, layout.entries())
        prove(placement, layout, files, settings)
    identity = _identity(folder, layout, version)
    state = state_of(model)
    if state is not None and state.active is not None and state.active() is not None:
        raise PlacementError("an update of this model is prepared; commit or discard it first")
    _states[model] = LiveState(identity, placement)
    return AttachReport(
        version=identity.version,
        placed={name: region.live_names for name, region in placement.regions.items()},
        placed_bytes=placement.nbytes,
        unmanaged=placement.unmanaged,
        seconds=time.monotonic() - start,
    )


def attach_first(model: torch.nn.Module, chain: Chain) -> LiveState:
    """Attach a model at its first update: to the local checkpoint it was loaded from, else to the base.

    Without either the model is taken to hold version 0; then the digests of what changes are the only proof.

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
            attach(model, folder)
            return _states[model]
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
    if state.placement is None:
        return place_by_name(model, dict.fromkeys(names))
    now = place_by_name(model, dict.fromkeys(state.placement.regions))
    gone = moved(state.placement, state.placement.regions, now)
    if gone:
        _prove_again(model, state, chain, gone)
        now = place_by_name(model, dict.fromkeys(state.placement.regions))
    state.placement = now
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
        sink = _CompareSink(region.array)
        fold.run(plan.nbytes, plan.origin, (), sink, ())
        return name, sink.first_difference

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

    def __init__(self, live: Bytes) -> None:
        self._live = live
        self.first_difference: int | None = None

    def write(self, piece: Bytes, offset: int) -> None:
        if self.first_difference is not None:
            return
        live = self._live[offset : offset + piece.size]
        if not np.array_equal(piece, live):
            self.first_difference = offset + int(np.flatnonzero(piece != live)[0])


def _identity(folder: Path, layout: Layout, version: int | None) -> Marker:
    found = read_marker(folder)
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
