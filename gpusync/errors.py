"""Every error gpusync raises, split by what the caller does next.

::

    GpuSyncError
    ├── SourceNotReadyError      the published bytes are not (all) visible yet: refresh the mount, retry
    ├── FormatError              the published bytes break the format: republish
    │   ├── IndexFormatError
    │   ├── HeaderFormatError
    │   └── FrameFormatError
    ├── ChainError               these versions do not lead from here to there: pick another target, or reset
    │   ├── BaseMismatchError
    │   └── VersionConflictError
    ├── DigestMismatchError      the result would not be the published tensor: republish
    ├── PlacementError           a parameter is not a byte image of its tensor: disk path and the engine's reload
    ├── CheckpointError          the local folder: the operator acts, the next update catches up
    │   ├── LockTimeoutError
    │   └── CheckpointIOError
    ├── DeviceError              the GPU side, before commit: disk path
    │   ├── DecodeError
    │   ├── KernelError
    │   ├── OutOfScratchError
    │   └── MissingDependencyError
    └── ModelPoisonedError       the live weights are in an unknown state: replace the process

All but ModelPoisonedError promise that no live parameter and no file of the local checkpoint was changed
(a CheckpointError out of ``finish`` says in ``live_version`` and ``disk_version`` which side is new).
"""

from __future__ import annotations

from typing import Any, ClassVar


def printable(text: str) -> str:
    """Return text that any stream can carry: bytes of a file's name that are no UTF-8 come out as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class GpuSyncError(Exception):
    """Base of all gpusync errors.

    Parameters
    ----------
    message
        What happened and what to do next, one sentence each.
    version, file, tensor, offset, expected, got
        Where it happened, and the two values that should have been equal. Those given are kept as
        attributes and appended to the text; the others are None.
    details
        Further values, kept as attributes only.
    """

    exit_code: ClassVar[int] = 1
    FIELDS: ClassVar[tuple[str, ...]] = ("version", "file", "tensor", "offset", "expected", "got")

    def __init__(
        self,
        message: str,
        *,
        version: int | None = None,
        file: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: object = None,
        got: object = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.version = version
        self.file = file
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.got = got
        self._details: dict[str, Any] = {}
        self.noted(**details)

    def located(self, **where: Any) -> GpuSyncError:
        """Fill in those of ``FIELDS`` that are still None, and return self (for ``raise err.located(...)``)."""
        for key, value in where.items():
            if getattr(self, key) is None:
                setattr(self, key, value)
        return self

    def noted(self, **details: Any) -> None:
        """Keep further values, as if they had been given at first."""
        self._details.update(details)
        for key, value in details.items():
            setattr(self, key, value)

    def to_dict(self) -> dict[str, Any]:
        """Return class name, message and every value that was given, for JSON."""
        values = {key: getattr(self, key) for key in self.FIELDS if getattr(self, key) is not None}
        values.update(self._details)
        return {"error": type(self).__name__, "message": str(self), **values}

    def __str__(self) -> str:
        values = [
            f"{key} {getattr(self, key)}" for key in self.FIELDS if getattr(self, key) is not None
        ]
        return printable(f"{self.message} [{', '.join(values)}]" if values else self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {key: getattr(self, key) for key in self.FIELDS}
        return _rebuild, (type(self), self.message, {**fields, **self._details})


def _rebuild(cls: type[GpuSyncError], message: str, values: dict[str, Any]) -> GpuSyncError:
    return cls(message, **values)


class SourceNotReadyError(GpuSyncError):
    """A version, index, shard or blob is absent, empty, zeros, or shorter than its own header demands."""

    exit_code = 3


class FormatError(GpuSyncError):
    """Published bytes break the format."""

    exit_code = 4


class IndexFormatError(FormatError):
    """``model.safetensors.index.json`` or ``gpusync.manifest.json`` breaks the format."""


class HeaderFormatError(FormatError):
    """A safetensors header breaks the format, or disagrees with the index."""


class FrameFormatError(FormatError):
    """A blob, its zstd frames, or the payload inside breaks the format."""


class ChainError(GpuSyncError):
    """The published versions do not lead from the applied version to the target."""

    exit_code = 4


class BaseMismatchError(ChainError):
    """A delta's base is not the state it would be applied to."""


class VersionConflictError(ChainError):
    """A version was published again with other bytes, or by another run."""


class DigestMismatchError(GpuSyncError):
    """The result would not be the published tensor."""

    exit_code = 4


class PlacementError(GpuSyncError):
    """A live parameter is not a byte-preserving image of its tensor, or moved.

    ``reasons`` maps tensor names to why.
    """

    exit_code = 6
    reasons: dict[str, str]

    def __init__(
        self, message: str, *, reasons: dict[str, str] | None = None, **values: Any
    ) -> None:
        super().__init__(message, reasons=dict(reasons or {}), **values)


class CheckpointError(GpuSyncError):
    """The local checkpoint folder cannot be used as asked.

    Out of ``finish``, ``live_version`` and ``disk_version`` say where each side stands.
    """

    exit_code = 5
    live_version: int | None = None
    disk_version: int | None = None


class LockTimeoutError(CheckpointError):
    """The folder's lock was not free in time; ``pid`` is the holder's, where it is known."""

    pid: int | None = None


class CheckpointIOError(CheckpointError):
    """Reading or writing the local folder failed; ``errno`` is the system's number."""

    errno: int | None = None


class DeviceError(GpuSyncError):
    """The device cannot do what was asked; nothing was committed."""

    exit_code = 6


class DecodeError(DeviceError):
    """The device's decoder failed."""


class KernelError(DeviceError):
    """A kernel could not be built or launched."""


class OutOfScratchError(DeviceError):
    """A memory cap would be exceeded; ``needed_bytes`` and ``budget_bytes`` say by how much."""

    FIELDS = (*DeviceError.FIELDS, "needed_bytes", "budget_bytes")
    needed_bytes: int | None = None
    budget_bytes: int | None = None


class MissingDependencyError(DeviceError):
    """A package or driver that the asked-for path needs is absent."""


class ModelPoisonedError(GpuSyncError):
    """Commit began and its end is unknown: the live model must not serve again."""

    exit_code = 7
