"""Commit and finish of a live update when something fails in them: taken back, poisoned, or caught up with later."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpusync
from gpusync.errors import (
    CheckpointError,
    DeviceError,
    ModelPoisonedError,
    OutOfScratchError,
    PlacementError,
)
from gpusync.host.changes import ENTRIES_PER_STEP, RegionChanges
from tests import live, wire
from tests.crash.harness import open_descriptors, state_files
from tests.driver import Call, Trace, check_at, model_at, open_chain, pull, refused, update

NAMES = ("a.weight", "s.scale", "d.weight", "b.lut", "c.weight", "o.byte")


class Lost(Exception):
    """Something that nobody expects in a store."""


@pytest.fixture
def stream(tmp_path: Any) -> wire.Stream:
    """A host at version 1, with versions 2 and 3 published."""
    stream = wire.Stream(tmp_path / "stream")
    stream.delta(NAMES)
    pull(stream, 1)
    stream.delta(NAMES)
    stream.delta(NAMES)
    return stream


def prepare(stream: wire.Stream, model: nn.Module, target: int = 2) -> gpusync.Update:
    return gpusync.prepare(model, open_chain(stream, target), device="cpu")


class Stores:
    """Lets ``RegionChanges.store`` do its work but for the k-th call, which fails before, within or after it."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int, how: str) -> None:
        self.calls = self.entries = 0
        real = RegionChanges.store

        def store(region: RegionChanges, begin: int, end: int, begun: Any) -> bool:
            number, self.calls = self.calls, self.calls + 1
            if number != fail_at:
                done = real(region, begin, end, begun)
                self.entries += int(begun[0]) - begin
                return done
            if how == "within":
                real(region, begin, begin + (end - begin + 1) // 2, begun)
                begun[0] = end
            elif how == "after":
                real(region, begin, end, begun)
            raise Lost(f"store {number}")

        patch.setattr(RegionChanges, "store", store)


def count_of_parts(stream: wire.Stream) -> int:
    with pytest.MonkeyPatch.context() as patch:
        stores = Stores(patch, -1, "")
        model = model_at(stream, 1)
        prepare(stream, model).commit()
        return stores.calls


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_store_that_fails_is_taken_back_with_all_others(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    parts = count_of_parts(stream)
    assert parts >= len(NAMES)
    for number in range(parts):
        model = model_at(stream, 1)
        pointers = live.pointers_of(model)
        pending = prepare(stream, model)
        with (
            pytest.MonkeyPatch.context() as patch,
            refused(stream, DeviceError, text="taken back", model=model) as caught,
        ):
            Stores(patch, number, how)
            pending.commit()
        assert isinstance(caught.value.__cause__, Lost)
        assert gpusync.live_version(model) == 1
        assert "staging" not in " ".join(state_files(stream.local)), "the update is not discarded"
        with pytest.raises(DeviceError):
            pending.commit()
        update(stream, model, 2, write_back="none")
        assert live.bytes_of(model) == stream.states[2]
        assert live.pointers_of(model) == pointers


def test_a_failing_store_among_threads_is_taken_back(stream: wire.Stream) -> None:
    model = model_at(stream, 1)
    pending = prepare(stream, model)
    with (
        pytest.MonkeyPatch.context() as patch,
        refused(stream, DeviceError, model=model),
    ):
        Stores(patch, 3, "after")
        pending.commit()
    update(stream, model, 2)
    check_at(stream, 2)


def test_a_store_that_can_not_be_taken_back_poisons_the_model(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails and so does its undoing: the process is to be replaced, the folder is still good."""
    model = model_at(stream, 1)
    pending = prepare(stream, model)
    before = wire.snapshot(stream.local)

    def fail(region: RegionChanges, begin: int, end: int) -> None:
        raise Lost("take back")

    with pytest.MonkeyPatch.context() as patch:
        Stores(patch, 2, "after")
        patch.setattr(RegionChanges, "take_back", fail)
        with pytest.raises(ModelPoisonedError):
            pending.commit()
    check_poisoned(stream, model, pending)
    assert wire.snapshot(stream.local) == before
    pull(stream, 3)
    check_at(stream, 3)


def test_a_store_that_stopped_half_way_is_never_served(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a list's words are stored: either all of it is put back, or the model is poisoned."""
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    for number in range(count_of_parts(stream)):
        model = model_at(stream, 1)
        pending = prepare(stream, model)
        with pytest.MonkeyPatch.context() as patch:
            Stores(patch, number, "within")
            with pytest.raises((DeviceError, ModelPoisonedError)) as caught:
                pending.commit()
        if isinstance(caught.value, ModelPoisonedError):
            check_poisoned(stream, model, pending)
        else:
            assert live.bytes_of(model) == stream.states[1]


def check_poisoned(stream: wire.Stream, model: nn.Module, pending: gpusync.Update) -> None:
    assert gpusync.live_version(model) is None
    for call in (
        lambda: prepare(stream, model),
        lambda: prepare(stream, model, 3),
        lambda: gpusync.apply_to_model(model, open_chain(stream, 2)),
        lambda: gpusync.attach(model, stream.base),
    ):
        with pytest.raises((ModelPoisonedError, PlacementError)):
            call()
    with pytest.raises(ModelPoisonedError):
        prepare(stream, model)
    for verb in (pending.commit, pending.finish):
        with pytest.raises(DeviceError):
            verb()


# ---- what changed since prepare ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_changed_since_prepare_are_noticed_before_the_first_store(
    stream: wire.Stream, name: str
) -> None:
    model = model_at(stream, 1)
    pending = prepare(stream, model)
    old, new = stream.states[1][name], stream.states[2][name]
    at = next(at for at in range(len(old)) if old[at] != new[at])
    tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
    tensor.detach().reshape(-1).view(torch.uint8)[at] ^= 0x10
    with pytest.MonkeyPatch.context() as patch:
        stores = Stores(patch, -1, "")
        with refused(stream, PlacementError, model=model):
            pending.commit()
        assert stores.calls == 0


def test_a_word_that_changed_in_the_last_step_has_every_step_before_it_taken_back(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample holds the word, so steps are stored before the check that finds it."""
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    nbytes = 64 << 10
    stream = wire.Stream(
        tmp_path / "stream", (wire.Row(wire.FIRST, "big.weight", "U8", (nbytes,), nbytes),)
    )
    stream.delta(new=stream.changed(["big.weight"], stream.states[0], nbytes))
    model = model_at(stream, 0)
    pending = gpusync.prepare(model, open_chain(stream, 1, checkpoint=None), write_back="none")
    flat = dict(model.named_buffers())["big.weight"]
    flat[-1] ^= 0x10
    before = live.bytes_of(model)
    with pytest.MonkeyPatch.context() as patch:
        stores = Stores(patch, -1, "")
        with pytest.raises(PlacementError, match=r"big\.weight"):
            pending.commit()
    assert stores.entries == nbytes // 2 - ENTRIES_PER_STEP
    assert live.bytes_of(model) == before
    flat[-1] ^= 0x10
    gpusync.apply_to_model(model, open_chain(stream, 1, checkpoint=None), write_back="none")
    assert live.bytes_of(model) == stream.states[1]


def _reallocate(model: nn.Module) -> None:
    owner = model.get_submodule("c")
    owner.weight.data = owner.weight.data.clone()


def _replace(model: nn.Module) -> None:
    owner = model.get_submodule("c")
    owner.weight = nn.Parameter(owner.weight.clone(), requires_grad=False)


def _remove(model: nn.Module) -> None:
    del model.get_submodule("c").weight


@pytest.mark.parametrize("move", [_reallocate, _replace, _remove])
def test_a_parameter_that_moved_since_prepare_is_noticed(
    stream: wire.Stream, move: Callable[[nn.Module], None]
) -> None:
    model = model_at(stream, 1)
    pending = prepare(stream, model)
    move(model)
    with pytest.MonkeyPatch.context() as patch:
        stores = Stores(patch, -1, "")
        with refused(stream, PlacementError, text=r"c\.weight", model=model):
            pending.commit()
        assert stores.calls == 0


def test_change_lists_over_their_cap_leave_both_sides_untouched(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    monkeypatch.setenv("GPUSYNC_CHANGE_LIST_BYTES", "64")
    opened = open_descriptors()
    with refused(stream, OutOfScratchError, text="GPUSYNC_CHANGE_LIST_BYTES", model=model):
        prepare(stream, model)
    assert open_descriptors() == opened
    assert "staging" not in " ".join(state_files(stream.local))
    monkeypatch.delenv("GPUSYNC_CHANGE_LIST_BYTES")
    update(stream, model, 2)
    check_at(stream, 2)


# ---- finish -----------------------------------------------------------------------------------------


def test_finish_on_a_full_disk_says_where_both_sides_stand(stream: wire.Stream) -> None:
    """The disk is full from finish's n-th write on. Live is new; the next update catches up, whatever n is."""
    number = 0
    while True:
        model = restart_at_1(stream)
        pending = prepare(stream, model)
        pending.commit()
        with pytest.MonkeyPatch.context() as patch:
            full = FullDisk(patch, number)
            try:
                pending.finish()
            except CheckpointError as err:
                error = err
            else:
                break
        assert full.failed and getattr(error, "errno", None) == errno.ENOSPC
        assert live.bytes_of(model) == stream.states[2]
        assert gpusync.live_version(model) == error.live_version == 2
        if error.disk_version == 1:
            check_at(stream, 1)
            assert (stream.local / "config.json").exists()
        else:
            assert error.disk_version is None
            assert not (stream.local / wire.MARKER).exists()
        report = update(stream, model, 3)
        assert report.disk_version == 3
        assert live.bytes_of(model) == stream.states[3]
        check_at(stream, 3)
        number += 1
    assert number >= 2 and not full.failed


class FullDisk:
    """From the n-th operation that takes blocks on, each fails with ENOSPC."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.failed = False
        self._left = number
        Trace(patch, self._before)

    def _before(self, call: Call) -> None:
        if call.operation not in ("create", "pwrite", "allocate", "make_dir", "scratch_file"):
            return
        if call.path.name in ("lock", "?"):
            return  # its blocks are there already
        if self._left <= 0:
            self.failed = True
            raise OSError(errno.ENOSPC, "No space left on device", str(call.path))
        self._left -= 1


def restart_at_1(stream: wire.Stream) -> nn.Module:
    """Put folder and module back to version 1."""
    pull(stream, 0)
    pull(stream, 1)
    return model_at(stream, 1)
