"""Apply a chain to a live model: prepare while it serves, commit in the pause, finish after it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Literal

import torch

from gpusync.attaching import Loading, attach, attach_first, current_placement
from gpusync.chain import Chain, start_layout
from gpusync.devices import PathRunner, check_device, warm_up_device
from gpusync.errors import CheckpointError, DeviceError, ModelPoisonedError
from gpusync.lists import LivePlan, plan_live
from gpusync.live import LiveState, known_state, live_version, state_of, take_lease
from gpusync.marker import read_marker
from gpusync.parts import PreparedPart
from gpusync.places import LoadWeights, Places
from gpusync.ranks import Ranks, join
from gpusync.relaid import plan_relaid
from gpusync.relayout import Relayout, engine_relayout
from gpusync.timing import StageClock, one_at_a_time
from gpusync.types import ProgressCallback, UpdateReport
from gpusync.update import Update, WriteBackMode
from gpusync.writeback import WriteBack, take_error

__all__ = ["Update", "apply_to_model", "attach", "live_version", "prepare", "warmup"]

log = logging.getLogger(__name__)


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
        Only the group's store is used: any backend will do, and no collective runs. Of the ranks of one host with one
        local checkpoint, the lowest writes back.
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
    ranks = join(group, folder, chain.settings.vote_timeout_seconds)
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
    """Build whatever the first update on a device would build. On the CPU there is nothing to build.

    Raises
    ------
    MissingDependencyError
        The device is not supported here.
    """
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
        plan = _plan(model, state, chain, loading.relayout)
        stands_at = _disk_version(chain)
        parts = _prepare_both(plan, disk, chain, runner, clock)
        report = _first_report(state, chain, plan, parts, mode, clock)
        notes = (*report.notes, *ranks.notes, *_earlier(chain))
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


def _plan(
    model: torch.nn.Module, state: LiveState, chain: Chain, relayout: Relayout | None
) -> LivePlan | None:
    """Plan the live side; None where the model stands at or above the target."""
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
    plan = plan_live(chain, route, placement, state.places or Places(), state.identity)
    if state.relaid is None:
        return plan
    work = plan_relaid(chain, route, placement, state.relaid, state.identity, relayout)
    return replace(plan, relaid=work)


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
                try:
                    disk.discard()
                except (
                    CheckpointError
                ) as err:  # the next pull clears it; why prepare failed matters more
                    log.warning("staging_left reason=%s", err)
            raise


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
