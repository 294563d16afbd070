"""nvCOMP's batched zstd decoder, through its C functions: the only module that knows that ABI.

Bound by ctypes, for 5.3 and later 5.x (libnvcomp.so.5) and for 6.x (libnvcomp.so.6): they differ in the name and in the
last parameter of the function that gives the size of the scratch. All memory is the caller's; nothing here allocates
on the device or synchronises. Facts are from the wheels' nvcomp/zstd.h and nvcomp/shared_types.h, and from calls to
6.0.0.12 and 5.3.0.16 on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

import torch

from gpusync.device.runtime import Stream
from gpusync.errors import DecodeError, MissingDependencyError

MAX_FRAME_NBYTES = (1 << 31) - 1
"""The most bytes that a frame may have and may decode to (zstd.h: nvcompZstdDecompressionMaxAllowedChunkSize)."""

MAX_FRAMES = (1 << 30) - 1
"""The most frames in a batch: the library's own arithmetic for the scratch goes wrong from 2^30 on."""

TEMP_ALIGNMENT = 8
"""What the scratch's address must be a multiple of (zstd.h: nvcompZstdRequiredDecompressionAlignment)."""

_DISTRIBUTIONS = ("nvidia-libnvcomp-cu13", "nvidia-libnvcomp-cu12")  # both install the same paths
_FOLDER = "nvidia/libnvcomp/lib64"
_SONAMES = ("libnvcomp.so.6", "libnvcomp.so.5")
_OLDEST, _NEWEST_MAJOR = 5300, 6
_STATUS_NAMES = {
    10: "invalid value",
    11: "not supported",
    12: "cannot decompress",
    13: "bad checksum",
    14: "cannot verify checksums",
    15: "output buffer too small",
    16: "wrong header length",
    17: "alignment",
    18: "chunk size too large",
    19: "cannot compress",
    20: "wrong input length",
    21: "batch size too large",
    22: "subchunk count too large",
    23: "subchunk count too small",
    24: "output buffer alignment too small",
    1000: "CUDA error",
    10000: "internal",
}


class _Options(ctypes.Structure):
    """nvcompBatchedZstdDecompressOpts_t, passed by value; zeros: the library chooses the backend."""

    _fields_ = (("backend", ctypes.c_int), ("reserved", ctypes.c_uint8 * 60))


