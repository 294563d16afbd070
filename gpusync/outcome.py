"""How an operation's end is told to people and machines: one JSON shape, one line of advice per error class.

The command line prints these documents and the HTTP server replies with them, so that a script reads both alike:
``success`` and ``message`` always, then the report's fields, or ``error`` (the class) and the error's values.
"""

from __future__ import annotations

import threading
from typing import Any

from gpusync.errors import (
    BaseMismatchError,
    ChainError,
    CheckpointError,
    DeviceError,
    DigestMismatchError,
    FormatError,
    GpuSyncError,
    LockTimeoutError,
    MissingDependencyError,
    ModelPoisonedError,
    OutOfScratchError,
    PlacementError,
    SourceNotReadyError,
    VersionConflictError,
)
from gpusync.types import Progress, PullReport

STOPPED_EXIT_CODE = 130  # what a shell reports for a process that ended on Ctrl-C

# The first class that the error is an instance of gives the line: subclasses stand before their bases.
_ADVICE: tuple[tuple[type[GpuSyncError], str], ...] = (
    (
        SourceNotReadyError,
        "nothing was changed; check the path, refresh the mount or mend the pre-read hook, and try again",
    ),
    (FormatError, "nothing was changed; publish this version again"),
    (
        VersionConflictError,
        "nothing was changed; this version number stands for other bytes than before; to pull: pull 0 to go back "
        "to the base, then the target; to publish: do as the message says",
    ),
    (
        BaseMismatchError,
        "nothing was changed; to pull: pull 0 to go back to the base, then the target; "
        "to publish: give the checkpoint of the last published version as the base",
    ),
    (
        ChainError,
        "nothing was changed; give what the message asks for, or pick another target, "
        "or pull 0 to go back to the base",
    ),
    (DigestMismatchError, "nothing was changed; publish this version again"),
    (
        PlacementError,
        "nothing was changed; pull to the local checkpoint and let the engine reload it",
    ),
    (LockTimeoutError, "another process works on this folder; wait for it, or look at its pid"),
    (
        CheckpointError,
        "look at the folder that the message names (path, space, permissions) and try again; "
        "a pull catches up",
    ),
    (
        MissingDependencyError,
        "install what the message names, or take another device or the disk path",
    ),
    (OutOfScratchError, "raise the budget, or apply the chain as several updates"),
    (
        DeviceError,
        "this call changed nothing; pull to the local checkpoint and let the engine reload it",
    ),
    (ModelPoisonedError, "replace the serving process: its weights are in an unknown state"),
)


class Stopped(Exception):
    """The work was stopped at a safe point, because someone asked for it."""


class StopFlag:
    """Asks running work to stop at its next safe point. Safe to use from signal handlers and any thread."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """Let every :meth:`check` from now on raise."""
        self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def check(self, progress: Progress | None = None) -> None:
        """Raise :class:`Stopped` once stopping was asked for; has the signature of a progress callback."""
        if self._asked.is_set():
            at = f" in stage {progress.stage}" if progress is not None else ""
            raise Stopped(
                f"stopped at a safe point{at}: what stood there is whole, and as it was; "
                "doing the same again finishes the job"
            )


def advice_for(error: GpuSyncError) -> str:
    """Return what to do next, one line."""
    for kind, line in _ADVICE:
        if isinstance(error, kind):
            return line
    return "this is a bug in gpusync: report it with the message above"


def error_document(error: Exception) -> dict[str, Any]:
    """Return the JSON document of a failure."""
    if isinstance(error, GpuSyncError):
        return {"success": False, **error.to_dict(), "what_to_do": advice_for(error)}
    return {"success": False, "error": type(error).__name__, "message": str(error)}


def success_document(message: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON document of a success: the message, then a report's values."""
    return {"success": True, "message": message, **values}


def describe_pull(report: PullReport) -> str:
    """Return one sentence on what a pull did."""
    if report.outcome == "unchanged":
        return f"nothing to do: the checkpoint is at version {report.to_version}"
    if report.outcome == "stale":
        return (
            f"nothing to do: the checkpoint is at version {report.to_version}, "
            f"past the target {report.target_version}"
        )
    if report.outcome == "reset":
        return f"reset from version {report.from_version} to the base"
    start = "a fresh folder" if report.from_version is None else f"version {report.from_version}"
    return f"applied version {report.to_version}, from {start}"
