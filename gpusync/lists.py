"""Change lists of a live model along a route: planned, digested on every destination, built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpusync.chain import Chain, identity_after, start_layout
from gpusync.changes import ChangeList, ListBudget, LiveSink, RegionChanges
from gpusync.errors import PlacementError
from gpusync.fold import ArrayOrigin, BlobSource, Fold, run_parallel
from gpusync.marker import Marker
from gpusync.materialize import TensorPlan, mismatch, plan_tensor
from gpusync.placement import Placement, refused
from gpusync.route import Route, check_targets
from gpusync.timing import Meter
from gpusync.types import Algorithm, Digest, ProgressCallback


@dataclass(frozen=True)
class LivePlan:
    """What an update does to a model: tensors to fold, with the region of each."""

    route: Route
    placement: Placement
    tensors: tuple[TensorPlan, ...]
    identity_after: Marker

    @property
    def nbytes(self) -> int:
        """Live bytes of the tensors that may change."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Prepared:
    """Finished change lists; ``changed_bytes`` counts the live bytes under them."""

    changes: tuple[RegionChanges, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory that the lists take."""
        return sum(region.nbytes for region in self.changes)

    @property
    def changed_bytes(self) -> int:
        return sum(region.value.nbytes for region in self.changes)


def plan_live(chain: Chain, route: Route, placement: Placement, identity: Marker) -> LivePlan:
    """Plan the update of a placed model along a route.

    Raises
    ------
    PlacementError
        A changed tensor has no place, or a full version has another tensor set than the model.
    IndexFormatError
        A delta names a tensor that its checkpoint does not hold.
    """
    if route.start == "applied":
        names = {name for delta in route.deltas for name in delta.digests}
        tensors = [_plan_patch(name, route, placement, chain) for name in sorted(names)]
        planned = [tensor for tensor in tensors if tensor is not None]
    else:
        planned = _plan_replacement(chain, route, placement)
    planned.sort(key=lambda tensor: tensor.nbytes, reverse=True)
    return LivePlan(route, placement, tuple(planned), identity_after(route, identity, chain))


def prepare_lists(
    plan: LivePlan, fold: Fold, budget: ListBudget, progress: ProgressCallback | None
) -> Prepared:
    """Fold every planned tensor, digest the result against what was published, and build its change list.

    Live memory is read, never written.

    Raises
    ------
    DigestMismatchError
        A result is not the published tensor.
    PlacementError
        Names that share a storage do not agree on its new bytes.
    OutOfScratchError
        The lists exceed their cap.
    """
    shared = _shared_regions(plan.placement)
    meter = Meter("decode", plan.nbytes, progress)

    def one(tensor: TensorPlan) -> tuple[TensorPlan, Digest | None, list[RegionChanges]]:
        region = plan.placement.regions[tensor.name]
        names = shared.get(region.address, (tensor.name,))
        algorithms: set[Algorithm] = {"xxh3-128"} if len(names) > 1 else set()
        if tensor.expected is not None:
            algorithms.add(tensor.expected.algorithm)
        changes = ChangeList(tensor.name, region.array, budget) if tensor.name == names[0] else None
        alone = isinstance(tensor.origin, ArrayOrigin) and all(blob.is_xor for blob in tensor.blobs)
        sink = LiveSink(region.array, algorithms, changes, holds_delta=alone)
        origin = None if alone else tensor.origin
        fold.run(tensor.nbytes, origin, tensor.blobs, sink, (), meter.add)
        digests = sink.digests()
        if tensor.expected is not None and digests[tensor.expected.algorithm] != tensor.expected:
            raise mismatch(tensor, digests[tensor.expected.algorithm])
        return tensor, digests.get("xxh3-128"), sink.finish()

    changes: list[RegionChanges] = []
    ours: dict[str, Digest | None] = {}
    for tensor, digest, made in run_parallel(one, plan.tensors, fold.workers):
        ours[tensor.name] = digest
        changes.extend(made)
    _check_shared(shared, ours)
    return Prepared(tuple(changes))


def _plan_patch(name: str, route: Route, placement: Placement, chain: Chain) -> TensorPlan | None:
    """Plan one changed tensor against its live bytes; None for a second name of a tensor that changes alike."""
    blobs = tuple(
        BlobSource(chain.source.files, delta, name)
        for delta in route.deltas
        if name in delta.digests
    )
    region = placement.regions.get(name)
    if region is None:
        _check_alias(name, route, placement)
        return None
    return TensorPlan(
        name,
        "",
        0,
        region.nbytes,
        ArrayOrigin(region.array),
        blobs,
        blobs[-1].delta.digests[name],
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


def _plan_replacement(chain: Chain, route: Route, placement: Placement) -> list[TensorPlan]:
    """Plan every tensor from a full version or the base."""
    layout = start_layout(chain, route, None)
    check_targets(route, layout)
    missing = placement.regions.keys() - layout.file_of.keys()
    extra = layout.file_of.keys() - placement.regions.keys()
    reasons = {
        **{name: f"not in version {route.start_version}" for name in missing},
        **{name: f"new in version {route.start_version}" for name in extra},
    }
    for name in layout.file_of.keys() & placement.regions.keys():
        nbytes = placement.regions[name].nbytes
        if layout.entry(name).nbytes != nbytes:
            reasons[name] = f"{layout.entry(name).nbytes} bytes published, {nbytes} live"
    if reasons:
        raise refused(reasons)
    files = chain.source.files
    return [
        plan_tensor(name, layout, route, files, known={}, from_local=False)
        for name in layout.file_of
    ]


def _shared_regions(placement: Placement) -> dict[int, tuple[str, ...]]:
    """Map the address of each storage that several checkpoint tensors share to their names."""
    names: dict[int, list[str]] = {}
    for name, region in placement.regions.items():
        if region.nbytes:
            names.setdefault(region.address, []).append(name)
    return {address: tuple(sorted(found)) for address, found in names.items() if len(found) > 1}


def _check_shared(shared: Mapping[int, tuple[str, ...]], ours: Mapping[str, Digest | None]) -> None:
    for names in shared.values():
        changed = [name for name in names if name in ours]
        if changed and (len(changed) != len(names) or len({ours[name] for name in changed}) > 1):
            raise PlacementError(
                "tensors that share one live storage do not agree on its new bytes",
                tensor=changed[0],
                expected=f"the same change for {', '.join(names)}",
                got=f"changes for {', '.join(changed)}",
            )
