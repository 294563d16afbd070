"""Where a region lies, and the layers that make up its delta: what is to be done to one destination of one tensor.

A layer is one step from old bytes to new ones. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpusync.folding.fold import Origin
from gpusync.format.rows import BAND_NBYTES, count_bands
from gpusync.published.blobmaps import BlobMap, Positions
from gpusync.published.blobs import BlobSource


@dataclass(frozen=True, slots=True)
class RegionMap:
    """Where a region lies, live and in its tensor. Sizes and positions are bytes.

    Parameters
    ----------
    address
        Device address of the region's first byte.
    nbytes
        Size of the region.
    run_nbytes, run_stride
        Bytes of a run that is contiguous on both sides, and live bytes from one run's begin to the next one's.
        ``run_nbytes`` is ``nbytes`` where the region is contiguous on both sides.
    tensor_begin, tensor_stride
        Tensor byte of the region's first, and tensor bytes from one run's begin to the next one's.
    """

    address: int
    nbytes: int
    run_nbytes: int
    run_stride: int
    tensor_begin: int = 0
    tensor_stride: int = 0

    @classmethod
    def whole(cls, address: int, nbytes: int) -> RegionMap:
        """Return the region of a whole contiguous tensor."""
        return cls(address, nbytes, nbytes, nbytes, 0, nbytes)

    @property
    def is_one_run(self) -> bool:
        """True where the region is contiguous, live and in its tensor."""
        return self.run_nbytes == self.nbytes

    @property
    def unit(self) -> int:
        """Bytes per word of the change list: 2 where every word lies on an even address, else 1."""
        odd = self.address if self.is_one_run else self.address | self.run_nbytes | self.run_stride
        return 1 if odd & 1 else 2

    def tensor_position(self, q: int) -> int:
        """Return the tensor byte that region byte ``q`` comes from."""
        if self.is_one_run:
            return self.tensor_begin + q
        run, column = divmod(q, self.run_nbytes)
        return self.tensor_begin + run * self.tensor_stride + column

    def tensor_spans(self, q0: Positions, q1: Positions) -> tuple[Positions, Positions]:
        """Return :meth:`tensor_span` of many ranges, none of them empty."""
        if self.is_one_run:
            return self.tensor_begin + q0, self.tensor_begin + q1
        run0, column0 = np.divmod(q0, self.run_nbytes)
        run1, column1 = np.divmod(q1 - 1, self.run_nbytes)
        return (
            self.tensor_begin + run0 * self.tensor_stride + column0,
            self.tensor_begin + run1 * self.tensor_stride + column1 + 1,
        )

    def tensor_span(self, q0: int, q1: int) -> tuple[int, int]:
        """Return the tensor bytes, from and to, that cover region bytes ``q0`` to ``q1``."""
        if q0 >= q1:
            return self.tensor_begin, self.tensor_begin
        return self.tensor_position(q0), self.tensor_position(q1 - 1) + 1


@dataclass(frozen=True, eq=False, slots=True)
class FramesLayer:
    """An xor blob, decoded on the device as far as a chunk's frames go: its content is the delta itself."""

    blob: BlobSource
    map: BlobMap

    def covering(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first frame, and the one after the last, for tensor bytes ``begin`` to ``end``."""
        return self.map.covering(begin, end)

    def tensor_end(self, frames: int) -> int:
        """Return the tensor byte before which the first ``frames`` frames end."""
        return self.map.content(0, frames)[1]


@dataclass(frozen=True, eq=False, slots=True)
class RecordsLayer:
    """An xor_rows blob with a frame for each record, decoded on the device as far as a chunk's bands go."""

    blob: BlobSource
    map: BlobMap

    def covering(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first frame, and the one after the last, for tensor bytes ``begin`` to ``end``."""
        return (begin // BAND_NBYTES, count_bands(end)) if begin < end else (0, 0)

    def tensor_end(self, frames: int) -> int:
        """Return the tensor byte before which the first ``frames`` frames end, the last of all apart."""
        return frames * BAND_NBYTES


@dataclass(frozen=True, eq=False, slots=True)
class PayloadLayer:
    """A sparse blob, decoded on the device as a whole for every chunk."""

    blob: BlobSource
    map: BlobMap
    form: Literal["overwrite", "xor_sparse"]


@dataclass(frozen=True, eq=False, slots=True)
class RawLayer:
    """New bytes that are read as they are: a full version, or the base. They come packed, in region order."""

    origin: Origin


@dataclass(frozen=True, eq=False, slots=True)
class FoldedLayer:
    """A whole tensor folded by the host, alone in its tensor. Its bytes come packed, in region order.

    They are new bytes where there is an origin, else the delta.
    """

    origin: Origin | None
    blobs: tuple[BlobSource, ...]

    @property
    def is_full(self) -> bool:
        """True where the bytes are the tensor's new ones."""
        return self.origin is not None


LayerPlan = FramesLayer | RecordsLayer | PayloadLayer | RawLayer | FoldedLayer


@dataclass(frozen=True, eq=False, slots=True)
class DeviceTensor:
    """One destination of one tensor.

    Parameters
    ----------
    number
        Row in the tables of states and digests; unique within an update.
    layers
        Oldest first; at most the first one is raw. A tensor that the host folds has one FoldedLayer.
    host_reason
        Why the host folds it; None where the device does.
    listed
        False where another destination of the same storage has the change list.
    """

    number: int
    name: str
    tensor_nbytes: int
    region: RegionMap
    layers: tuple[LayerPlan, ...]
    host_reason: str | None = None
    listed: bool = True
