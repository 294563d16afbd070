"""Statuses of a decode, and the guard zones around its outputs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpusync.device.runtime import Runtime
from tests.device.arrays import UNWRITTEN, Device, Memory

THREADS = 256
ZONE_NBYTES = 256
FAILED = 1


def check_statuses(
    device: Device, statuses: NDArray[np.int32], actual: NDArray[np.uint64], tensors: int
) -> tuple[list[int], int]:
    """Return the tensors' flags and the gate; every frame should have 1000 bytes, frame i is of tensor i % tensors."""
    nframes = statuses.size
    bad, gate = device.full(4 * tensors, 0), device.full(4, 0)
    device.launch(
        "gs_check_statuses",
        -(-nframes // THREADS),
        device.put(statuses),
        device.put(actual),
        device.put(np.full(nframes, 1000, np.uint64)),
        device.put(np.arange(nframes, dtype=np.uint32) % tensors),
        nframes,
        bad,
        gate,
    )
    return bad.read(np.uint32).tolist(), int(gate.read(np.uint32)[0])


@pytest.mark.parametrize("nframes", [0, 1, 255, 256, 257, 1000])
def test_good_statuses_leave_the_gate_open(runtime: Runtime, nframes: int) -> None:
    statuses = np.zeros(nframes, np.int32)
    actual = np.full(nframes, 1000, np.uint64)
    assert check_statuses(Device(runtime), statuses, actual, 3) == ([0, 0, 0], 0)


@pytest.mark.parametrize("frame", [0, 255, 256, 299])
@pytest.mark.parametrize("status", [12, -1])
def test_a_bad_status_shuts_it(runtime: Runtime, frame: int, status: int) -> None:
    statuses = np.zeros(300, np.int32)
    statuses[frame] = status
    bad = [0] * 7
    bad[frame % 7] = FAILED
    got = check_statuses(Device(runtime), statuses, np.full(300, 1000, np.uint64), 7)
    assert got == (bad, 1)


@pytest.mark.parametrize("nbytes", [0, 999, 1001, 1000 + (1 << 32)])
def test_another_size_shuts_it(runtime: Runtime, nbytes: int) -> None:
    actual = np.full(10, 1000, np.uint64)
    actual[[4, 5]] = nbytes
    got = check_statuses(Device(runtime), np.zeros(10, np.int32), actual, 5)
    assert got == ([FAILED, 0, 0, 0, FAILED], 1)


class Zones:
    """Guard zones in memory whose other bytes must stay."""

    def __init__(self, device: Device, offsets: list[int]) -> None:
        self._device = device
        self._offsets = offsets
        self.memory = device.full(max(offsets) + ZONE_NBYTES + 5)
        self._table: Memory = device.put(np.array(offsets, np.uint64) + self.memory.address)
        device.launch("gs_fill_guards", len(offsets), self._table, len(offsets))
        self.filled = self.memory.read().copy()

    @property
    def is_guard(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.filled.size, bool)
        for offset in self._offsets:
            mask[offset : offset + ZONE_NBYTES] = True
        return mask

    def damaged(self, bytes_: NDArray[np.uint8]) -> bool:
        """Whether the check finds damage when memory holds ``bytes_``."""
        self.memory.write(bytes_)
        flag = self._device.full(4, 0)
        count = len(self._offsets)
        self._device.launch("gs_check_guards", count, self._table, count, flag)
        return bool(flag.read(np.uint32)[0])


def test_guards_are_filled_and_nothing_else_is(runtime: Runtime) -> None:
    zones = Zones(Device(runtime), [0, 256, 513, 1000, 4099])
    assert (zones.filled[~zones.is_guard] == UNWRITTEN).all()
    assert not zones.damaged(zones.filled)
    around = np.where(zones.is_guard, zones.filled, 0)
    assert not zones.damaged(around)


def test_damage_of_each_byte_is_found(runtime: Runtime) -> None:
    zones = Zones(Device(runtime), [3, 600])
    for place in np.flatnonzero(zones.is_guard):
        bytes_ = zones.filled.copy()
        bytes_[place] ^= 0x80 if place % 2 else 1
        assert zones.damaged(bytes_)


@pytest.mark.parametrize("byte", [0, 0x55, UNWRITTEN, 0xCD, 0xFF])
def test_a_constant_over_a_zone_is_found(runtime: Runtime, byte: int) -> None:
    zones = Zones(Device(runtime), [256])
    bytes_ = zones.filled.copy()
    bytes_[256:264] = byte
    assert zones.damaged(bytes_)


@pytest.mark.parametrize("distance", [1, 8, 16, 256])
def test_a_copy_of_another_zone_is_found(runtime: Runtime, distance: int) -> None:
    zones = Zones(Device(runtime), [0, 256])
    bytes_ = zones.filled.copy()
    bytes_[256:512] = zones.filled[256 - distance : 512 - distance]
    assert zones.damaged(bytes_)


def test_no_zones(runtime: Runtime) -> None:
    device = Device(runtime)
    device.launch("gs_check_guards", 0, device.full(8), 0, device.full(4, 0))
