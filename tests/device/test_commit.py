"""Commit on a device: what changed since prepare is noticed, and a commit that fails is taken back or never served."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpusync
from gpusync.errors import (
    DecodeError,
    DeviceError,
    GpuSyncError,
    KernelError,
    ModelPoisonedError,
    PlacementError,
)
from gpusync.host.parts import LiveChanges, PreparedPart, commit_parts
from gpusync.live import devices
from gpusync.live import update as update_module
from gpusync.testing import Order
from tests import live, wire
from tests.device.updates import (
    BIG,
    DEVICES,
    MIB,
    NAMES,
    Device,
    Failing,
    check_next_update,
    counted_device,
    flat_bytes,
    list_sizes,
    model_at,
    own_device,
    prepare,
    published,
)

LISTS = ("on the device", "in host memory", "in both")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> wire.Stream:
    """Versions 1 and 2, each of which changes every tensor. No test publishes or writes to it."""
    return published(tmp_path_factory.mktemp("commit") / "stream")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with counted_device(request.param, monkeypatch) as made:
        yield made


def cap_lists(patch: pytest.MonkeyPatch, stream: wire.Stream, device: str, where: str) -> None:
    """Have the entries of the lists of version 1 go there."""
    if where != "on the device":
        sizes = list_sizes(stream, 1, device)
        entries = 0 if where == "in host memory" else sizes.entries // 2
        patch.setenv("GPUSYNC_DEVICE_LIST_BYTES", str(sizes.tables + entries))


def listed_words(stream: wire.Stream, name: str) -> np.ndarray:
    """Return the positions of a tensor's aligned 2-byte words that version 1 changes."""
    old, new = (np.frombuffer(stream.states[at][name], np.uint8) for at in (0, 1))
    even = old.size & ~1
    return np.flatnonzero((old != new)[:even].reshape(-1, 2).any(1)) * 2


def stored(device: Device) -> int:
    """How often live words have been written, where that can be told."""
    return device.runtime.operations["gs_store"] if device.runtime is not None else 0


