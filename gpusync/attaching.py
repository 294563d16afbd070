"""Attaching: a checkpoint's tensors placed in a live model, and the proof by bytes that the model holds them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gpusync.chain import Chain
from gpusync.config import Settings
from gpusync.digest import fingerprint
from gpusync.errors import FormatError, PlacementError, SourceNotReadyError
from gpusync.experts import match_slices
from gpusync.files import OpenFiles
from gpusync.fold import Bytes, Fold, run_parallel
from gpusync.layout import Layout, absolute_path, read_layout, unreadable
from gpusync.lists import layout_at
from gpusync.live import LiveState, keep_state, state_of, take_lease
from gpusync.marker import Marker, MarkerState, read_marker
from gpusync.materialize import NOTHING_TO_FOLD, plan_tensor
from gpusync.placement import (
    Placement,
    Region,
    live_tensors,
    moved,
    place_by_name,
    reading,
    refused,
    wait_for_writes,
)
from gpusync.places import LoadWeights, Places, trace_places
from gpusync.slices import Slice
from gpusync.types import AttachReport

_ATTACH_ATTEMPTS = 3
_DIFFER = "live bytes differ from"


def attach(
    model: torch.nn.Module,
    checkpoint_dir: str | os.PathLike[str],
    *,
    load_weights: LoadWeights | None = None,
    version: int | None = None,
    relayout: bool = False,
) -> AttachReport:
    """Place a checkpoint's tensors in a live model, and prove by bytes that the model holds that checkpoint.

    Parameters
    ----------
    model
        A module whose parameters and buffers are named as in the checkpoint, or one whose own loader is given.
    checkpoint_dir
        The checkpoint that the model was loaded from: the base, or a local checkpoint with its marker.
    load_weights
        The model's own loader, of (name, tensor) pairs: the placement is derived by running it once without any bytes, and
        proven by bytes. What it casts or computes is refused by name: an update of that tensor raises PlacementError. None: by
        name.
    version
        The version that the checkpoint is; default its marker's, else 0.
    relayout
        Accept relaid parameters; there are none in a plain module.

    Raises
    ------
    PlacementError
        By name: a tensor has no place, or its live bytes are not the checkpoint's; with a reason per tensor. By the loader:
        no tensor has a place.
    SourceNotReadyError, FormatError
        The folder is not a readable checkpoint.
    """
    if relayout:
        raise PlacementError("relaid parameters are not part of this release")
    start = time.monotonic()
    folder = absolute_path(checkpoint_dir, SourceNotReadyError, "checkpoint_dir")
    state_of(model)
    lease = take_lease(model)
    try:
        state, placement = _attach(model, folder, version, load_weights)
        keep_state(model, state)
    finally:
        lease.give_back()
    places = state.places or Places()
    return AttachReport(
        version=state.identity.version,
        placed=_placed(placement),
        placed_bytes=placement.nbytes,
        dropped=places.dropped,
        refused=places.refused,
        unmanaged=placement.unmanaged,
        seconds=time.monotonic() - start,
    )


def _placed(placement: Placement) -> dict[str, tuple[str, ...]]:
    placed = {name: region.live_names for name, region in placement.regions.items()}
    for name, parts in placement.slices.items():
        placed[name] = tuple(dict.fromkeys(live for part in parts for live in part.live_names))
    return placed


def attach_first(
    model: torch.nn.Module, chain: Chain, load_weights: LoadWeights | None
) -> LiveState:
    """Attach a model at its first update: to the local checkpoint it was loaded from, else to the base.

    Without either the model is taken to hold version 0; then the digests of what changes are the only proof. Nobody sees
    a report here, so every placed byte must be the checkpoint's. The caller holds the lease.

    Raises
    ------
    PlacementError
        The model holds neither.
    """
    failures: list[Exception] = []
    for folder in (chain.checkpoint, chain.base_dir):
        if folder is None or (folder == chain.checkpoint and read_marker(folder).marker is None):
            continue
        try:
            state, _ = _attach(model, folder, None, load_weights)
            _refuse_differing(state)
        except (PlacementError, SourceNotReadyError, FormatError) as err:
            failures.append(err)
            continue
        keep_state(model, state)
        return state
    if failures:
        raise failures[-1]
    if load_weights is not None:
        raise PlacementError(
            "a placement by the model's loader takes a checkpoint or base that says which tensors there are"
        )
    state = LiveState(Marker(0))
    keep_state(model, state)
    return state


def _refuse_differing(state: LiveState) -> None:
    """Refuse a model of which some bytes are not the checkpoint's: of another version, or rearranged after loading."""
    reasons = state.places.refused if state.places is not None else {}
    differing = {name: why for name, why in reasons.items() if why.startswith(_DIFFER)}
    if differing:
        raise refused(
            {
                name: f"{why}; attach the model, and look at the report"
                for name, why in differing.items()
            }
        )


