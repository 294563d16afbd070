"""Ranks: one update of many processes, which all commit it or all discard it.

1. hello (prepare begins): who is on which host with which folder; per host and folder the lowest rank writes back.
2. slices (still in prepare): who holds which slices of changed tensors, and so what the ranks can prove together.
3. sums (each has done its part of that): the slices' shares are added up to the digests of the wholes.
4. vote (commit begins, nothing stored): every rank is ready, all stand on the same history and end at the same bytes.
   A rank that failed, discarded, died or is late makes it a no.
5. outcome (after the stores): all have stored; only then is the version set.
6. undone (where the outcome is no): those that stored have taken it back; all are as before.

What ends 5 or 6 without an answer of every rank, or with a rank that cannot say what its weights are, poisons all.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import distributed
from torch.distributed import distributed_c10d

from gpusync.errors import (
    DeviceError,
    GpuSyncError,
    ModelPoisonedError,
)
from gpusync.folder.marker import current_boot_id
from gpusync.ranks.ballots import Ballot, judge_ballots, read_ballot
from gpusync.ranks.channel import Channel, Members
from gpusync.ranks.rounds import (
    YES,
    Message,
    Round,
    Stage,
    StoreLostError,
    Verdict,
    next_round,
    no,
)
from gpusync.ranks.sharefile import ShareFile
from gpusync.ranks.shares import Agreement, Offer, agree, pack_offers, unpack_offers
from gpusync.ranks.tally import Tally

_BEFORE_THE_VOTE: tuple[Stage, ...] = ("slices", "sums")

log = logging.getLogger(__name__)


class Ranks(Protocol):
    """The ranks of an update, as one of them sees them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Whatever the ranks made different from what was asked, for the report."""

    @property
    def writes_back(self) -> bool:
        """Whether this process lets the local checkpoint follow."""

    def agree(self, offers: Mapping[str, Offer]) -> Agreement:
        """Return which of the tensors that ranks hold slices of they prove together, the same on all of them.

        Parameters
        ----------
        offers
            The tensors that this rank holds slices of, whose new bytes it can tell.

        Raises
        ------
        GpuSyncError
            Another rank failed, or DeviceError for one that died or is late.
        """

    def prove(self, agreement: Agreement, shares: ShareFile) -> None:
        """Hold what all ranks' slices make, together, against the published digests.

        Parameters
        ----------
        shares
            Those of this rank's slices of what was agreed on, complete.

        Raises
        ------
        DigestMismatchError
            This rank found that a tensor would not be the published one; the vote tells the others.
        GpuSyncError
            As for :meth:`agree`.
        """

    def vote(self, ballot: Ballot) -> None:
        """Return when every rank may store.

        Raises
        ------
        GpuSyncError
            No rank stores. A rank's own error has its class; DeviceError for a rank that died or is late.
        """

    def settle(self, failure: GpuSyncError | None, take_back: Callable[[], None]) -> None:
        """Return when every rank has stored.

        Parameters
        ----------
        failure
            Why this rank has stored nothing; None where it has stored everything.
        take_back
            Undoes the store.

        Raises
        ------
        GpuSyncError
            ``failure``, or another rank's: no rank's weights changed.
        ModelPoisonedError
            Nobody knows what all ranks' weights are.
        """

    def refuse(self, error: BaseException) -> None:
        """Take no further part, with nothing stored here. Never raises; once the update is over it does nothing."""

    def poison(self, error: BaseException) -> None:
        """Tell the ranks that nobody knows what this one's weights are. Never raises."""

    def leave(self) -> None:
        """Be done, after the pause. Never raises."""


class Alone:
    """The ranks of an update without a group."""

    notes = ()
    writes_back = True

    def agree(self, offers: Mapping[str, Offer]) -> Agreement:
        return Agreement()

    def prove(self, agreement: Agreement, shares: ShareFile) -> None:
        pass

    def vote(self, ballot: Ballot) -> None:
        pass

    def settle(self, failure: GpuSyncError | None, take_back: Callable[[], None]) -> None:
        if failure is not None:
            raise failure

    def refuse(self, error: BaseException) -> None:
        pass

    def poison(self, error: BaseException) -> None:
        pass

    def leave(self) -> None:
        pass


