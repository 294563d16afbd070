"""Attaching: a checkpoint's tensors placed in a live model, and the proof by bytes that the model holds them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpusync.config import Settings
from gpusync.errors import FormatError, PlacementError, SourceNotReadyError
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import Layout, absolute_path, local_io_error, read_layout, unreadable
from gpusync.folder.marker import Marker, MarkerState, read_marker
from gpusync.format.digest import fingerprint
from gpusync.live.lists import layout_at
from gpusync.live.probe import find_relaid
from gpusync.live.proof import DIFFER, prove
from gpusync.live.state import LiveState, keep_state, state_of, take_lease
from gpusync.local.checkpoint import is_absence
from gpusync.placement.experts import match_slices
from gpusync.placement.places import LoadWeights, Places, trace_places
from gpusync.placement.regions import (
    RELAID,
    Placement,
    live_tensors,
    moved,
    place_by_name,
    refused,
)
from gpusync.placement.relayout import Relayout, engine_relayout
from gpusync.published.chain import Chain
from gpusync.types import AttachReport

log = logging.getLogger(__name__)

_ATTACH_ATTEMPTS = 3
_MAY_BE_RELAID = "; where the engine rearranges its module after loading, relayout=True may take it"


@dataclass(frozen=True)
class Loading:
    """How the engine loads the model: its loader, and what it does to modules after that; None where it has neither."""

    load_weights: LoadWeights | None = None
    relayout: Relayout | None = None


@dataclass(frozen=True)
class _Attached:
    """A proven model, and the checkpoint that it was proven against."""

    state: LiveState
    placement: Placement
    layout: Layout

    def report(self, seconds: float) -> AttachReport:
        places = self.state.places or Places()
        relaid = self.state.relaid.names() if self.state.relaid is not None else {}

        def nbytes(names: Iterable[str]) -> int:
            return sum(self.layout.entry(name).nbytes for name in names)

        return AttachReport(
            version=self.state.identity.version,
            placed=_placed(self.placement),
            placed_bytes=self.placement.nbytes,
            dropped=places.dropped,
            relaid=relaid,
            refused=places.refused,
            unmanaged=self.placement.unmanaged,
            seconds=seconds,
            dropped_bytes=nbytes(places.dropped),
            relaid_bytes=sum(region.nbytes for region in self.placement.relaid.values()),
            refused_bytes=nbytes(places.refused),
        )


def attach(
    model: torch.nn.Module,
    checkpoint_dir: str | os.PathLike[str],
    *,
    load_weights: LoadWeights | None = None,
    version: int | None = None,
    relayout: bool | Relayout = False,
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
        What the engine does to its modules after loading (see :class:`gpusync.placement.relayout.Relayout`; the mounts in
        :mod:`gpusync.engines` pass their own for True): tensors that it rearranges are then relaid, where that is proven to be
        a pure relayout. A plain module has none.

    Raises
    ------
    PlacementError
        By name: a tensor has no place, or its live bytes are not the checkpoint's; with a reason per tensor. By the loader:
        no tensor has a place.
    SourceNotReadyError, FormatError
        The folder is not a readable checkpoint.
    OutOfScratchError
        A module to be relaid does not fit into scratch memory.
    """
    start = time.monotonic()
    folder = absolute_path(checkpoint_dir, SourceNotReadyError, "checkpoint_dir")
    state_of(model)
    lease = take_lease(model)
    try:
        loading = Loading(load_weights, engine_relayout(relayout))
        attached = _attach(model, folder, version, loading)
        keep_state(model, attached.state)
    finally:
        lease.give_back()
    report = attached.report(time.monotonic() - start)
    log.info(
        "model_attached version=%d placed=%d relaid=%d dropped=%d refused=%d",
        report.version,
        len(report.placed),
        len(report.relaid),
        len(report.dropped),
        len(report.refused),
    )
    return report


def _placed(placement: Placement) -> dict[str, tuple[str, ...]]:
    placed = {name: region.live_names for name, region in placement.regions.items()}
    for name, parts in placement.slices.items():
        placed[name] = tuple(dict.fromkeys(live for part in parts for live in part.live_names))
    return placed


