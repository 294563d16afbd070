"""Apply a chain to a live model: prepare while it serves, commit in the pause, finish after it."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from gpusync.compiled import compile_loops
from gpusync.errors import CheckpointError, DeviceError, ModelPoisonedError
from gpusync.folder.marker import read_marker
from gpusync.host.parts import PreparedPart
from gpusync.live.attaching import Loading, attach, attach_first, current_placement
from gpusync.live.devices import PathRunner, check_device, warm_up_device
from gpusync.live.lists import LivePlan, offers_of, plan_live
from gpusync.live.relaid import plan_relaid
from gpusync.live.state import LiveState, known_state, live_version, state_of, take_lease
from gpusync.live.update import Update, WriteBackMode
from gpusync.local.writeback import WriteBack, take_error
from gpusync.observers import failures_told
from gpusync.placement.places import LoadWeights, Places
from gpusync.placement.regions import Placement
from gpusync.placement.relayout import Relayout, engine_relayout
from gpusync.published.chain import Chain, start_layout
from gpusync.published.route import Route
from gpusync.ranks.group import Limits, Ranks, join
from gpusync.ranks.sharefile import ShareFile
from gpusync.ranks.shares import Agreement, Offer
from gpusync.timing import StageClock, one_at_a_time
from gpusync.types import ProgressCallback, UpdateReport

__all__ = ["Update", "apply_to_model", "attach", "live_version", "prepare", "warmup"]

log = logging.getLogger(__name__)

_BUFFERS = 4
"""What an exchange needs its limit for: bytes to send, bytes that came, and the sums of these twice."""


@failures_told("prepare")
def prepare(
    model: torch.nn.Module,
    chain: Chain,
    *,
    device: str = "auto",
    load_weights: LoadWeights | None = None,
    group: Any = None,
    scratch_bytes: int | None = None,
    write_back: WriteBackMode = "sync",
    durable: bool = True,
    untrusted_source: bool = False,
    relayout: bool | Relayout = False,
    progress: ProgressCallback | None = None,
) -> Update:
    """Prepare an update while the model serves: live bytes are read and digested, never written.

    Parameters
    ----------
    model
        A module with parameters and buffers named as in the checkpoint, on the CPU or on CUDA devices. Its first update attaches it: it
        must hold the chain's local checkpoint, or its base.
    chain
        From :func:`gpusync.open_chain`.
    device
        "auto": every tensor is updated by the path of the memory that it lives in. "cuda" and "cpu" refuse tensors that
        live elsewhere. "emulated" runs the CUDA path on host memory, for tests.
    scratch_bytes
        Cap on the scratch memory of each CUDA device, default ``GPUSYNC_SCRATCH_BYTES``; for a model on the CPU, cap on
        its change lists, default ``GPUSYNC_CHANGE_LIST_BYTES``; and on the scratch memory of a relaid module, default
        ``GPUSYNC_RELAYOUT_BYTES``.
    write_back
        "sync": the local checkpoint's next state is staged now and swapped in by ``finish``. "background": a worker
        pulls it after commit. "none": only the live model. Without a checkpoint it is none.
    durable
        See :func:`gpusync.pull`.
    untrusted_source
        Whoever can write to the source may be hostile. nvCOMP is undefined on corrupt entropy-coded data: blobs whose
        digest the publisher's manifest does not give are then decoded on the host. On the CPU it changes nothing.
    load_weights
        See :func:`gpusync.attach`; used where this update attaches the model.
    group
        A torch.distributed process group: its ranks update together, all or none. Each of them calls this once per update,
        in the same order, with its own model, and waits here for the others, at most ``GPUSYNC_VOTE_TIMEOUT_SECONDS``.
        Of the group itself only the store is used: any backend will do, and no collective of it runs. Tensors of which the
        ranks hold slices that together are the whole (on 16-byte borders, published with xxh3-128) are proven by them
        together, over a gloo group of our own in host memory; they need no checkpoint. Of the ranks of one host with one local
        checkpoint, the lowest writes back.
    relayout
        See :func:`gpusync.attach`; a model with relaid modules takes it at every update.
    progress
        Called with :class:`gpusync.Progress`; an exception from it stops prepare, and nothing was changed.

    Raises
    ------
    GpuSyncError
        The live model and the local checkpoint are byte-identical to before. With a group, the other ranks' commit raises it
        too, and nothing is stored.
    """
    mode = _write_back_mode(write_back, chain)
    if progress is not None:
        progress = one_at_a_time(progress)
    runner = PathRunner(
        device,
        chain.settings,
        scratch_bytes=scratch_bytes,
        untrusted_source=untrusted_source,
        progress=progress,
    )
    state_of(model)  # a poisoned model's rank is to be replaced, and has no part in a vote
    folder = chain.checkpoint if mode != "none" else None
    limits = Limits(chain.settings.vote_timeout_seconds, chain.settings.exchange_bytes // _BUFFERS)
    ranks = join(group, folder, limits)
    try:
        check_device(device)
        if not ranks.writes_back:
            mode = "none"
        disk = None
        if mode == "sync" and folder is not None:
            disk = WriteBack(chain, folder, durable=durable, progress=progress)
        loading = Loading(load_weights, engine_relayout(relayout))
        return _prepare(model, chain, loading, runner, disk, mode, durable, ranks)
    except BaseException as err:
        ranks.refuse(err)
        raise


def apply_to_model(
    model: torch.nn.Module,
    chain: Chain,
    *,
    device: str = "auto",
    load_weights: LoadWeights | None = None,
    group: Any = None,
    scratch_bytes: int | None = None,
    write_back: WriteBackMode = "sync",
    durable: bool = True,
    untrusted_source: bool = False,
    relayout: bool | Relayout = False,
    progress: ProgressCallback | None = None,
) -> UpdateReport:
    """Prepare, commit and finish an update of a live model in one call.

    Parameters and errors are those of :func:`prepare`, :meth:`Update.commit` and :meth:`Update.finish`.
    """
    update = prepare(
        model,
        chain,
        device=device,
        load_weights=load_weights,
        group=group,
        scratch_bytes=scratch_bytes,
        write_back=write_back,
        durable=durable,
        untrusted_source=untrusted_source,
        relayout=relayout,
        progress=progress,
    )
    update.commit()
    return update.finish()


def warmup(device: str = "auto") -> None:
    """Build whatever the first update on a device would build, and the CPU's compiled loops, which every device may need.

    Raises
    ------
    MissingDependencyError
        The device is not supported here.
    """
    import gpusync.format.encode_rows
    import gpusync.format.zstd.encode_runs  # noqa: F401  (a host may publish as well)

    compile_loops()
    warm_up_device(device)


def _write_back_mode(asked: WriteBackMode, chain: Chain) -> WriteBackMode:
    if asked not in ("sync", "background", "none"):
        raise DeviceError("write_back is not sync, background or none", got=asked)
    return asked if chain.checkpoint is not None else "none"


def _prepare(
    model: torch.nn.Module,
    chain: Chain,
    loading: Loading,
    runner: PathRunner,
    disk: WriteBack | None,
    mode: WriteBackMode,
    durable: bool,
    ranks: Ranks,
) -> Update:
    """Prepare this rank's part under the lease on its weights."""
    clock = StageClock()
    lease = take_lease(model)
    try:
        with clock.stage("attach"):
            state = state_of(model) or attach_first(model, chain, loading)
        way = _find_way(model, state, chain)
        if way is not None:
            lease.cover(way.placement)
        agreement = ranks.agree(way.offers if way is not None else {})
        stands_at = _disk_version(chain)
        with contextlib.closing(_share_file(way, agreement)) as shares:
            plan = None
            if way is not None:
                plan = way.plan(chain, state, loading.relayout, agreement, shares)
            parts = _prepare_both(plan, disk, chain, runner, clock)
            try:
                with clock.stage("ranks"):
                    ranks.prove(agreement, shares)
            except BaseException:
                _undo_staging(disk)
                raise
        report = _first_report(state, chain, plan, parts, mode, clock)
        notes = (*report.notes, *ranks.notes, *_proofs(plan, agreement), *_earlier(chain))
        report = replace(report, disk_version=stands_at, notes=notes)
        if plan is not None:
            relaid = [part.relaid for part in parts if part.relaid is not None]
            plan = replace(plan, relaid=None, relaid_after=relaid[0] if relaid else None)
        changes = [part.changes for part in parts]
        return Update(
            model, state, chain, plan, changes, disk, report, clock, durable, lease, ranks
        )
    except BaseException as err:
        if isinstance(err, ModelPoisonedError) and (found := known_state(model)) is not None:
            found.poisoned = True  # a lost device, or memory that was written past
        lease.give_back()
        raise


