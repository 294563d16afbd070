"""Several threads, models or processes that have hold of the same weights, or of the same update."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpusync
from gpusync.errors import DeviceError, DigestMismatchError, GpuSyncError, PlacementError
from gpusync.host import parts
from gpusync.live import update as update_module
from gpusync.local import writeback
from tests import live, wire
from tests.crash.harness import open_descriptors, state_files
from tests.driver import check_at, model_at, open_chain
from tests.engine_side.scene import (
    check_next_updates,
    check_nothing_is_left,
    nothing_stays_open,
    prepare,
)
from tests.warm import Warm

THREADS = 8


def at_once(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Run ``work`` in threads that begin together; return what each returned or raised."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except BaseException as err:
            results[number] = err.with_traceback(None)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---- threads --------------------------------------------------------------------------------------------


def test_threads_that_update_one_model_at_once_apply_each_delta_once(
    stream: wire.Stream, device: str
) -> None:
    model = model_at(stream, 1)
    with nothing_stays_open():
        results = at_once(
            lambda number: gpusync.apply_to_model(model, open_chain(stream, 2), device=device)
        )
        outcomes = [r.outcome for r in results if isinstance(r, gpusync.UpdateReport)]
        refusals = [r for r in results if not isinstance(r, gpusync.UpdateReport)]
        assert outcomes.count("applied") == 1
        assert set(outcomes) <= {"applied", "unchanged"}
        assert all(isinstance(r, PlacementError) and "prepared" in str(r) for r in refusals)
    assert live.bytes_of(model) == stream.states[2]
    check_at(stream, 2)
    check_nothing_is_left(stream)


@pytest.mark.parametrize("verb", ["commit", "discard"])
def test_threads_that_commit_one_update_at_once_store_it_once(
    stream: wire.Stream, device: str, verb: str
) -> None:
    """Half of them discard it, in one of the cases: the first one decides."""
    for _ in range(4):
        model = model_at(stream, 1)
        update = prepare(stream, model, device=device, write_back="none")

        def work(number: int, update: gpusync.Update = update) -> str:
            chosen = verb if number % 2 else "commit"
            getattr(update, chosen)()
            return chosen

        results = at_once(work)
        done = [r for r in results if isinstance(r, str)]
        refusals = [r for r in results if not isinstance(r, str)]
        assert all(type(r) is DeviceError for r in refusals), refusals
        assert done.count("commit") == (0 if "discard" in done else 1)
        version = 1 if "discard" in done else 2
        assert gpusync.live_version(model) == version
        assert live.bytes_of(model) == stream.states[version]


def test_an_update_is_not_discarded_while_it_is_stored(
    stream: wire.Stream, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_at(stream, 1)
    update = prepare(stream, model, device=device)
    refusals = []

    def commit_parts(changes: Any) -> None:
        parts.commit_parts(changes)
        for verb in (update.discard, update.commit, update.finish):
            with pytest.raises(DeviceError, match="committing") as caught:
                verb()
            refusals.append(caught.value)

    monkeypatch.setattr(update_module, "commit_parts", commit_parts)
    update.commit()
    assert len(refusals) == 3
    update.finish()
    assert live.bytes_of(model) == stream.states[2]
    check_at(stream, 2)


def test_threads_that_finish_one_update_at_once_swap_it_in_once(stream: wire.Stream) -> None:
    model = model_at(stream, 1)
    update = prepare(stream, model)
    update.commit()
    results = at_once(lambda number: update.finish())
    assert sum(isinstance(r, gpusync.UpdateReport) for r in results) == 1
    assert sum(type(r) is DeviceError for r in results) == THREADS - 1
    check_at(stream, 2)
    check_nothing_is_left(stream)


# ---- models that share parameters -----------------------------------------------------------------------


def sharing(model: nn.Module, *, all_of_it: bool) -> nn.Module:
    """Return a second model that holds some or all of the first one's tensors, and copies of the others."""
    other = nn.Module()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in named.items():
        shared = all_of_it or name == "a.weight"
        live.place(other, name, tensor.data if shared else tensor.data.clone())
    return other


@pytest.mark.parametrize("all_of_it", [True, False])
def test_models_that_share_weights_are_not_updated_at_once(
    stream: wire.Stream, device: str, all_of_it: bool
) -> None:
    """Each would be checked against the other's half-stored words."""
    model = model_at(stream, 1)
    other = sharing(model, all_of_it=all_of_it)
    update = prepare(stream, model, device=device)
    with pytest.raises(PlacementError, match="shares weights"):
        prepare(stream, other, device=device)
    unrelated = model_at(stream, 1)
    prepare(stream, unrelated, device=device, write_back="none").discard()
    update.discard()
    prepare(stream, other, device=device).discard()
    check_next_updates(stream, model, device)


def test_a_model_that_shares_all_weights_follows_by_an_attach(
    stream: wire.Stream, device: str
) -> None:
    model = model_at(stream, 1)
    other = sharing(model, all_of_it=True)
    for one in (model, other):
        gpusync.attach(one, stream.local)
    gpusync.apply_to_model(model, open_chain(stream, 2), device=device)
    held = live.bytes_of(other)
    assert held == stream.states[2]
    with pytest.raises((DigestMismatchError, PlacementError)):
        prepare(stream, other, device=device)
    assert live.bytes_of(other) == held
    assert gpusync.attach(other, stream.local).version == 2
    gpusync.apply_to_model(other, open_chain(stream, 3), device=device)
    assert live.bytes_of(model) == live.bytes_of(other) == stream.states[3]


