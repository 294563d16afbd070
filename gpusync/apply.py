"""Apply a chain to a live model: prepare while it serves, commit in the pause, finish after it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Literal

import torch

from gpusync.chain import Chain, start_layout
from gpusync.changes import ListBudget
from gpusync.errors import (
    CheckpointError,
    DeviceError,
    MissingDependencyError,
    PlacementError,
)
from gpusync.fold import Fold
from gpusync.lists import LivePlan, Prepared, plan_live, prepare_lists
from gpusync.live import (
    LiveState,
    attach,
    attach_first,
    current_placement,
    live_version,
    refuse_tracing,
    state_of,
    take_lease,
)
from gpusync.marker import read_marker
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
    load_weights: Any = None,
    group: Any = None,
    scratch_bytes: int | None = None,
    write_back: WriteBackMode = "sync",
    durable: bool = True,
    untrusted_source: bool = False,
    relayout: bool = False,
    progress: ProgressCallback | None = None,
) -> Update:
    """Prepare an update while the model serves: live bytes are read and digested, never written.

    Parameters
    ----------
    model
        A module on the CPU with parameters and buffers named as in the checkpoint. Its first update attaches it: it
        must hold the chain's local checkpoint, or its base.
    chain
        From :func:`gpusync.open_chain`.
    device
        "auto" or "cpu". "cuda" and "emulated" are not part of this release.
    scratch_bytes
        Cap on the change lists in host memory; default ``GPUSYNC_CHANGE_LIST_BYTES``.
    write_back
        "sync": the local checkpoint's next state is staged now and swapped in by ``finish``. "background": a worker
        pulls it after commit. "none": only the live model. Without a checkpoint it is none.
    durable
        See :func:`gpusync.pull`.
    untrusted_source
        Changes nothing here: blobs are decoded by libzstd on the host, which is safe on hostile bytes.
    load_weights, group, relayout
        For engines and ranks; not part of this release.
    progress
        Called with :class:`gpusync.Progress`; an exception from it stops prepare, and nothing was changed.

    Raises
    ------
    GpuSyncError
        The live model and the local checkpoint are byte-identical to before.
    """
    clock = StageClock()
    resolve_device(device)
    _refuse_unsupported(load_weights, group, relayout)
    if write_back not in ("sync", "background", "none"):
        raise DeviceError("write_back is not sync, background or none", got=write_back)
    mode: WriteBackMode = write_back if chain.checkpoint is not None else "none"
    if progress is not None:
        progress = one_at_a_time(progress)
    cap = scratch_bytes if scratch_bytes is not None else chain.settings.change_list_bytes
    state_of(model)
    lease = take_lease(model)
    try:
        with clock.stage("attach"):
            state = state_of(model) or attach_first(model, chain)
        plan = _plan(model, state, chain)
        stands_at = _disk_version(chain)
        disk = None
        if mode == "sync" and chain.checkpoint is not None:
            disk = WriteBack(chain, chain.checkpoint, durable=durable, progress=progress)
        prepared = _prepare_both(plan, disk, chain, ListBudget(cap), progress, clock)
        report = _first_report(state, chain, plan, prepared, mode, clock)
        report = replace(report, disk_version=stands_at, notes=(*report.notes, *_earlier(chain)))
        return Update(model, state, chain, plan, prepared, disk, report, clock, durable, lease)
    except BaseException:
        lease.give_back()
        raise


def apply_to_model(
    model: torch.nn.Module,
    chain: Chain,
    *,
    device: str = "auto",
    load_weights: Any = None,
    group: Any = None,
    scratch_bytes: int | None = None,
    write_back: WriteBackMode = "sync",
    durable: bool = True,
    untrusted_source: bool = False,
    relayout: bool = False,
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
    resolve_device(device)


def resolve_device(device: str) -> Literal["cpu"]:
    """Return the path that ``device`` names.

    Raises
    ------
    MissingDependencyError
        It names a path that this release does not have; it never runs elsewhere instead.
    DeviceError
        It is not a device name.
    """
    if device in ("auto", "cpu"):
        return "cpu"
    if device in ("cuda", "emulated"):
        raise MissingDependencyError(
            f"device {device!r} is not part of this release: use 'cpu', or 'auto'", got=device
        )
    raise DeviceError("device is not auto, cuda, cpu or emulated", got=device)


def _refuse_unsupported(load_weights: Any, group: Any, relayout: bool) -> None:
    refuse_tracing(load_weights)
    if group is not None:
        raise PlacementError("updates voted on by a group of ranks are not part of this release")
    if relayout:
        raise PlacementError("relaid parameters are not part of this release")


def _plan(model: torch.nn.Module, state: LiveState, chain: Chain) -> LivePlan | None:
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
    return plan_live(chain, route, current_placement(model, state, chain, names), state.identity)


def _prepare_both(
    plan: LivePlan | None,
    disk: WriteBack | None,
    chain: Chain,
    budget: ListBudget,
    progress: ProgressCallback | None,
    clock: StageClock,
) -> Prepared:
    """Build the change lists while a thread stages the local checkpoint; if either fails, neither is left."""
    fold = Fold(chain.settings.piece_bytes, chain.settings.workers)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpusync-stage") as pool:
        staging = pool.submit(disk.stage) if disk is not None else None
        try:
            prepared = Prepared()
            if plan is not None:
                with clock.stage("decode", plan.nbytes):
                    prepared = prepare_lists(plan, fold, budget, progress)
                chain.source.check_unchanged(plan.route.versions)
                chain.check_base_unchanged()
            if staging is not None:
                with clock.stage("stage"):
                    staging.result()
            return prepared
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
    prepared: Prepared,
    mode: WriteBackMode,
    clock: StageClock,
) -> UpdateReport:
    version = state.identity.version
    reached = chain.target_version if plan is not None else version
    unchanged: Literal["unchanged", "stale"] = (
        "unchanged" if chain.target_version == version else "stale"
    )
    route = plan.route if plan is not None else None
    return UpdateReport(
        outcome=unchanged if plan is None else "reset" if chain.target_version == 0 else "applied",
        from_version=version,
        to_version=reached,
        target_version=chain.target_version,
        device="cpu",
        write_back=mode,
        versions=tuple(delta.version for delta in route.deltas) if route is not None else (),
        tensors_changed=len(plan.tensors) if plan is not None else 0,
        changed_bytes=prepared.changed_bytes,
        change_list_bytes=prepared.nbytes,
        wire_bytes=route.wire_nbytes if route is not None else 0,
        tensors_by_path={"cpu": len(plan.tensors)} if plan is not None else {},
        reasons={"cpu": "the model's parameters are on the CPU"} if plan is not None else {},
        unverified_source=(route.full.version,) if route is not None and route.full else (),
        notes=tuple(route.notes()) if route is not None else (),
        prepare_seconds=clock.total_seconds,
        stages=clock.times(),
    )
