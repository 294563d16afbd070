"""Scrub: read a whole local checkpoint, hold every tensor against its digest, and rebuild what rotted."""

from __future__ import annotations

from dataclasses import replace

from gpusync import fsio
from gpusync.config import Settings
from gpusync.errors import ChainError, CheckpointError
from gpusync.folder.layout import absolute_path
from gpusync.folder.lock import FolderLock
from gpusync.folder.marker import STATE_DIR, read_marker
from gpusync.folding.fold import Fold
from gpusync.local.audit import Audit, audit
from gpusync.local.pull import FolderUpdate, OpenedFolder, PathLike, find_evidence, open_folder
from gpusync.published.chain import Chain, resolve_base
from gpusync.timing import StageClock
from gpusync.types import ProgressCallback, VerifyReport

_LOCK_TIMEOUT_SECONDS = 600.0


def verify(
    local_checkpoint_dir: PathLike,
    *,
    repair: bool = False,
    source_dir: PathLike | None = None,
    base_dir: PathLike | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Check every tensor of a local checkpoint.

    Parameters
    ----------
    repair
        Rebuild bad tensors from the base or newest full version and the deltas up to the applied version; needs
        ``source_dir``, and the base where no full version was published.
    source_dir, base_dir
        Where to find evidence for a folder without a digest table, and what to repair from. The base defaults to
        the one latched when the folder was seeded.
    progress
        Called with :class:`gpusync.Progress`; an exception from it stops the scrub at a safe point.

    Raises
    ------
    CheckpointError
        There is no usable checkpoint in the folder, or its disk failed.
    ChainError
        Bad tensors cannot be rebuilt: versions are gone, or no source was given.
    """
    settings = Settings.from_env()
    folder = absolute_path(local_checkpoint_dir, CheckpointError, "local_checkpoint_dir")
    if read_marker(folder).state == "absent" and not folder.is_dir():
        raise CheckpointError("there is no such folder", file=str(folder))
    if read_marker(folder).state == "absent" and not fsio.exists(folder / STATE_DIR):
        raise CheckpointError(
            "there is no local checkpoint here: the folder was never pulled into", file=str(folder)
        )
    clock = StageClock()
    with FolderLock(folder, _LOCK_TIMEOUT_SECONDS, progress):
        opened = open_folder(folder, settings, progress)
        marker = opened.state.marker
        if marker is None or opened.state.layout is None:
            raise CheckpointError(
                f"nothing to verify: the marker is {opened.state.found.state}"
                + ("" if opened.state.found.marker is None else ", and the shards cannot be read")
                + "; pull to rebuild the folder",
                file=str(folder),
            )
        with Chain(
            source_dir if source_dir is not None else folder,
            marker.version,
            checkpoint=folder,
            base_dir=resolve_base(folder, base_dir, marker, marker.version),
            settings=settings,
        ) as chain:
            fold = Fold(settings.piece_bytes, settings.workers)
            with find_evidence(chain, opened.state, fold) as evidence:
                found = audit(opened.state.layout, chain.source.files, fold, evidence, progress)
            report = VerifyReport(
                ok=not found.bad,
                version=marker.version,
                tensors=len(opened.state.layout.file_of),
                nbytes=found.nbytes,
                evidence=evidence.name if evidence is not None else "none",
                bad=tuple(found.bad),
                unproven=found.unproven,
                seconds=clock.total_seconds,
            )
            if report.ok or not repair:
                return report
            if source_dir is None:
                raise ChainError(
                    "repair needs the published versions: give source_dir (--source)",
                    tensor=found.bad[0].tensor,
                )
            return _repair(chain, opened, found, report, clock, progress)


def _repair(
    chain: Chain,
    opened: OpenedFolder,
    found: Audit,
    report: VerifyReport,
    clock: StageClock,
    progress: ProgressCallback | None,
) -> VerifyReport:
    """Rebuild the bad tensors at the same version and swap the files in."""
    update = FolderUpdate(chain, opened, durable=True, progress=progress, clock=clock)
    pulled = update.commit(update.stage(found))
    return replace(
        report,
        ok=True,
        repaired=tuple(sorted(item.tensor for item in found.bad)),
        seconds=clock.total_seconds,
        notes=pulled.notes,
    )
