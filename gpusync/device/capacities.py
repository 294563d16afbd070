"""How much of the scratch memory each buffer of the device path gets. Pure.

Two batches are in work at once, so deltas, inputs and tables exist twice; there is one decode stream, so the output
buffer and nvCOMP's own scratch exist once. nvCOMP asks for about three bytes per decoded byte.
"""

from __future__ import annotations

from collections.abc import Callable

from gpusync.device.chunks import ALIGNMENT, GUARD_NBYTES, Capacities
from gpusync.device.kernels import TILE_NBYTES
from gpusync.errors import OutOfScratchError
from gpusync.published.blobmaps import MAX_FRAME_NBYTES

SLOTS = 2
"""Batches in work at once."""

INPUT_SLACK_NBYTES = 4096
"""Room behind an input buffer: nvCOMP may load beyond a frame's last byte."""

TILE_TABLES_NBYTES = 5632
"""Of a batch's tables, per tile: block sums (4096), counts (1024), rows (128), and rows of the tables of tiles, chunks
and layers."""

REGION_TABLES_NBYTES = 84
"""Of an update's tables, per region: the digest's state, the digest and a mark."""

TempNbytes = Callable[[int, int, int], int]
"""nvCOMP's scratch, in bytes, for a number of frames, the largest frame's content and the sum of all contents."""

# A delta buffer of 1 MiB is the least that is worth launching kernels for.
_MIN_TILES = 16
# The kernels count a batch's entries in 32 bits, and there may be one for every byte.
_MAX_TILES = (1 << 32) // TILE_NBYTES - 1
# Buffers this many times as large as the regions hold all of an update that most publishers would write.
_ROOMY = 4
# Around nvCOMP's scratch and before the output, the flags, and what aligning them takes.
_GUARDS_NBYTES = 3 * GUARD_NBYTES + 2 * ALIGNMENT
# Tables of a batch of few frames: a chain of some hundred versions has as many rounds.
_MIN_TABLES_NBYTES = 64 << 10
_TABLES_NBYTES_PER_FRAME = 128
# Tensors of some hundred bytes have tiles and frames of their own.
_SMALL_TENSORS = 64


def capacities_for(
    scratch_nbytes: int,
    temp_nbytes: TempNbytes,
    region_nbytes: int = 1 << 62,
    regions: int = 0,
) -> Capacities:
    """Return the largest capacities that ``scratch_nbytes`` of device memory allow, and the work can use.

    Parameters
    ----------
    region_nbytes, regions
        Bytes of all regions, and their number: a small update takes little.

    Raises
    ------
    OutOfScratchError
        Not even the smallest fit.
    """
    scratch_nbytes -= regions * REGION_TABLES_NBYTES
    least = scratch_of(_capacities(_MIN_TILES), temp_nbytes)
    if least > scratch_nbytes:
        raise OutOfScratchError(
            "the scratch memory is too small for the device path; give it more",
            needed_bytes=least + regions * REGION_TABLES_NBYTES,
            budget_bytes=scratch_nbytes + regions * REGION_TABLES_NBYTES,
        )
    useful = _MIN_TILES + _ROOMY * region_nbytes // TILE_NBYTES
    low, high = _MIN_TILES, min(useful, _MAX_TILES, max(_MIN_TILES, scratch_nbytes // TILE_NBYTES))
    while low < high:
        middle = (low + high + 1) // 2
        if scratch_of(_capacities(middle), temp_nbytes) <= scratch_nbytes:
            low = middle
        else:
            high = middle - 1
    return _capacities(low)


def scratch_of(capacities: Capacities, temp_nbytes: TempNbytes) -> int:
    """Return the device memory, in bytes, of all buffers and tables of these capacities."""
    slot = (
        capacities.delta_nbytes
        + capacities.input_nbytes
        + INPUT_SLACK_NBYTES
        + capacities.tiles * TILE_TABLES_NBYTES
        + capacities.tables_nbytes
    )
    output = capacities.output_nbytes
    temp = temp_nbytes(capacities.frames, min(output, MAX_FRAME_NBYTES), output)
    return SLOTS * slot + output + temp + _GUARDS_NBYTES


def _capacities(tiles: int) -> Capacities:
    """Return the capacities around a delta buffer of so many tiles.

    The input takes half as many bytes: sparse deltas shrink far more, and full tensors, which do not, are cut smaller.
    """
    delta_nbytes = tiles * TILE_NBYTES
    frames = 2 * tiles + _SMALL_TENSORS
    return Capacities(
        delta_nbytes=delta_nbytes,
        input_nbytes=delta_nbytes // 2,
        output_nbytes=delta_nbytes,
        tiles=tiles + tiles // 2 + _SMALL_TENSORS,
        frames=frames,
        tables_nbytes=_MIN_TABLES_NBYTES + _TABLES_NBYTES_PER_FRAME * frames,
    )
