"""Which versions lead from an applied version to the target.

A :class:`gpusync.published.route.Route` is the answer for one starting point.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from gpusync.config import Settings
from gpusync.errors import (
    ChainError,
    CheckpointError,
    FormatError,
    SourceNotReadyError,
    VersionConflictError,
)
from gpusync.folder.layout import Layout, absolute_path, is_unchanged, read_layout
from gpusync.folder.marker import Marker, read_marker
from gpusync.format.digest import fingerprint
from gpusync.published.hook import HookCall, PreReadHook
from gpusync.published.route import (
    Route,
    check_base_fingerprint,
    check_order,
    check_run,
    check_target,
    check_targets,
)
from gpusync.published.source import Source, SourceVersion
from gpusync.types import Progress, ProgressCallback

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.05
_LAST_PAUSE_SECONDS = 2.0
_LOOK_BACK = 4
"""Versions before the applied one that are held against those applied: a later one need not touch what they changed."""


class Chain:
    """Validated published versions up to ``target_version``, opened once and shared by live and disk.

    Made by :func:`open_chain`. Holds descriptors of published shards until closed or collected; a context manager.
    """

    def __init__(
        self,
        source_dir: str | os.PathLike[str],
        target_version: int,
        *,
        checkpoint: Path | None,
        base_dir: Path | None,
        settings: Settings,
    ) -> None:
        self.source = Source(source_dir, settings)
        self.settings = settings
        self.target_version = check_target(target_version)
        self.checkpoint = checkpoint
        self.base_dir = base_dir
        self._opened: dict[int, SourceVersion] = {}
        self._base: Layout | None = None

    def version(self, number: int) -> SourceVersion:
        """Return a version, opened and validated on first use.

        Raises
        ------
        SourceNotReadyError, FormatError, ChainError
            See :meth:`gpusync.published.source.Source.open_version`.
        """
        if number not in self._opened:
            self._opened[number] = self.source.open_version(number)
        return self._opened[number]

    def base_layout(self) -> Layout:
        """Return the base checkpoint's layout.

        Raises
        ------
        ChainError
            No base was given.
        SourceNotReadyError, FormatError
            The base is not a readable checkpoint.
        """
        if self.base_dir is None:
            raise ChainError("version 0 is needed, and no base_dir (--base) was given", version=0)
        if self._base is None:
            try:
                self._base = read_layout(self.base_dir, self.source.files, self.settings)
            except SourceNotReadyError as err:
                err.message = f"the base checkpoint (base_dir) is not readable: {err.message}"
                raise
        return self._base

    def check_base_unchanged(self) -> None:
        """Notice a base that was rewritten since it was opened, if it was.

        Raises
        ------
        VersionConflictError
            A shard of the base is not the file that was read: what was made of it may be a mixture.
        SourceNotReadyError, HeaderFormatError
            A shard of the base is gone, or cannot be looked at.
        """
        shards = self._base.shards.values() if self._base is not None else ()
        for shard in shards:
            if not is_unchanged(shard):
                raise VersionConflictError(
                    "the base was rewritten while it was read; pull again",
                    version=0,
                    file=str(shard.path),
                )

    def base_fingerprint(self) -> str:
        """Return the base's fingerprint: of its index and shard headers, as a version's."""
        layout = self.base_layout()
        headers = {name: shard.header.raw for name, shard in layout.shards.items()}
        return fingerprint(layout.index_raw, headers)

    def route(self, applied: int | None, *, use_aggregate: bool = True) -> Route:
        """Return the way to the target from ``applied`` (None: from nothing).

        Walks down from the target to the newest full version above ``applied``, else to ``applied``, else to the
        base. Everything it names is validated before it is returned.

        Raises
        ------
        SourceNotReadyError
            A version in between is not visible.
        BaseMismatchError
            A delta's base is not the version before it.
        """
        target = self.target_version
        if target == 0:
            return Route("base", 0, 0)
        floor = applied or 0
        aggregate = self._usable_aggregate() if applied is None and use_aggregate else None
        deltas: list[SourceVersion] = []
        for number in range(target, floor, -1):
            if aggregate is not None and number == aggregate.version:
                deltas.append(aggregate)
                return check_order(Route("aggregate", 0, target, tuple(reversed(deltas))))
            found = self.version(number)
            if found.kind == "full":
                return check_order(
                    Route("full", number, target, tuple(reversed(deltas)), full=found)
                )
            deltas.append(found)
        start: Literal["applied", "base"] = "base" if applied is None else "applied"
        return check_order(Route(start, floor, target, tuple(reversed(deltas))))

    def check_identity(self, marker: Marker) -> None:
        """Refuse a source whose version numbers stand for other bytes than those applied.

        Compares the applied version's fingerprint, the target's where the marker knows it, and those of the versions
        applied last with what is published under those numbers now; versions that are gone are fine.

        Raises
        ------
        VersionConflictError
            Republished, or another run in the same folder.
        """
        known = {**marker.history}
        if marker.fingerprint is not None:
            known[marker.version] = marker.fingerprint
        decisive = {marker.version, self.target_version} & known.keys()
        earlier = sorted(known.keys() - decisive - {0})[-_LOOK_BACK:]
        for number in sorted({*decisive, *earlier}):
            if not self.source.has_version(number):
                continue
            try:
                found = self.version(number)
            except SourceNotReadyError:
                continue  # half gone: being pruned
            except (FormatError, ChainError):
                if number in decisive:
                    raise
                continue  # nothing is built on it any more
            if found.fingerprint != known[number]:
                raise VersionConflictError(
                    "this version number now holds other bytes than those applied: it was published again, or by "
                    "another run; pull target 0 to reset to the base",
                    version=number,
                    expected=known[number],
                    got=found.fingerprint,
                )

    def check_base_identity(self, route: Route, marker: Marker) -> None:
        """Refuse a first delta whose manifest names another base, or another run, than the applied bytes'.

        Raises
        ------
        BaseMismatchError
            The delta was made from other bytes.
        VersionConflictError
            The delta is another run's.
        """
        if route.start != "applied" or not route.deltas:
            return
        check_run(route.deltas[0], marker.run_id)
        if marker.fingerprint is not None:
            check_base_fingerprint(route.deltas[0], marker.fingerprint)

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "source"):
            self.source.close()

    def _usable_aggregate(self) -> SourceVersion | None:
        found = self.source.open_aggregate()
        return found if found is not None and 0 < found.version <= self.target_version else None


def open_chain(
    source_dir: str | os.PathLike[str],
    target_version: int,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    pre_read_hook: PreReadHook | None = None,
    visibility_timeout_seconds: float = 0.0,
) -> Chain:
    """Read and validate every published version that an update to ``target_version`` may need.

    Parameters
    ----------
    source_dir
        Folder of ``weight_vNNNNNN`` version folders.
    target_version
        The version wanted; 0 means the base.
    checkpoint
        The host-local checkpoint that follows the update, and whose applied version is the starting point.
    base_dir
        The engine's base checkpoint, version 0.
    pre_read_hook
        ``"module:function"``, ``"module.function"`` or a function, called ``hook(source_dir, target_version)``
        before anything is read.
    visibility_timeout_seconds
        How long to wait, refreshing the folder's listing, for versions that are not visible yet.

    Returns
    -------
    Chain
        Nothing was changed on either side. It owns open descriptors: close it, or let it be collected.

    Raises
    ------
    SourceNotReadyError, FormatError, ChainError
        By what the caller does next; see :mod:`gpusync.errors`.
    """
    settings = Settings.from_env()
    check_target(target_version)
    if pre_read_hook is not None:
        HookCall(pre_read_hook, os.fspath(source_dir), target_version).run(
            settings.hook_timeout_seconds
        )
    folder = None
    if checkpoint is not None:
        folder = absolute_path(checkpoint, CheckpointError, "checkpoint")
    marker = read_marker(folder).marker if folder is not None else None
    base = resolve_base(folder, base_dir, marker, target_version)
    chain = Chain(source_dir, target_version, checkpoint=folder, base_dir=base, settings=settings)
    applied = marker.version if marker is not None else None
    try:
        if marker is not None and chain.target_version > 0:  # a reset is the way out of a conflict
            chain.check_identity(marker)
        if applied is None or chain.target_version > applied or chain.target_version == 0:
            wait_visible(lambda: _validate(chain, applied), visibility_timeout_seconds)
    except BaseException:
        chain.close()  # an error that is kept would keep its descriptors, too
        raise
    return chain


def wait_visible(
    attempt: Callable[[], T], timeout_seconds: float, progress: ProgressCallback | None = None
) -> T:
    """Return what ``attempt`` returns, trying again while the source is not ready, up to the timeout.

    Every try lists the folders anew, which is what refreshes a stale directory entry on network mounts.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return attempt()
        except SourceNotReadyError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if progress is not None:
                progress(Progress("open", message="waiting for the source to be visible"))
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def resolve_base(
    folder: Path | None,
    base_dir: str | os.PathLike[str] | None,
    marker: Marker | None,
    target_version: int,
) -> Path | None:
    """Return the base to use: the latched one while the folder descends from it, else the one given.

    The pristine base is latched when the folder is seeded. Engines repoint their model path at the local checkpoint
    after the first update and from then on pass that as base; and a tensor can only be rebuilt from the base that it
    came from. A reset (target 0) starts over from the base given.

    Raises
    ------
    CheckpointError
        Base and local checkpoint are the same folder, and no other base was latched.
    """
    latched = Path(marker.base) if marker is not None and marker.base is not None else None
    given = None
    if base_dir is not None:
        given = absolute_path(base_dir, SourceNotReadyError, "base_dir")
    try:
        return _choose_base(folder, given, latched, target_version)
    except OSError as err:
        raise SourceNotReadyError(
            f"the base cannot be looked at: {err.strerror}; check its mount",
            version=0,
            file=err.filename,
        ) from err