def attach_first(model: torch.nn.Module, chain: Chain, loading: Loading) -> LiveState:
    """Attach a model at its first update: to the local checkpoint it was loaded from, else to the base.

    Without either the model is taken to hold version 0; then the digests of what changes are the only proof. Nobody sees
    a report here, so every placed byte must be the checkpoint's. The caller holds the lease.

    Raises
    ------
    PlacementError
        The model holds neither; the reasons are those of the folder from which fewer tensors differ.
    CheckpointIOError
        The local checkpoint cannot be read: nothing says that the model is not of it.
    """
    failures: list[Exception] = []
    for folder in (chain.checkpoint, chain.base_dir):
        if folder is None or (folder == chain.checkpoint and read_marker(folder).marker is None):
            continue
        try:
            state = _attach(model, folder, None, loading).state
            _refuse_differing(state)
        except (PlacementError, SourceNotReadyError, FormatError) as err:
            cause = err.__cause__
            if folder == chain.checkpoint and isinstance(cause, OSError) and not is_absence(cause):
                raise local_io_error(cause, "reading the local checkpoint", folder) from err
            failures.append(err)
            continue
        keep_state(model, state)
        return state
    if failures:
        raise _nearest(failures)
    if loading.load_weights is not None:
        raise PlacementError(
            "a placement by the model's loader takes a checkpoint or base that says which tensors there are"
        )
    state = LiveState(Marker(0))
    keep_state(model, state)
    return state


def _nearest(failures: Sequence[Exception]) -> Exception:
    """Return the refusal that says most: one bad tensor of the right folder, not all those of another version."""
    last = failures[-1]
    if not isinstance(last, PlacementError):
        return last
    refusals = [each for each in failures if isinstance(each, PlacementError) and each.reasons]
    return min(reversed(refusals), key=lambda each: len(each.reasons), default=last)


def _refuse_differing(state: LiveState) -> None:
    """Refuse a model of which some bytes are not the checkpoint's: of another version, or rearranged after loading."""
    reasons = state.places.refused if state.places is not None else {}
    differing = {name: why for name, why in reasons.items() if why.startswith(DIFFER)}
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
    # Relaid tensors are held against the digest of their bytes at each update, wherever they are.
    spans = {at: span for at, span in state.spans.items() if at[1] != RELAID}
    gone = moved(spans, now)
    if gone:
        _prove_again(model, state, chain, gone)
        now = state.places.place(model)
    state.spans = now.spans()
    return now


def _attach(
    model: torch.nn.Module,
    folder: Path,
    version: int | None,
    loading: Loading,
) -> _Attached:
    """Prove a model against a folder that stands still meanwhile.

    Shards of one version under the marker of the next would give the model an identity that its bytes do not have.
    """
    for attempt in range(1, _ATTACH_ATTEMPTS + 1):
        found = read_marker(folder)
        try:
            attached = _proven(model, folder, found, version, loading)
        except (PlacementError, SourceNotReadyError, FormatError):
            if attempt == _ATTACH_ATTEMPTS or read_marker(folder) == found:
                raise
            continue
        if read_marker(folder) == found:
            return attached
    raise SourceNotReadyError(
        "the checkpoint was swapped each time it was read; attach again", file=str(folder)
    )


def _proven(
    model: torch.nn.Module,
    folder: Path,
    found: MarkerState,
    version: int | None,
    loading: Loading,
) -> _Attached:
    settings = Settings.from_env()
    with OpenFiles(settings.max_open_files, settings.source_retries) as files:
        layout = read_layout(folder, files, settings)
        if loading.load_weights is not None and loading.relayout is not None:
            search = find_relaid(
                model, layout, files, settings, loading.load_weights, loading.relayout
            )
            places, relaid, differ = search.places, search.relaid, dict(search.failed)
            is_other = search.is_other_checkpoint
        else:
            places, relaid = _places(model, layout, files, loading.load_weights), None
            differ = prove(places.place(model), layout, files, settings)
            bad, all_names = places.live_names(differ), places.live_names(places.copies)
            is_other = bool(differ) and 2 * len(bad) >= len(all_names)
    if is_other:
        raise refused(
            differ
        )  # not rearranged here and there: it is another checkpoint that the model holds
    if differ and relaid is None and loading.load_weights is not None:
        differ = {name: why + _MAY_BE_RELAID for name, why in differ.items()}
    places = places.less(differ)
    placement = places.place(model)
    identity = _identity(found, layout, version)
    state = LiveState(identity, places.without_shapes(), placement.spans(), relaid=relaid)
    return _Attached(state, placement, layout)


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