@dataclass(frozen=True)
class _Way:
    """A model's way to the target, and where its changed tensors are."""

    route: Route
    placement: Placement
    offers: Mapping[str, Offer]

    def plan(
        self,
        chain: Chain,
        state: LiveState,
        relayout: Relayout | None,
        agreement: Agreement,
        shares: ShareFile,
    ) -> LivePlan:
        """Plan the live side; the shares of what the ranks prove together go into ``shares``."""
        places = state.places or Places()
        plan = plan_live(chain, self.route, self.placement, places, state.identity, agreement)
        plan = replace(plan, shares=shares)
        if state.relaid is None:
            return plan
        work = plan_relaid(
            chain, self.route, self.placement, state.relaid, state.identity, relayout
        )
        return replace(plan, relaid=work)


def _find_way(model: torch.nn.Module, state: LiveState, chain: Chain) -> _Way | None:
    """Find the way to the target; None where the model stands at or above it."""
    version, target = state.identity.version, chain.target_version
    if target > 0:
        chain.check_identity(state.identity)
    if target == version or 0 < target < version:
        return None
    route = chain.route(version)
    chain.check_base_identity(route, state.identity)
    names = {name for delta in route.deltas for name in delta.digests}
    if route.start != "applied":
        names |= start_layout(chain, route, None).file_of.keys()
    placement = current_placement(model, state, chain, names)
    return _Way(route, placement, offers_of(route, placement, state.places or Places()))


