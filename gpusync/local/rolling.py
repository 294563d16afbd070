"""The rolling swap: no room for a second copy, so shards are built and renamed one by one.

By the time the marker is removed every digest was proven by a dry pass, the deltas are in the local spool (a verbatim
copy of their version folders, so the same readers read it), and space for the largest shard was seen to be free.
What is left after a crash needs neither the publisher nor the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpusync import fsio
from gpusync.config import Settings
from gpusync.errors import (
    ChainError,
    CheckpointError,
    DigestMismatchError,
    FormatError,
    SourceNotReadyError,
    VersionConflictError,
)
from gpusync.folder.layout import local_io_error, read_layout
from gpusync.folding.fold import Fold
from gpusync.folding.plan import TensorPlan, mismatch
from gpusync.format.index import INDEX_NAME, MANIFEST_NAME
from gpusync.local.checkpoint import FolderPaths, is_absence, read_bound_table
from gpusync.local.materialize import (
    Materializer,
    ShardPlan,
    copy_file,
    plan_shards,
    reserve_shards,
)
from gpusync.local.swap import BuildShard, Journal
from gpusync.published.chain import Chain
from gpusync.published.route import Route
from gpusync.types import Digest, ProgressCallback


def spool_versions(route: Route, paths: FolderPaths, settings: Settings) -> None:
    """Copy the route's deltas into the spool, fsynced: index and manifest last, as a publisher writes them.

    Raises
    ------
    SourceNotReadyError, HeaderFormatError
        The source cannot be read.
    VersionConflictError
        A version is not the one that was validated any more.
    OSError
        The local disk failed.
    """
    fsio.remove_tree(paths.spool)
    for delta in route.deltas:
        folder = paths.spool / delta.path.name
        fsio.make_dir(folder)
        names = [*delta.shards, *([MANIFEST_NAME] if delta.manifest is not None else [])]
        for name in [*names, INDEX_NAME]:
            copy_file(delta.path / name, folder / name)
            fsio.fsync_file(folder / name)
        fsio.fsync_dir(folder)
    fsio.make_dir(paths.spool)
    fsio.fsync_dir(paths.spool)
    with (
        Chain(
            paths.spool, route.target, checkpoint=None, base_dir=None, settings=settings
        ) as spooled,
        _all_is_local(paths),
    ):
        for delta in route.deltas:
            got = spooled.version(delta.version).fingerprint
            if got != delta.fingerprint:
                raise VersionConflictError(
                    "the version was replaced while it was read; pull again",
                    version=delta.version,
                    expected=delta.fingerprint,
                    got=got,
                )


def reserve_rolling(paths: FolderPaths, plans: Sequence[ShardPlan]) -> None:
    """Reserve room for the largest shard beside the spool, before anything is removed; building the first one frees it.

    An old file that has other links (to the base, say) gives nothing back when it is replaced, so every such file
    counts in full.

    Raises
    ------
    OSError
        ENOSPC where there is not.
    """
    nbytes = rolling_room(paths.folder, plans)
    fd = fsio.create(paths.reserve)
    try:
        fsio.allocate(fd, nbytes)
    except OSError as err:
        free = fsio.free_bytes(paths.state)
        raise OSError(
            err.errno,
            f"{err.strerror} ({nbytes} bytes needed to build the largest shard, {free} free)",
        ) from err
    finally:
        fsio.close(fd)


def rolling_room(folder: Path, plans: Sequence[ShardPlan]) -> int:
    """Bytes of local disk that building the shards one by one takes at its worst moment."""
    linked = sum(plan.nbytes for plan in plans if fsio.lstat(folder / plan.file).st_nlink > 1)
    return linked + max((plan.nbytes for plan in plans), default=0)


def shard_builder(
    paths: FolderPaths,
    journal: Journal,
    settings: Settings,
    fold: Fold,
    progress: ProgressCallback | None,
) -> tuple[Chain, BuildShard]:
    """Return the spool's chain (the caller closes it) and a function that builds one staged shard from it.

    Every tensor is checked against the digest that the dry pass recorded for it.

    Raises
    ------
    CheckpointError
        The spool or its table is damaged.
    """
    staged = paths.staging / paths.table.name
    table = read_bound_table(staged, journal.after.id)
    if table is None:  # resumed after step 12
        table = read_bound_table(paths.table, journal.after.id)
    if table is None:
        raise CheckpointError(
            "the table of a swap in progress is damaged; pull again to rebuild the folder",
            file=str(staged),
        )
    chain = Chain(
        paths.spool, journal.after.version, checkpoint=None, base_dir=None, settings=settings
    )
    files = chain.source.files
    try:
        with _all_is_local(paths):
            route = chain.route(journal.from_version)
            layout = read_layout(paths.folder, files, settings)
            plans = {plan.file: plan for plan in plan_shards(layout, route, files, known=table)}
    except BaseException:
        chain.close()
        raise

    def build(file: str) -> None:
        if file not in plans:
            raise CheckpointError(
                "the spool does not hold what the journal of this swap promises", file=file
            )
        fsio.make_dir(paths.new_files)
        fsio.unlink(paths.reserve)
        reserve_shards([plans[file]], paths.new_files)
        with _all_is_local(paths):
            Materializer(fold, _refuse, progress).write([plans[file]], paths.new_files)
        fsio.fsync_file(paths.new_files / file)
        fsio.fsync_dir(paths.new_files)
        files.forget(paths.folder / file)  # the old file's blocks are free once it is replaced

    return chain, build


@contextmanager
def _all_is_local(paths: FolderPaths) -> Iterator[None]:
    """Turn what the readers say of a published version into what it means here: spool and old shards are local files.

    A disk that cannot be read keeps the swap, to be resumed when it can. Only what is damaged ends it.
    """
    try:
        yield
    except VersionConflictError:
        raise
    except (SourceNotReadyError, FormatError, ChainError, DigestMismatchError) as err:
        cause = err.__cause__
        if isinstance(cause, OSError) and not is_absence(cause):
            raise local_io_error(
                cause, "reading the spool and the old shards", paths.folder
            ) from err
        raise CheckpointError(
            "the spool, or a shard that is still old, is damaged; pull again to rebuild the folder: "
            + err.message,
            version=err.version,
            file=err.file,
            tensor=err.tensor,
        ) from err


def _refuse(plan: TensorPlan, got: Digest) -> TensorPlan:
    raise mismatch(plan, got)
