"""Floors: each thing that an update cannot do without, done alone.

What the product does on several threads is done here on as many, a tensor per thread at a time, the largest first;
what is up to the file system or the memory bus is done on one, as ``shutil.copyfile`` would.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash
import zstandard
from common import map_tensors, read_header, warm
from numpy.typing import NDArray
from rounds import Parts

from gpusync.compiled import compiled

Bytes = NDArray[np.uint8]
Item = TypeVar("Item")
_local = threading.local()


def in_threads(work: Callable[[Item], object], items: Iterable[Item], threads: int) -> None:
    """Do the work for every item, each on one of ``threads`` threads."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, items):
            pass


def buffer_of(nbytes: int) -> Bytes:
    """Return this thread's buffer: fresh memory would cost a page fault per 4 KiB."""
    held: Bytes | None = getattr(_local, "buffer", None)
    if held is None or held.size < nbytes:
        held = _local.buffer = np.zeros(nbytes, np.uint8)
    return held[:nbytes]


def read_blobs(version_dir: Path) -> dict[str, bytes]:
    """Read the shards of a version; return tensor -> blob, the largest first."""
    blobs: dict[str, bytes] = {}
    for path in sorted(version_dir.glob("*.safetensors")):
        start, rows = read_header(path)
        data = path.read_bytes()
        for name, row in rows.items():
            if name != "__metadata__":
                begin, end = row["data_offsets"]
                blobs[name] = data[start + begin : start + end]
    return dict(sorted(blobs.items(), key=lambda item: len(item[1]), reverse=True))


def decode(blobs: Iterable[bytes], threads: int, step_nbytes: int) -> None:
    """Decode every blob, in steps into a buffer that is used again: zstd alone."""

    def one(blob: bytes) -> None:
        buffer = buffer_of(step_nbytes)
        with zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True) as reader:
            while reader.readinto(buffer):
                pass

    in_threads(one, blobs, threads)


def xxh3(arrays: Iterable[Bytes], threads: int) -> None:
    """Take the xxh3-128 of every array."""
    in_threads(xxhash.xxh3_128_digest, arrays, threads)


def xor(arrays: Iterable[Bytes], threads: int, step_nbytes: int) -> None:
    """XOR every array with a buffer, in steps into that buffer."""

    def one(array: Bytes) -> None:
        for begin in range(0, array.size, step_nbytes):
            piece = array[begin : begin + step_nbytes]
            out = buffer_of(step_nbytes)[: piece.size]
            np.bitwise_xor(piece, out, out=out)

    in_threads(one, arrays, threads)


@compiled("void(uint16[::1], uint32[::1])")
def change_words(words: NDArray[np.uint16], places: NDArray[np.uint32]) -> None:
    """Change the words at some places: each read, and written back XORed."""
    for number in range(np.uint64(places.size)):
        words[places[number]] ^= np.uint16(1)


def copy_files(folder: Path, target: Path) -> None:
    """Copy the shard files to new files in a new folder."""
    target.mkdir()
    for path in sorted(folder.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)


class Alone:
    """What the memory of this machine does with a checkpoint's bytes, on one thread: read, copied, hashed.

    Parameters
    ----------
    checkpoint_dir
        Its bytes, mapped, are what is handled.
    """

    def __init__(self, checkpoint_dir: Path) -> None:
        self._folder = checkpoint_dir
        self.arrays = largest_first(map_tensors(checkpoint_dir).values())
        self._target = np.ones(self.arrays[0].size, np.uint8)  # faulted in

    def run(self, number: int) -> Parts:
        """Run one round; every part handles all bytes of the checkpoint."""
        parts = Parts()
        with parts.timed("page-cache read"):
            warm(self._folder)
        with parts.timed("memcpy"):
            for array in self.arrays:
                np.copyto(self._target[: array.size], array)
        with parts.timed("xxh3"):
            xxh3(self.arrays, 1)
        return parts


def largest_first(arrays: Iterable[Bytes]) -> Sequence[Bytes]:
    """Return the arrays, the largest first."""
    return sorted(arrays, key=len, reverse=True)
