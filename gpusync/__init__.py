"""gpusync: bring a serving engine's live weights, and its local checkpoint, to a published version.

Importing this package loads nothing but itself: names resolve, and torch, numpy or CuPy load, on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gpusync.apply import Update, apply_to_model, attach, live_version, prepare, warmup
    from gpusync.chain import Chain, open_chain
    from gpusync.errors import *  # noqa: F403
    from gpusync.publish import Publisher
    from gpusync.disk import pull
    from gpusync.types import AttachReport, PullReport, UpdateReport, VerifyReport
    from gpusync.scrub import verify

_HOMES = {
    "gpusync.apply": ("Update", "apply_to_model", "attach", "live_version", "prepare", "warmup"),
    "gpusync.chain": ("Chain", "open_chain"),
    "gpusync.publish": ("Publisher",),
    "gpusync.disk": ("pull",),
    "gpusync.scrub": ("verify",),
    "gpusync.types": ("AttachReport", "Progress", "PullReport", "UpdateReport", "VerifyReport"),
    "gpusync.errors": (
        "BaseMismatchError",
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
        "SourceNotReadyError",
        "VersionConflictError",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gpusync' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
