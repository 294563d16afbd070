"""How deltas are written: what a caller chose, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np

from gpusync.format.digest import new_hasher
from gpusync.format.encode import (
    MAX_FRAME_BYTES,
    MIN_FRAME_BYTES,
    Bytes,
    EncodedFrame,
    can_make_runs,
    compress_frames,
)
from gpusync.format.encode_rows import encode_rows
from gpusync.format.rows import BAND_NBYTES
from gpusync.types import ALGORITHMS, ENCODINGS, Algorithm, Encoding, Framing

FRAMINGS: tuple[Framing, ...] = ("seekable", "single")

# With 1 MiB publishing takes some 7 % longer, for each block hands the interpreter's lock over; with 4 MiB no less.
_BLOCK_NBYTES = 2 << 20
# The encoder of runs is compiled once on a machine, for some ten seconds: small models are published before.
_LARGE_CHECKPOINT_NBYTES = 256 << 20

_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """How deltas are written.

    Parameters
    ----------
    by_runs
        Frames of xor are made by the encoder of runs (format/zstd/encode_runs.py) and not by libzstd.
    """

    encoding: Encoding
    algorithm: Algorithm
    framing: Framing
    frame_bytes: int
    by_runs: bool = False

    def of_checkpoint(self, nbytes: int) -> DeltaOptions:
        """Return these options for a version of a checkpoint of so many bytes.

        That size alone decides, where loops can be compiled: the same steps make the same blobs.
        """
        is_wanted = self.encoding == "xor" and self.framing == "seekable"
        by_runs = is_wanted and nbytes >= _LARGE_CHECKPOINT_NBYTES and can_make_runs()
        return replace(self, by_runs=by_runs)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block: whole frames, or one band of xor_rows."""
        if self.encoding == "xor_rows":
            return BAND_NBYTES
        return max(1, _BLOCK_NBYTES // self.frame_bytes) * self.frame_bytes

    @property
    def blob_framing(self) -> Framing:
        """How blobs are framed: that of xor is the caller's choice, that of the others their encoding's."""
        if self.encoding == "xor":
            return self.framing
        return "seekable" if self.encoding == "xor_rows" else "single"

    @property
    def is_stream(self) -> bool:
        """True where a tensor's blocks are compressed into one frame as they come."""
        return self.encoding == "xor" and self.framing == "single"

    def encode(self, delta: Bytes) -> list[EncodedFrame]:
        """Return the frames of a block, of an encoding whose blobs are seekable."""
        if self.encoding == "xor_rows":
            return encode_rows(delta)
        return compress_frames(delta, self.frame_bytes, by_runs=self.by_runs)

    def encode_zeros(self, nbytes: int) -> list[EncodedFrame]:
        """Return the frames of a block in which nothing changed: experts that a step did not reach have many."""
        return _encode_zeros(self, nbytes)


@lru_cache(maxsize=16)
def _encode_zeros(options: DeltaOptions, nbytes: int) -> list[EncodedFrame]:
    return options.encode(np.zeros(nbytes, np.uint8))


def checked_options(encoding: str, checksum: str, framing: str, frame_bytes: int) -> DeltaOptions:
    """Return the options that a caller chose.

    Raises
    ------
    ValueError
        One is not one of its values.
    MissingDependencyError
        ``checksum`` is blake3 and its package is absent.
    """
    if not MIN_FRAME_BYTES <= frame_bytes <= MAX_FRAME_BYTES:
        raise ValueError(
            f"frame_bytes is {frame_bytes}, not {MIN_FRAME_BYTES} to {MAX_FRAME_BYTES}"
        )
    algorithm = _choice("checksum", checksum, ALGORITHMS)
    new_hasher(algorithm)  # an absent package shows before any work
    return DeltaOptions(
        _choice("encoding", encoding, ENCODINGS),
        algorithm,
        _choice("framing", framing, FRAMINGS),
        frame_bytes,
    )


def _choice(what: str, value: str, choices: tuple[_Choice, ...]) -> _Choice:
    for choice in choices:
        if choice == value:
            return choice
    raise ValueError(f"{what} is {value!r}, not one of {', '.join(map(str, choices))}")
