"""Where a blob stands, and the errors that say so."""

from __future__ import annotations

from dataclasses import dataclass

from gpusync.errors import FrameFormatError, SourceNotReadyError


class WindowTooLargeError(FrameFormatError):
    """A valid frame needs a larger window than the caller allows; ``window_nbytes`` says which."""

    window_nbytes: int


@dataclass(frozen=True, slots=True)
class Where:
    """A blob's place, for errors; ``offset`` is that of its first byte in the file.

    Its methods return errors and raise none. ``at`` is a byte of the blob.
    """

    version: int | None = None
    file: str | None = None
    tensor: str | None = None
    offset: int = 0

    def refused(
        self, message: str, *, at: int = 0, expected: object = None, got: object = None
    ) -> FrameFormatError:
        """The blob breaks the format."""
        return FrameFormatError(
            message,
            version=self.version,
            file=self.file,
            tensor=self.tensor,
            offset=self.offset + at,
            expected=expected,
            got=got,
        )

    def not_ready(self) -> SourceNotReadyError:
        """The blob's bytes are not there yet."""
        return SourceNotReadyError(
            "zeros where a blob should be; refresh the mount and retry",
            version=self.version,
            file=self.file,
            tensor=self.tensor,
            offset=self.offset,
        )

    def window_too_large(self, at: int, limit: int, window_nbytes: int) -> WindowTooLargeError:
        """A frame's window is over the caller's limit."""
        return WindowTooLargeError(
            "a frame's window is over the decoder's limit",
            version=self.version,
            file=self.file,
            tensor=self.tensor,
            offset=self.offset + at,
            expected=limit,
            got=window_nbytes,
            window_nbytes=window_nbytes,
        )
