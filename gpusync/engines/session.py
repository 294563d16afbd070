"""One live model in one worker process of an engine: an update from prepare to finish, over as many calls."""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Any, Literal, Protocol
from weakref import WeakSet

import torch

from gpusync.config import Settings
from gpusync.errors import DeviceError, GpuSyncError, PlacementError
from gpusync.live.apply import Update, attach, live_version, prepare
from gpusync.placement.relayout import Relayout
from gpusync.published.chain import open_chain
from gpusync.ranks.group import Limits, join
from gpusync.types import AttachReport, UpdateReport

log = logging.getLogger(__name__)

Phase = Literal["idle", "preparing", "prepared", "committed"]

_background: WeakSet[Thread] = WeakSet()
_END_SECONDS = 5.0


class Mount(Protocol):
    """What a session asks of the engine around it."""

    def model(self) -> torch.nn.Module:
        """Return the live model."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load tensors as the engine does; raise at those that the engine keeps derived copies of."""

    def why_not(self) -> str | None:
        """Return why the live weights cannot be updated in place now, and what to change; None where they can."""

    def group(self) -> Any:
        """Return the group of ranks that hold this model together; None for one that stands alone."""


class Session:
    """Updates of one live model, one at a time.

    An engine calls from its worker's loop; what is prepared in the background runs in a thread of the session's own.

    Parameters
    ----------
    mount
        The engine around the model.
    relayout
        Returns what the engine does to modules after loading them, for ``relayout=True``; None for an engine that offers
        nothing.
    """

    def __init__(self, mount: Mount, relayout: Callable[[], Relayout] | None = None) -> None:
        self._mount = mount
        self._relayout = relayout
        self._job: Future[Update] | None = None
        self._is_committed = False
        self._reload_reason: str | None = None

    def attach(
        self, checkpoint_dir: str, version: int | None = None, relayout: bool = False
    ) -> AttachReport:
        """Place and prove the model against the checkpoint that it was loaded from; see :func:`gpusync.attach`."""
        self._expect_usable(attaching=True)
        report = attach(
            self._mount.model(),
            checkpoint_dir,
            load_weights=self._mount.load_weights,
            version=version,
            relayout=self._relaying(relayout),
        )
        self._reload_reason = None
        return report

    def prepare(
        self,
        source_dir: str,
        target_version: int,
        checkpoint: str | None = None,
        base_dir: str | None = None,
        *,
        background: bool = False,
        pre_read_hook: str | None = None,
        visibility_timeout_seconds: float = 0.0,
        relayout: bool = False,
        **options: Any,
    ) -> None:
        """Prepare an update.

        Parameters
        ----------
        source_dir, target_version, checkpoint, base_dir, pre_read_hook, visibility_timeout_seconds
            See :func:`gpusync.open_chain`.
        background
            Return at once: the engine goes on serving meanwhile. ``commit`` waits for the end and raises what went wrong.
        relayout
            Take tensors that the engine rearranges after loading as well; see :func:`gpusync.attach`.
        options
            Those of :func:`gpusync.prepare`.

        Raises
        ------
        PlacementError
            The weights cannot be updated in place now; or background, and the model was not attached yet.
        GpuSyncError
            The live model and the local checkpoint are byte-identical to before.
        """
        if self.phase != "idle":
            raise PlacementError(
                f"an update of this model is {self.phase}; finish or discard it first"
            )
        self._expect_usable()

        def build() -> Update:
            group = self._mount.group()
            with _told_to(group):
                chain = open_chain(
                    source_dir,
                    target_version,
                    checkpoint=checkpoint,
                    base_dir=base_dir,
                    pre_read_hook=pre_read_hook,
                    visibility_timeout_seconds=visibility_timeout_seconds,
                )
            load_weights = self._mount.load_weights
            return prepare(
                self._mount.model(),
                chain,
                load_weights=load_weights,
                group=group,
                relayout=self._relaying(relayout),
                **options,
            )

        if background and live_version(self._mount.model()) is None:
            # A trace runs the engine's own loader, which must not happen beside a forward pass.
            raise PlacementError("attach the model before an update is prepared in the background")
        job = Future[Update]()
        if background:
            thread = Thread(target=_run, args=(job, build), name="gpusync-prepare", daemon=True)
            # A signal's exception may come as soon as it has started.
            _background.add(thread)
            thread.start()
        else:
            _run(job, build)
            job.result()
        self._job = job

    def commit(self) -> UpdateReport:
        """Make the prepared weights live; in the engine's pause. See :meth:`gpusync.Update.commit`."""
        if self._job is None or self._is_committed:
            raise DeviceError(f"there is no prepared update to commit: the session is {self.phase}")
        update = self._result(self._job)
        self._expect_usable()
        try:
            update.commit()
        except BaseException:
            # Also a cancelled request: it is not to keep the next one from preparing. What is still prepared after this,
            # because a graph is being captured, can be had again.
            self.discard()
            raise
        self._is_committed = True
        return update.report

    def finish(self) -> UpdateReport:
        """Let the local checkpoint follow a committed update; see :meth:`gpusync.Update.finish`."""
        if self._job is None or not self._is_committed:
            raise DeviceError(
                f"there is no committed update to finish: the session is {self.phase}"
            )
        update = self._job.result()
        self._job, self._is_committed = None, False
        return update.finish()

    def apply(self, *args: Any, **kwargs: Any) -> UpdateReport:
        """Prepare, commit and finish an update, with the arguments of ``prepare``."""
        self.prepare(*args, **kwargs)
        self.commit()
        return self.finish()

    def discard(self) -> None:
        """Forget an update that is not committed: nothing happened, on either side."""
        job = self._job
        if job is None or self._is_committed:
            return
        self._job = None
        if job.exception() is None:  # waits for a background thread
            with _quiet("an update was not discarded"):
                job.result().discard()

    def weights_replaced(self, reason: str) -> None:
        """Take note that the engine takes away or replaces the weights: what was proven of them holds no longer."""
        self.discard()
        self._reload_reason = reason

    @property
    def phase(self) -> Phase:
        """Where the session's update stands."""
        if self._job is None:
            return "idle"
        if self._is_committed:
            return "committed"
        return "prepared" if self._job.done() else "preparing"

    @property
    def version(self) -> int | None:
        """The version that is live; None before the model was attached, after a reload, or once it is poisoned."""
        return None if self._reload_reason is not None else live_version(self._mount.model())

    def _relaying(self, wanted: bool) -> Relayout | Literal[False]:
        return self._relayout() if wanted and self._relayout is not None else False

    def _result(self, job: Future[Update]) -> Update:
        try:
            return job.result()
        except BaseException:
            self._job = None
            raise

    def _expect_usable(self, *, attaching: bool = False) -> None:
        reason = self._mount.why_not()
        if reason is None and not attaching and self._reload_reason is not None:
            reason = (
                f"{self._reload_reason} since the model was attached; attach it again, to the checkpoint "
                "that it holds now"
            )
        if reason is not None:
            raise PlacementError(reason)


