"""The CUDA sources, and the tables that kernels read."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from gpusync.errors import MissingDependencyError

UNITS = (
    "common.cu",
    "xxh3.cu",
    "xxh3_finish.cu",
    "layers.cu",
    "changes.cu",
    "rows.cu",
    "commit.cu",
    "guards.cu",
)
"""The files of ``kernels/``, in the order in which they are joined."""

TILE_NBYTES = 65536
"""Bytes of a region that one thread block works on."""


def _struct(*fields: str) -> np.dtype[np.void]:
    """Return the layout of a struct of the kernels: every field takes 8 bytes, addresses too."""
    return np.dtype([(field, np.uint64) for field in fields])


CHUNK = _struct(
    "delta",
    "live",
    "run_nbytes",
    "run_stride",
    "offset",
    "nbytes",
    "region_nbytes",
    "region",
    "first_tile",
    "unit",
    "listed",
)
"""``struct Chunk`` of kernels/common.cu."""

LAYER = _struct(
    "source",
    "source_begin",
    "chunk",
    "mode",
    "tensor_begin",
    "tensor_stride",
    "first_tile",
)
"""``struct Layer`` of kernels/layers.cu. Modes: 0 delta = source, 1 delta ^= source, 2 delta = source ^ live."""

PAYLOAD = _struct(
    "data",
    "nbytes",
    "form",
    "tensor_nbytes",
    "bitmap",
    "tensor",
    "chunk",
    "tensor_begin",
    "tensor_stride",
    "first_item",
)
"""``struct Payload`` of kernels/layers.cu. Forms: 1 overwrite, 2 xor_sparse."""

RECORD = _struct(
    "data",
    "nbytes",
    "band_begin",
    "band_nbytes",
    "tensor",
    "chunk",
    "tensor_begin",
    "tensor_stride",
)
"""``struct Record`` of kernels/rows.cu."""

LIST = _struct("chunks", "tile_chunk", "firsts", "index", "value", "checks", "first_tile")
"""``struct List`` of kernels/commit.cu."""

ITEM_ENTRIES = 4096
"""Entries of a payload that one thread block works on."""


@cache
def kernel_source() -> str:
    """Return all kernels as one translation unit; ``#line`` keeps the compiler's messages to their files.

    Raises
    ------
    MissingDependencyError
        The sources are neither in the package nor beside it.
    """
    folder = kernels_folder()
    return "".join(f'#line 1 "{unit}"\n{(folder / unit).read_text()}\n' for unit in UNITS)


def kernels_folder() -> Path:
    """Return the folder of the sources: in an installed package its own, in a checkout ``kernels/``."""
    package = Path(str(files("gpusync")))
    for folder in (package / "_kernels", package.parent / "kernels"):
        if (folder / UNITS[0]).is_file():
            return folder
    raise MissingDependencyError("the kernel sources are missing: reinstall gpusync", file=UNITS[0])
