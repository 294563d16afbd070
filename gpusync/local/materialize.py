"""Materialize: new shard files = a starting checkpoint with deltas folded in, verified, in staging.

Seeding, patching, catching up, healing and resetting are this one operation with different plans. Nothing outside
staging is written.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from gpusync import fsio
from gpusync.errors import GpuSyncError
from gpusync.folder.files import FileChangedError, OpenFiles
from gpusync.folder.layout import Layout, Shard, unreadable
from gpusync.folding.fold import FileSink, Fold, NullSink, Sink
from gpusync.folding.parallel import run_parallel
from gpusync.folding.plan import TensorPlan, mismatch, plan_tensor, plan_unmanaged
from gpusync.published.route import Route
from gpusync.timing import Meter
from gpusync.types import Algorithm, Digest, ProgressCallback

Result = TypeVar("Result")

_TABLE_ALGORITHM: Algorithm = "xxh3-128"
_MAX_SHARDS_OPEN = 64
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardPlan:
    """One new shard file: the header of the starting shard, verbatim, and every tensor in it."""

    file: str
    header: bytes
    nbytes: int
    mode: int
    tensors: tuple[TensorPlan, ...]


class Healer(Protocol):
    """Finds another way to a tensor whose local bytes turned out bad."""

    def __call__(self, plan: TensorPlan, got: Digest) -> TensorPlan:
        """Return a plan that starts from the seed, or raise what the caller should know."""


@dataclass
class Outcome:
    """What materializing gave: xxh3-128 hex by tensor, and which tensors were healed."""

    table: dict[str, str] = field(default_factory=dict)
    healed: list[str] = field(default_factory=list)
    changed: int = 0
    copied: int = 0
    written_bytes: int = 0


def plan_shards(
    layout: Layout,
    route: Route,
    files: OpenFiles,
    *,
    known: Mapping[str, str],
    suspects: frozenset[str] = frozenset(),
) -> tuple[ShardPlan, ...]:
    """Plan the shard files that differ from the starting layout; all of them unless the route starts from "applied".

    ``suspects`` are tensors whose local bytes are known to be bad.
    """
    local = route.start == "applied"
    touched = {name for delta in route.deltas for name in delta.digests} | suspects
    plans = []
    for file, shard in layout.shards.items():
        if local and touched.isdisjoint(shard.header.entries):
            continue
        tensors = tuple(
            plan_tensor(name, layout, route, files, known=known, from_local=local)
            if layout.file_of.get(name) == file
            else plan_unmanaged(name, shard, files, from_local=local)
            for name in shard.header.entries
        )
        plans.append(
            ShardPlan(
                file, shard.header.raw, shard.header.file_nbytes, _mode(shard, local), tensors
            )
        )
    return tuple(plans)


def reserve_shards(plans: Sequence[ShardPlan], staging: Path) -> None:
    """Create every staged file at its full size, so that a full disk is met before any work is done.

    Raises
    ------
    OSError
        ENOSPC or EDQUOT, or whatever the local disk says.
    """
    for plan in plans:
        fd = fsio.create(staging / plan.file, plan.mode)
        try:
            fsio.allocate(fd, plan.nbytes)
        finally:
            fsio.close(fd)


class Materializer:
    """Runs shard plans.

    Parameters
    ----------
    fold
        The fold engine, with its number of threads.
    heal
        What to do when a result misses its digest.
    progress
        Called from worker threads, one at a time; an exception from it stops the work.
    """

    def __init__(self, fold: Fold, heal: Healer, progress: ProgressCallback | None) -> None:
        self._fold = fold
        self._heal = heal
        self._progress = progress
        self._meter = Meter("materialize", 0, None)

    def write(self, plans: Sequence[ShardPlan], staging: Path) -> Outcome:
        """Fill the reserved staged files and verify every tensor.

        Raises
        ------
        GpuSyncError
            A blob or a digest is wrong; staging is void.
        OSError
            The local disk failed.
        """
        outcome = Outcome()
        self._begin("materialize", plans)
        for group in _groups(plans):
            with contextlib.ExitStack() as stack:
                fds = {}
                for plan in group:
                    fd = fds[plan.file] = fsio.open_for_writing(staging / plan.file)
                    stack.callback(fsio.close, fd)
                    fsio.pwrite(fd, memoryview(plan.header), 0)
                self._run(group, outcome, _file_sinks(fds))
        outcome.written_bytes = sum(plan.nbytes for plan in plans)
        return outcome

    def prove(self, plans: Sequence[ShardPlan]) -> Outcome:
        """Digest every result and write nothing."""
        outcome = Outcome()
        self._begin("verify", plans)
        self._run(plans, outcome, lambda plan: NullSink())
        return outcome

    def _begin(self, stage: str, plans: Sequence[ShardPlan]) -> None:
        total = sum(tensor.nbytes for plan in plans for tensor in plan.tensors)
        self._meter = Meter(stage, total, self._progress)

    def _run(
        self,
        plans: Sequence[ShardPlan],
        outcome: Outcome,
        sink_of: Callable[[TensorPlan], Sink],
    ) -> None:
        tensors = [tensor for plan in plans for tensor in plan.tensors]

        def one(plan: TensorPlan) -> tuple[TensorPlan, Digest, bool]:
            digest, healed = self._tensor(plan, sink_of(plan))
            return plan, digest, healed

        for plan, digest, healed in run_parallel(
            one, tensors, self._fold.workers, lambda tensor: tensor.nbytes
        ):
            if plan.managed:
                outcome.table[plan.name] = digest.hex
            outcome.changed += bool(plan.blobs)
            outcome.copied += not plan.blobs
            if healed:
                outcome.healed.append(plan.name)

    def _tensor(self, plan: TensorPlan, sink: Sink) -> tuple[Digest, bool]:
        """Fold one tensor, healing it once if it misses its digest; return our digest and whether it was healed."""
        digest, miss = self._attempt(plan, sink)
        if miss is None:
            return digest, False
        healing = self._heal(plan, miss)
        digest, miss = self._attempt(healing, sink)
        if miss is not None:
            raise mismatch(healing, miss)
        return digest, True

    def _attempt(self, plan: TensorPlan, sink: Sink) -> tuple[Digest, Digest | None]:
        """Return our digest, and the digest that missed, if one did."""
        algorithms = {_TABLE_ALGORITHM}
        if plan.expected is not None:
            algorithms.add(plan.expected.algorithm)
        digests = self._fold.run(
            plan.nbytes, plan.origin, plan.blobs, sink, algorithms, self._meter.add
        )
        got = digests[plan.expected.algorithm] if plan.expected is not None else None
        return digests[_TABLE_ALGORITHM], got if got != plan.expected else None


def _file_sinks(fds: Mapping[str, int]) -> Callable[[TensorPlan], Sink]:
    return lambda plan: FileSink(fds[plan.file], plan.begin)


def copy_file(source: Path, target: Path) -> int:
    """Copy a checkpoint's side file (config, tokenizer) into staging, in pieces; return its size.

    No digest tells a torn side file from a whole one, so the size must be right, and the file must be the same before
    and after.

    Raises
    ------
    SourceNotReadyError, HeaderFormatError
        The source cannot be read, ended early, or changed while it was read.
    OSError
        The local disk failed.
    """

    def reading(operation: Callable[..., Result], *arguments: object) -> Result:
        try:
            return operation(*arguments)
        except OSError as err:
            raise unreadable(err, source) from err

    origin = reading(fsio.open_regular, source)
    try:
        before = reading(fsio.fstat, origin)
        copy = fsio.create(target, stat.S_IMODE(before.st_mode) | stat.S_IWUSR)
        try:
            buffer = memoryview(bytearray(min(_COPY_BYTES, before.st_size)))
            done = 0
            while done < before.st_size:
                piece = buffer[: before.st_size - done]
                got = reading(fsio.pread_into, origin, piece, done)
                if got < len(piece):
                    raise _changed(source, f"ended {len(piece) - got} bytes early at {done + got}")
                fsio.pwrite(copy, piece, done)
                done += got
        finally:
            fsio.close(copy)
        after = reading(fsio.fstat, origin)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise _changed(source, "rewritten meanwhile")
        return done
    finally:
        fsio.close_read(origin)


def _changed(source: Path, how: str) -> GpuSyncError:
    return unreadable(FileChangedError(errno.ESTALE, how, str(source)), source)


def _mode(shard: Shard, local: bool) -> int:
    """Permission bits of the starting file, writable by its owner (another receiver patches in place)."""
    try:
        return stat.S_IMODE(fsio.stat_path(shard.path).st_mode) | stat.S_IWUSR
    except OSError as err:
        if local:
            raise
        raise unreadable(err, shard.path) from err


def _groups(plans: Sequence[ShardPlan]) -> list[Sequence[ShardPlan]]:
    return [plans[i : i + _MAX_SHARDS_OPEN] for i in range(0, len(plans), _MAX_SHARDS_OPEN)]
