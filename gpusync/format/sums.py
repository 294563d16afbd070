"""XXH3-128 in parts: what the bytes of a tensor add to its 1024-byte blocks, and the digest that the sums make.

The long form of XXH3 (over 240 bytes; xxHash specification, "XXH3 algorithm details", seed 0, default secret) keeps 8
accumulators. A block's 16 stripes of 64 bytes are added to them modulo 2^64, in any order, and only between blocks are
they scrambled. A *unit*, 16 bytes at a multiple of 16, adds to two accumulators alone. So whoever holds some units of a
tensor can say what these add to each block, and such sums from many places add up to the sums of the whole. Behind the
last whole block the bytes themselves are needed: the *tail*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpusync.types import Digest

Bytes = NDArray[np.uint8]
Sums = NDArray[np.uint64]
"""Shape (blocks, 8): what is added to each accumulator in each block."""

BLOCK_NBYTES = 1024
SUMS_NBYTES = 64
"""Bytes of one block's sums."""
UNIT_NBYTES = 16

_STRIPE_NBYTES = 64
_STRIPES = BLOCK_NBYTES // _STRIPE_NBYTES
_LANES = 8
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# XXH3's default secret from its first byte on, as little-endian words: as many as a block uses.
_SECRET = np.array(
    [
        0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
        0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
        0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
        0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,
        0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
        0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45,
    ],
    np.uint64,
)  # fmt: skip
_KEYS = np.stack([_SECRET[stripe : stripe + _LANES] for stripe in range(_STRIPES)])
"""The secret's word for each lane (column) of each stripe (row) of a block."""
_PARTNER = np.arange(_LANES) ^ 1
"""A word is multiplied for its own accumulator, and added to that of the other lane of its unit."""
# Blocks worked on at a time: their words, and what is made of them, stay in cache.
_BLOCKS_AT_ONCE = 128


def whole_blocks(nbytes: int) -> int:
    """Return how many blocks of a tensor are known by their sums alone."""
    return max(0, nbytes - 1) // BLOCK_NBYTES


def tail_begin(nbytes: int) -> int:
    """Return where a tensor's tail begins: behind its whole blocks, or 64 bytes before its end where that is earlier.

    XXH3 takes the last 64 bytes as a stripe of their own, even where they reach into the last whole block.
    """
    return max(0, min(whole_blocks(nbytes) * BLOCK_NBYTES, nbytes - _STRIPE_NBYTES))


def add_blocks(sums: Sums, data: Bytes) -> None:
    """Add whole blocks, contiguous, to their sums, of which there are as many; ``sums`` is changed in place."""
    words = data.view(np.uint64).reshape(-1, _STRIPES, _LANES)
    keys = _KEYS[:, :, np.newaxis]
    for begin in range(0, len(words), _BLOCKS_AT_ONCE):
        # Blocks along the last axis, where numpy's loops are long.
        part = words[begin : begin + _BLOCKS_AT_ONCE].transpose(1, 2, 0).copy()
        total = part.sum(axis=0, dtype=np.uint64)[_PARTNER]
        part ^= keys
        high = part >> _HALF
        part &= _LOW
        part *= high
        total += part.sum(axis=0, dtype=np.uint64)
        sums[begin : begin + _BLOCKS_AT_ONCE] += total.T


@dataclass(frozen=True)
class Fragments:
    """Parts of blocks, each contiguous, in tensor order.

    Parameters
    ----------
    blocks
        Number of each one's block in the tensor, in non-descending order.
    begins, ends
        Bytes within the block, multiples of 16.
    """

    blocks: NDArray[np.intp]
    begins: NDArray[np.intp]
    ends: NDArray[np.intp]

    @classmethod
    def of(cls, begins: NDArray[np.intp], ends: NDArray[np.intp]) -> Fragments:
        """Cut ranges of a tensor, none of them empty, at the borders of blocks."""
        firsts = begins // BLOCK_NBYTES
        counts = (ends - 1) // BLOCK_NBYTES - firsts + 1
        blocks = np.repeat(firsts, counts) + counted(counts)
        at = blocks * BLOCK_NBYTES
        return cls(
            blocks,
            np.maximum(np.repeat(begins, counts) - at, 0),
            np.minimum(np.repeat(ends, counts) - at, BLOCK_NBYTES),
        )


