"""Scratch files: what a fold in several passes keeps between them, and sparse payloads over their cap.

They are unlinked as soon as they are made, so nothing of them outlives the process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from gpusync import fsio
from gpusync.errors import CheckpointIOError

Bytes = NDArray[np.uint8]


@contextmanager
def scratch_errors(folder: Path | None) -> Iterator[None]:
    """Turn an OSError of a scratch file into CheckpointIOError: no source or version is to blame, this host's disk is."""
    try:
        yield
    except OSError as err:
        where = folder or tempfile.gettempdir()
        raise CheckpointIOError(
            f"a scratch file in {where} failed: {err.strerror or err}; nothing was changed",
            file=str(where),
            errno=err.errno,
        ) from err


class ScratchFile:
    """A tensor's bytes between two passes: the sink of the one, the origin of the next.

    Parameters
    ----------
    folder
        Where the file is; None for the system's temporary folder.

    Raises
    ------
    CheckpointIOError
        The folder's disk failed, or is full: here, and in every method.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        with scratch_errors(folder):
            self._file: IO[bytes] = fsio.scratch_file(folder)

    def write(self, piece: Bytes, offset: int) -> None:
        """Store bytes of the tensor from ``offset`` on."""
        with scratch_errors(self._folder):
            fsio.pwrite(self._file.fileno(), piece.data, offset)

    def read_into(self, piece: Bytes, offset: int) -> None:
        """Fill ``piece`` with the tensor's bytes from ``offset`` on, which were stored before."""
        with scratch_errors(self._folder):
            fsio.pread_all(self._file.fileno(), piece.data, offset)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()
