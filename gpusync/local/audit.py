"""Audit: are the bytes of a local checkpoint what they should be, and how is a bad tensor rebuilt?

Evidence is the digest table where gpusync wrote the folder, else whatever is still published: the digest of the last
delta that touched a tensor, or the seed's own bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpusync.errors import ChainError, GpuSyncError, SourceNotReadyError
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import Layout
from gpusync.folding.fold import Fold, NullSink
from gpusync.folding.parallel import run_parallel
from gpusync.folding.plan import NOTHING_TO_FOLD, TensorPlan, mismatch, plan_tensor
from gpusync.published.chain import Chain, start_layout
from gpusync.published.route import Route
from gpusync.timing import Meter
from gpusync.types import Algorithm, BadTensor, Digest, ProgressCallback


class Evidence(Protocol):
    """Says what a tensor's digest should be."""

    @property
    def name(self) -> str:
        """What the report calls this evidence."""

    def expected(self, tensor: str, nbytes: int) -> Digest | None:
        """Return the digest, or None where nothing is known."""


@dataclass(frozen=True)
class TableEvidence:
    """The digests taken when gpusync wrote the folder."""

    table: Mapping[str, str]
    name: str = "table"

    def expected(self, tensor: str, nbytes: int) -> Digest | None:
        known = self.table.get(tensor)
        return Digest("xxh3-128", known) if known is not None else None


class PublishedEvidence:
    """What the source and the base still show of a version.

    Parameters
    ----------
    chain
        Opened at the version that the folder claims.

    Raises
    ------
    SourceNotReadyError, FormatError, ChainError
        From the constructor: the versions up to it are not all there.
    """

    name = "published"

    def __init__(self, chain: Chain, fold: Fold) -> None:
        self._route = chain.route(None, use_aggregate=False)
        self._layout = start_layout(chain, self._route, None)
        self._files = chain.source.files
        self._fold = fold

    def expected(self, tensor: str, nbytes: int) -> Digest | None:
        for delta in reversed(self._route.deltas):
            if tensor in delta.digests:
                return delta.digests[tensor]
        if tensor not in self._layout or self._layout.entry(tensor).nbytes != nbytes:
            return None
        plan = plan_tensor(
            tensor, self._layout, NOTHING_TO_FOLD, self._files, known={}, from_local=False
        )
        return self._fold.run(nbytes, plan.origin, (), NullSink(), ["xxh3-128"])["xxh3-128"]


@dataclass
class Audit:
    """What an audit found: xxh3-128 hex of every good tensor, the bad ones, and how many had no evidence."""

    table: dict[str, str] = field(default_factory=dict)
    bad: list[BadTensor] = field(default_factory=list)
    unproven: int = 0
    nbytes: int = 0

    @property
    def suspects(self) -> frozenset[str]:
        return frozenset(item.tensor for item in self.bad)


def audit(
    layout: Layout,
    files: OpenFiles,
    fold: Fold,
    evidence: Evidence | None,
    progress: ProgressCallback | None,
) -> Audit:
    """Digest every tensor of a local checkpoint and hold it against the evidence.

    Raises
    ------
    CheckpointIOError
        The local disk failed.
    """
    found = Audit()
    meter = Meter("verify", layout.nbytes, progress)

    def one(name: str) -> tuple[str, Digest | None, dict[Algorithm, Digest]]:
        plan = plan_tensor(name, layout, NOTHING_TO_FOLD, files, known={}, from_local=True)
        expected = evidence.expected(name, plan.nbytes) if evidence is not None else None
        algorithms: set[Algorithm] = {"xxh3-128"}
        if expected is not None:
            algorithms.add(expected.algorithm)
        return (
            name,
            expected,
            fold.run(plan.nbytes, plan.origin, (), NullSink(), algorithms, meter.add),
        )

    for name, expected, digests in run_parallel(
        one, list(layout.file_of), fold.workers, lambda name: layout.entry(name).nbytes
    ):
        found.nbytes += layout.entry(name).nbytes
        if expected is not None and digests[expected.algorithm] != expected:
            got = digests[expected.algorithm]
            found.bad.append(BadTensor(layout.file_of[name], name, str(expected), str(got)))
            continue
        found.unproven += expected is None
        found.table[name] = digests["xxh3-128"].hex
    return found


class SeedHealer:
    """Rebuilds a tensor from the seed and the whole chain when its local bytes turned out bad.

    Parameters
    ----------
    chain
        Opened at the pull's target.
    known
        xxh3-128 hex of the local tensors as they should be; a local tensor that still has its digest is good, and
        then it is the publication that is bad.
    """

    def __init__(self, chain: Chain, known: Mapping[str, str], fold: Fold) -> None:
        self._chain = chain
        self._known = known
        self._fold = fold
        self._lock = threading.Lock()
        self._seed: tuple[Route, Layout] | None = None

    def __call__(self, plan: TensorPlan, got: Digest) -> TensorPlan:
        """Return a plan that starts from the seed.

        Raises
        ------
        DigestMismatchError
            The local bytes are good: the published delta is not what its digest says.
        ChainError
            The versions that could rebuild the tensor are gone.
        """
        if not plan.from_local or self._local_is_good(plan):
            raise mismatch(plan, got)
        return self.rebuild(plan)

    def rebuild(self, plan: TensorPlan) -> TensorPlan:
        """Return a plan for the same place in the same file that starts from the seed.

        Raises
        ------
        ChainError
            The versions that could rebuild the tensor are gone.
        """
        route, layout = self._open_seed(plan)
        if plan.name not in layout or layout.entry(plan.name).nbytes != plan.nbytes:
            raise ChainError(
                "a local tensor is damaged, and the seed does not hold it in this size",
                tensor=plan.name,
                file=plan.file,
            )
        healing = plan_tensor(
            plan.name,
            layout,
            route,
            self._chain.source.files,
            known=self._known,
            from_local=False,
        )
        return replace(healing, file=plan.file, begin=plan.begin)

    def _local_is_good(self, plan: TensorPlan) -> bool:
        known = self._known.get(plan.name)
        if known is None:
            return False
        digests = self._fold.run(plan.nbytes, plan.origin, (), NullSink(), ["xxh3-128"])
        return digests["xxh3-128"].hex == known

    def _open_seed(self, plan: TensorPlan) -> tuple[Route, Layout]:
        with self._lock:
            if self._seed is None:
                try:
                    route = self._chain.route(None, use_aggregate=False)
                    self._seed = route, start_layout(self._chain, route, None)
                except (SourceNotReadyError, ChainError) as err:
                    raise _not_rebuildable(plan, err) from err
            return self._seed


def _not_rebuildable(plan: TensorPlan, err: GpuSyncError) -> ChainError:
    return ChainError(
        "a local tensor is damaged, and what could rebuild it is gone; publish a full version, or restore the base: "
        + err.message,
        version=err.version,
        file=plan.file,
        tensor=plan.name,
    )
