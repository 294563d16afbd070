"""XXH3-128 in parts: whatever ranges of a tensor are summed, by whomever, the sums make the library's digest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpusync.errors import KernelError
from gpusync.format.sums import (
    BLOCK_NBYTES,
    SummedDigest,
    Sums,
    add_sums,
    blocks_of,
    sums_of,
    tail_begin,
    whole_blocks,
)

Bytes = NDArray[np.uint8]
Ranges = Sequence[tuple[int, int]]


def data_of(nbytes: int, seed: int = 0) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def summed(data: Bytes, ranges: Ranges) -> tuple[list[int], Sums]:
    """Return the blocks of ranges of a tensor, and their sums."""
    begins, ends = (np.array([each[side] for each in ranges], np.intp) for side in (0, 1))
    held = np.concatenate([data[begin:end] for begin, end in ranges])
    blocks, sums = sums_of(begins, ends, held)
    assert np.array_equal(blocks, blocks_of(begins, ends))
    return blocks.tolist(), sums


def digest_of(data: Bytes, step: int = 1 << 20, split: int = BLOCK_NBYTES) -> str:
    """Return the digest from sums: of parts of ``split`` bytes, taken by two, and given ``step`` blocks at a time."""
    blocks = whole_blocks(data.size)
    total: Sums = np.zeros((blocks, 8), np.uint64)
    end = blocks * BLOCK_NBYTES
    for holder in range(2):
        ranges = [(at, min(at + split, end)) for at in range(holder * split, end, 2 * split)]
        if ranges:
            found, sums = summed(data, ranges)
            add_sums(total, 0, np.array(found), sums)
    digest = SummedDigest(data.size)
    for first in range(0, blocks, step):
        digest.add(total[first : first + step])
    return digest.finish(data[tail_begin(data.size) :]).hex


def test_tensors_of_every_size() -> None:
    data = data_of(5001)
    for nbytes in range(5001):
        assert digest_of(data[:nbytes]) == xxhash.xxh3_128_hexdigest(data[:nbytes]), nbytes


@pytest.mark.parametrize("blocks", [16, 63, 1000])
def test_larger_tensors_around_the_edges_of_stripes_and_blocks(blocks: int) -> None:
    data = data_of((blocks + 2) * BLOCK_NBYTES, seed=1)
    around = {edge + by for edge in (0, 64, 960, 1024) for by in (-17, -16, -1, 0, 1, 15, 16, 17)}
    for rest in around:
        part = data[: blocks * BLOCK_NBYTES + rest]
        assert digest_of(part, step=7, split=1408) == xxhash.xxh3_128_hexdigest(part), rest


@pytest.mark.parametrize("fill", [0, 0x80, 0xFF])
def test_bytes_that_are_all_alike(fill: int) -> None:
    """Every sum, product and fold carries, or none does."""
    data = np.full(70_000, fill, np.uint8)
    assert digest_of(data) == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize("split", [16, 48, 64, 192, 240, 256, 272, 640, 1408, 4096, 100_000])
def test_rows_of_every_width(split: int) -> None:
    data = data_of(100_000)
    assert digest_of(data, step=3, split=split) == xxhash.xxh3_128_hexdigest(data)


def test_every_range_of_a_block_adds_its_part() -> None:
    data = data_of(BLOCK_NBYTES)
    _, whole = summed(data, [(0, BLOCK_NBYTES)])
    for begin in range(0, BLOCK_NBYTES, 16):
        for end in range(begin + 16, BLOCK_NBYTES + 1, 16):
            outer = [(a, b) for a, b in ((0, begin), (end, BLOCK_NBYTES)) if a < b]
            _, total = summed(data, [(begin, end)])
            if outer:
                total = total + summed(data, outer)[1]
            assert np.array_equal(total, whole), (begin, end)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32), st.sampled_from([16, 64, 1024]))
def test_sums_of_parts_add_up_to_those_of_the_whole(blocks: int, seed: int, unit: int) -> None:
    data = data_of(blocks * BLOCK_NBYTES, seed)
    found, whole = summed(data, [(0, data.size)])
    assert found == list(range(blocks))
    added: Sums = np.zeros((blocks, 8), np.uint64)
    owners = np.random.default_rng(seed).integers(0, 3, data.size // unit)
    for owner in range(3):
        mine = (np.flatnonzero(owners == owner) * unit).tolist()
        if mine:
            numbers, sums = summed(data, [(at, at + unit) for at in mine])
            assert numbers == sorted({at // BLOCK_NBYTES for at in mine})
            add_sums(added, 0, np.array(numbers), sums)
    assert np.array_equal(added, whole)


def test_bytes_may_lie_at_any_address_and_be_read_only() -> None:
    data = data_of(3000)
    for by in range(17):
        part = data[by : by + 2048]
        _, sums = sums_of(np.array([0]), np.array([2048]), part)
        assert np.array_equal(sums, summed(part, [(0, 2048)])[1])


def test_sums_may_begin_behind_the_first_block() -> None:
    data = data_of(4096)
    blocks, sums = summed(data, [(1024, 2048), (3072, 4096)])
    total: Sums = np.zeros((3, 8), np.uint64)
    add_sums(total, 1, np.array(blocks), sums)
    assert np.array_equal(total[[0, 2]], sums)
    assert not total[1].any()


@pytest.mark.parametrize(
    "ranges",
    [
        [(16, 16)],
        [(32, 16)],
        [(0, 32), (16, 48)],
        [(64, 80), (0, 16)],
        [(-16, 16)],
        [(-32, -16)],
        [(0, 16), (16, -16)],
    ],
)
def test_ranges_that_are_empty_or_not_in_order_are_refused(ranges: Ranges) -> None:
    begins, ends = (np.array([each[side] for each in ranges]) for side in (0, 1))
    with pytest.raises(KernelError, match="in order"):
        sums_of(begins, ends, np.zeros(max(0, int((ends - begins).sum())), np.uint8))


@pytest.mark.parametrize(
    ("begin", "end", "nbytes"), [(0, 1024, 1008), (0, 1024, 1040), (8, 24, 16), (0, 8, 8)]
)
def test_bytes_that_are_not_those_of_their_ranges_are_refused(
    begin: int, end: int, nbytes: int
) -> None:
    with pytest.raises(KernelError, match="not those") as caught:
        sums_of(np.array([begin]), np.array([end]), np.zeros(nbytes, np.uint8))
    assert (caught.value.expected, caught.value.got) == (end - begin, nbytes)


@pytest.mark.parametrize("first", [0, 2])
def test_sums_of_blocks_that_are_not_there_are_refused(first: int) -> None:
    total: Sums = np.zeros((2, 8), np.uint64)
    with pytest.raises(KernelError, match="other blocks"):
        add_sums(total, first, np.array([1, 2]), np.ones((2, 8), np.uint64))
    assert not total.any()


@pytest.mark.skipif("NUMBA_BOUNDSCHECK" in os.environ, reason="this is that run")
def test_no_index_is_out_of_bounds(repository: Path, tmp_path: Path) -> None:
    """All of the above once more, with every index checked."""
    env = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
