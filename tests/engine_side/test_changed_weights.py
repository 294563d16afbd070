"""Weights that an engine changes, takes away, moves or ties while an update is under way, or before one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gpusync
from gpusync.errors import GpuSyncError, PlacementError
from tests import live, wire
from tests.driver import model_at, open_chain, pull
from tests.engine_side.scene import (
    check_next_updates,
    check_nothing_is_left,
    nothing_stays_open,
    prepare,
)

Undo = Callable[[], None]


def _merge(model: nn.Module) -> Undo:
    """A LoRA merge: every float weight moves, in place."""
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for tensor in model.parameters():
        if tensor.element_size() > 1:
            tensor.data += 0.5 + tensor.data.abs()

    def undo() -> None:
        for name, tensor in model.named_parameters():
            tensor.data.copy_(before[name])

    return undo


def _sleep(model: nn.Module) -> Undo:
    """Every weight goes to a device without memory, and comes back elsewhere."""
    before = {name: tensor.detach().clone() for name, tensor in live_named(model).items()}
    model.to("meta")

    def wake() -> None:
        for name, tensor in before.items():
            owner, leaf = owner_of(model, name)
            if isinstance(live_named(model)[name], nn.Parameter):
                setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
            else:
                setattr(owner, leaf, tensor)

    return wake


def _free(model: nn.Module) -> Undo:
    weight = model.get_parameter("a.weight")
    before = weight.data
    weight.data = torch.empty(0, dtype=weight.dtype)

    def undo() -> None:
        weight.data = before.clone()

    return undo


def _resize(model: nn.Module) -> Undo:
    weight = model.get_parameter("a.weight")
    before = weight.data
    weight.data = before[:16]

    def undo() -> None:
        weight.data = before

    return undo


def _remove(model: nn.Module) -> Undo:
    owner = model.get_submodule("a")
    weight = owner.weight
    del owner.weight

    def undo() -> None:
        owner.weight = weight

    return undo


def _cast(model: nn.Module) -> Undo:
    weight = model.get_parameter("a.weight")
    before = weight.data
    weight.data = before.to(torch.float16)

    def undo() -> None:
        weight.data = before

    return undo


def _move(model: nn.Module) -> Undo:
    weight = model.get_parameter("a.weight")
    weight.data = weight.data.clone()
    return lambda: None


def _replace(model: nn.Module) -> Undo:
    owner = model.get_submodule("a")
    owner.weight = nn.Parameter(owner.weight.detach().clone(), requires_grad=False)
    return lambda: None


def _replace_module(model: nn.Module) -> Undo:
    owner = nn.Module()
    owner.weight = nn.Parameter(
        model.get_parameter("a.weight").detach().clone(), requires_grad=False
    )
    model.a = owner
    return lambda: None


def _add(model: nn.Module) -> Undo:
    model.get_submodule("a").register_parameter("lora", nn.Parameter(torch.zeros(3)))
    return lambda: None


def live_named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def images(model: nn.Module) -> dict[str, bytes]:
    """Return the bytes of every tensor that has some."""
    return {
        name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in live_named(model).items()
        if tensor.device.type == "cpu"
    }


HARMFUL = (_merge, _sleep, _free, _resize, _remove, _cast)
MOVING = (_move, _replace, _replace_module)


def names(change: Callable[[nn.Module], Undo]) -> str:
    return change.__name__.strip("_")


@pytest.mark.parametrize("change", [*HARMFUL, *MOVING], ids=names)
def test_a_change_between_prepare_and_commit_is_refused_and_the_next_update_is_right(
    stream: wire.Stream, device: str, change: Callable[[nn.Module], Undo]
) -> None:
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    before = wire.snapshot(stream.local)
    with nothing_stays_open():
        update = prepare(stream, model, device=device)
        undo = change(model)
        held = images(model)
        with pytest.raises(PlacementError):
            update.commit()
        del update
        assert images(model) == held
        assert wire.snapshot(stream.local) == before
        check_nothing_is_left(stream)
    assert gpusync.live_version(model) == 1
    undo()
    check_next_updates(stream, model, device)


@pytest.mark.parametrize("change", HARMFUL, ids=names)
def test_a_change_between_attach_and_update_is_refused_and_undone_it_is_right(
    stream: wire.Stream, device: str, change: Callable[[nn.Module], Undo]
) -> None:
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    before = wire.snapshot(stream.local)
    undo = change(model)
    held = images(model)
    with nothing_stays_open(), pytest.raises(GpuSyncError, match=r"\.(weight|scale)"):
        prepare(stream, model, device=device)
    assert images(model) == held
    assert wire.snapshot(stream.local) == before
    check_nothing_is_left(stream)
    undo()
    check_next_updates(stream, model, device)


@pytest.mark.parametrize("change", [*MOVING, _sleep], ids=names)
def test_weights_that_moved_between_attach_and_update_are_found_and_proven_again(
    stream: wire.Stream, device: str, change: Callable[[nn.Module], Undo]
) -> None:
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    change(model)()
    check_next_updates(stream, model, device)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_parameter_that_is_added_is_left_alone(
    stream: wire.Stream, device: str, when: str
) -> None:
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    if when == "before":
        _add(model)
    update = prepare(stream, model, device=device)
    if when == "between":
        _add(model)
    update.commit()
    update.finish()
    held = live.bytes_of(model)
    assert held.pop("a.lora") == bytes(12)
    assert held == stream.states[2]


# ---- ties -----------------------------------------------------------------------------------------------

TWINS = (
    wire.Row(wire.FIRST, "embed.weight", "BF16", (16, 8), 256),
    wire.Row(wire.SECOND, "head.weight", "BF16", (16, 8), 256),
    wire.Row(wire.SECOND, "norm.weight", "F32", (8,), 32),
)


def twins(root: Path, layout: tuple[wire.Row, ...], *, equal: bool) -> wire.Stream:
    """Versions 1 and 2, in which embedding and head, where both are there, stay equal or do not."""
    stream = wire.Stream(root / "twins", layout)
    if equal:
        stream.states[0]["head.weight"] = stream.states[0]["embed.weight"]
        stream.write_checkpoint(stream.base, stream.states[0])
    for _ in range(2):
        new = stream.changed([row.name for row in layout], stream.states[stream.last])
        if equal:
            new["head.weight"] = new["embed.weight"]
        stream.delta(new=new)
    pull(stream, 0)
    return stream


def tie(model: nn.Module) -> None:
    head = model.get_submodule("head") if hasattr(model, "head") else nn.Module()
    head.weight = model.get_parameter("embed.weight")
    model.head = head


def untie(model: nn.Module) -> None:
    head = model.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_head_untied_from_an_embedding_that_feeds_it_is_not_left_behind(
    fast_path: Path, device: str, when: str
) -> None:
    """The checkpoint has no head of its own: untied, nothing would ever update it."""
    stream = twins(fast_path, TWINS[::2], equal=False)
    model = model_at(stream, 0)
    tie(model)
    gpusync.attach(model, stream.local)
    if when == "before":
        untie(model)
        with pytest.raises(PlacementError, match=r"head\.weight: .*untied from embed\.weight"):
            prepare(stream, model, 1, device)
    else:
        update = prepare(stream, model, 1, device)
        untie(model)
        with pytest.raises(PlacementError, match=r"head\.weight: .*untied from embed\.weight"):
            update.commit()
    held = live.bytes_of(model)
    assert {name: held[name] for name in stream.states[0]} == stream.states[0]
    tie(model)
    for target in (1, 2):
        gpusync.apply_to_model(model, open_chain(stream, target), device=device)
        assert live.bytes_of(model) == stream.states[target]
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")


def test_an_alias_that_is_gone_is_missed_by_nobody(fast_path: Path, device: str) -> None:
    stream = twins(fast_path, TWINS[::2], equal=False)
    model = model_at(stream, 0)
    tie(model)
    gpusync.attach(model, stream.local)
    del model.head
    gpusync.apply_to_model(model, open_chain(stream, 1), device=device)
    assert live.bytes_of(model) == stream.states[1]


@pytest.mark.parametrize("equal", [True, False])
def test_names_tied_after_attach_follow_only_where_their_tensors_agree(
    fast_path: Path, device: str, equal: bool
) -> None:
    stream = twins(fast_path, TWINS, equal=equal)
    model = model_at(stream, 0)
    gpusync.attach(model, stream.local)
    tie(model)
    if equal:
        gpusync.apply_to_model(model, open_chain(stream, 2), device=device)
        assert live.bytes_of(model)["embed.weight"] == stream.states[2]["embed.weight"]
        untie(model)
        stream.delta(("norm.weight", "head.weight"))
        gpusync.apply_to_model(model, open_chain(stream, 3), device=device)
        assert live.bytes_of(model) == stream.states[3]
    else:
        held = live.bytes_of(model)
        with pytest.raises(PlacementError, match=r"head\.weight"):
            prepare(stream, model, 1, device)
        assert live.bytes_of(model) == held


# ---- models that go -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["prepare", "between"])
def test_a_model_that_is_collected_takes_its_update_with_it(
    stream: wire.Stream, device: str, when: str
) -> None:
    models = [model_at(stream, 1)]
    gpusync.attach(models[0], stream.local)
    before = wire.snapshot(stream.local)
    events = []

    def drop(event: gpusync.Progress) -> None:
        events.append(event)
        if when == "prepare":
            models.clear()

    with nothing_stays_open():
        update = gpusync.prepare(
            models.pop() if when == "prepare" else models[0],
            open_chain(stream, 2),
            device=device,
            progress=drop,
        )
        models.clear()
        gc.collect()
        assert events
        with pytest.raises(PlacementError, match="gone"):
            update.commit()
        del update
        assert wire.snapshot(stream.local) == before
        check_nothing_is_left(stream)
    check_next_updates(stream, model_at(stream, 1), device)


# ---- autograd's modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("built", ["inside", "outside"])
def test_autograd_modes_make_no_difference(
    stream: wire.Stream, device: str, mode: Callable[[], object], built: str
) -> None:
    if built == "inside":
        with mode():  # type: ignore[attr-defined]
            model = model_at(stream, 1)
    else:
        model = model_at(stream, 1)
        for tensor in model.parameters():
            tensor.requires_grad_(tensor.element_size() > 1)
    with mode():  # type: ignore[attr-defined]
        gpusync.attach(model, stream.local)
        update = prepare(stream, model, device=device)
    done = threading.Thread(target=update.commit)
    done.start()
    done.join()
    with mode():  # type: ignore[attr-defined]
        update.finish()
        gpusync.apply_to_model(model, open_chain(stream, 3), device=device)
        held = live.bytes_of(model)
    assert held == stream.states[3]


def test_a_default_device_makes_no_difference(stream: wire.Stream, device: str) -> None:
    """Engines build layers under ``with torch.device(...)``."""
    model = model_at(stream, 1)
    with torch.device("meta"):
        gpusync.attach(model, stream.local)
        check_next_updates_under_meta(stream, model, device)


def check_next_updates_under_meta(stream: wire.Stream, model: nn.Module, device: str) -> None:
    for target in (2, 3):
        gpusync.apply_to_model(model, open_chain(stream, target), device=device)
        assert live.bytes_of(model) == stream.states[target]