def _choose_base(
    folder: Path | None, given: Path | None, latched: Path | None, target_version: int
) -> Path | None:
    if given is not None and folder is not None and _same_folder(folder, given):
        given = None
        if latched is None:
            raise CheckpointError(
                "base_dir is the local checkpoint itself; there would be no pristine base to go back to",
                file=str(folder),
            )
    if given is None or (target_version > 0 and latched is not None and latched.is_dir()):
        return latched
    return given


def _same_folder(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and os.path.samefile(one, other)


def start_layout(chain: Chain, route: Route, local: Layout | None) -> Layout:
    """Return the layout that a route starts from; ``local`` is the local checkpoint's, where it is readable."""
    if route.full is not None and route.full.layout is not None:
        return route.full.layout
    if route.start == "applied" and local is not None:
        return local
    return chain.base_layout()


def identity_after(route: Route, old: Marker | None, chain: Chain) -> Marker:
    """Return the identity of the bytes at the end of a route, with a new id."""
    kept = old if old is not None and route.start == "applied" else None
    history = dict(kept.history) if kept is not None else {}
    if kept is not None and kept.fingerprint is not None:
        history[kept.version] = kept.fingerprint
    if route.start == "base":
        history[0] = chain.base_fingerprint()
    if route.start != "aggregate":  # its fingerprint is not that of the version it stands for
        history.update({found.version: found.fingerprint for found in route.versions})
    manifest = route.versions[-1].manifest if route.versions else None
    carried = kept.run_id if kept is not None else None
    return Marker(0).advanced(
        version=route.target,
        fingerprint=history.get(route.target),
        run_id=manifest.run_id if manifest is not None else carried,
        history=history,
    )


def _validate(chain: Chain, applied: int | None) -> None:
    """Open everything that the way from ``applied`` needs, and check it against what it will be applied to."""
    route = chain.route(applied)
    local = None
    if route.start == "applied" and chain.checkpoint is not None:
        try:
            local = read_layout(chain.checkpoint, chain.source.files, chain.settings)
        except (SourceNotReadyError, FormatError):
            return  # damaged here: the pull rebuilds it, against the base's own layout
    if route.full is not None or local is not None or chain.base_dir is not None:
        check_targets(route, start_layout(chain, route, local))
