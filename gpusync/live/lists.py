"""The live side of an update along a route, planned: which tensors change, from what, and where they live."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gpusync.errors import ChainError, PlacementError, SourceNotReadyError
from gpusync.folder.layout import Layout, read_layout
from gpusync.folder.marker import Marker, read_marker
from gpusync.folding.fold import RegionOrigin
from gpusync.folding.plan import TensorPlan, plan_tensor
from gpusync.format.header import tensor_nbytes
from gpusync.host.parts import LiveWork, RelaidWork
from gpusync.placement.places import Places
from gpusync.placement.regions import Placement, refused
from gpusync.placement.relayout import Relaid
from gpusync.published.blobs import BlobSource
from gpusync.published.chain import Chain, identity_after, start_layout
from gpusync.published.route import Route, check_targets
from gpusync.ranks.sharefile import ShareFile
from gpusync.ranks.shares import Agreement, Extent, Offer, SharedTensor, SlicesOrigin
from gpusync.types import Digest


@dataclass(frozen=True)
class LivePlan:
    """What an update does to a model: tensors to fold, with the region of each, and relaid modules.

    ``relaid_after`` is what will be known of relaid modules then, where any changes.
    """

    route: Route
    placement: Placement
    tensors: tuple[TensorPlan, ...]
    identity_after: Marker
    relaid: RelaidWork | None = None
    relaid_after: Relaid | None = None
    shares: ShareFile | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are folded."""
        whole = self.relaid.nbytes if self.relaid is not None else 0
        return whole + sum(tensor.nbytes for tensor in self.tensors)

    @property
    def changed(self) -> int:
        """Number of tensors that may change."""
        return len(self.tensors) + (self.relaid.changed if self.relaid is not None else 0)

    def work(self, tensors: Sequence[TensorPlan]) -> LiveWork:
        """Return the part of the plan that these tensors are."""
        names = {tensor.name for tensor in tensors}
        return LiveWork(
            tuple(tensors),
            {name: region for name, region in self.placement.regions.items() if name in names},
            shared_regions(self.placement),
            {name: parts for name, parts in self.placement.slices.items() if name in names},
            self.shares,
        )

    def by_device(self) -> dict[torch.device, list[TensorPlan]]:
        """Return the tensors, in their order, by the device that they live on."""
        found: dict[torch.device, list[TensorPlan]] = {}
        for tensor in self.tensors:
            region = self.placement.regions.get(tensor.name)
            where = (
                region.device
                if region is not None
                else self.placement.slices[tensor.name][0].device
            )
            found.setdefault(where, []).append(tensor)
        return found


def offers_of(route: Route, placement: Placement, places: Places) -> dict[str, Offer]:
    """Return the changed tensors that a model holds slices of, and that its ranks may prove together."""
    offers: dict[str, Offer] = {}
    if route.start != "applied":
        return offers  # what a full version or the base brings has no published digest
    held = (placement.slices.keys() & places.kinds.keys()) - places.relaid.keys()
    for delta in route.deltas:
        for name in delta.digests.keys() & held:
            digest = delta.digests[name]
            nbytes = tensor_nbytes(*places.kinds[name])
            offers.pop(name, None)
            if digest.algorithm == "xxh3-128" and nbytes:
                extents = tuple(map(Extent.of, placement.slices[name]))
                offers[name] = Offer(nbytes, digest.hex, delta.version, extents)
    return offers


def plan_live(
    chain: Chain,
    route: Route,
    placement: Placement,
    places: Places,
    identity: Marker,
    agreement: Agreement,
) -> LivePlan:
    """Plan the update of a placed model along a route; tensors that the model dropped, or that are relaid, are left out.

    Parameters
    ----------
    agreement
        What the ranks prove together: of these tensors the live slices are enough.

    Raises
    ------
    PlacementError
        A changed tensor has no place, or a full version has another tensor set than the model.
    IndexFormatError
        A delta names a tensor that its checkpoint does not hold.
    """
    if route.start == "applied":
        names = {name for delta in route.deltas for name in delta.digests} - places.dropped.keys()
        _refuse(places, names)
        names -= places.relaid.keys()
        whole = names - placement.slices.keys()
        tensors = [_plan_patch(name, route, placement, chain) for name in sorted(whole)]
        planned = [tensor for tensor in tensors if tensor is not None]
        sliced = names & placement.slices.keys()
        together = sliced & agreement.tensors.keys()
        planned += [
            _plan_share(agreement.tensors[name], route, placement, chain)
            for name in sorted(together)
        ]
        planned += _plan_slices(chain, route, identity, sliced - together, agreement.reasons)
    else:
        planned = _plan_replacement(chain, route, placement, places)
    planned.sort(key=lambda tensor: tensor.nbytes, reverse=True)
    return LivePlan(route, placement, tuple(planned), identity_after(route, identity, chain))


