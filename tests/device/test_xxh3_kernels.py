"""XXH3-128 of regions by the kernels, against xxhash; block sums and checks of change lists, against numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from gpusync.device.kernels import TILE_NBYTES
from gpusync.device.runtime import Runtime
from tests.device.arrays import (
    EDGES,
    UNWRITTEN,
    Bytes,
    Device,
    Region,
    chunk_row,
    contiguous,
    cut_tiles,
    mix_entry,
    random_delta,
    side_by_side,
)

BLOCK_NBYTES = 1024
SHORT_NBYTES = 240
UNWRITTEN_WORD = int.from_bytes(bytes([UNWRITTEN] * 8), "little")
SECRET = (
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret (xxHash specification)."""


@dataclass(frozen=True)
class Subject:
    """A region, and the XOR of its new and its live bytes; None: plain, its new bytes are what lies there."""

    region: Region
    delta: Bytes | None
    listed: bool = True

    def new(self, live: Bytes) -> Bytes:
        """Return the bytes that the digest is of."""
        old = live[self.region.places] if self.region.nbytes else np.empty(0, np.uint8)
        return old if self.delta is None else old ^ self.delta

    def cuts(self, most: int) -> list[tuple[int, int]]:
        """Return (offset, nbytes) of chunks of at most that many bytes, and a short rest with the last of them."""
        nbytes = self.region.nbytes
        offsets = list(range(0, nbytes, most)) or [0]
        if len(offsets) > 1 and nbytes - offsets[-1] < 64:
            offsets.pop()
        return [(a, b - a) for a, b in zip(offsets, [*offsets[1:], nbytes], strict=True)]