def current_placement(
    model: torch.nn.Module, state: LiveState, chain: Chain, names: set[str]
) -> Placement:
    """Return where the tensors are now, re-proving the model if its parameters moved.

    Raises
    ------
    PlacementError
        A tensor has no place any more, or moved and is not provably the same.
    """
    if state.places is None:
        return place_by_name(model, dict.fromkeys(names))
    now = state.places.place(model)
    gone = moved(state.spans, now)
    if gone:
        _prove_again(model, state, chain, gone)
        now = state.places.place(model)
    state.spans = now.spans()
    return now


def prove(
    placement: Placement, layout: Layout, files: OpenFiles, settings: Settings
) -> dict[str, str]:
    """Compare every placed region with the checkpoint's bytes; return the tensors that differ, with where."""
    fold = Fold(settings.piece_bytes, settings.workers)

    def one(name: str) -> tuple[str, int | None]:
        plan = plan_tensor(name, layout, NOTHING_TO_FOLD, files, known={}, from_local=False)
        region = placement.regions.get(name)
        parts = placement.slices.get(name, ())
        sink = _CompareSink(region) if region is not None else _CompareSlices(parts)
        with reading(region.device if region is not None else parts[0].device):
            fold.run(plan.nbytes, plan.origin, (), sink, ())
        return name, sink.first_difference

    wait_for_writes(placement)
    names = sorted(
        placement.regions.keys() | placement.slices.keys(),
        key=lambda name: layout.entry(name).nbytes,
        reverse=True,
    )
    found = dict(run_parallel(one, names, settings.workers))
    return {
        name: f"{_DIFFER} {layout.folder} at byte {offset} of the tensor"
        for name, offset in found.items()
        if offset is not None
    }


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


class _CompareSlices:
    """Notes the first byte at which a tensor differs from a slice of it."""

    def __init__(self, parts: Sequence[Slice]) -> None:
        self._parts = parts
        self.first_difference: int | None = None

    def write(self, piece: Bytes, offset: int) -> None:
        if self.first_difference is not None:
            return
        for part in self._parts:
            range_ = part.part_of(offset, piece.size)
            if range_[0] < range_[1] and not np.array_equal(
                part.from_tensor(piece, offset, range_), part.from_live(range_)
            ):
                self.first_difference = offset
                return


def _attach(
    model: torch.nn.Module,
    folder: Path,
    version: int | None,
    load_weights: LoadWeights | None,
) -> tuple[LiveState, Placement]:
    """Prove a model against a folder that stands still meanwhile.

    Shards of one version under the marker of the next would give the model an identity that its bytes do not have.
    """
    for attempt in range(1, _ATTACH_ATTEMPTS + 1):
        found = read_marker(folder)
        try:
            state, placement = _proven(model, folder, found, version, load_weights)
        except (PlacementError, SourceNotReadyError, FormatError):
            if attempt == _ATTACH_ATTEMPTS or read_marker(folder) == found:
                raise
            continue
        if read_marker(folder) == found:
            return state, placement
    raise SourceNotReadyError(
        "the checkpoint was swapped each time it was read; attach again", file=str(folder)
    )


def _proven(
    model: torch.nn.Module,
    folder: Path,
    found: MarkerState,
    version: int | None,
    load_weights: LoadWeights | None,
) -> tuple[LiveState, Placement]:
    settings = Settings.from_env()
    with OpenFiles(settings.max_open_files, settings.source_retries) as files:
        layout = read_layout(folder, files, settings)
        places = _places(model, layout, files, load_weights)
        placement = places.place(model)
        differ = prove(placement, layout, files, settings)
    if differ and 2 * len(places.live_names(differ)) >= len(places.live_names(places.copies)):
        raise refused(
            differ
        )  # not rearranged here and there: it is another checkpoint that the model holds
    if differ:
        places = places.less(differ)
        placement = places.place(model)
    state = LiveState(_identity(found, layout, version), places.without_shapes(), placement.spans())
    return state, placement


def _places(
    model: torch.nn.Module, layout: Layout, files: OpenFiles, load_weights: LoadWeights | None
) -> Places:
    """Return where the tensors should be: as the loader copies them; else by name; else in fused parameters as well."""
    entries = layout.entries()
    if load_weights is not None:
        return trace_places(model, entries, load_weights)
    missing = entries.keys() - live_tensors(model).keys()
    if not missing:
        return Places(entries).anchored(model, entries)

    def read(name: str, offset: int, nbytes: int) -> bytearray:
        shard = layout.shards[layout.file_of[name]]
        begin = shard.header.data_offset + layout.entry(name).begin + offset
        buffer = bytearray(nbytes)
        try:
            files.read_into(shard.path, memoryview(buffer), begin, shard.stamp)
        except OSError as err:
            raise unreadable(err, shard.path) from err
        return buffer

    places = match_slices(model, entries, read)
    if places.copies.keys().isdisjoint(missing):  # nothing is fused: names are simply wrong
        raise refused(places.refused)
    return places


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
    layout = layout_at(chain, state.identity)
    if layout is None:
        raise refused(
            {name: "its storage moved, and no checkpoint of its version proves it" for name in gone}
        )
    places = state.places or Places()
    entries = layout.entries()
    again = replace(places, entries={name: entries.get(name) for name in places.entries})
    differ = prove(again.place(model), layout, chain.source.files, chain.settings)
    if differ:
        raise refused(differ)
