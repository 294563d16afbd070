"""A live module and its folder: each knows where it stands, and neither is taken back or half moved."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import gpusync
from gpusync.errors import (
    DigestMismatchError,
    GpuSyncError,
    PlacementError,
)
from tests import live, wire
from tests.driver import check_at, model_at, open_chain, pull, refused, update


@pytest.fixture
def two(stream: wire.Stream) -> wire.Stream:
    """A host at version 1, with version 2 published."""
    stream.delta()
    pull(stream, 1)
    stream.delta()
    return stream


# ---- where each side stands ----------------------------------------------------------------------------


def test_a_module_that_was_never_attached_has_no_version(two: wire.Stream) -> None:
    model = model_at(two, 1)
    assert gpusync.live_version(model) is None
    report = gpusync.attach(model, two.local)
    assert (report.version, gpusync.live_version(model)) == (1, 1)
    assert set(report.placed) == set(two.states[1])
    assert report.placed_bytes == sum(map(len, two.states[1].values()))
    assert report.unmanaged == ()


def test_parameters_that_no_tensor_feeds_are_left_alone(two: wire.Stream) -> None:
    model = model_at(two, 1)
    model.register_buffer("inv_freq", torch.arange(5, dtype=torch.float32))
    assert gpusync.attach(model, two.local).unmanaged == ("inv_freq",)
    update(two, model, 2)
    assert model.get_buffer("inv_freq").tolist() == [0, 1, 2, 3, 4]
    assert {**live.bytes_of(model), "inv_freq": b""} == {**two.states[2], "inv_freq": b""}


def test_a_module_at_the_target_lets_a_folder_that_is_behind_follow(two: wire.Stream) -> None:
    model = model_at(two, 1)
    update(two, model, 2, write_back="none")
    check_at(two, 1)
    report = update(two, model, 2)
    assert (report.outcome, report.disk_version) == ("unchanged", 2)
    assert live.bytes_of(model) == two.states[2]
    check_at(two, 2)


def test_a_folder_that_moved_on_meanwhile_is_not_taken_back(two: wire.Stream) -> None:
    model = model_at(two, 1)
    pending = gpusync.prepare(model, open_chain(two, 2), device="cpu")
    two.delta(("a.weight", "c.weight"))
    pull(two, 3)
    pending.commit()
    report = pending.finish()
    assert (report.to_version, report.disk_version) == (2, 3)
    assert live.bytes_of(model) == two.states[2]
    check_at(two, 3)
    update(two, model, 3)
    assert live.bytes_of(model) == two.states[3]


def test_discarding_after_another_pull_leaves_its_folder_alone(two: wire.Stream) -> None:
    model = model_at(two, 1)
    pending = gpusync.prepare(model, open_chain(two, 2), device="cpu")
    pull(two, 2)
    pending.discard()
    check_at(two, 2)
    assert gpusync.verify(two.local).ok
    assert live.bytes_of(model) == two.states[1]


def test_two_modules_share_one_folder(two: wire.Stream) -> None:
    one, other = model_at(two, 1), model_at(two, 1)
    first = gpusync.prepare(one, open_chain(two, 2), device="cpu")
    second = gpusync.prepare(other, open_chain(two, 2), device="cpu")
    for pending in (first, second):
        pending.commit()
    for pending in (first, second):
        assert pending.finish().disk_version == 2
    assert live.bytes_of(one) == live.bytes_of(other) == two.states[2]
    check_at(two, 2)


def test_a_second_update_of_a_prepared_module_is_refused_until_the_first_ends(
    two: wire.Stream,
) -> None:
    model = model_at(two, 1)
    pending = gpusync.prepare(model, open_chain(two, 2), device="cpu")
    with refused(two, GpuSyncError, model=model):
        gpusync.prepare(model, open_chain(two, 2), device="cpu")
    pending.discard()
    update(two, model, 2)
    assert live.bytes_of(model) == two.states[2]


def test_a_background_write_back_follows_and_a_newer_one_covers_it(two: wire.Stream) -> None:
    two.delta()
    model = model_at(two, 1)
    for version in (2, 3):
        update(two, model, version, write_back="background")
        assert live.bytes_of(model) == two.states[version]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (two.local / wire.MARKER).exists() and wire.marker_version(two.local) == 3:
            break
        time.sleep(0.02)
    pull(two, 3)  # waits for the worker's lock
    check_at(two, 3)


def test_a_live_reset_goes_back_to_the_base(two: wire.Stream) -> None:
    model = model_at(two, 1)
    update(two, model, 2)
    report = update(two, model, 0)
    assert (report.outcome, report.to_version, report.disk_version) == ("reset", 0, 0)
    assert live.bytes_of(model) == two.states[0]
    check_at(two, 0)
    update(two, model, 2)
    assert live.bytes_of(model) == two.states[2]
    check_at(two, 2)


def test_a_progress_callback_that_raises_stops_prepare_on_both_sides(two: wire.Stream) -> None:
    class StopIt(Exception):
        pass

    def stop(event: gpusync.Progress) -> None:
        raise StopIt

    model = model_at(two, 1)
    before = wire.snapshot(two.local)
    with pytest.raises(StopIt):
        gpusync.prepare(model, open_chain(two, 2), device="cpu", progress=stop)
    assert live.bytes_of(model) == two.states[1]
    assert wire.snapshot(two.local) == before
    update(two, model, 2)
    check_at(two, 2)


# ---- what cannot be updated in place -----------------------------------------------------------------------


def images_of(model: nn.Module) -> dict[str, bytes]:
    """Return the bytes of every tensor that has any, whatever its strides."""
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
        if tensor.device.type != "meta"
    }


def bend_missing(model: nn.Module) -> None:
    del model.get_submodule("a").weight


def bend_cast(model: nn.Module) -> None:
    owner = model.get_submodule("a")
    owner.weight = nn.Parameter(owner.weight.float(), requires_grad=False)


def bend_transposed(model: nn.Module) -> None:
    owner = model.get_submodule("a")
    owner.weight = nn.Parameter(owner.weight.t().contiguous().t(), requires_grad=False)


def bend_shape(model: nn.Module) -> None:
    owner = model.get_submodule("a")
    owner.weight = nn.Parameter(owner.weight.reshape(64, 32), requires_grad=False)


def bend_bytes(model: nn.Module) -> None:
    owner = model.get_submodule("a")
    owner.weight.view(torch.uint8)[-1, -1] ^= 1


def bend_meta(model: nn.Module) -> None:
    owner = model.get_submodule("a")
    owner.weight = nn.Parameter(owner.weight.to("meta"), requires_grad=False)


def bend_overlap(model: nn.Module) -> None:
    owner = model.get_submodule("a")
    room = torch.zeros(4096 + 2048, dtype=torch.uint8)
    room[:4096] = owner.weight.view(torch.uint8).reshape(-1)
    owner.weight = nn.Parameter(room[:4096].view(torch.bfloat16).view(32, 64), requires_grad=False)
    lut = model.get_submodule("b")
    lut.lut = room[4000 : 4000 + 2049]


@pytest.mark.parametrize(
    "bend",
    [bend_missing, bend_cast, bend_transposed, bend_shape, bend_bytes, bend_meta, bend_overlap],
    ids=lambda bend: bend.__name__.removeprefix("bend_"),
)
def test_a_parameter_that_is_no_image_of_its_tensor_is_refused_with_its_name_and_reason(
    two: wire.Stream, bend
) -> None:
    model = model_at(two, 1)
    bend(model)
    held = images_of(model)
    before = wire.snapshot(two.local)
    with pytest.raises(PlacementError) as caught:
        update(two, model, 2)
    assert set(caught.value.reasons) & {"a.weight", "b.lut"}
    assert all(len(reason) > 5 for reason in caught.value.reasons.values())
    assert wire.snapshot(two.local) == before
    assert images_of(model) == held


def test_a_parameter_that_moved_between_prepare_and_commit_is_noticed(two: wire.Stream) -> None:
    model = model_at(two, 1)
    pending = gpusync.prepare(model, open_chain(two, 2), device="cpu")
    owner = model.get_submodule("a")
    owner.weight = nn.Parameter(owner.weight.clone(), requires_grad=False)
    with refused(two, PlacementError, text=r"a\.weight", model=model):
        pending.commit()
    update(two, model, 2)
    assert live.bytes_of(model) == two.states[2]


def test_a_parameter_that_moved_between_two_updates_is_proven_anew(two: wire.Stream) -> None:
    model = model_at(two, 1)
    update(two, model, 1)
    owner = model.get_submodule("a")
    owner.weight = nn.Parameter(owner.weight.clone(), requires_grad=False)
    update(two, model, 2)
    assert live.bytes_of(model) == two.states[2]
    two.delta()
    owner.weight = nn.Parameter(torch.zeros_like(owner.weight), requires_grad=False)
    with refused(two, GpuSyncError, text=r"a\.weight", model=model):
        update(two, model, 3)


def test_a_module_whose_bytes_drifted_after_it_was_attached_is_refused(two: wire.Stream) -> None:
    model = model_at(two, 1)
    update(two, model, 1)
    model.get_submodule("a").weight.view(torch.uint8)[0, 0] ^= 1
    with refused(two, DigestMismatchError, text=r"a\.weight", model=model):
        update(two, model, 2)


TWINS = (
    wire.Row(wire.FIRST, "embed.weight", "BF16", (16, 8), 256),
    wire.Row(wire.SECOND, "head.weight", "BF16", (16, 8), 256),
)


@pytest.mark.parametrize("agree", [True, False])
def test_two_names_of_one_storage_must_agree_and_get_their_delta_once(
    tmp_path: Path, agree: bool
) -> None:
    stream = wire.Stream(tmp_path / "twins", TWINS)
    same = stream.states[0]["embed.weight"]
    stream.states[0] = dict.fromkeys(stream.states[0], same)
    shutil.rmtree(stream.base)
    stream.write_checkpoint(stream.base, stream.states[0])
    new = stream.changed(("embed.weight",), stream.states[0])
    if agree:
        new["head.weight"] = new["embed.weight"]
    stream.delta(new=new)
    pull(stream, 0)
    model = model_at(stream, 0)
    model.get_submodule("head").weight = model.get_submodule("embed").weight
    if agree:
        update(stream, model, 1)
        assert live.bytes_of(model)["embed.weight"] == new["embed.weight"]
        check_at(stream, 1)
    else:
        with refused(stream, GpuSyncError, text="weight", model=model):
            update(stream, model, 1)


def test_a_full_version_of_another_shape_reaches_the_folder_but_not_the_module(
    two: wire.Stream,
) -> None:
    model = model_at(two, 1)
    two.hide(2)
    two.last = 1
    other = tuple(
        row if row.name != "a.weight" else wire.Row(row.file, row.name, "F32", (32, 32), 4096)
        for row in wire.LAYOUT
    )
    two.layout = (*other, wire.Row(wire.SECOND, "new.weight", "F32", (2,), 8))
    two.states[1] = {**two.states[1], "new.weight": bytes(8)}
    two.full()
    held = live.bytes_of(model)
    before = wire.snapshot(two.local)
    with pytest.raises(PlacementError):
        update(two, model, 2)
    assert live.bytes_of(model) == held
    assert wire.snapshot(two.local) == before
    pull(two, 2)
    check_at(two, 2)


def test_a_local_folder_that_is_damaged_heals_while_the_module_is_updated(two: wire.Stream) -> None:
    model = model_at(two, 1)
    gpusync.attach(model, two.local)
    wire.flip_tensor_byte(two.local, "a.weight")
    report = update(two, model, 2)
    assert live.bytes_of(model) == two.states[2]
    check_at(two, 2)
    assert report.pull is not None
    assert report.pull.tensors_healed == ("a.weight",)


def test_an_update_of_a_module_whose_folder_another_run_took_over_is_refused(
    two: wire.Stream,
) -> None:
    model = model_at(two, 1)
    update(two, model, 2)
    shutil.rmtree(two.local)
    two.republish(1)
    two.republish(2, ("c.weight",))
    pull(two, 2)
    two.last = 2
    two.delta()
    held = live.bytes_of(model)
    with pytest.raises(GpuSyncError):
        update(two, model, 3)
    assert live.bytes_of(model) == held
    assert json.loads((two.local / wire.MARKER).read_text())["version"] == "000002"


def test_a_fresh_folder_is_seeded_along_with_the_first_update(stream: wire.Stream) -> None:
    stream.delta()
    stream.delta()
    model = model_at(stream, 0)
    report = update(stream, model, 2)
    assert (report.from_version, report.to_version, report.disk_version) == (0, 2, 2)
    assert live.bytes_of(model) == stream.states[2]
    check_at(stream, 2)


def test_one_chain_serves_two_modules_and_the_folder(two: wire.Stream) -> None:
    one, other = model_at(two, 1), model_at(two, 1)
    for model in (one, other):
        gpusync.attach(model, two.local)
    chain = open_chain(two, 2)
    for model in (one, other):
        assert gpusync.apply_to_model(model, chain, device="cpu").to_version == 2
        assert live.bytes_of(model) == two.states[2]
    check_at(two, 2)


def test_a_chain_opened_before_its_versions_were_pruned_still_applies_or_says_so(
    two: wire.Stream,
) -> None:
    model = model_at(two, 1)
    chain = open_chain(two, 2)
    shutil.rmtree(two.folder(2))
    before = wire.snapshot(two.local)
    try:
        gpusync.apply_to_model(model, chain, device="cpu")
    except GpuSyncError:
        assert live.bytes_of(model) == two.states[1]
        assert wire.snapshot(two.local) == before
    else:
        assert live.bytes_of(model) == two.states[2]
        check_at(two, 2)


def test_a_version_replaced_after_its_chain_was_opened_is_never_mixed(two: wire.Stream) -> None:
    model = model_at(two, 1)
    chain = open_chain(two, 2)
    right = two.states[2]
    two.republish(2, ("a.weight", "c.weight"))
    before = wire.snapshot(two.local)
    try:
        gpusync.apply_to_model(model, chain, device="cpu")
    except GpuSyncError:
        assert live.bytes_of(model) == two.states[1]
        assert wire.snapshot(two.local) == before
    else:
        assert live.bytes_of(model) in (right, two.states[2])
        assert wire.read_tensors(two.local) == live.bytes_of(model)
    fresh = model_at(two, 1)
    shutil.rmtree(two.local)
    pull(two, 1)
    update(two, fresh, 2)
    assert live.bytes_of(fresh) == two.states[2]
    check_at(two, 2)