# ---- what commit does ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lists", LISTS)
def test_commit_makes_all_segments_live_where_they_are(
    stream: wire.Stream, device: Device, lists: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap_lists(monkeypatch, stream, device.name, lists)
    model = model_at(stream, 0, device.name)
    device.start_counting()
    pointers = live.pointers_of(model)
    update = prepare(stream, model, 1, device.name)
    assert update.report.stages.bytes["read"] > 0
    spilled = [note for note in update.report.notes if "host memory" in note]
    assert bool(spilled) == (lists != "on the device")
    assert live.bytes_of(model) == stream.states[0]
    assert stored(device) == 0
    update.commit()
    assert live.bytes_of(model) == stream.states[1]
    assert live.pointers_of(model) == pointers
    update.finish()
    assert device.held_nbytes == 0
    check_next_update(stream, model, 2, device.name)


# ---- what changed since prepare -----------------------------------------------------------------------


def check_noticed(
    stream: wire.Stream, model: nn.Module, update: gpusync.Update, device: Device, name: str
) -> None:
    """Commit refuses, names the tensor, stores nothing, and the update is over."""
    held = live.bytes_of(model)
    with pytest.raises(PlacementError) as caught:
        update.commit()
    assert live.bytes_of(model) == held
    assert stored(device) == 0
    assert caught.value.tensor == name
    assert gpusync.live_version(model) == 0
    with pytest.raises(DeviceError, match="discarded"):
        update.commit()
    update.discard()


@pytest.mark.parametrize("name", NAMES)
def test_one_changed_bit_under_a_list_is_noticed_before_the_first_store(
    stream: wire.Stream, device: Device, name: str
) -> None:
    old, new = stream.states[0][name], stream.states[1][name]
    at = max(at for at in range(len(old)) if old[at] != new[at])
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    flat = flat_bytes(model, name)
    flat[at] ^= 0x10
    check_noticed(stream, model, update, device, name)
    flat[at] ^= 0x10
    check_next_update(stream, model, 1, device.name)


def _swap(words: torch.Tensor, at: list[int]) -> None:
    words[at] = words[at[1:] + at[:1]].clone()


def _move(words: torch.Tensor, at: list[int]) -> None:
    words[at[0]] += 1
    words[at[1]] -= 1


def _overwrite(words: torch.Tensor, at: list[int]) -> None:
    words[:] = words[0]


@pytest.mark.parametrize("lists", ["on the device", "in both"])
@pytest.mark.parametrize("change", [_swap, _move, _overwrite])
@pytest.mark.parametrize("where", ["one tile", "two tiles"])
def test_words_that_changed_together_do_not_cancel_out(
    stream: wire.Stream,
    device: Device,
    change: Callable[[torch.Tensor, list[int]], None],
    where: str,
    lists: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cap_lists(monkeypatch, stream, device.name, lists)
    words = listed_words(stream, BIG.name) // 2
    chosen = words[-2:].tolist() if where == "one tile" else words[[0, -1]].tolist()
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    change(flat_bytes(model, BIG.name).view(torch.int16), chosen)
    check_noticed(stream, model, update, device, BIG.name)


def test_another_version_in_the_model_is_noticed(stream: wire.Stream, device: Device) -> None:
    """Somebody else applied the same update meanwhile: XOR would take it back."""
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    for name in NAMES:
        new = torch.frombuffer(bytearray(stream.states[1][name]), dtype=torch.uint8)
        flat_bytes(model, name).copy_(new)
    with pytest.raises(PlacementError, match="changed since prepare"):
        update.commit()
    assert live.bytes_of(model) == stream.states[1]


@pytest.mark.parametrize("name", ["a.weight", BIG.name, "b.lut"])
@pytest.mark.parametrize("path", live.DEVICES)
def test_a_byte_under_no_list_is_not_looked_at_on_any_path(
    stream: wire.Stream, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only words that are stored to are checked: what an engine does elsewhere is neither noticed nor undone."""
    if path != "cpu":
        own_device(path, monkeypatch)
    words = set(listed_words(stream, name).tolist())
    at = next(at for at in range(0, len(stream.states[0][name]), 2) if at not in words)
    model = model_at(stream, 0, path)
    update = prepare(stream, model, 1, path)
    flat_bytes(model, name)[at] ^= 0x10
    update.commit()
    update.finish()
    flat_bytes(model, name)[at] ^= 0x10
    assert live.bytes_of(model) == stream.states[1]


def _reallocate(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def _grow_storage(tensor: torch.Tensor) -> None:
    larger = torch.empty(tensor.nbytes + 4 * MIB, dtype=torch.uint8, device=tensor.device)
    larger[: tensor.nbytes] = tensor.data.reshape(-1).view(torch.uint8)
    tensor.set_(larger.untyped_storage(), 0, tensor.shape, tensor.stride())


def _offload_and_reload(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    kept, nbytes = tensor.data.clone(), storage.nbytes()
    storage.resize_(0)
    blocker = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
    storage.resize_(nbytes)
    tensor.data.copy_(kept)
    del blocker


MOVES = [
    ("emulated", _reallocate),
    ("emulated", _grow_storage),
    *(
        # a storage of host memory that numpy has seen is not resized any more
        pytest.param("cuda", move, marks=pytest.mark.gpu)
        for move in (_reallocate, _grow_storage, _offload_and_reload)
    ),
]


@pytest.mark.parametrize(("device", "move"), MOVES, indirect=["device"])
@pytest.mark.parametrize("name", ["c.weight", BIG.name])
def test_a_storage_that_moved_is_noticed_and_the_old_memory_not_written(
    stream: wire.Stream, device: Device, move: Callable[[torch.Tensor], None], name: str
) -> None:
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    tensor = model.get_parameter(name)
    before = tensor.data.reshape(-1).view(torch.uint8)
    move(tensor)
    assert tensor.data_ptr() != before.data_ptr()
    check_noticed(stream, model, update, device, name)
    if move is not _offload_and_reload:
        assert before.cpu().numpy().tobytes() == stream.states[0][name]
    check_next_update(stream, model, 1, device.name)


@pytest.mark.gpu
def test_a_storage_that_is_offloaded_is_noticed(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleep modes free the storage under a parameter: there is nothing at its address."""
    own_device("cuda", monkeypatch)
    model = model_at(stream, 0, "cuda")
    update = prepare(stream, model, 1, "cuda")
    tensor = model.get_parameter("a.weight")
    storage = tensor.untyped_storage()
    kept, nbytes = tensor.data.clone(), storage.nbytes()
    storage.resize_(0)
    with pytest.raises(PlacementError, match=r"a\.weight"):
        update.commit()
    with pytest.raises(PlacementError, match=r"a\.weight"):
        prepare(stream, model, 1, "cuda")
    storage.resize_(nbytes)
    tensor.data.copy_(kept)
    assert live.bytes_of(model) == stream.states[0]
    check_next_update(stream, model, 1, "cuda")


def _replace(model: nn.Module) -> None:
    owner = model.get_submodule("c")
    owner.weight = nn.Parameter(owner.weight.clone(), requires_grad=False)


def _remove(model: nn.Module) -> None:
    del model.get_submodule("c").weight


def _cut(model: nn.Module) -> None:
    owner = model.get_submodule("c")
    owner.weight = nn.Parameter(owner.weight.data[:8], requires_grad=False)


@pytest.mark.parametrize("change", [_replace, _remove, _cut])
def test_a_parameter_that_is_another_is_noticed(
    stream: wire.Stream, device: Device, change: Callable[[nn.Module], None]
) -> None:
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    change(model)
    held = live.bytes_of(model)
    with pytest.raises(PlacementError, match=r"c\.weight"):
        update.commit()
    assert live.bytes_of(model) == held and stored(device) == 0


def test_what_the_engine_has_queued_is_waited_for(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to the weights that the engine has queued, and that has not run when commit begins, is noticed."""
    with counted_device("emulated", monkeypatch, order=Order((0, 9, 9, 9, 9))) as device:
        model = model_at(stream, 0, "emulated")
        update = prepare(stream, model, 1, "emulated")
        device.emulated.engine_stream.fill(flat_bytes(model, "a.weight"), 0x77)
        assert live.bytes_of(model) == stream.states[0]
        with pytest.raises(PlacementError, match=r"a\.weight"):
            update.commit()
        now = live.bytes_of(model)
        assert now == {**stream.states[0], "a.weight": b"\x77" * 4096}


@pytest.mark.gpu
def test_what_the_engine_has_queued_is_waited_for_on_cuda(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_device("cuda", monkeypatch)
    model = model_at(stream, 0, "cuda")
    update = prepare(stream, model, 1, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        flat_bytes(model, "a.weight").fill_(0x77)
    with pytest.raises(PlacementError, match=r"a\.weight"):
        update.commit()
    assert live.bytes_of(model) == {**stream.states[0], "a.weight": b"\x77" * 4096}


@pytest.mark.parametrize("lists", LISTS)
def test_lists_in_host_memory_do_not_rely_on_the_order_of_copies_within_it(
    stream: wire.Stream, lists: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work runs late, but for copies from host memory to host memory, which are no part of any queue."""
    with counted_device("emulated", monkeypatch):
        cap_lists(monkeypatch, stream, "emulated", lists)
    with counted_device("emulated", monkeypatch, order=Order()):
        model = model_at(stream, 0, "emulated")
        update = prepare(stream, model, 1, "emulated")
        flat = flat_bytes(model, BIG.name)
        at = int(listed_words(stream, BIG.name)[-1])
        flat[at] ^= 0x10
        with pytest.raises(PlacementError):
            update.commit()
        flat[at] ^= 0x10
        assert live.bytes_of(model) == stream.states[0]
        check_next_update(stream, model, 1, "emulated")


# ---- commits that fail --------------------------------------------------------------------------------


def fail_in_commit(
    stream: wire.Stream,
    device: Device,
    kind: str,
    number: int,
    error: BaseException,
    **options: Any,
) -> tuple[nn.Module, gpusync.Update, GpuSyncError | None]:
    """Prepare, commit with a failure, and return what is left; the failure comes too late where there is no error."""
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch, device.name, kind, number, error, **options)
        try:
            update.commit()
        except GpuSyncError as err:
            assert failing.happened
            return model, update, err
    assert live.bytes_of(model) == stream.states[1]
    return model, update, None


def check_outcome(
    stream: wire.Stream, device: Device, model: nn.Module, update: gpusync.Update, err: GpuSyncError
) -> None:
    """Either all is as before the call and the update is discarded, or the model is never served again."""
    if isinstance(err, ModelPoisonedError):
        check_poisoned(stream, device, model, update)
        return
    assert isinstance(err, DeviceError)
    assert live.bytes_of(model) == stream.states[0], f"{err}, and the new weights are live"
    assert gpusync.live_version(model) == 0
    update.discard()  # where the wait for the engine failed it is still prepared
    with pytest.raises(DeviceError, match="discarded"):
        update.commit()
    check_next_update(stream, model, 1, device.name)
    check_next_update(stream, model, 2, device.name)


def check_poisoned(
    stream: wire.Stream, device: Device, model: nn.Module, update: gpusync.Update
) -> None:
    assert gpusync.live_version(model) is None
    with pytest.raises(ModelPoisonedError):
        prepare(stream, model, 1, device.name)
    with pytest.raises(ModelPoisonedError):
        gpusync.attach(model, stream.base)
    for call in (update.commit, update.finish, update.discard):
        with pytest.raises(DeviceError):
            call()


@pytest.mark.parametrize("lists", ["on the device", "in both"])
@pytest.mark.parametrize("kind", ["launch", "copy", "fill"])
def test_a_failure_at_any_point_of_commit_is_taken_back(
    stream: wire.Stream, device: Device, kind: str, lists: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap_lists(monkeypatch, stream, device.name, lists)
    for number in itertools.count(1):
        model, update, err = fail_in_commit(stream, device, kind, number, KernelError("planned"))
        if err is None:
            break
        assert not isinstance(err, ModelPoisonedError)
        assert "planned" in (str(err), str(err.__cause__))
        check_outcome(stream, device, model, update, err)
    assert number > 1 or kind != "launch"


def test_a_failure_between_the_stores_of_two_devices_is_taken_back(
    stream: wire.Stream, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models stand for the parts of one that two devices hold: both change, or neither does."""
    real = devices.prepare_on_device
    parts: list[LiveChanges] = []

    def recording(*args: Any, **options: Any) -> PreparedPart:
        part = real(*args, **options)
        parts.append(part.changes)
        return part

    monkeypatch.setattr(devices, "prepare_on_device", recording)
    between = 0
    for number in itertools.count(1):
        parts.clear()
        models = [model_at(stream, 0, device.name) for _ in range(2)]
        updates = [prepare(stream, model, 1, device.name) for model in models]
        before = stored(device)
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, device.name, "launch", number, KernelError("planned"))
            try:
                commit_parts(parts)
            except DeviceError:
                between += stored(device) > before
            else:
                break
        assert [live.bytes_of(model) for model in models] == [stream.states[0]] * 2
        for update in updates:
            update.discard()
    assert [live.bytes_of(model) for model in models] == [stream.states[1]] * 2
    assert between or device.runtime is None


def test_a_failure_that_lasts_leaves_the_model_as_it_was_or_poisons_it(
    stream: wire.Stream, device: Device
) -> None:
    """The launches that would take stores back fail as well."""
    outcomes = set()
    for number in itertools.count(1):
        model, update, err = fail_in_commit(
            stream, device, "launch", number, KernelError("planned"), lasting=True
        )
        if err is None:
            break
        outcomes.add(type(err))
        check_outcome(stream, device, model, update, err)
    assert outcomes and outcomes <= {DeviceError, KernelError, ModelPoisonedError}


@pytest.mark.parametrize("error", [KernelError, DecodeError])
def test_a_wait_that_fails_in_commit_never_leaves_new_weights_under_an_old_version(
    stream: wire.Stream, device: Device, error: type[DeviceError]
) -> None:
    """CUDA refuses to wait for a device while any of its streams is captured; the stores may have run by then."""
    for number in itertools.count(1):
        model, update, err = fail_in_commit(stream, device, "synchronize", number, error("planned"))
        if err is None:
            break
        check_outcome(stream, device, model, update, err)
    assert number > 2


def test_a_lost_device_poisons_the_model(stream: wire.Stream, device: Device) -> None:
    for number in itertools.count(1):
        model, update, err = fail_in_commit(
            stream, device, "synchronize", number, ModelPoisonedError("lost"), lasting=True
        )
        if err is None:
            break
        assert isinstance(err, ModelPoisonedError)
        check_poisoned(stream, device, model, update)
    assert number > 2


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["launch", "synchronize"])
def test_an_interrupt_in_commit_is_taken_back_or_poisons(
    stream: wire.Stream, device: Device, kind: str, after: bool
) -> None:
    """It may arrive anywhere: before a call does its work, and after it, too."""
    for number in itertools.count(1):
        model = model_at(stream, 0, device.name)
        update = prepare(stream, model, 1, device.name)
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, device.name, kind, number, KeyboardInterrupt(), after=after)
            try:
                update.commit()
            except (KeyboardInterrupt, GpuSyncError):
                pass
            else:
                break
        if gpusync.live_version(model) is None:
            check_poisoned(stream, device, model, update)
        else:
            assert live.bytes_of(model) == stream.states[0]
            update.discard()
            check_next_update(stream, model, 1, device.name)
    assert number > 1


class _Refuses:
    """A part, on another device, that cannot be stored."""

    nbytes = changed_bytes = 0

    def check(self) -> None:
        pass

    def store(self) -> None:
        raise PlacementError("planned")

    def take_back(self) -> None:
        raise AssertionError("it was not stored")


@pytest.mark.parametrize("lists", LISTS)
def test_a_stored_part_is_taken_back_when_the_next_device_refuses(
    stream: wire.Stream, device: Device, lists: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap_lists(monkeypatch, stream, device.name, lists)
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            update_module, "commit_parts", lambda parts: commit_parts([*parts, _Refuses()])
        )
        with pytest.raises(PlacementError, match="planned"):
            update.commit()
    assert live.bytes_of(model) == stream.states[0]
    assert gpusync.live_version(model) == 0
    assert stored(device) == 2 or device.runtime is None
    check_next_update(stream, model, 1, device.name)


# ---- while the engine captures ------------------------------------------------------------------------


def test_commit_is_refused_during_capture_and_works_after_it(
    stream: wire.Stream, device: Device
) -> None:
    """The error says to commit after the capture, and so it must be possible."""
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    before = device.runtime.operations.copy() if device.runtime is not None else None
    with device.capturing(), pytest.raises(DeviceError, match="captur"):
        update.commit()
    if device.runtime is not None:
        assert device.runtime.operations == before
    assert live.bytes_of(model) == stream.states[0]
    assert gpusync.live_version(model) == 0
    update.commit()
    update.finish()
    assert live.bytes_of(model) == stream.states[1]


def test_an_update_refused_during_capture_can_be_discarded(
    stream: wire.Stream, device: Device
) -> None:
    model = model_at(stream, 0, device.name)
    device.start_counting()
    update = prepare(stream, model, 1, device.name)
    with device.capturing(), pytest.raises(DeviceError):
        update.commit()
    update.discard()
    assert device.held_nbytes == 0
    check_next_update(stream, model, 2, device.name)


def test_prepare_is_refused_during_capture_and_leaves_nothing(
    stream: wire.Stream, device: Device, tmp_path: Path
) -> None:
    local = stream.foreign_local(0) if not stream.local.exists() else stream.local
    model = model_at(stream, 0, device.name)
    gpusync.attach(model, stream.base)
    device.start_counting()
    before = wire.tree_sha256(local)
    with device.capturing(), pytest.raises(DeviceError, match="captur"):
        prepare(stream, model, 1, device.name, checkpoint=local, write_back="sync")
    after = wire.tree_sha256(local)
    assert {path: after[path] for path in before} == before
    assert not [path for path in after if "staging" in path]
    assert device.held_nbytes == 0
    check_next_update(stream, model, 1, device.name)


def test_a_capture_between_prepare_and_commit_does_no_harm(
    stream: wire.Stream, device: Device
) -> None:
    """An engine captures its graphs anew after it has woken up; the update waits."""
    model = model_at(stream, 0, device.name)
    update = prepare(stream, model, 1, device.name)
    with device.capturing():
        pass
    update.commit()
    assert live.bytes_of(model) == stream.states[1]
