"""Change lists made, summed and scattered by the kernels, against numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpusync.device.kernels import LIST, TILE_NBYTES
from gpusync.device.runtime import Runtime
from tests.device.arrays import (
    EDGES,
    UNWRITTEN,
    Bytes,
    Device,
    Memory,
    Region,
    chunk_row,
    contiguous,
    cut_tiles,
    mix_entry,
    random_delta,
    side_by_side,
)

THREADS = 256
SEGMENTS = 1024


@dataclass(frozen=True)
class Cut:
    """A chunk: the region's bytes from ``offset`` on whose delta is ``delta``."""

    region: Region
    delta: Bytes
    offset: int = 0
    listed: bool = True
    has_delta: bool = True


def words(data: Bytes, unit: int) -> NDArray[Any]:
    """One number per word; a last odd byte is a word."""
    if unit == 1:
        return data
    return np.append(data, np.zeros(data.size % 2, np.uint8)).view(np.uint16)


class Expected:
    """What the kernels are to make of some chunks, by numpy."""

    def __init__(self, cuts: list[Cut], live: Bytes) -> None:
        counts, index, value, seen, totals, checks = [], [], [], [], [0], []
        for cut in cuts:
            unit = cut.region.unit
            old = live[cut.region.places]
            is_listed = cut.listed and cut.has_delta
            for begin in range(0, cut.delta.size, TILE_NBYTES):
                tile = cut.delta[begin : begin + TILE_NBYTES] if is_listed else np.empty(0, "u1")
                delta = words(tile, unit)
                before = words(old[cut.offset + begin :][: tile.size], unit)
                changed = np.flatnonzero(delta)
                by_segment = changed * unit // 64
                counts.append(np.bincount(by_segment, minlength=SEGMENTS))
                totals.append(changed.size)
                index.append(changed)
                value.append(delta[changed])
                seen.append(before[changed])
                checks.append([mix_entry(changed, w[changed]).sum() for w in (delta, before)])
        self.counts = np.concatenate(counts)
        self.firsts = np.cumsum(totals)
        self.index = np.concatenate(index)
        self.value = np.concatenate(value)
        self.checks = np.array(checks, np.uint64)
        self.new = live.copy()
        for cut in cuts:
            if cut.listed and cut.has_delta:
                self.new[cut.region.places[cut.offset :][: cut.delta.size]] ^= cut.delta


