"""The shares of one rank's slices, written while their new bytes are made, and read when the ranks add them up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import numpy as np
from numpy.typing import NDArray

from gpusync import fsio
from gpusync.errors import DeviceError, KernelError, OutOfScratchError
from gpusync.format.sums import (
    BLOCK_NBYTES,
    Bytes,
    Sums,
    sums_of,
    tail_begin,
    whole_blocks,
)
from gpusync.ranks.shares import Extent, Offer


class ShareFile:
    """The shares of one rank's slices, in an unlinked file: they are a sixteenth of the slices, whatever these are.

    Parameters
    ----------
    offers
        Those of the rank that are proven together.

    Raises
    ------
    OutOfScratchError
        The system's temporary folder has no room for them.
    """

    def __init__(self, offers: Mapping[str, Offer]) -> None:
        self._offers = offers
        self._places: dict[tuple[str, int], int] = {}
        sizes: dict[tuple[Extent, int], int] = {}
        total = 0
        for name, offer in offers.items():
            for number, extent in enumerate(offer.extents):
                key = (extent, offer.nbytes)
                if key not in sizes:
                    sizes[key] = extent.share_nbytes(offer.nbytes)
                self._places[name, number] = total
                total += sizes[key]
        self._file: IO[bytes] | None = None
        if total:
            self._file = fsio.scratch_file(None)
            try:
                fsio.allocate(self._file.fileno(), total)
            except OSError as err:
                self._file.close()
                raise OutOfScratchError(
                    f"the temporary folder has no room for the sums of slices: {err}",
                    needed_bytes=total,
                    budget_bytes=0,
                ) from err

    def writers(self, name: str) -> tuple[ShareWriter, ...]:
        """Return what takes the new bytes of a tensor's slices, by number; none for another tensor."""
        offer = self._offers.get(name)
        if offer is None:
            return ()
        return tuple(
            ShareWriter(self, name, extent, offer.nbytes, self._places[name, number])
            for number, extent in enumerate(offer.extents)
        )

    def read(self, name: str, number: int, offset: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes from ``offset`` on of the share of a tensor's slice ``number``.

        Raises
        ------
        DeviceError
            The file cannot be read.
        """
        if self._file is not None:
            place = self._places[name, number] + offset
            with _failing_disk(name):
                fsio.pread_all(self._file.fileno(), out.data, place)

    def write(self, name: str, data: NDArray[np.generic], position: int) -> None:
        """Write bytes of a share of a tensor's at a position of the file.

        Raises
        ------
        DeviceError
            The file cannot be written.
        """
        if self._file is not None and data.size:
            raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            with _failing_disk(name):
                fsio.pwrite(self._file.fileno(), raw.data, position)

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            self._file.close()
            self._file = None


@contextmanager
def _failing_disk(tensor: str) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise DeviceError(f"the file of slices' sums failed: {err}", tensor=tensor) from err


class ShareWriter:
    """Takes a slice's new bytes in order and writes its share. It keeps one block's sums, and the tail."""

    def __init__(
        self, file: ShareFile, name: str, extent: Extent, tensor_nbytes: int, position: int
    ) -> None:
        self._file = file
        self._name = name
        self._extent = extent
        self._blocks_end = extent.before(whole_blocks(tensor_nbytes) * BLOCK_NBYTES)
        self._tail_begin = extent.before(tail_begin(tensor_nbytes))
        self._position = position
        self._nbytes = extent.share_nbytes(tensor_nbytes)
        self.restart()

    def restart(self) -> None:
        """Drop what was taken: the bytes come again from the first."""
        self._written = 0
        self._block = -1
        self._sums: Sums = np.zeros((1, 8), np.uint64)
        self._tail: list[Bytes] = []

    def write(self, begin: int, new: Bytes) -> None:
        """Take the slice's new bytes from ``begin`` on."""
        end = begin + new.size
        summed = min(end, self._blocks_end)
        if begin < summed:
            ranges = self._extent.ranges(begin, summed)
            self._add(*sums_of(*ranges, new[: summed - begin]))
        if end > self._tail_begin:
            self._tail.append(new[max(0, self._tail_begin - begin) :].copy())

    def finish(self) -> None:
        """Write what is left.

        Raises
        ------
        KernelError
            The bytes were not all there.
        """
        if self._block >= 0:
            self._put(self._sums)
        for piece in self._tail:
            self._put(piece)
        if self._written != self._nbytes:
            raise KernelError(
                "a slice's share is not as large as its geometry says",
                tensor=self._name,
                expected=self._nbytes,
                got=self._written,
            )

    def _add(self, blocks: NDArray[np.intp], sums: Sums) -> None:
        """Write the sums of blocks that are complete; the last one may go on."""
        if blocks[0] == self._block:
            sums[0] += self._sums[0]
        elif self._block >= 0:
            self._put(self._sums)
        self._put(sums[:-1])
        self._block, self._sums = int(blocks[-1]), sums[-1:].copy()

    def _put(self, data: NDArray[np.generic]) -> None:
        self._file.write(self._name, data, self._position + self._written)
        self._written += data.nbytes