class Digester:
    """Subjects in one live buffer, their deltas one behind the other, and the tables of their regions.

    The live buffer begins ``shift`` bytes behind an aligned address.
    """

    def __init__(
        self, runtime: Runtime, live: Bytes, subjects: Sequence[Subject], *, shift: int = 0
    ) -> None:
        self.device = Device(runtime)
        self.subjects = subjects
        self.live_bytes = live
        self.live = self.device.put(live, shift=shift)
        self.begins, packed = pack(subject.delta for subject in subjects)
        self.packed = packed
        self.deltas = self.device.put(packed)
        self.states = self.device.full(len(subjects) * 64)
        self.digests = self.device.full(len(subjects) * 16)
        self.sums: NDArray[np.uint64]
        self.checks: NDArray[np.uint64]

    def run(self, most: int | None = None, *, gate: int | None = None) -> None:
        """Digest all subjects, in batches of a chunk of at most ``most`` bytes of each; None: in one batch."""
        cuts = [subject.cuts(most or 1 << 62) for subject in self.subjects]
        for number in range(max(map(len, cuts), default=0)):
            self.run_batch(
                [(i, *cut[number]) for i, cut in enumerate(cuts) if number < len(cut)], gate
            )
        assert np.array_equal(self.live.read(), self.live_bytes)
        assert np.array_equal(self.deltas.read(), self.packed)

    def run_batch(self, chunks: list[tuple[int, int, int]], gate: int | None) -> None:
        """Digest chunks: number of the subject, offset and nbytes of each."""
        device = self.device
        rows = np.concatenate([self._row(*chunk) for chunk in chunks])
        rows["first_tile"], tile_chunk = cut_tiles((nbytes for _, _, nbytes in chunks), TILE_NBYTES)
        ntiles, nchunks = tile_chunk.size, len(chunks)
        table, tiles = device.put(rows), device.put(tile_chunk)
        sums, checks = device.full(ntiles * 64 * 64), device.full(ntiles * 16, 0)
        flag = 0 if gate is None else device.put(np.array([gate], np.uint32))
        device.launch("gs_digest_sums", ntiles, table, tiles, ntiles, sums, checks, flag)
        blocks = -(-nchunks * 8 // 256)
        device.launch("gs_digest_chain", blocks, table, nchunks, sums, self.states, flag)
        blocks = -(-nchunks // 256)
        device.launch("gs_digest_finish", blocks, table, nchunks, self.states, self.digests, flag)
        self.sums = sums.read(np.uint64).reshape(-1, 64, 8)
        self.checks = checks.read(np.uint64).reshape(-1, 2)
        if not gate:
            self._verify_batch(rows, self.sums, self.checks)

    def _row(self, number: int, offset: int, nbytes: int) -> NDArray[Any]:
        subject = self.subjects[number]
        delta = 0 if subject.delta is None else self.deltas.address + self.begins[number] + offset
        row = chunk_row(subject.region, self.live.address, delta, offset, nbytes)
        if self.live.address % 2:
            row["unit"] = 1
        row["region"] = number
        row["listed"] = subject.listed
        return row

    def _verify_batch(
        self, rows: NDArray[Any], sums: NDArray[np.uint64], checks: NDArray[np.uint64]
    ) -> None:
        expected = np.zeros_like(checks)
        for row in rows:
            subject = self.subjects[int(row["region"])]
            first, offset, nbytes = int(row["first_tile"]), int(row["offset"]), int(row["nbytes"])
            whole = whole_blocks(subject.region.nbytes) - offset // BLOCK_NBYTES
            mine = sums[first : first - (-nbytes // TILE_NBYTES)].reshape(-1, 8)
            new = subject.new(self.live_bytes)[offset : offset + nbytes]
            count = min(whole, nbytes // BLOCK_NBYTES)
            assert np.array_equal(mine[:count], block_sums(new[: count * BLOCK_NBYTES]))
            assert (mine[count:] == UNWRITTEN_WORD).all()
            if subject.delta is None or not subject.listed:
                continue
            old = new ^ subject.delta[offset : offset + nbytes]
            for tile, begin in enumerate(range(0, nbytes, TILE_NBYTES), first):
                piece = slice(begin, begin + TILE_NBYTES)
                delta = words((old ^ new)[piece], int(row["unit"]))
                (changed,) = np.nonzero(delta)
                before = words(old[piece], int(row["unit"]))
                expected[tile] = [mix_entry(changed, w[changed]).sum() for w in (delta, before)]
        assert np.array_equal(checks, expected)

    def verify(self) -> None:
        """Compare all digests with xxhash's."""
        got = self.digests.read(np.uint64).reshape(-1, 2).tolist()
        for subject, (low, high) in zip(self.subjects, got, strict=True):
            want = xxhash.xxh3_128_intdigest(subject.new(self.live_bytes).tobytes())
            assert high << 64 | low == want, subject.region


def pack(deltas: Iterable[Bytes | None]) -> tuple[list[int], Bytes]:
    """Return where each delta begins in an array of all, 256 apart, and that array; the gaps are not zeros."""
    begins, pieces, end = [], [], 0
    for delta in deltas:
        begins.append(end)
        if delta is not None:
            pieces += [delta, np.full(-delta.size % 256, UNWRITTEN, np.uint8)]
            end += delta.size + -delta.size % 256
    return begins, np.concatenate([*pieces, np.empty(0, np.uint8)])


def whole_blocks(nbytes: int) -> int:
    """Return the number of a region's blocks that have sums."""
    return (nbytes - 1) // BLOCK_NBYTES if nbytes > SHORT_NBYTES else 0


def block_sums(data: Bytes) -> NDArray[np.uint64]:
    """Return what each block of 1024 bytes adds to the 8 accumulators, by the specification."""
    secret = np.frombuffer(bytes.fromhex(SECRET), np.uint64)
    keys = np.stack([secret[stripe : stripe + 8] for stripe in range(16)])
    stripes = data.view(np.uint64).reshape(-1, 16, 8)
    keyed = stripes ^ keys
    low, high = keyed & np.uint64(0xFFFFFFFF), keyed >> np.uint64(32)
    sums = low * high + stripes[..., [1, 0, 3, 2, 5, 4, 7, 6]]
    total: NDArray[np.uint64] = sums.sum(axis=1, dtype=np.uint64)
    return total


def words(data: Bytes, unit: int) -> NDArray[Any]:
    """Return one number per word; a last odd byte is a word."""
    if unit == 1:
        return data
    return np.append(data, np.zeros(data.size % 2, np.uint8)).view(np.uint16)


def subjects_of(
    rng: np.random.Generator, regions: Iterable[Region], density: float | None
) -> list[Subject]:
    """Return subjects with deltas of that density; None: without deltas."""
    return [
        Subject(r, None if density is None else random_delta(rng, r.nbytes, density))
        for r in regions
    ]


def live_for(rng: np.random.Generator, regions: Iterable[Region]) -> Bytes:
    """Return random bytes for regions to lie in, none behind the last one."""
    end = max(int(r.places[-1]) + 1 if r.nbytes else r.begin for r in regions)
    return rng.integers(0, 256, end, np.uint8)


@pytest.mark.parametrize("density", [None, 0.02])
@pytest.mark.parametrize("aligned", [True, False])
def test_digests_equal_xxhash_for_every_length_to_5000(
    runtime: Runtime, aligned: bool, density: float | None
) -> None:
    rng = np.random.default_rng(1)
    if aligned:
        regions = [contiguous(5008 * nbytes, nbytes) for nbytes in range(5001)]
    else:
        regions = side_by_side(tuple(range(5001)), 1, 2)  # from every address modulo 16
    digester = Digester(runtime, live_for(rng, regions), subjects_of(rng, regions, density))
    digester.run()
    digester.verify()


@pytest.mark.parametrize("seed", range(4))
def test_digests_equal_xxhash_for_random_lengths(runtime: Runtime, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = (2 ** rng.uniform(8, 16, 800)).astype(int)
    sizes[:20] *= 16
    gap = (1, 0, 5, 2)[seed]
    regions = side_by_side(tuple(sizes.tolist()), int(rng.integers(16)), gap)
    subjects = subjects_of(rng, regions, float(rng.choice([0.0005, 0.01, 0.3, 1])))
    for i in range(0, len(subjects), 3):
        subjects[i] = replace(subjects[i], delta=None)
    for i in range(1, len(subjects), 4):
        subjects[i] = replace(subjects[i], listed=False)
    digester = Digester(runtime, live_for(rng, regions), subjects)
    digester.run()
    digester.verify()


@pytest.mark.parametrize("shift", [*range(9), 15])
def test_live_memory_may_begin_at_any_address(runtime: Runtime, shift: int) -> None:
    rng = np.random.default_rng(shift)
    regions = side_by_side(EDGES, 0, 0)
    subjects = subjects_of(rng, regions, 0.05)
    digester = Digester(runtime, live_for(rng, regions), subjects, shift=shift)
    digester.run()
    digester.verify()


@pytest.mark.parametrize("density", [None, 0.03])
@pytest.mark.parametrize(
    ("run_nbytes", "run_stride", "runs"),
    [
        (1, 2, 3000),
        (1, 3, 70000),
        (2, 6, 40000),
        (3, 7, 30000),
        (4, 4096, 500),
        (16, 32, 5000),
        (48, 64, 3000),
        (63, 65, 2100),
        (64, 80, 2500),
        (80, 128, 1700),
        (100, 200, 1500),
        (1008, 2048, 200),
        (1024, 1040, 130),
        (2048, 6144, 70),
        (65536, 65552, 3),
        (70001, 70002, 3),
        (131072, 262144, 2),
    ],
)
def test_strided_regions(
    runtime: Runtime, run_nbytes: int, run_stride: int, runs: int, density: float | None
) -> None:
    """Columns, rows, and odd runs; the digest is of their bytes one behind the other."""
    rng = np.random.default_rng(run_nbytes)
    region = Region(16, run_nbytes * runs, run_nbytes, run_stride)
    few = Region(32, run_nbytes * 2, run_nbytes, run_stride)
    digester = Digester(
        runtime, live_for(rng, [region, few]), subjects_of(rng, [region, few, region], density)
    )
    digester.run(TILE_NBYTES)
    digester.verify()


@pytest.mark.parametrize("most", [TILE_NBYTES, 2 * TILE_NBYTES, 5 * TILE_NBYTES])
def test_states_carry_a_region_through_many_batches(runtime: Runtime, most: int) -> None:
    """The rest behind the last multiple of a tile has every size around every edge."""
    rng = np.random.default_rng(most)
    rests = (0, 1, 63, 64, 65, 128, 240, 241, 1023, 1024, 1025, 1088, 40000, 65535)
    sizes = [tiles * TILE_NBYTES + rest for tiles in (0, 1, 2, 5) for rest in rests]
    begin, regions = 0, []
    for number, nbytes in enumerate(sizes):
        begin += -begin % 16 + (0 if number % 3 else number)
        regions.append(contiguous(begin, nbytes))
        begin += nbytes
    digester = Digester(runtime, live_for(rng, regions), subjects_of(rng, regions, 0.01))
    digester.run(most)
    digester.verify()


def test_a_region_beyond_4_gib(runtime: Runtime) -> None:
    """All positions are 64 bits wide. The first 4 GiB are zeros: one chunk's sums serve them all."""
    rng = np.random.default_rng(4)
    most, rest = 2**26, 3 * TILE_NBYTES + 777
    begin = 2**32 + most
    tail = rng.integers(0, 256, rest, np.uint8)
    oracle = xxhash.xxh3_128()
    for _ in range(0, begin, most):
        oracle.update(bytes(most))
    oracle.update(tail.tobytes())

    device = Device(runtime)
    states, digests = device.full(64), device.full(16)
    zeros = block_sums(np.zeros(TILE_NBYTES, np.uint8)).tobytes()
    tile_sums = device.put(np.frombuffer(zeros * (most // TILE_NBYTES), np.uint8))
    rows = chunk_row(contiguous(0, begin + rest), 0, 0, 0, most)
    for offset in range(0, begin, most):
        rows["offset"] = offset
        device.launch("gs_digest_chain", 1, device.put(rows), 1, tile_sums, states, 0)
        runtime.synchronize()
    last, tiles = device.put(tail), device.put(np.zeros(4, np.uint32))
    rows["offset"], rows["nbytes"] = begin, rest
    rows["live"] = last.address - begin  # where the region would begin
    table, sums, checks = device.put(rows), device.full(4 * 64 * 64), device.full(4 * 16, 0)
    device.launch("gs_digest_sums", 4, table, tiles, 4, sums, checks, 0)
    device.launch("gs_digest_chain", 1, table, 1, sums, states, 0)
    device.launch("gs_digest_finish", 1, table, 1, states, digests, 0)
    low, high = digests.read(np.uint64).tolist()
    assert high << 64 | low == oracle.intdigest()


def test_chunks_that_do_not_end_their_region_write_no_digest(runtime: Runtime) -> None:
    rng = np.random.default_rng(5)
    regions = [contiguous(0, 3 * TILE_NBYTES), contiguous(3 * TILE_NBYTES, 100)]
    digester = Digester(runtime, live_for(rng, regions), subjects_of(rng, regions, 0.1))
    digester.run_batch([(0, 0, TILE_NBYTES), (1, 0, 100)], None)
    got = digester.digests.read(np.uint64).reshape(-1, 2)
    assert (got[0] == UNWRITTEN_WORD).all()
    assert (got[1] != UNWRITTEN_WORD).all()


def test_a_set_gate_stops_all_three(runtime: Runtime) -> None:
    rng = np.random.default_rng(6)
    regions = side_by_side((0, 3, 100, 300, 5000, 200000), 0, 1)
    digester = Digester(runtime, live_for(rng, regions), subjects_of(rng, regions, 0.1))
    digester.run(gate=1)
    assert (digester.sums == UNWRITTEN_WORD).all()
    assert not digester.checks.any()
    assert (digester.states.read() == UNWRITTEN).all()
    assert (digester.digests.read() == UNWRITTEN).all()
    digester.run(gate=0)
    digester.verify()