def to_plain(report: AttachReport | UpdateReport) -> dict[str, Any]:
    """Return a report as what every RPC carries: dicts with text keys, lists, text, numbers."""
    plain: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    return plain


@contextmanager
def named_errors() -> Iterator[None]:
    """Begin the text of gpusync's errors with their class: an engine's RPC carries only the text."""
    try:
        yield
    except GpuSyncError as err:
        err.message = f"{type(err).__name__}: {err.message}"
        raise


def _run(job: Future[Update], build: Callable[[], Update]) -> None:
    try:
        job.set_result(build())
    except BaseException as err:
        job.set_exception(err)


@atexit.register
def _end_background() -> None:
    """Let updates that are being prepared end, where they can.

    Python stops daemon threads in its own way, and one that is in torch's code then aborts the process. They end soon: no pool
    takes tasks any more. Those that wait for a mount or for other ranks are left alone, however many they are.
    """
    deadline = time.monotonic() + _END_SECONDS
    for thread in filter(Thread.is_alive, list(_background)):
        thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def _told_to(group: Any) -> Iterator[None]:
    """Let the other ranks know of an error here, who else wait for this one until the vote's timeout."""
    try:
        yield
    except GpuSyncError as err:
        with _quiet("the other ranks were not told"):
            limits = Limits(Settings.from_env().vote_timeout_seconds, swap_bytes=0)
            join(group, None, limits).refuse(err)
        raise


@contextmanager
def _quiet(what: str) -> Iterator[None]:
    try:
        yield
    except GpuSyncError as err:
        log.warning("%s reason=%s", what.replace(" ", "_"), err)
