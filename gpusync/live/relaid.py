"""Updates of relaid modules: their new tensors are folded and verified whole, in scratch, and the engine rearranges those.

A change list is then, as everywhere, new bytes XOR live bytes. One module is worked on at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpusync.errors import OutOfScratchError, PlacementError
from gpusync.folder.marker import Marker
from gpusync.folding.fold import Bytes, Fold
from gpusync.folding.parallel import run_parallel
from gpusync.folding.plan import TensorPlan, mismatch, plan_tensor
from gpusync.format.digest import digest_of
from gpusync.host.applier import HostChanges
from gpusync.host.changes import ListBudget, RegionChanges
from gpusync.host.parts import PreparedPart, RelaidWork
from gpusync.host.sinks import ChangeList, LiveSink
from gpusync.live.lists import whole_tensors
from gpusync.placement.regions import Placement, Region, byte_view, refused
from gpusync.placement.relayout import (
    Loaded,
    Relaid,
    RelaidModule,
    Relayout,
    ScratchSink,
)
from gpusync.published.chain import Chain, start_layout
from gpusync.published.route import Route
from gpusync.timing import Meter, StageClock
from gpusync.types import Algorithm, Digest

_OURS: Algorithm = "xxh3-128"
_TEXT = 160


def plan_relaid(
    chain: Chain,
    route: Route,
    placement: Placement,
    relaid: Relaid,
    identity: Marker,
    relayout: Relayout | None,
) -> RelaidWork | None:
    """Plan the modules that an update changes: of each of them every tensor, whole.

    Raises
    ------
    PlacementError
        The update is prepared without the engine's relayout, nothing has the whole tensors, or a full version has others.
    """
    patches = route.start == "applied"
    changed = {name for delta in route.deltas for name in delta.digests}
    touched = [
        module
        for module in relaid.modules.values()
        if not patches or not changed.isdisjoint(module.copies)
    ]
    if not touched:
        return None
    if relayout is None:
        why = "it is relaid: prepare the update with relayout=True, as the model was attached"
        raise refused({name: why for module in touched for name in module.copies})
    plans = _plan_patches if patches else _plan_replacements
    tensors = plans(chain, route, touched, relaid, identity)
    regions = {name: placement.relaid[name] for module in touched for name in module.live.values()}
    count = sum(not patches or name in changed for module in touched for name in module.copies)
    return RelaidWork(relaid, tensors, regions, relayout, count)


def _plan_patches(
    chain: Chain,
    route: Route,
    modules: Sequence[RelaidModule],
    relaid: Relaid,
    identity: Marker,
) -> dict[str, tuple[TensorPlan, ...]]:
    """Plan whole tensors along deltas; one that does not change must be what it was when it was last seen."""
    wholes = whole_tensors(chain, route, identity)
    reasons = {
        name: f"it is relaid, and nothing has the whole tensor: {wholes.missing}"
        for module in modules
        for name in module.copies
        if name not in wholes.layout_of
    }
    if reasons:
        raise refused(reasons)
    return {
        module.name: tuple(
            wholes.plan(chain, name, unchanged=relaid.tensors[name]) for name in module.copies
        )
        for module in modules
    }


def _plan_replacements(
    chain: Chain,
    route: Route,
    modules: Sequence[RelaidModule],
    relaid: Relaid,
    identity: Marker,
) -> dict[str, tuple[TensorPlan, ...]]:
    """Plan whole tensors from a full version or the base."""
    layout = start_layout(chain, route, None)
    reasons: dict[str, str] = {}
    for module in modules:
        for name, (dtype, shape) in module.kinds.items():
            if name not in layout.file_of:
                reasons[name] = f"not in version {route.start_version}"
                continue
            entry = layout.entry(name)
            if (entry.dtype, entry.shape) != (dtype, shape):
                reasons[name] = (
                    f"{entry.dtype} {list(entry.shape)} published, attached as {dtype} {list(shape)}"
                )
    if reasons:
        raise refused(reasons)
    files = chain.source.files
    return {
        module.name: tuple(
            plan_tensor(name, layout, route, files, known={}, from_local=False)
            for name in module.copies
        )
        for module in modules
    }


def prepare_relaid(
    work: RelaidWork, fold: Fold, budget: ListBudget, scratch_bytes: int, meter: Meter
) -> PreparedPart:
    """Verify every tensor of every module, have the engine rearrange them, and list what changes.

    Live memory is read, never written.

    Raises
    ------
    DigestMismatchError
        A result is not the published tensor.
    PlacementError
        Live bytes are not those that the last commit left, or the engine cannot rearrange the new ones.
    OutOfScratchError
        A module does not fit into ``scratch_bytes``, or the lists exceed their cap.
    """
    for name in work.tensors:
        module = work.relaid.modules[name]
        check_scratch(module, _live_nbytes(module, work.regions), scratch_bytes)
    live, whole = dict(work.relaid.live), dict(work.relaid.tensors)
    lists: list[RegionChanges] = []
    clock = StageClock()
    with clock.stage("relay", work.nbytes):
        for name in work.tensors:
            made = _relay(work, name, fold, budget, meter)
            live |= made.live
            whole |= made.tensors
            lists += made.lists
    return PreparedPart(
        "cpu",
        HostChanges(lists, fold.workers),
        {},
        {"relaid": work.changed},
        {"relaid": "the engine rearranges these after loading: made anew and verified on the host"},
        clock.times(),
        relaid=Relaid(work.relaid.modules, live, whole),
    )


@dataclass(frozen=True)
class _Made:
    """One module's new state: digests of its live and of its checkpoint tensors, and what changes."""

    live: Mapping[str, Digest]
    tensors: Mapping[str, Digest]
    lists: Sequence[RegionChanges]