def _plan_patch(name: str, route: Route, placement: Placement, chain: Chain) -> TensorPlan | None:
    """Plan one changed tensor against its live bytes; None for a second name of a tensor that changes alike."""
    blobs = _blobs(name, route, chain)
    region = placement.regions.get(name)
    if region is None:
        _check_alias(name, route, placement)
        return None
    return TensorPlan(
        name,
        "",
        0,
        region.nbytes,
        RegionOrigin(region),
        blobs,
        blobs[-1].delta.digests[name],
        origin_is_live=True,
    )


def _blobs(name: str, route: Route, chain: Chain) -> tuple[BlobSource, ...]:
    return tuple(
        BlobSource(chain.source.files, delta, name)
        for delta in route.deltas
        if name in delta.digests
    )


def _check_alias(name: str, route: Route, placement: Placement) -> None:
    """A published name without a region must be a tied second name, with the first one's digest in every delta."""
    owner = next(
        (key for key, region in placement.regions.items() if name in region.live_names), None
    )
    for delta in route.deltas:
        if name in delta.digests and (
            owner is None or delta.digests.get(owner) != delta.digests[name]
        ):
            raise refused({name: "the model was attached to a checkpoint without this tensor"})


def _plan_share(
    tensor: SharedTensor, route: Route, placement: Placement, chain: Chain
) -> TensorPlan:
    """Plan a changed tensor of which all ranks together hold the whole: from the live slices, for those alone."""
    name = tensor.name
    return TensorPlan(
        name,
        "",
        0,
        tensor.nbytes,
        SlicesOrigin(name, placement.slices[name]),
        _blobs(name, route, chain),
        Digest("xxh3-128", tensor.digest),
        origin_is_live=True,
    )


def _plan_slices(
    chain: Chain,
    route: Route,
    identity: Marker,
    sliced: Collection[str],
    why_not_together: Mapping[str, str],
) -> list[TensorPlan]:
    """Plan changed tensors of which the model holds slices: a slice alone cannot be held against the whole's digest."""
    if not sliced:
        return []
    wholes = whole_tensors(chain, route, identity)
    reasons = {
        name: f"the model holds slices of it, and nothing has the whole: {wholes.missing}"
        + (
            f"; the ranks cannot prove it together: {why_not_together[name]}"
            if name in why_not_together
            else ""
        )
        for name in sliced
        if name not in wholes.layout_of
    }
    if reasons:
        raise refused(reasons)
    return [wholes.plan(chain, name) for name in sorted(sliced)]


@dataclass(frozen=True)
class Wholes:
    """Where whole tensors come from: a layout by tensor, and the deltas from there to the target."""

    layout: Layout | None
    route: Route
    target: Route
    is_live: bool
    missing: str

    @property
    def layout_of(self) -> Collection[str]:
        return self.layout.file_of if self.layout is not None else ()

    def plan(self, chain: Chain, name: str, unchanged: Digest | None = None) -> TensorPlan:
        """Plan a whole tensor, to be held against the digest that the target's last delta gives.

        ``unchanged`` is what one that no delta of the target names must have.
        """
        if self.layout is None:
            raise refused({name: self.missing})
        files = chain.source.files
        plan = plan_tensor(name, self.layout, self.route, files, known={}, from_local=False)
        published = (
            delta.digests[name] for delta in reversed(self.target.deltas) if name in delta.digests
        )
        expected = next(published, unchanged)
        return replace(plan, expected=expected, origin_is_live=self.is_live)


