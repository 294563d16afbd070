"""How a tensor's new bytes come about: its origin, the deltas to fold in, and the digest that the result must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpusync.errors import DigestMismatchError, GpuSyncError
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import Layout, Shard, local_io_error, unreadable
from gpusync.folding.fold import FileOrigin, Origin
from gpusync.published.blobs import BlobSource
from gpusync.published.route import Route
from gpusync.types import Algorithm, Digest

NOTHING_TO_FOLD = Route("applied", 0, 0)
"""The route of a tensor that is only read."""

_TABLE_ALGORITHM: Algorithm = "xxh3-128"


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor's new bytes come about.

    Parameters
    ----------
    begin
        Bytes from the start of the new shard file.
    blobs
        Deltas to fold in, oldest first; empty for a tensor that is copied.
    expected
        The digest that the result must have; None where nobody published one (unchanged tensors of a seed).
    from_local
        The origin is the local checkpoint, whose bytes may have rotted.
    managed
        False for a copy that the index does not name: it is carried along, and the table is not about it.
    origin_is_live
        The origin's bytes are those of the live model: what works on live memory need not read them.
    """

    name: str
    file: str
    begin: int
    nbytes: int
    origin: Origin
    blobs: tuple[BlobSource, ...] = ()
    expected: Digest | None = None
    from_local: bool = False
    managed: bool = True
    origin_is_live: bool = False


def plan_tensor(
    name: str,
    layout: Layout,
    route: Route,
    files: OpenFiles,
    *,
    known: Mapping[str, str],
    from_local: bool,
) -> TensorPlan:
    """Plan one tensor along a route.

    ``known`` gives xxh3-128 hex of the origin's bytes; it is what an unchanged tensor is checked against.
    """
    shard = layout.shards[layout.file_of[name]]
    blobs = tuple(BlobSource(files, delta, name) for delta in route.deltas if name in delta.digests)
    return _plan(name, shard, files, blobs, _expected(name, blobs, known), from_local)


def plan_unmanaged(name: str, shard: Shard, files: OpenFiles, *, from_local: bool) -> TensorPlan:
    """Plan a copy of a tensor that the index does not name: it is carried along."""
    return replace(_plan(name, shard, files, (), None, from_local), managed=False)


def mismatch(plan: TensorPlan, got: Digest) -> DigestMismatchError:
    """Return the error for a result that is not the published tensor."""
    last = plan.blobs[-1].delta if plan.blobs else None
    return DigestMismatchError(
        "the result is not the published tensor; nothing was changed, publish the version again",
        version=last.version if last is not None else None,
        file=last.blob(plan.name)[0].path.name if last is not None else plan.file,
        tensor=plan.name,
        expected=plan.expected,
        got=got,
    )


def _plan(
    name: str,
    shard: Shard,
    files: OpenFiles,
    blobs: tuple[BlobSource, ...],
    expected: Digest | None,
    from_local: bool,
) -> TensorPlan:
    entry = shard.header.entries[name]
    begin = shard.header.data_offset + entry.begin

    def explain(err: OSError) -> GpuSyncError:
        if from_local:
            return local_io_error(err, "reading the local checkpoint", shard.path)
        return unreadable(err, shard.path)

    origin = FileOrigin(files, shard.path, shard.stamp, begin, explain)
    return TensorPlan(
        name, shard.path.name, begin, entry.nbytes, origin, blobs, expected, from_local
    )


def _expected(name: str, blobs: tuple[BlobSource, ...], known: Mapping[str, str]) -> Digest | None:
    """The newest delta's digest; digests in between are not enforced, a fold never forms those bytes."""
    if blobs:
        return blobs[-1].delta.digests[name]
    return Digest(_TABLE_ALGORITHM, known[name]) if name in known else None
