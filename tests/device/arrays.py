"""Device memory for tests of single kernels: numpy in, numpy out, on whatever runtime."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from gpusync.device.kernels import CHUNK
from gpusync.device.runtime import Runtime
from tests.device.support import download, upload

Bytes = NDArray[np.uint8]

UNWRITTEN = 0xA5
"""What fills memory that a kernel is to write, and the gaps that it is not."""

EDGES = (1, 2, 3, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 65535, 65536, 65537, 131071, 200001)
"""Region sizes around every edge that the kernels know: vectors, segments, rows, tiles."""


@dataclass(frozen=True)
class Memory:
    """A piece of a device's memory."""

    runtime: Runtime
    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def read(self, dtype: DTypeLike = np.uint8) -> NDArray[Any]:
        """Return what it holds once all kernels have run."""
        return download(self.runtime, self.tensor, dtype)

    def write(self, array: NDArray[Any]) -> None:
        """Have it hold ``array`` for the kernels launched from now on."""
        self.runtime.synchronize()
        stream = self.runtime.stream()
        stream.copy(self.tensor, torch.from_numpy(array.reshape(-1).view(np.uint8).copy()))
        stream.synchronize()


class Device:
    """Memory and launches of one runtime, on one stream."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._stream = runtime.stream()

    def put(self, array: NDArray[Any], *, shift: int = 0) -> Memory:
        """Return memory that holds ``array``, ``shift`` bytes behind a multiple of 256; nothing of ours follows it."""
        return Memory(self.runtime, upload(self.runtime, array, shift=shift))

    def full(self, nbytes: int, byte: int = UNWRITTEN) -> Memory:
        """Return memory full of one byte."""
        return self.put(np.full(nbytes, byte, np.uint8))

    def launch(self, kernel: str, blocks: int, *args: Memory | int) -> None:
        """Queue a kernel."""
        addresses = [arg.address if isinstance(arg, Memory) else int(arg) for arg in args]
        self._stream.launch(kernel, blocks, addresses)


def random_delta(rng: np.random.Generator, nbytes: int, density: float) -> Bytes:
    """Return bytes of which about that part differs from zero; the first and the last do, if any."""
    delta = rng.integers(1, 256, nbytes, np.uint8)
    if density < 1:
        delta[rng.random(nbytes) >= density] = 0
        if density and nbytes:
            delta[[0, -1]] = 0x81
    return delta


def cut_tiles(sizes: Iterable[int], item: int) -> tuple[NDArray[np.intp], NDArray[np.uint32]]:
    """Return the number of each row's first tile (or item of that size), and then the row of each."""
    counts = [-(-nbytes // item) for nbytes in sizes]
    rows = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    return np.cumsum([0, *counts])[:-1], rows


@dataclass(frozen=True)
class Region:
    """Bytes of a live buffer: runs of ``run_nbytes``, ``run_stride`` apart, the first at ``begin``."""

    begin: int
    nbytes: int
    run_nbytes: int
    run_stride: int

    @property
    def unit(self) -> int:
        """Bytes per word of its lists, where the live buffer begins at an even address."""
        one_run = self.run_nbytes == self.nbytes
        even_runs = self.run_nbytes % 2 == 0 and self.run_stride % 2 == 0
        return 2 if self.begin % 2 == 0 and (one_run or even_runs) else 1

    @property
    def places(self) -> NDArray[np.intp]:
        """Where in the live buffer its bytes are, in region order."""
        run, column = np.divmod(np.arange(self.nbytes), self.run_nbytes)
        return self.begin + run * self.run_stride + column


def contiguous(begin: int, nbytes: int) -> Region:
    """Return a region of one run."""
    return Region(begin, nbytes, nbytes, nbytes)


def chunk_row(region: Region, live: int, delta: int, offset: int, nbytes: int) -> NDArray[Any]:
    """Return a CHUNK of a region in the live buffer at ``live``; it is listed, and its first tile is 0."""
    row = np.zeros(1, CHUNK)
    row["delta"], row["live"] = delta, live + region.begin
    row["run_nbytes"], row["run_stride"] = region.run_nbytes, region.run_stride
    row["offset"], row["nbytes"], row["region_nbytes"] = offset, nbytes, region.nbytes
    row["unit"], row["listed"] = region.unit, 1
    return row


def side_by_side(sizes: tuple[int, ...], begin: int, gap: int) -> list[Region]:
    """Return regions of one run each, ``gap`` bytes between them."""
    regions = []
    for nbytes in sizes:
        regions.append(contiguous(begin, nbytes))
        begin += nbytes + gap
    return regions


def mix_entry(index: NDArray[Any], word: NDArray[Any]) -> NDArray[np.uint64]:
    """Return what each entry adds to an order-free sum; see kernels/common.cu."""
    h = (index.astype(np.uint64) << np.uint64(16) | word.astype(np.uint64)) + np.uint64(1)
    h *= np.uint64(0x9E3779B185EBCA87)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0xC2B2AE3D27D4EB4F)
    return h ^ h >> np.uint64(32)