def whole_tensors(chain: Chain, route: Route, identity: Marker) -> Wholes:
    """Find the bytes of whole tensors: at the model's version, at the target, or at the base with every delta since.

    Any of them will do: the published digest proves the whole.
    """
    layout = layout_at(chain, identity)
    if layout is not None:
        return Wholes(layout, route, route, True, "")
    found = read_marker(chain.checkpoint).marker if chain.checkpoint is not None else None
    if chain.checkpoint is not None and found is not None and found.version == chain.target_version:
        layout = read_layout(chain.checkpoint, chain.source.files, chain.settings)
        return Wholes(layout, Route("applied", found.version, 0), route, False, "")
    if chain.base_dir is not None:
        with contextlib.suppress(ChainError, SourceNotReadyError):
            since_base = chain.route(0)
            if since_base.start == "applied":
                layout = read_layout(chain.base_dir, chain.source.files, chain.settings)
                return Wholes(layout, since_base, route, False, "")
    stands = (
        f"the local checkpoint is at version {found.version}"
        if found is not None
        else ("there is no local checkpoint")
    )
    return Wholes(
        None,
        route,
        route,
        False,
        f"{stands}, the model at {identity.version}, and the base with all deltas since is not there; "
        "give the chain a checkpoint of the model's version, or pull and reload",
    )


def layout_at(chain: Chain, identity: Marker) -> Layout | None:
    """Return the layout of a folder that holds the bytes of an identity: the local checkpoint's, or the base's."""
    if chain.checkpoint is not None:
        found = read_marker(chain.checkpoint).marker
        if found is not None and _is_same(found, identity):
            layout = read_layout(chain.checkpoint, chain.source.files, chain.settings)
            if read_marker(chain.checkpoint).marker == found:
                return layout
    if identity.version == 0 and chain.base_dir is not None:
        return read_layout(chain.base_dir, chain.source.files, chain.settings)
    return None


def _is_same(found: Marker, identity: Marker) -> bool:
    """Return whether two markers are of one version of one run, as far as both say."""
    known = found.fingerprint is not None and identity.fingerprint is not None
    return found.version == identity.version and (
        not known or found.fingerprint == identity.fingerprint
    )


def _refuse(places: Places, names: Collection[str]) -> None:
    """Refuse an update of tensors that cannot be updated in place."""
    reasons = {name: reason for name, reason in places.refused.items() if name in names}
    if reasons:
        raise refused(reasons)


def _plan_replacement(
    chain: Chain, route: Route, placement: Placement, places: Places
) -> list[TensorPlan]:
    """Plan every tensor from a full version or the base."""
    layout = start_layout(chain, route, None)
    check_targets(route, layout)
    _refuse(places, layout.file_of)
    wanted = layout.file_of.keys() - places.dropped.keys() - places.relaid.keys()
    placed = placement.regions.keys() | placement.slices.keys()
    missing = placed - wanted
    extra = wanted - placed
    reasons = {
        **{name: f"not in version {route.start_version}" for name in missing},
        **{name: f"new in version {route.start_version}" for name in extra},
    }
    for name in wanted & places.kinds.keys():
        entry = layout.entry(name)
        dtype, shape = places.kinds[name]
        if (entry.dtype, entry.shape) != (dtype, shape):
            reasons[name] = (
                f"{entry.dtype} {list(entry.shape)} published, attached as {dtype} {list(shape)}"
            )
    for name in (wanted & placement.regions.keys()) - reasons.keys():
        nbytes = placement.regions[name].nbytes
        if layout.entry(name).nbytes != nbytes:
            reasons[name] = f"{layout.entry(name).nbytes} bytes published, {nbytes} live"
    if reasons:
        raise refused(reasons)
    files = chain.source.files
    return [
        plan_tensor(name, layout, route, files, known={}, from_local=False)
        for name in layout.file_of
        if name in wanted
    ]


def shared_regions(placement: Placement) -> dict[int, tuple[str, ...]]:
    """Map the address of each storage that several checkpoint tensors share to their names."""
    names: dict[int, list[str]] = {}
    for name, region in placement.regions.items():
        if region.nbytes:
            names.setdefault(region.address, []).append(name)
    return {address: tuple(sorted(found)) for address, found in names.items() if len(found) > 1}


def check_shared(
    shared: Mapping[int, tuple[str, ...]],
    changed_names: Collection[str],
    ours: Mapping[str, Digest],
) -> None:
    """Hold the new bytes of names that share a storage against each other.

    Parameters
    ----------
    changed_names
        The tensors that may change.
    ours
        xxh3-128 of the new bytes of each of them that shares its storage.

    Raises
    ------
    PlacementError
        They differ, or only some of them change.
    """
    for names in shared.values():
        changed = [name for name in names if name in changed_names]
        if changed and (len(changed) != len(names) or len({ours[name] for name in changed}) > 1):
            raise PlacementError(
                "tensors that share one live storage do not agree on its new bytes",
                tensor=changed[0],
                expected=f"the same change for {', '.join(names)}",
                got=f"changes for {', '.join(changed)}",
            )
