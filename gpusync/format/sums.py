"""XXH3-128 in parts: what the bytes of a tensor add to its 1024-byte blocks, and the digest that the sums make.

The long form of XXH3 (over 240 bytes; xxHash specification, "XXH3 algorithm", seed 0, default secret) keeps 8
accumulators. A block's 16 stripes of 64 bytes are added to them modulo 2^64, in any order, and only between blocks are
they scrambled. A *unit*, 16 bytes at a multiple of 16, adds to two accumulators alone. So whoever holds some units of a
tensor can say what these add to each block, and such sums from many places add up to the sums of the whole. Behind the
last whole block the bytes themselves are needed: the *tail*.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpusync.compiled import compiled
from gpusync.errors import KernelError
from gpusync.types import Digest

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Positions = NDArray[np.intp]
Sums = NDArray[np.uint64]
"""Shape (blocks, 8): what is added to each accumulator in each block."""

BLOCK_NBYTES = 1024
SUMS_NBYTES = 64
"""Bytes of one block's sums."""
UNIT_NBYTES = 16

_STRIPE_NBYTES = 64
_LANES = 8
# XXH3's default secret, as little-endian words.
_SECRET = np.array(
    [
        0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
        0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
        0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
        0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,
        0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
        0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
    ],
    np.uint64,
)  # fmt: skip
_KEYS = np.concatenate([_SECRET[stripe : stripe + _LANES] for stripe in range(16)])
"""The secret's word for each word of a block."""
_SCRAMBLER = _SECRET[16:].copy()
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (
    _PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1,
)  # fmt: skip
"""What the accumulators hold at first."""
_AVALANCHE = 0x165667919E3779F9
_MASK = (1 << 64) - 1
# From which byte on the secret is mixed into the last stripe, and into the halves of the digest.
_LAST_STRIPE_KEY, _LOW_HALF_KEY, _HIGH_HALF_KEY = 121, 11, 117

# Compiled loops count in unsigned integers only: with signed ones among them they would become floats.
_0, _1, _2, _4, _8, _32, _128, _1024 = map(np.uint64, (0, 1, 2, 4, 8, 32, 128, 1024))
_SIGN = np.uint64(1 << 63)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(47)
_FACTOR = np.uint64(_PRIME32_1)


def whole_blocks(nbytes: int) -> int:
    """Return how many blocks of a tensor are known by their sums alone."""
    return max(0, nbytes - 1) // BLOCK_NBYTES


def tail_begin(nbytes: int) -> int:
    """Return where a tensor's tail begins: behind its whole blocks, or 64 bytes before its end where that is earlier.

    XXH3 takes the last 64 bytes as a stripe of their own, even where they reach into the last whole block.
    """
    return max(0, min(whole_blocks(nbytes) * BLOCK_NBYTES, nbytes - _STRIPE_NBYTES))


def blocks_of(begins: Positions, ends: Positions) -> Positions:
    """Return the numbers of the blocks that ranges of a tensor have bytes in, each once.

    Parameters
    ----------
    begins, ends
        Bytes of the tensor. The ranges are in order, none is empty, and no two overlap.

    Raises
    ------
    KernelError
        They are not like that.
    """
    if not begins.size:
        return np.empty(0, np.intp)
    most = int(ends[-1] - 1) // BLOCK_NBYTES - int(begins[0]) // BLOCK_NBYTES + 1
    blocks: Positions = np.empty(max(0, most), np.intp)
    count = _number(begins.view(np.uint64), ends.view(np.uint64), blocks.view(np.uint64))
    if count > blocks.size:
        raise KernelError("a slice's ranges are not in order", got=f"{begins.size} ranges")
    return blocks[:count]