def _relay(work: RelaidWork, name: str, fold: Fold, budget: ListBudget, meter: Meter) -> _Made:
    """Make one module anew, and list what changes; its scratch memory goes when this returns."""
    module = work.relaid.modules[name]
    _check_live(module, work)
    scratch, tensors = folded(module, work.tensors[name], fold, meter)
    made = processed(work.relayout, module, scratch)
    live: dict[str, Digest] = {}
    lists: list[RegionChanges] = []
    for leaf, live_name in module.live.items():
        region = work.regions[live_name]
        new = _new_bytes(made, leaf, region, live_name)
        live[live_name], found = _list(live_name, region, new, fold, budget)
        lists += found
    return _Made(live, tensors, lists)


def folded(
    module: RelaidModule, tensors: Sequence[TensorPlan], fold: Fold, meter: Meter | None = None
) -> tuple[Loaded, dict[str, Digest]]:
    """Return a module as the loader fills it, in scratch, with the xxh3-128 of each tensor.

    Raises
    ------
    DigestMismatchError, PlacementError
        A tensor is not the one that was published, or has changed without having been published.
    """
    scratch = module.scratch()

    def one(tensor: TensorPlan) -> tuple[str, Digest]:
        sink = ScratchSink(module.copies[tensor.name], scratch)
        algorithms: set[Algorithm] = {_OURS}
        if tensor.expected is not None:
            algorithms.add(tensor.expected.algorithm)
        on_piece = meter.add if meter is not None else None
        digests = fold.run(tensor.nbytes, tensor.origin, tensor.blobs, sink, algorithms, on_piece)
        if tensor.expected is not None and digests[tensor.expected.algorithm] != tensor.expected:
            raise _differs(tensor, digests[tensor.expected.algorithm])
        return tensor.name, digests[_OURS]

    return scratch, dict(run_parallel(one, tensors, fold.workers, lambda tensor: tensor.nbytes))


def processed(
    relayout: Relayout, module: RelaidModule, loaded: Loaded
) -> Mapping[str, torch.Tensor]:
    """Return what the engine makes of a module's loaded tensors.

    Raises
    ------
    PlacementError
        It makes nothing of them.
    """
    try:
        with torch.no_grad():
            made = relayout.process(module.name, loaded)
    except Exception as err:
        text = (str(err).splitlines() or [""])[0][:_TEXT]
        raise PlacementError(
            f"the engine's own processing of {module.name} fails in scratch: {type(err).__name__}: {text}",
            tensor=min(module.copies),
        ) from err
    return {leaf: tensor.detach().contiguous() for leaf, tensor in made.items()}


def check_scratch(module: RelaidModule, live_nbytes: int, scratch_bytes: int) -> None:
    """Refuse a module that does not fit: what the loader fills, what is made of it, and what is made on the way.

    Raises
    ------
    OutOfScratchError
        It does not.
    """
    needed = module.loaded_nbytes + 3 * live_nbytes
    if needed > scratch_bytes:
        raise OutOfScratchError(
            f"the relaid module {module.name} does not fit into scratch memory: raise GPUSYNC_RELAYOUT_BYTES, "
            "or pull and reload",
            needed_bytes=needed,
            budget_bytes=scratch_bytes,
        )


def _live_nbytes(module: RelaidModule, regions: Mapping[str, Region]) -> int:
    return sum(regions[name].nbytes for name in module.live.values())


def _check_live(module: RelaidModule, work: RelaidWork) -> None:
    """Hold the live bytes against those of the last commit, which alone are known to be the engine's result."""
    for name in module.live.values():
        got = digest_of(_OURS, work.regions[name].array)
        if got != work.relaid.live[name]:
            raise PlacementError(
                "live bytes are not those that were proven, or last committed; attach the model again",
                tensor=name,
                expected=work.relaid.live[name],
                got=got,
            )


def _new_bytes(
    made: Mapping[str, torch.Tensor], leaf: str, region: Region, live_name: str
) -> Bytes:
    tensor = made.get(leaf)
    if tensor is None or tensor.nbytes != region.nbytes:
        raise PlacementError(
            "the engine's own processing makes another tensor than when the model was attached",
            tensor=live_name,
            expected=region.nbytes,
            got=tensor.nbytes if tensor is not None else None,
        )
    array: Bytes = byte_view(tensor).numpy()
    return array


def _list(
    name: str, region: Region, new: Bytes, fold: Fold, budget: ListBudget
) -> tuple[Digest, list[RegionChanges]]:
    """List where new bytes differ from live ones."""
    live = region.array
    sink = LiveSink(live, (_OURS,), ChangeList(name, live, budget), holds_delta=False)
    for offset in range(0, new.size, fold.piece_bytes):
        sink.write(new[offset : offset + fold.piece_bytes], offset)
    return sink.digests()[_OURS], sink.finish()


def _differs(tensor: TensorPlan, got: Digest) -> Exception:
    if tensor.blobs or tensor.expected is None:
        return mismatch(tensor, got)
    return PlacementError(
        "a tensor that does not change is not the one that the live model was made of; verify the local checkpoint",
        file=tensor.file,
        tensor=tensor.name,
        expected=tensor.expected,
        got=got,
    )