class _Properties(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


class _Alignments(ctypes.Structure):
    _fields_ = (("input", ctypes.c_size_t), ("output", ctypes.c_size_t), ("temp", ctypes.c_size_t))


@dataclass(frozen=True)
class DecodeArrays:
    """Device addresses of the arrays that describe a batch of ``count`` frames.

    The caller owns them, and what they point to, until the decode has run.

    Parameters
    ----------
    count
        Frames in the batch, and elements in each array.
    in_addresses, in_nbytes
        u64: where each frame begins, and its size. Any alignment.
    out_capacities, out_addresses
        u64: what each frame may decode to, and where to. Any alignment.
    out_nbytes
        u64, written: what each frame has decoded to.
    statuses
        i32, written: 0 where a frame was decoded. Not all corrupt frames are noticed (zstd.h).
    """

    count: int
    in_addresses: int
    in_nbytes: int
    out_capacities: int
    out_addresses: int
    out_nbytes: int
    statuses: int

    INPUT_NBYTES_PER_FRAME = 32
    NBYTES_PER_FRAME = 44

    @classmethod
    def within(cls, address: int, count: int) -> DecodeArrays:
        """Lay the arrays out one behind the other, in the order of the fields, from a multiple of 8 on.

        The first ``INPUT_NBYTES_PER_FRAME * count`` bytes are the caller's to fill, the rest of the
        ``NBYTES_PER_FRAME * count`` is written by the decode.
        """
        return cls(count, *(address + 8 * count * number for number in range(6)))


class Nvcomp:
    """A loaded libnvcomp. Loading and asking need no GPU.

    Parameters
    ----------
    path
        The library's file.

    Attributes
    ----------
    path, version
        The file, and its version as ``major.minor.patch``.

    Raises
    ------
    MissingDependencyError
        It cannot be loaded, is not of a supported version, or wants frames at aligned addresses.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            library = ctypes.CDLL(self.path)
            number = _read_version(library)
        except (OSError, AttributeError) as err:
            raise MissingDependencyError(f"nvCOMP cannot be loaded: {err}", file=self.path) from err
        self.version = f"{number // 1000}.{number % 1000 // 100}.{number % 100}"
        if number < _OLDEST or number // 1000 > _NEWEST_MAJOR:
            raise MissingDependencyError(
                "this version of nvCOMP is not supported",
                file=self.path,
                expected=f"5.3 or later, up to {_NEWEST_MAJOR}.x",
                got=self.version,
            )
        try:
            self._bind(library, major=number // 1000)
        except AttributeError as err:
            raise MissingDependencyError(
                f"nvCOMP {self.version} lacks a function: {err}", file=self.path
            ) from err
        self._check_alignments(library)

    def _bind(self, library: ctypes.CDLL, *, major: int) -> None:
        pointer, size, status = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        # From 6.0 on with a stream, on which nothing is queued: the default one will do.
        self._temp_tail: tuple[None, ...] = (None,) if major >= 6 else ()
        self._temp = getattr(
            library,
            "nvcompBatchedZstdDecompressGetTempSize" + ("" if major >= 6 else "Async"),
        )
        self._temp.argtypes = [size, size, _Options, ctypes.POINTER(size), size]
        self._temp.argtypes += [pointer for _ in self._temp_tail]
        self._temp.restype = status
        self._decode = library.nvcompBatchedZstdDecompressAsync
        self._decode.argtypes = [pointer] * 4 + [size, pointer, size, pointer, _Options, pointer]
        self._decode.argtypes += [pointer]
        self._decode.restype = status

    def _check_alignments(self, library: ctypes.CDLL) -> None:
        """Frames lie in their blob, and decode into their tensor, wherever the publisher cut."""
        found = _Alignments()
        ask = library.nvcompBatchedZstdDecompressGetRequiredAlignments
        ask.argtypes, ask.restype = [_Options, ctypes.POINTER(_Alignments)], ctypes.c_int
        status = ask(_Options(), ctypes.byref(found))
        got = (found.input, found.output, found.temp)
        if status or got[:2] != (1, 1) or got[2] > TEMP_ALIGNMENT:
            raise MissingDependencyError(
                f"nvCOMP {self.version} wants other alignments of input, output and scratch"
                if not status
                else f"nvCOMP does not tell its alignments: {describe_status(status)}",
                file=self.path,
                expected=(1, 1, TEMP_ALIGNMENT),
                got=status or got,
            )

    def decode_temp_nbytes(self, nframes: int, max_frame_nbytes: int, total_nbytes: int) -> int:
        """Return the scratch that a decode needs, in bytes: about 3.05 per decoded byte.

        Parameters
        ----------
        nframes, max_frame_nbytes, total_nbytes
            Upper bounds: frames in the batch, what the largest decodes to, what all decode to.

        Raises
        ------
        DecodeError
            A bound is over ``MAX_FRAMES`` or ``MAX_FRAME_NBYTES``, or the library refuses.
        """
        for what, value, most in (
            ("frames in a batch", nframes, MAX_FRAMES),
            ("bytes in a frame", max_frame_nbytes, MAX_FRAME_NBYTES),
        ):
            if not 0 <= value <= most:
                raise DecodeError(f"nvCOMP cannot take that many {what}", expected=most, got=value)
        temp = ctypes.c_size_t()
        status: int = self._temp(
            nframes,
            max_frame_nbytes,
            _Options(),
            ctypes.byref(temp),
            total_nbytes,
            *self._temp_tail,
        )
        _raise_for(status, "nvCOMP does not tell the size of its scratch")
        return temp.value

    def decode(self, stream: Stream, arrays: DecodeArrays, temp: torch.Tensor) -> None:
        """Queue the decode of a batch of frames, each a whole zstd frame, without synchronising.

        What was decoded counts only after ``statuses`` and ``out_nbytes`` have been checked, and the digest of the
        result: corrupt entropy-coded data is undefined behaviour (zstd.h).

        Parameters
        ----------
        stream
            The one stream on which frames are decoded.
        arrays
            The batch; none of its memory may change until the decode has run.
        temp
            Scratch: device memory, uint8, at least ``decode_temp_nbytes`` long, its address a multiple of 8. Kept
            until the decode is queued; the caller keeps it until the decode has run.

        Raises
        ------
        DecodeError
            The library refuses, now or, where the stream runs late, at the next wait.
        """
        if not arrays.count:
            return
        status = stream.call(
            lambda handle: self._decode(
                arrays.in_addresses,
                arrays.in_nbytes,
                arrays.out_capacities,
                arrays.out_nbytes,
                arrays.count,
                temp.data_ptr(),
                temp.numel(),
                arrays.out_addresses,
                _Options(),
                arrays.statuses,
                handle,
            )
        )
        _raise_for(status, "nvCOMP refuses a batch")


def find_nvcomp() -> Path:
    """Return the library of the installed nvidia-libnvcomp-cu13 or -cu12 distribution.

    Raises
    ------
    MissingDependencyError
        None is installed, or it holds neither libnvcomp.so.6 nor libnvcomp.so.5.
    """
    for name in _DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        folder = Path(str(distribution.locate_file(_FOLDER)))
        for soname in _SONAMES:
            if (folder / soname).is_file():
                return folder / soname
        raise MissingDependencyError(
            f"{name} {distribution.version} holds no libnvcomp that is supported",
            file=str(folder),
            expected=_SONAMES,
        )
    raise MissingDependencyError(
        "nvCOMP is not installed: pip install nvidia-libnvcomp-cu13 (or -cu12, as torch's CUDA is)",
        expected=_DISTRIBUTIONS,
    )


def describe_status(status: int) -> str:
    """Return a status of shared_types.h in words."""
    return f"{_STATUS_NAMES.get(status, 'unknown status')} ({status})"


def _read_version(library: ctypes.CDLL) -> int:
    """Return major * 1000 + minor * 100 + patch (version.h); 0 where the library does not tell."""
    ask = library.nvcompGetProperties
    ask.argtypes, ask.restype = [ctypes.POINTER(_Properties)], ctypes.c_int
    properties = _Properties()
    return 0 if ask(ctypes.byref(properties)) else properties.version


def _raise_for(status: int, message: str) -> None:
    if status:
        raise DecodeError(f"{message}: {describe_status(status)}", expected=0, got=status)