class Voters:
    """The ranks of a group, after their hello; see :class:`Ranks`."""

    def __init__(self, round: Round, members: Members, writer: int, limits: Limits) -> None:
        self._round = round
        self._members = members
        self._limits = limits
        self._writer = writer
        self._over = False
        self._left = False

    @property
    def notes(self) -> tuple[str, ...]:
        if self.writes_back:
            return ()
        return (f"rank {self._writer} writes back this host's local checkpoint",)

    @property
    def writes_back(self) -> bool:
        return self._writer == self._round.rank

    def agree(self, offers: Mapping[str, Offer]) -> Agreement:
        hello = {"slices": len(offers), "gloo": distributed.is_gloo_available()}
        said = self._meet("slices", hello, _judge_slices)
        if not said["exchange"]:
            return Agreement(reasons=dict.fromkeys(offers, said["why"]))
        with self._channel("slices") as channel:
            found = channel.gather(pack_offers(offers))
        return agree([unpack_offers(packed) for packed in found])

    def prove(self, agreement: Agreement, shares: ShareFile) -> None:
        if not agreement.tensors:
            return
        self._meet("sums", {}, _all_well)
        with self._channel("sums") as channel:
            Tally(channel, shares, self._limits.swap_bytes).run(agreement.tensors)

    def vote(self, ballot: Ballot) -> None:
        def judge(messages: Sequence[Message]) -> Verdict:
            return judge_ballots([read_ballot(message) for message in messages])

        self._meet("vote", asdict(ballot), judge)

    def settle(self, failure: GpuSyncError | None, take_back: Callable[[], None]) -> None:
        with _lost_store_is(ModelPoisonedError, "what the ranks stored is unknown"):
            outcome = self._outcome(failure)
            if outcome.go:
                return
            if outcome.poisons:
                raise outcome.exception()
            if failure is None:
                take_back()
            undone = self._round.exchange("undone", {}, _all_well, ModelPoisonedError)
        if not undone.go:
            raise undone.exception()
        self._over = True
        raise failure if failure is not None else outcome.exception()

    def refuse(self, error: BaseException) -> None:
        if not self._over:
            self._over = True
            kind = DeviceError if isinstance(error, ModelPoisonedError) else None
            with _telling():
                verdict = no(self._round.rank, error, kind)
                for stage in _BEFORE_THE_VOTE:  # where others may wait for this rank
                    self._round.propose(stage, verdict)
                if self._round.propose("vote", verdict).go:  # stopped just as the vote said yes
                    stopped = no(self._round.rank, error, DeviceError)
                    self._round.propose("outcome", stopped)
                    self._round.say("undone", {}, _all_well)
        self.leave()

    def poison(self, error: BaseException) -> None:
        if not self._over:
            self._over = True
            with _telling():
                verdict = no(self._round.rank, error, ModelPoisonedError)
                self._round.propose("outcome", verdict)
                self._round.propose("undone", verdict)
        self.leave()

    def leave(self) -> None:
        self._over = True
        if not self._left:
            self._left = True
            with _telling():
                self._round.leave()

    def _meet(
        self,
        stage: Stage,
        message: Message,
        judge: Callable[[Sequence[Message]], Verdict],
    ) -> Mapping[str, Any]:
        """Speak in a stage before any store, and return its result, or raise why it is the update's end."""
        with _lost_store_is(DeviceError, "nothing was stored here"):
            verdict = self._round.exchange(stage, message, judge, DeviceError)
        if not verdict.go:
            self._over = True
            raise verdict.exception()
        return verdict.result

    @contextmanager
    def _channel(self, stage: Stage) -> Iterator[Channel]:
        """Open a channel to the other ranks; a failure here is theirs before it closes."""

        def watch() -> None:
            with _lost_store_is(DeviceError, "nothing was stored here"):
                self._round.look_around()

        members = replace(self._members, prefix=f"{self._round.channel_prefix}/{stage}")
        with Channel(members, self._limits.timeout_seconds, watch) as channel:
            try:
                yield channel
            except BaseException as err:
                self.refuse(err)
                raise

    def _outcome(self, failure: GpuSyncError | None) -> Verdict:
        if failure is None:
            return self._round.exchange("outcome", {}, _all_well, ModelPoisonedError)
        return self._round.propose("outcome", no(self._round.rank, failure))