class Lists:
    """A batch's tables on the device, and its list."""

    def __init__(self, device: Device, cuts: list[Cut], live: Bytes, *, gate: int = 0) -> None:
        self.device = device
        self.live = device.put(live)
        self.gate = device.put(np.array([gate], np.uint32))
        # Memory of its own for each: what lies behind a delta is nobody's.
        self._deltas = [device.put(cut.delta) for cut in cuts]
        rows = np.concatenate(
            [
                chunk_row(
                    cut.region,
                    self.live.address,
                    delta.address if cut.has_delta else 0,
                    cut.offset,
                    cut.delta.size,
                )
                for cut, delta in zip(cuts, self._deltas, strict=True)
            ]
        )
        rows["first_tile"], tile_chunk = cut_tiles((cut.delta.size for cut in cuts), TILE_NBYTES)
        rows["listed"] = [cut.listed for cut in cuts]
        self.ntiles = tile_chunk.size
        self.tile_chunk, self.chunks = device.put(tile_chunk), device.put(rows)
        self.counts = device.full(self.ntiles * SEGMENTS)
        self.rows = device.full(self.ntiles * 64 * 2)
        self.totals = device.full(self.ntiles * 4)
        self.groups = device.full(-(-self.ntiles // 64) * 4)
        self.firsts = device.full((self.ntiles + 1) * 4)

    def count(self) -> None:
        device, ntiles = self.device, self.ntiles
        device.launch(
            "gs_count", ntiles * 4, self.chunks, self.tile_chunk, ntiles, self.counts, self.gate
        )
        place_entries(
            device,
            self.counts,
            ntiles,
            self.rows,
            self.totals,
            self.groups,
            self.firsts,
            gate=self.gate,
        )

    def write(self) -> None:
        number = int(self.firsts.read(np.uint32)[-1])
        self.index = self.device.full(2 * number)
        self.value = self.device.full(2 * number)
        self.device.launch(
            "gs_write",
            self.ntiles * 4,
            self.chunks,
            self.tile_chunk,
            self.ntiles,
            self.counts,
            self.rows,
            self.firsts,
            self.index,
            self.value,
            self.gate,
        )

    def lists(self, checks: Memory | int = 0) -> tuple[Memory, Memory, int]:
        """This list as the only one of a commit: its row, the row of each tile, and their number."""
        row = np.zeros(1, LIST)
        for field in ("chunks", "tile_chunk", "firsts", "index", "value"):
            row[field] = getattr(self, field).address
        row["checks"] = checks if isinstance(checks, int) else checks.address
        return self.device.put(row), self.device.full(4 * self.ntiles, 0), self.ntiles

    def sums(self, *, of_live: bool) -> Memory:
        sums = self.device.full(8 * self.ntiles, 0)
        if of_live:
            self.device.launch("gs_live_sums", self.ntiles, *self.lists(), sums)
            return sums
        arguments = (self.ntiles, self.firsts, self.index, self.value, sums)
        self.device.launch("gs_list_sums", self.ntiles, *arguments)
        return sums

    def differ(self, checks: NDArray[np.uint64], *, of_live: bool) -> bool:
        """Whether a tile's sum is not the one in its column of ``checks``."""
        table = self.device.put(checks)
        differs = self.device.full(4, 0)
        blocks, sums = -(-self.ntiles // THREADS), self.sums(of_live=of_live)
        if of_live:
            self.device.launch("gs_compare_live", blocks, *self.lists(table), sums, differs)
        else:
            arguments = (sums, 1, table, 2, self.ntiles, differs)
            self.device.launch("gs_compare", blocks, *arguments)
        return bool(differs.read(np.uint32)[0])

    def scatter(self) -> Bytes:
        self.device.launch("gs_store", self.ntiles, *self.lists())
        return self.live.read()


def place_entries(
    device: Device,
    counts: Memory,
    ntiles: int,
    rows: Memory,
    totals: Memory,
    groups: Memory,
    firsts: Memory,
    *,
    gate: Memory | int = 0,
) -> None:
    """From counts to firsts."""
    ngroups = -(-ntiles // 64)
    device.launch("gs_rows", -(-ntiles // THREADS), counts, ntiles, rows, totals, gate)
    device.launch("gs_groups", -(-ngroups // THREADS), totals, ntiles, groups)
    device.launch("gs_firsts", -(-ngroups // THREADS), totals, groups, ntiles, firsts)


def random_live(seed: int, regions: list[Region]) -> Bytes:
    """Live bytes with some that belong to no region behind the last one."""
    end = max(int(region.places[-1]) + 1 for region in regions)
    return np.random.default_rng(seed).integers(0, 256, end + 7, np.uint8)


def check_lists(device: Device, cuts: list[Cut], live: Bytes) -> None:
    """Make the list of some chunks and use it, comparing every step with numpy."""
    expected = Expected(cuts, live)
    lists = Lists(device, cuts, live)
    lists.count()
    np.testing.assert_array_equal(lists.counts.read(), expected.counts)
    np.testing.assert_array_equal(lists.firsts.read(np.uint32), expected.firsts)
    lists.write()
    np.testing.assert_array_equal(lists.index.read(np.uint16), expected.index)
    np.testing.assert_array_equal(lists.value.read(np.uint16), expected.value)
    for of_live in (False, True):
        sums = lists.sums(of_live=of_live).read(np.uint64)
        np.testing.assert_array_equal(sums, expected.checks[:, int(of_live)])
        assert not lists.differ(expected.checks, of_live=of_live)
    np.testing.assert_array_equal(lists.live.read(), live)
    np.testing.assert_array_equal(lists.scatter(), expected.new)
    np.testing.assert_array_equal(lists.scatter(), live)


@pytest.mark.parametrize("density", [0, 0.001, 0.02, 0.5, 1])
@pytest.mark.parametrize(("begin", "gap"), [(0, 0), (0, 1), (1, 0), (2, 14), (15, 16)])
def test_lists_of_every_size_equal_numpy(
    runtime: Runtime, density: float, begin: int, gap: int
) -> None:
    rng = np.random.default_rng(begin)
    regions = side_by_side(EDGES, begin, gap)
    cuts = [Cut(region, random_delta(rng, region.nbytes, density)) for region in regions]
    check_lists(Device(runtime), cuts, random_live(gap, regions))


@pytest.mark.parametrize(
    ("run_nbytes", "run_stride", "begin"),
    [
        (1, 2, 0),
        (2, 6, 4),
        (2, 6, 5),
        (3, 3, 0),
        (30, 64, 16),
        (48, 64, 0),
        (129, 400, 0),
        (130, 400, 2),
        (100002, 100100, 0),
    ],
)
@pytest.mark.parametrize("density", [0.02, 1])
def test_strided_regions(
    runtime: Runtime, run_nbytes: int, run_stride: int, begin: int, density: float
) -> None:
    runs = max(2, 70001 // run_nbytes)
    region = Region(begin, runs * run_nbytes, run_nbytes, run_stride)
    delta = random_delta(np.random.default_rng(begin), region.nbytes, density)
    check_lists(Device(runtime), [Cut(region, delta)], random_live(1, [region]))


def test_columns_of_one_buffer_side_by_side(runtime: Runtime) -> None:
    rng = np.random.default_rng(3)
    widths, regions, begin = (5, 6, 1, 20), [], 0
    for width in widths:
        regions.append(Region(begin, 1000 * width, width, sum(widths)))
        begin += width
    cuts = [Cut(region, random_delta(rng, region.nbytes, 0.4)) for region in regions]
    check_lists(Device(runtime), cuts, random_live(4, regions))


def test_odd_regions_that_share_words_each_keep_to_their_bytes(runtime: Runtime) -> None:
    regions = side_by_side((1, 1, 3, 5, 1, 2, 7), begin=0, gap=0)
    assert {region.unit for region in regions} == {1, 2}
    live = random_live(5, regions)
    device = Device(runtime)
    for region in regions:
        check_lists(device, [Cut(region, np.full(region.nbytes, 0xFF, np.uint8))], live)
    check_lists(
        device, [Cut(region, np.full(region.nbytes, 7, np.uint8)) for region in regions], live
    )


@pytest.mark.parametrize("begin", [0, 1])
def test_chunks_of_a_region(runtime: Runtime, begin: int) -> None:
    rng = np.random.default_rng(6)
    region = contiguous(begin, 4 * TILE_NBYTES + 77)
    offsets = (0, TILE_NBYTES, 3 * TILE_NBYTES)
    ends = (*offsets[1:], region.nbytes)
    cuts = [
        Cut(region, random_delta(rng, end - offset, 0.1), offset)
        for offset, end in zip(offsets, ends, strict=True)
    ]
    live = random_live(7, [region])
    device = Device(runtime)
    check_lists(device, cuts, live)
    check_lists(device, [cuts[2]], live)  # its batch holds nothing of what comes before


def test_chunks_that_are_not_listed_have_no_entries(runtime: Runtime) -> None:
    rng = np.random.default_rng(8)
    regions = side_by_side((70000, 70000, 70000), begin=0, gap=0)
    deltas = [random_delta(rng, region.nbytes, 0.3) for region in regions]
    cuts = [
        Cut(regions[0], deltas[0], listed=False),
        Cut(regions[1], deltas[1]),
        Cut(regions[2], deltas[2], has_delta=False),
    ]
    check_lists(Device(runtime), cuts, random_live(9, regions))


def test_made_again_a_list_is_the_same(runtime: Runtime) -> None:
    region = contiguous(0, 3 * TILE_NBYTES)
    cut = Cut(region, random_delta(np.random.default_rng(10), region.nbytes, 0.1))
    lists = Lists(Device(runtime), [cut], random_live(10, [region]))
    made = []
    for _ in range(2):
        lists.count()
        lists.write()
        made.append((lists.index.read().tobytes(), lists.value.read().tobytes()))
    assert made[0] == made[1]


@pytest.mark.parametrize("ntiles", [1, 2, 63, 64, 65, 128, 1000, 64 * 256 + 1])
def test_places_of_many_tiles(runtime: Runtime, ntiles: int) -> None:
    device = Device(runtime)
    counts = np.random.default_rng(ntiles).integers(0, 65, (ntiles, 64, 16), np.uint8)
    counts[-1] = 64  # unit 1, all bytes
    rows, totals = device.full(ntiles * 128), device.full(ntiles * 4)
    groups, firsts = device.full(-(-ntiles // 64) * 4), device.full(ntiles * 4 + 4)
    place_entries(device, device.put(counts), ntiles, rows, totals, groups, firsts)
    by_row = np.cumsum(counts.sum(2), axis=1)
    np.testing.assert_array_equal(totals.read(np.uint32), by_row[:, -1])
    np.testing.assert_array_equal(
        rows.read(np.uint16).reshape(ntiles, 64)[:, 1:], by_row[:, :-1].astype(np.uint16)
    )
    np.testing.assert_array_equal(rows.read(np.uint16).reshape(ntiles, 64)[:, 0], 0)
    np.testing.assert_array_equal(firsts.read(np.uint32), [0, *np.cumsum(by_row[:, -1])])


def test_damage_shows_in_the_sums(runtime: Runtime) -> None:
    region = contiguous(0, TILE_NBYTES + 1001)
    live = random_live(11, [region])
    cut = Cut(region, random_delta(np.random.default_rng(11), region.nbytes, 0.05))
    checks = Expected([cut], live).checks
    lists = Lists(Device(runtime), [cut], live)
    lists.count()
    lists.write()
    for memory, of_live in ((lists.index, False), (lists.value, False), (lists.live, True)):
        whole = memory.read().copy()
        entry = lists.index.read(np.uint16)[5]
        damaged = whole.copy()
        damaged[2 * entry if of_live else 10] ^= 1
        memory.write(damaged)
        assert lists.differ(checks, of_live=of_live)
        memory.write(whole)
        assert not lists.differ(checks, of_live=of_live)
    swapped = lists.value.read(np.uint16).copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    lists.value.write(swapped)
    assert lists.differ(checks, of_live=False)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 600])
def test_compare(runtime: Runtime, n: int) -> None:
    device = Device(runtime)
    a = np.random.default_rng(n).integers(0, 1 << 63, (n, 3), np.uint64)
    b = np.random.default_rng(n + 1).integers(0, 1 << 63, (n, 2), np.uint64)
    b[:, 1] = a[:, 2]

    def differs() -> int:
        flag, left, right = device.full(4, 0), device.put(a), device.put(b)
        blocks = -(-n // THREADS)
        device.launch("gs_compare", blocks, left.address + 16, 3, right.address + 8, 2, n, flag)
        return int(flag.read(np.uint32)[0])

    assert differs() == 0
    for place in {0, n // 2, n - 1} if n else ():
        b[place, 1] ^= 1 << 63
        assert differs() == 1
        b[place, 1] ^= 1 << 63


def test_a_shut_gate_stops_every_kernel(runtime: Runtime) -> None:
    region = contiguous(0, 1000)
    cut = Cut(region, random_delta(np.random.default_rng(12), 1000, 1))
    live = random_live(12, [region])
    lists = Lists(Device(runtime), [cut], live)
    lists.count()
    gated = Lists(Device(runtime), [cut], live, gate=1)
    gated.count()
    for memory in (gated.counts, gated.rows, gated.totals):
        assert (memory.read() == UNWRITTEN).all()
    lists.gate.write(np.array([1], np.uint32))
    lists.write()
    assert lists.index.read().size == 1000
    assert (lists.index.read() == UNWRITTEN).all()
    assert (lists.value.read() == UNWRITTEN).all()
