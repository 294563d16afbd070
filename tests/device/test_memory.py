"""Memory of the device path: capped, counted, given back; and what does not fit is refused before anything is touched."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpusync
from gpusync.device.capacities import capacities_for
from gpusync.device.nvcomp import Nvcomp
from gpusync.errors import DeviceError, KernelError, OutOfScratchError
from tests import live, wire
from tests.device.updates import (
    BIG,
    DEVICES,
    KINDS,
    MIB,
    SCRATCH,
    Device,
    Failing,
    check_next_update,
    counted_device,
    list_sizes,
    model_at,
    prepare,
    published,
)
from tests.unit.strategies import seekable

RING = 32 * MIB
"""GPUSYNC_RING_BYTES' default."""
TABLES = 256 << 10
"""Pinned memory for tables on their way to the device, in these small updates, and for flags."""


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> wire.Stream:
    """Versions 1 and 2, each of which changes every tensor."""
    return published(tmp_path_factory.mktemp("memory") / "stream")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with counted_device(request.param, monkeypatch) as made:
        yield made


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with counted_device("emulated", monkeypatch) as made:
        yield made


def check_within_caps(device: Device, scratch_nbytes: int, lists_nbytes: int) -> None:
    """The peaks that the runtime has counted; on CUDA those of torch, which rounds every block up to 512 bytes."""
    slack = 0 if device.runtime is not None else 64 * 512
    assert device.peak_nbytes <= scratch_nbytes + lists_nbytes + slack


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What is freed within is freed by its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- caps ---------------------------------------------------------------------------------------------