@dataclass(frozen=True)
class Limits:
    """How long a rank waits for the others in each stage, and the bytes that it sends, or gets, at a time in an exchange."""

    timeout_seconds: float
    swap_bytes: int


def join(group: Any, folder: Path | None, limits: Limits) -> Ranks:
    """Join the ranks of a group in their next update; every rank of it must. Without a group: no others.

    Parameters
    ----------
    group
        A torch.distributed process group, over any backend: only its store is used, no collective of it is run.
    folder
        The local checkpoint that is to follow, None for none.
    limits
        Hold here and in every later stage.

    Raises
    ------
    DeviceError
        It is no group that this process is in, or a rank did not join in time.
    """
    if group is None:
        return Alone()
    members = _members(group)
    rank = members.rank
    with _lost_store_is(DeviceError, "nothing was stored"):
        round = next_round(members.store, rank, members.size, limits.timeout_seconds)
        try:
            verdict = _hello(round, folder)
        except BaseException as err:
            with _telling():
                round.propose("hello", no(rank, err))
            Voters(round, members, rank, limits).refuse(err)  # the hello may have just gone well
            raise
    if not verdict.go:
        with _telling():
            round.leave()
        raise verdict.exception()
    return Voters(round, members, verdict.result["writers"][rank], limits)


def _hello(round: Round, folder: Path | None) -> Verdict:
    round.show_process()
    hello = {
        "host": f"{socket.gethostname()} {current_boot_id()}",
        "folder": os.path.realpath(folder) if folder is not None else None,
    }
    return round.exchange("hello", hello, _judge_hellos, DeviceError)


def _members(group: Any) -> Members:
    try:
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        if rank < 0:
            raise DeviceError("this process is not a member of the group")
        # torch has no public way to a group's store that all its releases since 2.4 know
        store = distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as err:
        raise DeviceError(
            f"group is not an initialized torch.distributed process group with a store: {err!r}"
        ) from err
    return Members(store, rank, size)


def _judge_hellos(hellos: Sequence[Message]) -> Verdict:
    """Give each rank the lowest one that has the same folder on the same host."""
    places = [(hello["host"], hello["folder"]) for hello in hellos]
    writers = [
        places.index(place) if place[1] is not None else rank for rank, place in enumerate(places)
    ]
    return Verdict(True, result={"writers": writers})


def _judge_slices(messages: Sequence[Message]) -> Verdict:
    """Have the ranks exchange what slices they hold, if any of them does and all can."""
    without = [rank for rank, message in enumerate(messages) if not message["gloo"]]
    why = f"torch has no gloo on rank {without[0]}" if without else ""
    exchange = not without and any(message["slices"] for message in messages)
    return Verdict(True, result={"exchange": exchange, "why": why})


def _all_well(messages: Sequence[Message]) -> Verdict:
    """Judge a stage in which a rank speaks only where it is well."""
    return YES


@contextmanager
def _lost_store_is(kind: type[GpuSyncError], so: str) -> Iterator[None]:
    try:
        yield
    except StoreLostError as err:
        raise kind(f"{err}; {so}") from err


@contextmanager
def _telling() -> Iterator[None]:
    """What is told to the others while this rank is failing hides nothing: they find out by the timeout."""
    try:
        yield
    except StoreLostError as err:
        log.warning("ranks_not_told reason=%s", err)
