"""A prepared update of a live model, from commit to finish."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from gpusync.errors import (
    CheckpointError,
    DeviceError,
    GpuSyncError,
    ModelPoisonedError,
    PlacementError,
)
from gpusync.folder.marker import read_marker
from gpusync.host.parts import LiveChanges, commit_parts
from gpusync.live.lists import LivePlan
from gpusync.live.state import Lease, LiveState
from gpusync.local.writeback import WriteBack, submit
from gpusync.observers import failures_told, tell
from gpusync.placement.places import Places
from gpusync.placement.regions import Anchors, moved
from gpusync.published.chain import Chain
from gpusync.ranks.ballots import ballot_of
from gpusync.ranks.group import Ranks
from gpusync.timing import StageClock
from gpusync.types import UpdateReport

log = logging.getLogger(__name__)

WriteBackMode = Literal["sync", "background", "none"]
Phase = Literal[
    "prepared", "committing", "committed", "finishing", "finished", "discarded", "poisoned"
]


class Update:
    """One prepared update of one model.

    Made by :func:`prepare`. It holds the lease on the model's weights until it is committed, discarded or collected:
    whoever reloads, offloads or merges weights meanwhile discards it first. With a group, every rank commits it, or one of
    them discards it for all; one that is only dropped keeps the others waiting until their timeout.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        state: LiveState,
        chain: Chain,
        plan: LivePlan | None,
        changes: Sequence[LiveChanges],
        write_back: WriteBack | None,
        report: UpdateReport,
        clock: StageClock,
        durable: bool,
        lease: Lease,
        ranks: Ranks,
    ) -> None:
        self._lease = lease
        self._ranks = ranks
        self._durable = durable
        self._model = weakref.ref(model)
        self._state = state
        self._chain = chain
        self._plan = plan
        self._anchors = Anchors(model, plan.placement if plan is not None else None)
        self._changes = changes
        self._write_back = write_back
        self._report = report
        self._clock = clock
        self._phase: Phase = "prepared"
        self._turn = threading.Lock()
        self._whose: object = None

    @failures_told("commit")
    def commit(self) -> None:
        """Make the new weights live: let the ranks vote, check the live words, XOR the lists in.

        Belongs in the engine's pause: no forward pass may run. Returns when the stores are done, on every rank.

        Raises
        ------
        GpuSyncError
            Another rank failed, and the error is of its error's class, with ``rank``. No rank's weights changed; the update
            is discarded on all.
        ChainError
            The ranks have different targets, versions (VersionConflictError) or bases (BaseMismatchError); likewise.
        PlacementError
            The weights moved or changed since prepare; they are as they were before the call, and the update is
            discarded.
        DeviceError
            A store failed and every store was taken back, or a rank died or came too late for the vote; the update is
            discarded. Or a graph is being captured: then the update stays prepared, to be committed after the capture.
            A KeyboardInterrupt, SystemExit or CancelledError is raised as it is, once every store was taken back.
        ModelPoisonedError
            A store failed and could not be taken back, or a rank was lost after the vote.
        """
        with self._verb("prepared", "committing", "commit"):
            start = time.monotonic()
            try:
                for part in self._changes:
                    part.await_engine()
            except ModelPoisonedError as err:
                self._ranks.refuse(err)
                self._poison()
                raise
            self._vote()
            self._store()
            # The lists go in finish: freeing them takes milliseconds of the pause.
            self._lease.give_back()
            self._report = replace(self._report, pause_seconds=time.monotonic() - start)
        log.info(
            "update_committed outcome=%s from_version=%d version=%d device=%s tensors_changed=%d changed_bytes=%d "
            "wire_bytes=%d change_list_bytes=%d prepare_seconds=%.3f pause_seconds=%.4f stages=%s",
            self._report.outcome,
            self._report.from_version,
            self._state.identity.version,
            self._report.device,
            self._report.tensors_changed,
            self._report.changed_bytes,
            self._report.wire_bytes,
            self._report.change_list_bytes,
            self._report.prepare_seconds,
            self._report.pause_seconds,
            self._report.stages,
        )

    @failures_told("finish")
    def finish(self) -> UpdateReport:
        """Let the local checkpoint follow, after the engine resumed, and return the report.

        Raises
        ------
        CheckpointError
            The folder could not follow: ``live_version`` is new, ``disk_version`` old and intact. The next update or
            pull catches up.
        """
        with self._verb("committed", "finishing", "finish"):
            start = time.monotonic()
            self._release()
            self._ranks.leave()
            try:
                report = self._follow()
            except CheckpointError as err:
                err.noted(**self._standing())
                raise
            except GpuSyncError as err:
                raise CheckpointError(
                    f"the live weights are new, and the local checkpoint could not follow: {err}",
                    version=err.version,
                    file=err.file,
                    tensor=err.tensor,
                    **self._standing(),
                ) from err
            seconds = time.monotonic() - start
            self._report = replace(report, finish_seconds=seconds, stages=self._clock.times())
            self._phase = "finished"
        done = self._report
        tell(lambda observer: observer.updated(done))
        return done

    def discard(self) -> None:
        """Forget the update before commit: nothing happened, on either side. Discarding again is fine."""
        with self._turn:
            if self._phase not in ("prepared", "discarded"):
                raise DeviceError(f"an update that is {self._phase} cannot be discarded")
            self._phase = "discarded"
        self._drop()

    @property
    def report(self) -> UpdateReport:
        """The report so far."""
        return self._report

    def __enter__(self) -> Update:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._phase == "prepared":
            self.discard()

    @contextlib.contextmanager
    def _verb(self, phase: Phase, during: Phase, verb: str) -> Iterator[None]:
        """Run a verb in its turn, once; one that ends without a decision can be had again."""
        turn = object()
        try:  # from before the phase changes: an exception can arrive at any line
            with self._turn:
                if self._phase != phase:
                    raise DeviceError(f"cannot {verb} an update that is {self._phase}")
                self._whose = turn
                self._phase = during
            yield
        finally:
            if self._whose is turn and self._phase == during:
                self._phase = phase

    def _follow(self) -> UpdateReport:
        """Let the local checkpoint follow as it was asked to, and return the report."""
        report = self._report
        if report.write_back == "sync" and self._write_back is not None:
            pulled = self._write_back.finish()
            return replace(report, pull=pulled, disk_version=pulled.to_version)
        if report.write_back == "background" and self._chain.checkpoint is not None:
            submit(self._chain, self._chain.checkpoint, durable=self._durable, progress=None)
        return report

    def _vote(self) -> None:
        """Return when every rank may store, or end the update as discarded on all of them."""
        live = self._state.identity
        plan = self._plan
        try:
            if plan is not None:
                self._check_still_there(plan)
            after, route = (plan.identity_after, plan.route) if plan is not None else (live, None)
            self._ranks.vote(ballot_of(self._chain.target_version, live, after, route))
        except BaseException as err:
            self._ranks.refuse(err)
            self._abandon()
            raise

    def _store(self) -> None:
        """Store the lists and take the new identity, or end the update as discarded or poisoned, on all ranks."""
        try:
            failure: GpuSyncError | None = None
            try:
                commit_parts(self._changes)
            except (PlacementError, DeviceError) as err:
                failure = err
            self._ranks.settle(failure, self._take_back)
            if self._plan is not None:
                self._state.identity = self._plan.identity_after
                self._state.relaid = self._plan.relaid_after or self._state.relaid
            self._phase = "committed"
        except (PlacementError, DeviceError) as err:
            self._abandon()
            if (stopped := _interrupt_behind(err)) is not None:
                raise stopped from None
            raise
        except BaseException as err:
            # Not "taken back": an interrupt that arrives after the last store is no different from one before.
            self._ranks.poison(err)
            self._poison()
            raise

    def _take_back(self) -> None:
        for part in self._changes:
            part.take_back()

    def _poison(self) -> None:
        self._phase = "poisoned"
        self._state.poisoned = True

    def _abandon(self) -> None:
        """Discard within a failing commit: in the pause nothing waits, and nothing hides why it failed."""
        self._phase = "discarded"
        try:
            self._drop()
        except CheckpointError as err:
            log.warning("staging_left reason=%s", err)

    def _check_still_there(self, plan: LivePlan) -> None:
        model = self._model()
        if model is None:
            raise PlacementError("the model is gone")
        if self._anchors.hold(model):
            return
        places = self._state.places or Places(dict.fromkeys(plan.placement.regions))
        gone = moved(plan.placement.spans(), places.place(model))
        if gone:
            raise PlacementError(
                "a parameter moved since prepare; nothing was stored, prepare again", tensor=gone[0]
            )

    def _drop(self) -> None:
        self._ranks.refuse(DeviceError("the update was discarded"))
        self._release()
        if self._write_back is not None:
            self._write_back.discard()

    def _release(self) -> None:
        """Keep nothing alive: not the lists, and not the weights' storages, which the engine may want to free."""
        self._lease.give_back()
        self._changes = ()
        self._plan = None
        self._anchors = Anchors(None, None)

    def _standing(self) -> dict[str, int | None]:
        """Where both sides stand, for the error of a folder that did not follow."""
        disk = None
        if self._chain.checkpoint is not None:
            with contextlib.suppress(CheckpointError):  # the error at hand says more
                found = read_marker(self._chain.checkpoint).marker
                disk = found.version if found is not None else None
        return {"live_version": self._state.identity.version, "disk_version": disk}


def _interrupt_behind(err: GpuSyncError) -> BaseException | None:
    """Return what stopped a store that was then taken back, where it is none of a program's errors."""
    cause = err.__cause__
    return cause if cause is not None and not isinstance(cause, Exception) else None