def many_names(folder: Path, count: int, nbytes: int) -> tuple[bytes, bytes]:
    """Publish one tensor's change, of a hundredth of its elements, under many names; return its bytes before and after."""
    random = np.random.default_rng(0)
    old = random.integers(0, 256, nbytes, dtype=np.uint8)
    new = old.copy()
    new[random.choice(nbytes // 2, nbytes // 200, replace=False) * 2] ^= 1
    blob = seekable((old ^ new).tobytes(), 256 << 10)
    names = [f"w{number:03d}" for number in range(count)]
    version = folder / "weight_v000001"
    version.mkdir(parents=True)
    digests = dict.fromkeys(names, wire.digest("xxh3-128", new.tobytes()))
    rows = [(name, "U8", (len(blob),), blob) for name in names]
    (version / "m.safetensors").write_bytes(wire.pack(rows, digests))
    metadata = {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(names, "m.safetensors")}
    (version / wire.INDEX).write_text(json.dumps(index))
    return old.tobytes(), new.tobytes()


def test_a_gigabyte_updates_in_64_mib_of_scratch(device: Device, tmp_path: Path) -> None:
    old, new = many_names(tmp_path, 64, 16 * MIB)
    model = nn.Module()
    for number in range(64):
        data = torch.frombuffer(bytearray(old), dtype=torch.uint8)
        model.register_buffer(f"w{number:03d}", data)
    if device.name == "cuda":
        model.to("cuda")
    device.start_counting()
    chain = gpusync.open_chain(tmp_path, 1)
    update = gpusync.prepare(
        model, chain, device=device.name, scratch_bytes=64 * MIB, write_back="none"
    )
    assert update.report.tensors_by_path == {device.name: 64}
    lists_nbytes = update.report.change_list_bytes
    assert lists_nbytes < 0.025 * (1 << 30)
    check_within_caps(device, 64 * MIB, lists_nbytes)
    if device.runtime is not None:
        assert device.runtime.pinned_peak_nbytes <= RING + MIB
    assert device.held_nbytes <= lists_nbytes + 512 * 200
    update.commit()
    update.finish()
    expected = torch.frombuffer(bytearray(new), dtype=torch.uint8)
    for buffer in model.buffers():
        assert torch.equal(buffer.cpu(), expected)
    assert device.held_nbytes == 0


MEDIUM = wire.Row(wire.SECOND, "big.weight", "BF16", (512, 768), 768 << 10)
TINY = tuple(wire.Row(wire.FIRST, f"t{at:04d}", "U8", (at % 97,), at % 97) for at in range(800))
SHAPES: Mapping[str, tuple[tuple[wire.Row, ...], int]] = {
    "one large tensor": ((BIG,), 2),
    "all kinds": ((*wire.LAYOUT, BIG), 2),
    "64 versions": ((*wire.LAYOUT, MEDIUM), 64),
    "64 versions of small tensors": (wire.LAYOUT, 64),
    "hundreds of tiny tensors": (TINY, 2),
    "tiny tensors, 16 versions": (TINY[:150], 16),
}


@pytest.fixture(scope="module", params=SHAPES)
def shaped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> wire.Stream:
    layout, versions = SHAPES[request.param]
    return published(tmp_path_factory.mktemp("shaped") / "stream", versions, layout)


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("room", [0.0, 0.5, 1.0])
def test_scratch_lists_and_pinned_memory_stay_under_their_caps(
    shaped: wire.Stream, room: float, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room on the device for the lists' tables, and for none, a half or all of their entries."""
    with counted_device(device_name, monkeypatch) as device:
        least = least_scratch(device, shaped)
        sizes = list_sizes(shaped, shaped.last, device_name, scratch_bytes=least)
    cap = sizes.tables + int(room * sizes.entries)
    monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(cap))
    with counted_device(device_name, monkeypatch) as device:
        model = model_at(shaped, 0, device_name)
        device.start_counting()
        check_next_update(shaped, model, shaped.last, device_name, scratch_bytes=least)
        check_within_caps(device, least, cap)
        if device.runtime is not None:
            spilled = sizes.nbytes - cap
            assert device.runtime.pinned_peak_nbytes <= RING + spilled + least // 10
            assert device.runtime.pinned_nbytes == 0
        assert device.held_nbytes == 0


def least_scratch(device: Device, stream: wire.Stream) -> int:
    """Return the least scratch memory that the device path works with for all tensors of a stream."""
    if device.runtime is None:
        return SCRATCH
    nvcomp = Nvcomp(device.runtime.nvcomp_library())
    regions = sum(row.nbytes > 0 for row in stream.layout)
    with pytest.raises(OutOfScratchError) as caught:
        capacities_for(1, nvcomp.decode_temp_nbytes, 1 << 40, regions)
    assert caught.value.needed_bytes is not None and caught.value.needed_bytes <= SCRATCH
    return caught.value.needed_bytes


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse", "full"])
def test_other_encodings_stay_under_the_caps_too(
    device: Device, encoding: str, tmp_path: Path
) -> None:
    stream = wire.Stream(tmp_path / "stream", (*wire.LAYOUT, MEDIUM))
    for _ in range(3):
        if encoding == "full":
            stream.full()
        else:
            names = [row.name for row in stream.layout if row.nbytes]
            stream.delta(
                new=stream.changed(names, stream.states[stream.last], 9999), encoding=encoding
            )
    model = model_at(stream, 0, device.name)
    device.start_counting()
    report = check_next_update(stream, model, stream.last, device.name)
    check_within_caps(device, SCRATCH, report.change_list_bytes)
    assert device.held_nbytes == 0


def test_a_tensor_that_turns_out_to_be_the_hosts_takes_no_memory_twice(
    stream: wire.Stream, device: Device, tmp_path: Path
) -> None:
    """A seek table that lies is found out when the frames are read: what was taken by then is given back first."""
    lying = lying_stream(tmp_path, stream)
    model = model_at(stream, 0, device.name)
    device.start_counting()
    with no_garbage_collection():
        update = prepare(lying, model, 1, device.name)
    assert "host_decode" in update.report.tensors_by_path
    check_within_caps(device, SCRATCH, update.report.change_list_bytes)
    update.commit()
    assert live.bytes_of(model) == stream.states[1]


def lying_stream(root: Path, stream: wire.Stream) -> wire.Stream:
    """Return a stream of the same tensors, whose seek tables give frames other sizes than they have."""
    lying = wire.Stream(root / "lying", stream.layout)
    for version in (1, 2):
        old, new = stream.states[version - 1], stream.states[version]
        lying.states[version - 1] = old
        blob = bytearray(seekable(wire.xor(old[BIG.name], new[BIG.name]), 64 << 10))
        count = BIG.nbytes >> 16
        table = len(blob) - 9 - 8 * count
        rows = np.frombuffer(blob, "<u4", 2 * count, table).reshape(count, 2)
        other = int(np.flatnonzero(rows[:, 0] != rows[0, 0])[-1])
        rows[[0, other], 0] = rows[[other, 0], 0]
        lying.delta(new=new, bend=wire.Bend(blob={BIG.name: bytes(blob)}))
    return lying


# ---- lists that do not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", [1, 2])
def test_lists_over_both_caps_are_refused_before_anything_is_touched(
    stream: wire.Stream,
    device: Device,
    target: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = tmp_path / "local"
    stream.write_checkpoint(local, stream.states[0])
    wire.write_marker(local, json.dumps({"version": "000000"}))
    model = model_at(stream, 0, device.name)
    gpusync.attach(model, stream.base)
    sizes = list_sizes(stream, target, device.name)
    third = sizes.entries // 3
    device.start_counting()
    monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(sizes.tables + third))
    monkeypatch.setenv("GPUSYNC_CHANGE_LIST_BYTES", str(third))
    with pytest.raises(OutOfScratchError, match="GPUSYNC_CHANGE_LIST_BYTES") as caught:
        prepare(stream, model, target, device.name, checkpoint=local, write_back="sync")
    assert caught.value.budget_bytes == third
    assert caught.value.needed_bytes is not None and caught.value.needed_bytes > third
    del caught
    assert live.bytes_of(model) == stream.states[0]
    assert wire.read_tensors(local) == stream.states[0]
    check_nothing_is_held(device)
    monkeypatch.setenv("GPUSYNC_CHANGE_LIST_BYTES", "20000000")
    check_next_update(stream, model, target, device.name)


def test_a_chain_whose_lists_do_not_fit_goes_through_as_several_updates(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = published(tmp_path / "stream", 3, (MEDIUM,))
    one, whole = (list_sizes(stream, target, device.name) for target in (1, 3))
    assert one.entries < 0.4 * whole.entries
    monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(one.tables + one.entries // 2))
    monkeypatch.setenv("GPUSYNC_CHANGE_LIST_BYTES", str(one.entries + one.entries // 16))
    model = model_at(stream, 0, device.name)
    with pytest.raises(OutOfScratchError, match="several updates"):
        prepare(stream, model, 3, device.name)
    assert live.bytes_of(model) == stream.states[0]
    for target in (1, 2, 3):
        report = check_next_update(stream, model, target, device.name)
        assert report.to_version == target


def test_lists_go_to_host_memory_and_the_report_says_so(
    stream: wire.Stream, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list_sizes(stream, 1, device.name)
    device.start_counting()
    monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(sizes.tables))
    monkeypatch.setenv("GPUSYNC_CHANGE_LIST_BYTES", str(sizes.entries))
    model = model_at(stream, 0, device.name)
    with prepare(stream, model, 1, device.name) as update:
        assert update.report.change_list_bytes == sizes.nbytes
        (note,) = update.report.notes
        assert str(sizes.entries) in note and "host memory" in note
        if device.runtime is not None:
            assert device.runtime.pinned_nbytes >= sizes.entries
            assert device.runtime.scratch_nbytes == sizes.tables
    check_next_update(stream, model, 1, device.name)


def test_a_cap_on_the_lists_is_kept_to_the_byte(
    stream: wire.Stream, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list_sizes(stream, 1, device.name)
    model = model_at(stream, 0, device.name)
    for on_device, on_host in (
        (sizes.tables, sizes.entries - 1),
        (sizes.tables - 1, sizes.entries),
        (sizes.nbytes - 1, 0),
    ):
        monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(on_device))
        monkeypatch.setenv("GPUSYNC_CHANGE_LIST_BYTES", str(on_host))
        with pytest.raises(OutOfScratchError):
            prepare(stream, model, 1, device.name)
        assert live.bytes_of(model) == stream.states[0]
    monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(sizes.nbytes))
    check_next_update(stream, model, 1, device.name)


# ---- what the system does not give --------------------------------------------------------------------


@pytest.mark.parametrize("scratch_bytes", [1, MIB, "least"])
def test_too_little_scratch_is_refused_and_says_how_much_it_takes(
    stream: wire.Stream, device: Device, scratch_bytes: Any
) -> None:
    model = model_at(stream, 0, device.name)
    least = least_scratch(device, stream)
    asked = least - 1 if scratch_bytes == "least" else scratch_bytes
    if device.runtime is None and scratch_bytes == "least":
        pytest.skip("how much the real nvCOMP takes is not known here")
    with pytest.raises(OutOfScratchError, match="scratch") as caught:
        prepare(stream, model, 1, device.name, scratch_bytes=asked)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (least, asked) or (
        device.runtime is None
    )
    del caught
    assert live.bytes_of(model) == stream.states[0]
    check_nothing_is_held(device)
    check_next_update(stream, model, 1, device.name, scratch_bytes=least)


@pytest.mark.parametrize("capacity", [1 * MIB, 6 * MIB, SCRATCH])
def test_a_full_device_refuses_before_anything_is_touched(
    stream: wire.Stream, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has left so little that the scratch memory, or the lists behind it, do not fit."""
    with counted_device("emulated", monkeypatch, capacity_nbytes=capacity) as device:
        model = model_at(stream, 0, "emulated")
        with pytest.raises(OutOfScratchError) as caught:
            prepare(stream, model, 1, "emulated", scratch_bytes=capacity + 20 * MIB)
        assert caught.value.needed_bytes is not None
        del caught
        assert live.bytes_of(model) == stream.states[0]
        check_nothing_is_held(device)


def test_by_default_a_quarter_of_what_is_free_is_taken_at_most(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_device("emulated", monkeypatch, capacity_nbytes=40 * MIB) as device:
        model = model_at(stream, 0, "emulated")
        report = check_next_update(stream, model, 1, "emulated", scratch_bytes=None)
        assert device.peak_nbytes <= 10 * MIB + report.change_list_bytes


def test_lists_go_to_host_memory_where_the_device_has_less_than_the_cap(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(MIB))
    with counted_device("emulated", monkeypatch) as device:
        least = least_scratch(device, stream)
        with prepare(stream, model_at(stream, 0, "emulated"), 1, "emulated", scratch_bytes=least):
            scratch_nbytes = device.peak_nbytes - device.held_nbytes
    with counted_device("emulated", monkeypatch, capacity_nbytes=scratch_nbytes + 9000) as device:
        model = model_at(stream, 0, "emulated")
        report = check_next_update(stream, model, 1, "emulated", scratch_bytes=least)
        assert [note for note in report.notes if "host memory" in note]


@pytest.mark.parametrize("limit", [0, MIB, 8 * MIB + TABLES, 20 * MIB, 31 * MIB])
def test_refused_page_locking_is_survived_and_reported(
    stream: wire.Stream, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_device("emulated", monkeypatch, pinned_limit_nbytes=limit) as device:
        model = model_at(stream, 0, "emulated")
        report = check_next_update(stream, model, 1, "emulated")
        notes = " ".join(report.notes)
        assert ("pageable" in notes) == (limit < 8 * MIB), notes
        assert ("were refused" in notes) == (limit >= 8 * MIB), notes
        assert device.emulated.pinned_peak_nbytes <= limit
        assert device.emulated.pinned_nbytes == 0
        check_next_update(stream, model, 2, "emulated")


def test_lists_that_cannot_be_pinned_are_refused(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels reach page-locked memory only: there is no other way."""
    tables = list_sizes(stream, 1, "emulated").tables
    monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(tables))
    with counted_device("emulated", monkeypatch, pinned_limit_nbytes=100) as device:
        model = model_at(stream, 0, "emulated")
        with pytest.raises(OutOfScratchError):
            prepare(stream, model, 1, "emulated")
        assert live.bytes_of(model) == stream.states[0]
        check_nothing_is_held(device)
        monkeypatch.delenv("GPUSYNC_DEVICE_LIST_BYTES")
        check_next_update(stream, model, 1, "emulated")


# ---- what is given back -------------------------------------------------------------------------------


def check_nothing_is_held(device: Device) -> None:
    """Whatever an error kept in its traceback goes with it."""
    gc.collect()
    assert device.held_nbytes == 0
    if device.runtime is not None:
        assert device.runtime.pinned_nbytes == 0
    assert not [one.name for one in threading.enumerate() if one.name.startswith("gpusync-")]


def end_by_finish(update: gpusync.Update) -> None:
    update.commit()
    update.finish()


def end_by_discard(update: gpusync.Update) -> None:
    update.discard()


def end_by_leaving(update: gpusync.Update) -> None:
    with update:
        pass


@pytest.mark.parametrize("end", [end_by_finish, end_by_discard, end_by_leaving])
def test_nothing_is_held_after_the_end_without_help_of_the_garbage_collector(
    stream: wire.Stream, device: Device, end: Any
) -> None:
    model = model_at(stream, 0, device.name)
    with no_garbage_collection():
        device.start_counting()
        update = prepare(stream, model, 1, device.name)
        held = device.held_nbytes
        assert 0 < held < update.report.change_list_bytes + 512 * 64
        end(update)
        assert device.held_nbytes == 0
        if device.runtime is not None:
            assert device.runtime.pinned_nbytes == 0


def test_nothing_is_held_by_an_update_that_is_forgotten(
    stream: wire.Stream, device: Device
) -> None:
    model = model_at(stream, 0, device.name)
    device.start_counting()
    update = prepare(stream, model, 1, device.name)
    del update
    check_nothing_is_held(device)
    check_next_update(stream, model, 1, device.name)


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_prepare_gives_its_memory_back_as_soon_as_the_error_is_handled(
    stream: wire.Stream, device: Device, kind: str, number: int
) -> None:
    """An engine that is short of memory must not wait for the garbage collector."""
    model = model_at(stream, 0, device.name)
    with no_garbage_collection():
        device.start_counting()
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, device.name, kind, number, KernelError("planned"))
            try:
                prepare(stream, model, 1, device.name).discard()
            except DeviceError:
                pass
        assert device.held_nbytes == 0
        if device.runtime is not None:
            assert device.runtime.pinned_nbytes == 0
    check_nothing_is_held(device)