@compiled("uint64(uint64[::1], uint64[::1], uint64[::1])")
def _number(begins: Words, ends: Words, blocks: Words) -> np.uint64:
    """Write the numbers of the blocks of ranges, and return how many they are; of bad ranges, more than there is room for."""
    behind = _0
    for number in range(np.uint64(begins.size)):
        if begins[number] < behind or begins[number] >= ends[number]:
            return ~_0
        behind = ends[number]
    if behind >= _SIGN:
        return ~_0
    count, next_block = _0, _0
    for number in range(np.uint64(begins.size)):
        end = (ends[number] - _1) // _1024 + _1
        for block in range(max(begins[number] // _1024, next_block), end):
            blocks[count] = block
            count += _1
        next_block = end
    return count


def sums_of(begins: Positions, ends: Positions, data: Bytes) -> tuple[Positions, Sums]:
    """Return the blocks that ranges of a tensor have bytes in, and what their bytes add to each.

    Parameters
    ----------
    begins, ends
        As :func:`blocks_of` takes them, in whole units.
    data
        The ranges' bytes, one after the other; contiguous, at any address.

    Raises
    ------
    KernelError
        The ranges are not like that, or ``data`` has not as many bytes.
    """
    blocks = blocks_of(begins, ends)
    nbytes = int((ends - begins).sum())
    if data.size != nbytes or ((begins | ends) % UNIT_NBYTES).any():
        raise KernelError(
            f"the bytes of a slice are not those of its ranges, or these not whole {UNIT_NBYTES}-byte units",
            expected=nbytes,
            got=data.size,
        )
    sums: Sums = np.zeros((blocks.size, _LANES), np.uint64)
    if blocks.size:
        parts: Words = np.empty((2, 32), np.uint64)
        begins, ends = begins // 8, ends // 8
        _add_words(begins.view(np.uint64), ends.view(np.uint64), data.view(np.uint64), sums, parts)
    return blocks, sums


@compiled(
    "void(uint64[::1], uint64[::1], Array(uint64, 1, 'C', readonly=True, aligned=False),"
    " uint64[:, ::1], uint64[:, ::1])"
)
def _add_words(begins: Words, ends: Words, words: Words, sums: Sums, parts: Words) -> None:
    """Add ranges, in words of the tensor, to the sums of the blocks that they have words in.

    A word with its key in it is multiplied, one half by the other, for its own accumulator; the word itself is added to the
    accumulator of the other word of its unit. What a range has of a block is cut into four parts of whole stripes, whose
    words at the same place, for the same accumulator, are worked on together, many places side by side. ``parts``, of shape
    (2, 32), is room for the products' sums and the words' ones. What is left, less than 256 bytes, goes unit by unit.
    """
    at, row, last = _0, _0, begins[_0] // _128
    for number in range(np.uint64(begins.size)):
        begin = begins[number]
        while begin < ends[number]:
            block, first = begin // _128, begin % _128
            row += np.uint64(block != last)
            last = block
            count = min(ends[number] - begin, _128 - first)
            part = count // _32 * _8
            for j in range(part):
                products = plain = _0
                for quarter in range(_4):
                    word = words[at + quarter * part + j]
                    keyed = word ^ _KEYS[first + quarter * part + j]
                    products += (keyed & _LOW) * (keyed >> _32)
                    plain += word
                parts[_0, j], parts[_1, j] = products, plain
            for j in range(part):
                sums[row, (first + j) % _8] += parts[_0, j] + parts[_1, j ^ _1]
            for j in range(_4 * part, count, _2):
                one, other = words[at + j], words[at + j + _1]
                lane = (first + j) % _8
                keyed = one ^ _KEYS[first + j]
                sums[row, lane] += (keyed & _LOW) * (keyed >> _32) + other
                keyed = other ^ _KEYS[first + j + _1]
                sums[row, lane + _1] += (keyed & _LOW) * (keyed >> _32) + one
            at += count
            begin += count


def add_sums(total: Sums, first: int, blocks: Positions, sums: Sums) -> None:
    """Add the sums of blocks to those in ``total``, which begin with block ``first``; it is changed in place.

    Parameters
    ----------
    sums
        One row for each block, contiguous, at any address.

    Raises
    ------
    KernelError
        ``total`` has not all of the blocks.
    """
    rows = blocks - first
    if len(rows) != len(sums) or not _add_rows(rows.view(np.uint64), sums, total):
        raise KernelError("sums are of other blocks", expected=len(total), got=len(sums))


@compiled(
    "boolean(uint64[::1], Array(uint64, 2, 'C', readonly=True, aligned=False), uint64[:, ::1])"
)
def _add_rows(rows: Words, sums: Sums, total: Sums) -> bool:
    """Add each row of ``sums`` to one of ``total``; return False, and add nothing, where one is not there."""
    for number in range(np.uint64(rows.size)):
        if rows[number] >= np.uint64(len(total)):
            return False
    for number in range(np.uint64(rows.size)):
        for lane in range(_8):
            total[rows[number], lane] += sums[number, lane]
    return True


class SummedDigest:
    """Takes the sums of a tensor's blocks in order, then its tail, and gives the digest of the whole."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._accumulators: Words = np.array(_START, np.uint64)

    def add(self, sums: Sums) -> None:
        """Take the sums of the next blocks, contiguous."""
        _scramble(sums, self._accumulators)

    def finish(self, tail: Bytes) -> Digest:
        """Return the digest; ``tail`` holds the bytes from ``tail_begin`` on."""
        tail = np.ascontiguousarray(tail)
        blocks_end = whole_blocks(self._nbytes) * BLOCK_NBYTES
        if not blocks_end:
            return Digest("xxh3-128", xxhash.xxh3_128_hexdigest(tail.data))
        rest = tail[blocks_end - tail_begin(self._nbytes) :]
        nbytes = (rest.size - 1) // _STRIPE_NBYTES * _STRIPE_NBYTES
        if nbytes:
            _, sums = sums_of(np.array([0]), np.array([nbytes]), rest[:nbytes])
            self._accumulators += sums[0]
        last = tail[-_STRIPE_NBYTES:].view(np.uint64)
        keyed = last ^ _secret(_LAST_STRIPE_KEY)
        self._accumulators += (keyed & _LOW) * (keyed >> _32)
        self._accumulators += last.reshape(-1, 2)[:, ::-1].reshape(-1)
        low = self._half(_LOW_HALF_KEY, self._nbytes * _PRIME64_1)
        high = self._half(_HIGH_HALF_KEY, ~(self._nbytes * _PRIME64_2))
        return Digest("xxh3-128", f"{high:016x}{low:016x}")

    def _half(self, key: int, total: int) -> int:
        """Return one half of the digest: ``total``, and the accumulators multiplied in pairs, mixed once more."""
        keyed = (self._accumulators ^ _secret(key)).tolist()
        for one, other in zip(keyed[::2], keyed[1::2], strict=True):
            product = one * other
            total += product & _MASK ^ product >> 64
        total &= _MASK
        total = (total ^ total >> 37) * _AVALANCHE & _MASK
        return total ^ total >> 32


@compiled("void(uint64[:, ::1], uint64[::1])")
def _scramble(sums: Sums, accumulators: Words) -> None:
    """Add the sums of blocks, one after the other, and scramble the accumulators behind each."""
    for row in range(np.uint64(len(sums))):
        for lane in range(_8):
            total = accumulators[lane] + sums[row, lane]
            accumulators[lane] = (total ^ total >> _SHIFT ^ _SCRAMBLER[lane]) * _FACTOR


def _secret(at: int) -> Words:
    """Return the words of the secret from a byte on."""
    return np.frombuffer(_SECRET.tobytes(), np.uint64, _LANES, at)
