"""Ballots: what each rank of a group brings to the vote, and whether ranks that are ready may commit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpusync.errors import BaseMismatchError, ChainError, GpuSyncError, VersionConflictError
from gpusync.folder.marker import Marker
from gpusync.published.route import Route
from gpusync.ranks.rounds import YES, Message, Verdict


@dataclass(frozen=True)
class Ballot:
    """What one rank brings to the vote.

    Parameters
    ----------
    target
        The version that was asked for.
    reached
        The version that the rank's live weights have after the commit.
    fingerprints
        Of the live weights, of every version on the way and of the one reached, by version, where known.
    runs
        The run ids of the live weights and of the version reached, by version, where known.
    """

    target: int
    reached: int
    fingerprints: dict[int, str] = field(default_factory=dict)
    runs: dict[int, str] = field(default_factory=dict)


def ballot_of(target: int, live: Marker, after: Marker, route: Route | None) -> Ballot:
    """Return a rank's ballot: its live identity, and the one that it goes to by a route, if by any."""
    fingerprints = {found.version: found.fingerprint for found in route.versions} if route else {}
    ends = (live, after)
    fingerprints |= {end.version: end.fingerprint for end in ends if end.fingerprint is not None}
    runs = {end.version: end.run_id for end in ends if end.run_id is not None}
    return Ballot(target, after.version, fingerprints, runs)


def judge_ballots(ballots: Sequence[Ballot]) -> Verdict:
    """Decide whether ranks that are ready may commit together.

    Ranks that start from different versions may, if what they share is the same and they end at the same version. No is,
    as the error's class: ChainError for different targets or ends; VersionConflictError for a version number that stands
    for different bytes or runs; BaseMismatchError for different bases.
    """
    targets = [{0: ballot.target} for ballot in ballots]
    if found := _differing(targets):
        return found.refusal(ChainError, "ranks were asked for different versions", version=None)
    if found := _differing([ballot.fingerprints for ballot in ballots]):
        kind = VersionConflictError if found.version else BaseMismatchError
        return found.refusal(kind, "ranks hold different bytes under one version")
    if found := _differing([ballot.runs for ballot in ballots]):
        return found.refusal(VersionConflictError, "ranks follow different runs")
    ends = [{0: ballot.reached} for ballot in ballots]
    if found := _differing(ends):
        return found.refusal(ChainError, "ranks would end at different versions", version=None)
    return YES


def read_ballot(message: Message) -> Ballot:
    """Read a ballot from its message; JSON has no numbers for keys."""
    fingerprints = {int(key): text for key, text in message["fingerprints"].items()}
    runs = {int(key): text for key, text in message["runs"].items()}
    return Ballot(message["target"], message["reached"], fingerprints, runs)


@dataclass(frozen=True)
class _Difference:
    """Two ranks that say different things of one version."""

    version: int
    ranks: tuple[int, int]
    values: tuple[Any, Any]

    def refusal(self, kind: type[GpuSyncError], what: str, **values: Any) -> Verdict:
        first, second = self.ranks
        values = {"version": self.version, **values, "ranks": [first, second]}
        values |= {"expected": self.values[0], "got": self.values[1]}
        message = f"{what}: rank {first} and rank {second} differ; no rank committed"
        return Verdict(False, kind.__name__, message, values)


def _differing(said: Sequence[dict[int, Any]]) -> _Difference | None:
    """Return the lowest version of which two ranks say different things."""
    first: dict[int, int] = {}
    found = []
    for rank, known in enumerate(said):
        for version, value in known.items():
            other = first.setdefault(version, rank)
            if said[other][version] != value:
                found.append(_Difference(version, (other, rank), (said[other][version], value)))
    return min(found, key=lambda one: one.version, default=None)