def sums_of(fragments: Fragments, data: Bytes) -> tuple[NDArray[np.intp], Sums]:
    """Return the blocks that fragments lie in, and what their bytes add to each.

    Parameters
    ----------
    data
        The fragments' bytes, contiguous.
    """
    new = np.ones(fragments.blocks.size, np.bool_)
    np.not_equal(fragments.blocks[1:], fragments.blocks[:-1], out=new[1:])
    blocks = fragments.blocks[new]
    sums: Sums = np.zeros((blocks.size, _LANES), np.uint64)
    if data.size == blocks.size * BLOCK_NBYTES:
        add_blocks(sums, data)
        return blocks, sums
    # In whole blocks, of which what is missing cancels its key, and so adds a constant that is taken off again.
    rows = np.cumsum(new) - 1
    step = _STRIPE_NBYTES
    if ((fragments.begins | fragments.ends) % step).any():
        step = UNIT_NBYTES
    counts = (fragments.ends - fragments.begins) // step
    places = np.repeat((rows * BLOCK_NBYTES + fragments.begins) // step, counts) + counted(counts)
    whole = np.empty((blocks.size, _STRIPES, _LANES), np.uint64)
    whole[:] = _KEYS
    whole.reshape(-1, step // 8)[places] = data.view(np.uint64).reshape(-1, step // 8)
    add_blocks(sums, whole.reshape(-1).view(np.uint8))
    there = _CANCELLED[fragments.ends // UNIT_NBYTES] - _CANCELLED[fragments.begins // UNIT_NBYTES]
    sums += np.add.reduceat(there, np.flatnonzero(new), axis=0)
    sums -= _CANCELLED[-1]
    return blocks, sums


class SummedDigest:
    """Takes the sums of a tensor's blocks in order, then its tail, and gives the digest of the whole.

    The order-bound half of XXH3 is left to the library: it hashes, for each block, another one with the same sums, which
    has the same effect. Such a block is quickly found: in its first two stripes the secret is cancelled so that a word
    adds what is wanted, in the others so that it adds a constant.
    """

    def __init__(self, nbytes: int) -> None:
        self._blocks = whole_blocks(nbytes)
        self._begin = tail_begin(nbytes)
        self._state = xxhash.xxh3_128()
        self._taken = 0
        self._last: Sums = np.zeros((0, _LANES), np.uint64)
        self._stand_ins = np.empty(
            (min(self._blocks, _BLOCKS_AT_ONCE), _STRIPES, _LANES), np.uint64
        )
        self._stand_ins[:] = _KEYS

    def add(self, sums: Sums) -> None:
        """Take the sums of the next blocks."""
        self._taken += len(sums)
        if self._taken == self._blocks and len(sums):  # the tail may reach into the last one
            sums, self._last = sums[:-1], sums[-1:].copy()
        for begin in range(0, len(sums), _BLOCKS_AT_ONCE):
            self._hash(sums[begin : begin + _BLOCKS_AT_ONCE])

    def finish(self, tail: Bytes) -> Digest:
        """Return the digest; ``tail`` holds the bytes from ``tail_begin`` on."""
        inside = self._blocks * BLOCK_NBYTES - self._begin  # tail bytes within the last whole block
        if len(self._last):
            block = self._stand_ins[0].reshape(-1).view(np.uint8)
            block[BLOCK_NBYTES - inside :] = tail[:inside]
            self._hash(self._last)
        self._state.update(np.ascontiguousarray(tail[inside:]).data)
        return Digest("xxh3-128", self._state.hexdigest())

    def _hash(self, sums: Sums) -> None:
        """Make blocks of these sums by setting the first two stripes of the stand-ins, and hash them."""
        blocks = self._stand_ins[: len(sums)]
        others = np.ascontiguousarray(blocks[0, 2:])  # alike in all of them
        wanted = sums - _added(others, _KEYS[2:]).sum(axis=0, dtype=np.uint64)
        # First stripe: keyed, a word is 1 in its low half, so that it multiplies to its high half, which is free.
        # Second stripe: keyed, a word is 0 in its low half, so that it multiplies to nothing.
        ones = _KEYS[0] & _LOW ^ np.uint64(1)
        factor = wanted - (ones + (_KEYS[1] & _LOW))[_PARTNER] & _LOW
        blocks[:, 0] = factor << _HALF ^ _KEYS[0] & ~_LOW | ones
        wanted -= factor
        wanted -= blocks[:, 0, _PARTNER]
        blocks[:, 1] = wanted[:, _PARTNER]
        self._state.update(blocks.data)


def _added(words: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return what stripes add to the accumulators."""
    keyed = words ^ keys
    added: NDArray[np.uint64] = (keyed & _LOW) * (keyed >> _HALF) + words[..., _PARTNER]
    return added


def counted(counts: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return 0, 1, ... up to each count, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def _cancelled() -> Sums:
    """Return what the first 0 to 64 units of a block add where each word is its key."""
    units = np.zeros((_STRIPES, _LANES // 2, _LANES), np.uint64)
    for pair in range(_LANES // 2):
        lanes = slice(2 * pair, 2 * pair + 2)
        units[:, pair, lanes] = _KEYS[:, _PARTNER][:, lanes]
    before = np.zeros((_STRIPES * _LANES // 2 + 1, _LANES), np.uint64)
    np.cumsum(units.reshape(-1, _LANES), axis=0, dtype=np.uint64, out=before[1:])
    return before


_CANCELLED = _cancelled()
