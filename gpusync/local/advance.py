"""Advance a local checkpoint to a chain's target: plan, stage, and hand over to the swap.

Two ways, the same bytes. Staged: everything is built beside the old files, then swapped in milliseconds. Rolling,
where a second copy does not fit: every digest is proven by a dry pass, the deltas are copied to the local spool, and
after the marker is gone shards are built and renamed one by one.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpusync import fsio
from gpusync.config import Settings
from gpusync.errors import DigestMismatchError, FormatError, SourceNotReadyError
from gpusync.folder.files import FileStamp
from gpusync.folder.layout import Layout, local_io_error
from gpusync.folder.marker import Marker, current_boot_id
from gpusync.folding.fold import Fold
from gpusync.folding.parallel import run_parallel
from gpusync.format.index import INDEX_NAME
from gpusync.local.audit import Audit, SeedHealer
from gpusync.local.checkpoint import FolderPaths, LocalState, local_errors, write_table
from gpusync.local.materialize import (
    Materializer,
    Outcome,
    ShardPlan,
    copy_file,
    plan_shards,
    reserve_shards,
)
from gpusync.local.rolling import reserve_rolling, shard_builder, spool_versions
from gpusync.local.sidefiles import plan_side_files, refuse_folders_in_the_way, refuse_other_folder
from gpusync.local.swap import Journal, Step, clear_staging, marker_token, reached, stamp_of, swap
from gpusync.published.chain import Chain, identity_after, start_layout
from gpusync.published.route import Route, check_targets
from gpusync.timing import StageClock
from gpusync.types import Progress, ProgressCallback

Mode = Literal["staged", "rolling"]


@dataclass(frozen=True)
class Staged:
    """A local checkpoint's next state: complete beside the old one or, rolling, proven and reproducible.

    Commit and discard need the folder's lock.
    """

    paths: FolderPaths
    journal: Journal
    route: Route
    outcome: Outcome
    chain: Chain
    fold: Fold
    progress: ProgressCallback | None

    @property
    def owner(self) -> Path:
        """A file in staging by which this is known: nobody else's staging has it."""
        return self.paths.staging / self.journal.after.id

    def is_current(self) -> bool:
        """True while the folder stands where it stood when this was staged, and nobody cleared staging."""
        with local_errors("reading the marker", self.paths.folder):
            before = self.journal.before
            return marker_token(self.paths.folder) == before and fsio.exists(self.owner)

    def commit(self) -> None:
        """Steps 6 to 15: swap it in.

        Raises
        ------
        CheckpointIOError
            The local disk failed; the next pull undoes or resumes.
        """
        with local_errors("writing the journal", self.paths.folder):
            fsio.unlink(self.paths.rolled)
            if self.journal.mode == "rolling":
                # Its name is durable with the journal's; an fsync of what is appended later would not make it so.
                fsio.close(fsio.create(self.paths.rolled))
            self.journal.write(self.paths)
        reached(Step.JOURNALED)
        if self.journal.mode == "staged":
            swap(self.paths, self.journal)
            return
        for name in self.journal.renames:
            self.chain.source.files.forget(self.paths.folder / name)
        finish_rolling(self.paths, self.journal, self.chain.settings, self.fold, self.progress)

    def discard(self) -> None:
        """Remove what was staged, unless somebody else has done so and staged their own."""
        if fsio.exists(self.owner):
            clear_staging(self.paths)


def finish_rolling(
    paths: FolderPaths,
    journal: Journal,
    settings: Settings,
    fold: Fold,
    progress: ProgressCallback | None,
) -> None:
    """Run a rolling swap's steps 7 to 15, first time or resumed.

    Progress is shown, and a callback that raises does not stop it: between the first and the last rename the folder
    cannot be loaded, and the way out is forward.
    """

    def show(event: Progress) -> None:
        with contextlib.suppress(Exception):
            if progress is not None:
                progress(event)

    spool, build = shard_builder(paths, journal, settings, fold, show)
    with spool:
        swap(paths, journal, build)