def _share_file(way: _Way | None, agreement: Agreement) -> ShareFile:
    """Return room for the shares of what this rank has to prove along with others."""
    offers = way.offers if way is not None else {}
    return ShareFile({name: offer for name, offer in offers.items() if name in agreement.tensors})


def _proofs(plan: LivePlan | None, agreement: Agreement) -> list[str]:
    """What a report should say of tensors in slices, where there are other ranks."""
    sliced = {tensor.name for tensor in plan.tensors} if plan is not None else set()
    together = sliced & agreement.tensors.keys()
    notes = [f"{len(together)} tensor(s) in slices were proven by all ranks together"] * bool(
        together
    )
    alone = Counter(agreement.reasons[name] for name in sliced & agreement.reasons.keys())
    return notes + [
        f"{count} tensor(s) in slices were proven by this rank alone, from the whole: {why}"
        for why, count in alone.most_common()
    ]


def _prepare_both(
    plan: LivePlan | None,
    disk: WriteBack | None,
    chain: Chain,
    runner: PathRunner,
    clock: StageClock,
) -> list[PreparedPart]:
    """Build the change lists while a thread stages the local checkpoint; if either fails, neither is left."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpusync-stage") as pool:
        staging = pool.submit(disk.stage) if disk is not None else None
        try:
            parts: list[PreparedPart] = []
            if plan is not None:
                parts = runner.prepare(plan)
                chain.source.check_unchanged(plan.route.versions)
                chain.check_base_unchanged()
            if staging is not None:
                with clock.stage("stage"):
                    staging.result()
            return parts
        except BaseException:
            if disk is not None and staging is not None:
                disk.stop()
                wait([staging])
                _undo_staging(disk)
            raise


def _undo_staging(disk: WriteBack | None) -> None:
    if disk is not None:
        try:
            disk.discard()
        except CheckpointError as err:  # the next pull clears it; why prepare failed matters more
            log.warning("staging_left reason=%s", err)


def _disk_version(chain: Chain) -> int | None:
    found = read_marker(chain.checkpoint).marker if chain.checkpoint is not None else None
    return found.version if found is not None else None


def _earlier(chain: Chain) -> list[str]:
    """What a report should say of the folder's last background write-back."""
    error = take_error(chain.checkpoint) if chain.checkpoint is not None else None
    return [f"the last background write-back failed: {error}"] if error is not None else []


def _first_report(
    state: LiveState,
    chain: Chain,
    plan: LivePlan | None,
    parts: Sequence[PreparedPart],
    mode: WriteBackMode,
    clock: StageClock,
) -> UpdateReport:
    version = state.identity.version
    reached = chain.target_version if plan is not None else version
    unchanged: Literal["unchanged", "stale"] = (
        "unchanged" if chain.target_version == version else "stale"
    )
    route = plan.route if plan is not None else None
    devices = [part.device for part in parts]
    by_path: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for part in parts:
        by_path.update(part.tensors_by_path)
        reasons.update(part.reasons)
        clock.add(part.stages)
    return UpdateReport(
        outcome=unchanged if plan is None else "reset" if chain.target_version == 0 else "applied",
        from_version=version,
        to_version=reached,
        target_version=chain.target_version,
        device=next((name for name in devices if name != "cpu"), "cpu"),
        write_back=mode,
        versions=tuple(delta.version for delta in route.deltas) if route is not None else (),
        tensors_changed=plan.changed if plan is not None else 0,
        changed_bytes=sum(part.changes.changed_bytes for part in parts),
        change_list_bytes=sum(part.changes.nbytes for part in parts),
        wire_bytes=route.wire_nbytes if route is not None else 0,
        tensors_by_path=dict(by_path),
        reasons=reasons,
        unverified_source=(route.full.version,) if route is not None and route.full else (),
        notes=tuple(
            [
                *(route.notes() if route is not None else ()),
                *(n for part in parts for n in part.notes),
            ]
        ),
        prepare_seconds=clock.total_seconds,
        stages=clock.times(),
    )