def test_a_model_of_which_some_weights_were_updated_by_another_is_refused(
    stream: wire.Stream, device: str
) -> None:
    model = model_at(stream, 1)
    other = sharing(model, all_of_it=False)
    gpusync.attach(other, stream.local)
    gpusync.apply_to_model(model, open_chain(stream, 2), device=device)
    held = live.bytes_of(other)
    for attempt in (
        lambda: prepare(stream, other, device=device),
        lambda: prepare(stream, other, 3, device=device),
        lambda: gpusync.attach(other, stream.local),
    ):
        with pytest.raises(GpuSyncError):
            attempt()
    assert live.bytes_of(other) == held
    gpusync.apply_to_model(model, open_chain(stream, 3), device=device)


# ---- updates that are dropped ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["prepared", "committed"])
def test_an_update_that_is_dropped_is_gone_at_once(
    stream: wire.Stream, device: str, when: str
) -> None:
    """No collection has to run for it: nothing of it is part of a cycle."""
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    before = wire.snapshot(stream.local)
    descriptors = open_descriptors()
    gc.disable()
    try:
        update = prepare(stream, model, device=device)
        if when == "committed":
            update.commit()
        gone = weakref.ref(update)
        assert any("staging" in name for name in state_files(stream.local))
        del update
        assert gone() is None
        check_nothing_is_left(stream)
        assert wire.snapshot(stream.local) == before
    finally:
        gc.enable()
    assert open_descriptors() == descriptors
    check_next_updates(stream, model, device)


def test_an_update_that_is_dropped_leaves_another_ones_staging_alone(stream: wire.Stream) -> None:
    one, other = model_at(stream, 1), model_at(stream, 1)
    dropped = prepare(stream, one)
    kept = prepare(stream, other)
    del dropped
    assert any("staging" in name for name in state_files(stream.local))
    kept.commit()
    report = kept.finish()
    assert report.pull is not None and report.pull.swap == "staged"
    check_at(stream, 2)


def test_a_swap_that_was_interrupted_is_not_taken_for_a_dropped_update(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its staged files are what the next pull resumes from."""
    model = model_at(stream, 1)
    update = prepare(stream, model)
    update.commit()
    with monkeypatch.context() as patch:
        renamed = []
        real = writeback.fsio.rename

        def rename(source: Any, target: Any) -> None:
            if target.suffix == ".safetensors":
                renamed.append(target)
                raise KeyboardInterrupt
            real(source, target)

        patch.setattr(writeback.fsio, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            update.finish()
    assert renamed
    del update
    gc.collect()
    assert any("staging" in name for name in state_files(stream.local))
    stream.source.rename(stream.root / "gone")
    stream.source.mkdir()
    report = gpusync.pull(stream.local, stream.base, stream.source, 2)
    assert report.recovered == "resumed"
    check_at(stream, 2)


# ---- processes ------------------------------------------------------------------------------------------

PREPARES = """
import json, os, sys, gpusync
from pathlib import Path
from tests import live
from tests.crash.harness import state_files
local, base, source, device, how = sys.argv[1:]
model = live.model_from(Path(local))
update = gpusync.prepare(
    model, gpusync.open_chain(source, 2, checkpoint=local, base_dir=base), device=device
)
staged = any("staging" in name for name in state_files(Path(local)))
if how == "exits":
    print(json.dumps(staged))
    sys.exit(0)
pid = os.fork()
if pid == 0:
    if how == "fork discards":
        update.discard()
    elif how == "fork commits":
        update.commit()
        update.finish()
    elif how == "fork drops":
        del update
        sys.exit(0)  # its exit handlers run, too
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
if how in ("fork exits", "fork drops"):
    assert any("staging" in name for name in state_files(Path(local)))
update.commit()
report = update.finish()
held = {name: data.hex() for name, data in live.bytes_of(model).items()}
print(json.dumps([report.disk_version, held]))
"""


def run_process(warm: Warm, stream: wire.Stream, device: str, how: str) -> Any:
    return warm.run(PREPARES, stream.local, stream.base, stream.source, device, how).json()


def test_a_process_that_ends_with_a_prepared_update_removes_what_it_staged(
    warm: Warm, stream: wire.Stream
) -> None:
    before = wire.snapshot(stream.local)
    assert run_process(warm, stream, "cpu", "exits") is True
    assert wire.snapshot(stream.local) == before
    check_nothing_is_left(stream)


@pytest.mark.parametrize("how", ["fork exits", "fork drops", "fork discards", "fork commits"])
def test_a_fork_after_prepare_does_not_disturb_the_update(
    warm: Warm, stream: wire.Stream, device: str, how: str
) -> None:
    """A data loader's worker, say. The child has the model's memory for itself; the folder is one."""
    disk_version, held = run_process(warm, stream, device, how)
    assert disk_version == 2
    assert held == {name: data.hex() for name, data in stream.states[2].items()}
    check_at(stream, 2)
    check_nothing_is_left(stream)


def test_a_model_in_shared_memory_is_updated_for_all_who_map_it(
    stream: wire.Stream, device: str
) -> None:
    model = model_at(stream, 1).share_memory()
    with torch.no_grad():
        check_next_updates(stream, model, device)