class Advance:
    """One advance of one folder. The caller holds the lock and has recovered the folder.

    Parameters
    ----------
    chain
        Opened at the target.
    state
        What stands in the folder.
    found
        The audit of the local bytes, where one was needed; its bad tensors are rebuilt from the seed.
    durable
        fsync data before the swap.
    """

    def __init__(
        self,
        paths: FolderPaths,
        chain: Chain,
        state: LocalState,
        *,
        found: Audit | None = None,
        durable: bool = True,
        progress: ProgressCallback | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self._paths = paths
        self._chain = chain
        self._state = state
        self._durable = durable
        self._progress = progress
        self._clock = clock or StageClock()
        self._suspects = found.suspects if found is not None else frozenset()
        audited = found.table if found is not None else {}
        self._known: Mapping[str, str] = state.table if state.table is not None else audited
        workers = chain.settings.workers
        self._fold = Fold(chain.settings.piece_bytes, workers, paths.state)

    def stage(self) -> Staged:
        """Steps 3 to 5: validate, materialize into staging (rolling: prove and spool), fsync.

        Raises
        ------
        GpuSyncError
            Nothing outside staging was changed, and staging is gone.
        """
        applied = self._state.marker.version if self._state.marker is not None else None
        route = self._chain.route(applied)
        try:
            return self._stage(route)
        except (FormatError, DigestMismatchError, SourceNotReadyError):
            if route.start != "aggregate":
                raise
        # The aggregate is rewritten in place and may have been torn under the reader: fold from the base.
        return self._stage(self._chain.route(None, use_aggregate=False))

    def _stage(self, route: Route) -> Staged:
        try:
            with local_errors("staging", self._paths.folder):
                clear_staging(self._paths)
                fsio.make_dir(self._paths.new_files)
                return self._stage_steps(route)
        except BaseException:
            with local_errors("clearing staging", self._paths.folder):
                clear_staging(self._paths)
            raise

    def _stage_steps(self, route: Route) -> Staged:
        layout = start_layout(self._chain, route, self._state.layout)
        check_targets(route, layout)
        reached(Step.VALIDATED)
        if self._state.found.state == "absent":
            refuse_other_folder(self._paths.folder)
        known = self._known if route.start == "applied" else {}
        healer = SeedHealer(self._chain, known, self._fold)
        plans = self._plan(layout, route, known, healer)
        sides = plan_side_files(self._paths.folder, route, layout, self._chain)
        refuse_folders_in_the_way(
            self._paths.folder, [*(plan.file for plan in plans), *sides.copies]
        )
        ours = (self._paths.table.name, self._paths.held_config.name)
        refuse_folders_in_the_way(self._paths.state, ours)
        mode = self._reserve(route, plans)
        work = Materializer(self._fold, healer, self._progress)
        with self._clock.stage("materialize", sum(plan.nbytes for plan in plans)):
            if mode == "staged":
                outcome = work.write(plans, self._paths.new_files)
            else:
                outcome = work.prove(plans)
                outcome.written_bytes = sum(plan.nbytes for plan in plans)  # by the swap
                self._refuse_healing(outcome)
        if route.start == "applied":
            outcome.healed.extend(self._suspects)
        for name, folder_of in sides.copies.items():
            if name == INDEX_NAME and layout.index_raw is not None:
                # As it was validated: the one that is there now may be another.
                fsio.write_file(self._paths.new_files / name, layout.index_raw, durable=False)
            else:
                copy_file(folder_of / name, self._paths.new_files / name)
        if mode == "rolling":
            with self._clock.stage("spool", route.wire_nbytes):
                spool_versions(route, self._paths, self._chain.settings)
                reserve_rolling(self._paths, plans)
        # After the spool, too: it must hold what the dry pass proved.
        self._chain.source.check_unchanged(route.versions)
        self._chain.check_base_unchanged()
        reached(Step.MATERIALIZED)
        journal = Journal(
            before=marker_token(self._paths.folder),
            after=self._next_marker(route),
            renames=(*(plan.file for plan in plans), *sides.renames),
            removes=sides.removes,
            new_config=sides.new_config,
            mode=mode,
            from_version=route.start_version,
            stamps=self._stamps(removed=sides.removes, rolled=mode == "rolling", plans=plans),
        )
        with self._clock.stage("sync"):
            self._sync(journal, {**known, **outcome.table})
        reached(Step.SYNCED)
        return Staged(self._paths, journal, route, outcome, self._chain, self._fold, self._progress)

    def _plan(
        self, layout: Layout, route: Route, known: Mapping[str, str], healer: SeedHealer
    ) -> list[ShardPlan]:
        plans = plan_shards(
            layout, route, self._chain.source.files, known=known, suspects=self._suspects
        )
        if route.start != "applied" or not self._suspects:
            return list(plans)
        return [
            replace(
                plan,
                tensors=tuple(
                    healer.rebuild(tensor) if tensor.name in self._suspects else tensor
                    for tensor in plan.tensors
                ),
            )
            for plan in plans
        ]

    def _reserve(self, route: Route, plans: list[ShardPlan]) -> Mode:
        """Reserve room for a second copy, or decide that there is none."""
        settings = self._chain.settings
        may_roll = route.start == "applied" and bool(plans)
        if settings.swap == "rolling" and may_roll:
            return "rolling"
        needed = sum(plan.nbytes for plan in plans)
        try:
            leave = settings.reserve_bytes if may_roll else 0
            if needed and (free := fsio.free_bytes(self._paths.state)) < needed + leave:
                text = f"no room to stage {needed} bytes and leave {leave}: {free} are free"
                raise OSError(errno.ENOSPC, text)
            reserve_shards(plans, self._paths.new_files)
        except OSError as err:
            no_room = err.errno in (errno.ENOSPC, errno.EDQUOT)
            if settings.swap == "staged" or not no_room or not may_roll:
                raise
            clear_staging(self._paths)
            fsio.make_dir(self._paths.new_files)
            return "rolling"
        return "staged"

    def _refuse_healing(self, outcome: Outcome) -> None:
        """A damaged tensor is rebuilt from the seed, which the spool does not hold."""
        if outcome.healed or self._suspects:
            raise local_io_error(
                OSError(errno.ENOSPC, "rebuilding damaged tensors needs room for a second copy"),
                "staging",
                self._paths.folder,
            )

    def _stamps(
        self, *, removed: Collection[str], rolled: bool, plans: Sequence[ShardPlan]
    ) -> dict[str, FileStamp]:
        """Return the stamps of the new version's files that are complete: staged ones, and those that stay."""
        folder, new = self._paths.folder, self._paths.new_files
        gone = {*removed, self._paths.config.name, *(plan.file for plan in plans if rolled)}
        places = {name: folder for name in fsio.regular_files(folder) if name not in gone}
        places |= {name: new for name in fsio.list_dir(new) if name != self._paths.config.name}
        return {name: stamp_of(path / name) for name, path in places.items()}

    def _sync(self, journal: Journal, table: Mapping[str, str]) -> None:
        """Step 5: everything that the journal will stand for is durable before it."""
        staging = self._paths.staging
        write_table(
            staging / self._paths.table.name, journal.after.id, table, durable=self._durable
        )
        fsio.write_file(staging / journal.after.id, b"", durable=self._durable)
        if not self._durable:
            return
        new = self._paths.new_files
        names = [new / name for name in fsio.list_dir(new)]
        run_parallel(fsio.fsync_file, names, self._fold.workers)
        fsio.fsync_dir(new)
        if self._state.marker is not None and not self._state.marker.durable:
            fsync_checkpoint(self._paths)
        fsio.fsync_dir(staging)
        fsio.fsync_dir(self._paths.state)
        fsio.fsync_dir(self._paths.folder)  # a new one would otherwise lose .weight_sync as a whole
        if self._state.found.state == "absent":
            with contextlib.suppress(PermissionError):  # then it was not made here
                fsio.fsync_dir(self._paths.folder.parent)

    def _next_marker(self, route: Route) -> Marker:
        base = self._chain.base_dir
        return replace(
            identity_after(route, self._state.marker, self._chain),
            durable=self._durable,
            boot_id=current_boot_id(),
            base=str(base) if base is not None else None,
        )


def fsync_checkpoint(paths: FolderPaths) -> None:
    """fsync every file that an earlier, not durable, update may have written, and the folders."""
    for name in fsio.regular_files(paths.folder):
        fsio.fsync_file(paths.folder / name)
    if fsio.exists(paths.table):
        fsio.fsync_file(paths.table)
    fsio.fsync_dir(paths.folder)
    fsio.fsync_dir(paths.state)
