"""gpusync: bring a serving engine's live weights, and its local checkpoint, to a published version.

Importing this package loads its errors and reports only: the functions resolve, and torch, numpy or CuPy load,
on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpusync.errors import (
    BaseMismatchError,
    ChainError,
    CheckpointError,
    CheckpointIOError,
    DecodeError,
    DeviceError,
    DigestMismatchError,
    FormatError,
    FrameFormatError,
    GpuSyncError,
    HeaderFormatError,
    IndexFormatError,
    KernelError,
    LockTimeoutError,
    MissingDependencyError,
    ModelPoisonedError,
    OutOfScratchError,
    PlacementError,
    SourceNotReadyError,
    VersionConflictError,
)
from gpusync.types import AttachReport, Progress, PullReport, UpdateReport, VerifyReport

if TYPE_CHECKING:
    from gpusync.live.apply import Update, apply_to_model, attach, live_version, prepare, warmup
    from gpusync.local.pull import pull
    from gpusync.local.verify import verify
    from gpusync.published.chain import Chain, open_chain
    from gpusync.publisher.publish import Publisher

__version__ = "0.1.0"

__all__ = [
    "AttachReport",
    "BaseMismatchError",
    "Chain",
    "ChainError",
    "CheckpointError",
    "CheckpointIOError",
    "DecodeError",
    "DeviceError",
    "DigestMismatchError",
    "FormatError",
    "FrameFormatError",
    "GpuSyncError",
    "HeaderFormatError",
    "IndexFormatError",
    "KernelError",
    "LockTimeoutError",
    "MissingDependencyError",
    "ModelPoisonedError",
    "OutOfScratchError",
    "PlacementError",
    "Progress",
    "Publisher",
    "PullReport",
    "SourceNotReadyError",
    "Update",
    "UpdateReport",
    "VerifyReport",
    "VersionConflictError",
    "__version__",
    "apply_to_model",
    "attach",
    "live_version",
    "open_chain",
    "prepare",
    "pull",
    "verify",
    "warmup",
]

_HOME_OF = {
    "Update": "gpusync.live.apply",
    "apply_to_model": "gpusync.live.apply",
    "attach": "gpusync.live.apply",
    "live_version": "gpusync.live.apply",
    "prepare": "gpusync.live.apply",
    "warmup": "gpusync.live.apply",
    "Chain": "gpusync.published.chain",
    "open_chain": "gpusync.published.chain",
    "pull": "gpusync.local.pull",
    "Publisher": "gpusync.publisher.publish",
    "verify": "gpusync.local.verify",
}


if not TYPE_CHECKING:  # a type checker would take any name for one that this function knows

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'gpusync' has no attribute {name!r}")
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
