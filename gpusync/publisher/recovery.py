"""Kept tensors that a power cut may have taken: proven by their digests, or rebuilt from what is published."""

from __future__ import annotations

import logging
from pathlib import Path

import gpusync
from gpusync.errors import (
    CheckpointError,
    CheckpointIOError,
    FormatError,
    GpuSyncError,
    VersionConflictError,
)
from gpusync.folder.layout import Layout
from gpusync.published.source import Source
from gpusync.publisher.standing import digest_tensors, read_checkpoint, reading_failed
from gpusync.publisher.state import PublisherState, StateStore

log = logging.getLogger(__name__)


def recover_tensors(
    store: StateStore, state: PublisherState, source: Source, base_dir: Path
) -> Layout:
    """Return the tensors of a state that another boot wrote and nobody fsynced.

    The state is itself durable, with the digest of every tensor. Where the tensors miss one, what every receiver does
    gives them back: a pull of the state's version, from the base and the published versions.

    Raises
    ------
    VersionConflictError
        They are lost, and what is still published does not lead to them.
    CheckpointIOError
        Reading or writing failed: publish again.
    """
    layout = _proven(state, source)
    if layout is not None:
        return layout
    folder = store.begin_rebuilding(state.version)
    log.warning("kept_tensors_lost version=%s rebuilding=%s", state.version, folder)
    try:
        # By its public name: a publisher stands beside the local checkpoint, and calls it as any user does.
        gpusync.pull(folder, base_dir, source.path, state.version, durable=False)
    except CheckpointIOError:
        raise
    except GpuSyncError as err:
        failed = reading_failed(err)
        if failed is not None:
            raise failed from err
        raise VersionConflictError(
            "the kept tensors were lost in a power cut, and what is published does not lead to them: "
            f"{err.message}. Publish a full version to go on.",
            version=state.version,
        ) from err
    store.finish_rebuilding(state)
    return read_checkpoint(folder, source.files, source.settings)


def _proven(state: PublisherState, source: Source) -> Layout | None:
    """Return the state's tensors where each has its digest."""
    try:
        layout = read_checkpoint(state.folder, source.files, source.settings)
        if layout.file_of.keys() != state.digests.keys():
            return None
        digests = digest_tensors(source.files, layout, source.settings, state.digests)
    except CheckpointIOError:
        raise
    except (CheckpointError, FormatError):
        return None  # cut short, or not its header's bytes
    return layout if digests == dict(state.digests) else None
