"""Traces of loaders that do more than slice and copy: followed or refused, and never wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gpusync.placement.trace import Copy, trace_load
from tests.tracing import (
    BF16,
    Awkward,
    Load,
    Weights,
    check,
    entries_of,
    plain,
    random_tensors,
    trace_of,
)


def test_casts_are_refused() -> None:
    shapes = {"w": (6, 6)}
    old = random_tensors(shapes, 1)
    model = Awkward({"w": plain("a")}, torch.float32)
    trace = trace_load(model, entries_of(old), model.load_weights)
    assert trace.refused == {"w": "a: cast from torch.bfloat16 to torch.float32"}
    assert not model.a.any()


def test_views_of_other_dtypes_are_bytes() -> None:
    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.view(torch.uint8)[:, 2:4].copy_(w.view(torch.uint8)[:, 4:6])

    trace = trace_of({"w": load})
    assert trace.copies["w"] == (Copy("w", "a", 1, (6, 2), 4, (12, 1), 2, (12, 1)),)


def derived_by(change: Callable[[torch.Tensor], torch.Tensor]) -> Load:
    return lambda model, name, w: model.a.data.copy_(change(w))


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w + 1,
        lambda w: w.float().to(BF16),
        lambda w: torch.cat([w[:3], w[3:]]),
        lambda w: w[torch.arange(5, -1, -1)],
        lambda w: w.t().contiguous().view(36).view(6, 6),
        lambda w: torch.empty(6, 6, dtype=BF16).copy_(w),
        lambda w: torch.empty_like(w).copy_(w),
        lambda w: w.mul_(2),
        lambda w: w.clone().fill_(1),
    ],
    ids=["plus", "cast twice", "cat", "gather", "view", "staging", "staging like", "mul_", "fill_"],
)
def test_derived_values_are_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    trace = trace_of({"w": derived_by(change), "v": plain("b")})
    assert "derived" in trace.refused["w"]
    assert [*trace.copies] == ["v"]
    assert trace.passes == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.contiguous(),
        lambda w: w.clone(),
        lambda w: w.cpu(),
        lambda w: w.t().contiguous(),
        lambda w: w.unsqueeze(0).squeeze_(0).t_(),
        lambda w: nn.Parameter(w, requires_grad=False).data,
        lambda w: w.reshape(2, 3, 6).permute(1, 0, 2).reshape(6, 6),
    ],
    ids=["contiguous", "clone", "cpu", "t contiguous", "in-place views", "parameter", "permute"],
)
def test_the_same_bytes_elsewhere_are_followed_or_refused(
    change: Callable[[torch.Tensor], torch.Tensor], request: pytest.FixtureRequest
) -> None:
    trace = trace_of({"w": derived_by(change)})
    assert ("w" in trace.copies) is (request.node.callspec.id != "permute")


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w[0, 0].item(),
        lambda w: bool((w == w).all()),
        lambda w: w.float().numpy(),
        lambda w: torch.equal(w, w),
        lambda w: w.nonzero(),
        lambda w: w[w > 0],
        lambda w: w.tolist(),
        lambda w: w.data_ptr() + 1,
    ],
    ids=["item", "bool", "numpy", "equal", "nonzero", "mask", "tolist", "data_ptr"],
)
def test_tensors_whose_values_are_read_are_refused(read: Callable[[torch.Tensor], Any]) -> None:
    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        read(w)
        model.a.data.copy_(w)

    trace = trace_of({"u": plain("c"), "w": load, "v": plain("b")})
    assert [*trace.refused] == ["w"]
    assert trace.passes == 2


def test_an_error_that_the_loader_catches_is_refused_all_the_same() -> None:
    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        try:
            model.b.data.fill_(float(w[0, 0]))
        except RuntimeError:
            model.a.data.copy_(w)

    trace = trace_of({"w": load})
    assert "item" in trace.refused["w"]
    assert trace.passes == 1


def test_errors_in_python_are_blamed_on_the_tensor_at_hand() -> None:
    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        if w.device.type == "meta":
            raise KeyError(name)

    trace = trace_of({"u": plain("a"), "w": load, "v": plain("b")})
    assert trace.refused == {"w": "the loader raised KeyError: 'w'"}


def test_many_tensors_of_a_kind_that_raise_take_few_passes() -> None:
    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.inner.scale.fill_(w.view(-1)[0].item())  # type: ignore[operator, union-attr]

    trace = trace_of({**{f"layers.{n}.scale": load for n in range(50)}, "w": plain("a")})
    assert len(trace.refused) == 50
    assert [*trace.copies] == ["w"]
    assert trace.passes == 3


def test_loaders_that_collect_everything_first() -> None:
    class Collecting(Awkward):
        def load_weights(self, weights: Weights) -> None:
            tensors = dict(weights)
            for name in sorted(tensors):
                self.loads[name](self, name, tensors.pop(name))

    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        if w.is_meta:
            raise ValueError("no")

    def item(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.b.data.fill_(w[0, 0].item())

    loads = {"z": plain("c"), "item": item, "bad": load, "w": plain("a")}
    trace = check(lambda: Collecting(loads), dict.fromkeys(loads, (6, 6)))
    assert [*trace.copies] == ["z", "w"]
    assert trace.passes == 3


def test_an_error_that_stays_refuses_all() -> None:
    class Strict(Awkward):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            if self.a.shape[0] == 6:
                raise ValueError("not all were there")

    model = Strict({"w": plain("a"), "v": plain("b")})
    entries = entries_of(random_tensors({"w": (6, 6), "v": (6, 6)}, 0))
    trace = trace_load(model, entries, model.load_weights)
    assert [*trace.refused] == ["w", "v"]
    assert trace.passes == 2


@pytest.mark.parametrize("times", [1, 2])
def test_two_names_to_one_place(times: int) -> None:
    loads = {"w": plain("a"), "v": plain("b")}
    loads["dup"] = plain("a") if times == 2 else plain("c")
    trace = trace_of(loads)
    assert ("w" in trace.refused) is ("dup" in trace.refused) is (times == 2)
    assert "v" in trace.copies


def test_one_name_to_one_place_twice() -> None:
    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.copy_(w)
        model.a.data[3:].copy_(w[3:])

    assert trace_of({"w": load}).refused == {"w": "the loader writes it to one place twice"}


def test_partial_overlap_is_refused_and_interleaving_is_not() -> None:
    def rows(begin: int, step: int) -> Load:
        return lambda model, name, w: model.long.data[begin::step][:6].copy_(w)

    meet = trace_of({"w": rows(0, 1), "v": rows(5, 1)})
    assert [*meet.refused] == ["w", "v"]
    assert not trace_of({"w": rows(0, 2), "v": rows(1, 2)}).refused


def test_fills_before_a_copy_are_fine_and_after_it_are_not() -> None:
    def before(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.zero_()
        model.a.data.copy_(w)

    def after(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.b.data.copy_(w)
        model.b.data[5:].mul_(0)

    def composed(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.c.data.copy_(w)
        model.c.data.copy_(-torch.exp(model.c.data))

    trace = trace_of({"w": before, "v": after, "x": composed})
    assert [*trace.copies] == ["w"]
    assert trace.refused["v"] == "written over afterwards by aten.mul_"
    assert trace.fills == {"a": ("aten.zero_",), "b": ("aten.mul_",)}


def test_live_memory_as_an_array_is_refused() -> None:
    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.view(torch.int16).numpy()[:] = 3

    trace = trace_of({"w": load, "v": plain("b")})
    assert trace.refused == {"w": "the loader calls numpy() on a live tensor"}


def test_broadcasts_and_overlapping_destinations_are_refused() -> None:
    def broadcast(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.copy_(w[0])

    def expand(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.b.data.copy_(w[:1].expand(6, 6))

    def unfold(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.long.data.view(-1)[:24].view(8, 3).copy_(w.view(-1)[:10].unfold(0, 3, 1))

    trace = trace_of({"w": broadcast, "x": expand, "y": unfold})
    assert [*trace.refused] == ["w", "x", "y"]

    def overlapping(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.as_strided((5, 6), (1, 1)).copy_(w[:5])

    model = Awkward({"w": overlapping})  # a real load of it is undefined
    trace = trace_load(model, entries_of(random_tensors({"w": (6, 6)}, 0)), model.load_weights)
    assert trace.refused == {"w": "a: its destination overlaps itself"}


def test_other_writes_of_checkpoint_tensors_are_refused() -> None:
    def fancy(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data[torch.arange(6)] = w

    def add(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.b.data.zero_().add_(w)

    trace = trace_of({"w": fancy, "x": add})
    assert [*trace.refused] == ["w", "x"]


def test_shapes_and_dtypes_may_be_read_and_the_iterator_asked_again() -> None:
    class Twice(Awkward):
        def load_weights(self, weights: Weights) -> None:
            for name, w in weights:
                if w.dtype == BF16 and w.dim() == 2 and w.numel() == 36 and len(w) == 6:
                    self.loads[name](self, name, w)
            assert [*weights] == []

    shapes = {"w": (6, 6), "skipped": (6,)}
    trace = check(lambda: Twice({"w": plain("a")}), shapes)
    assert trace.dropped == ("skipped",)


def test_loaders_that_are_generators_are_run_to_their_end() -> None:
    class Lazy(Awkward):
        def load_lazily(self, weights: Weights) -> Iterator[str]:
            for name, w in weights:
                self.loads[name](self, name, w)
                yield name

    model = Lazy({"w": plain("a"), "v": plain("b")})
    entries = entries_of(random_tensors({"w": (6, 6), "v": (6, 6)}, 0))
    assert [*trace_load(model, entries, model.load_lazily).copies] == ["w", "v"]


def test_tensors_that_the_loader_never_asks_for_are_refused() -> None:
    class Early(Awkward):
        def load_weights(self, weights: Weights) -> None:
            name, w = next(iter(weights))
            self.loads[name](self, name, w)

    model = Early({"w": plain("a")})
    entries = entries_of(random_tensors({"w": (6, 6), "v": (6, 6)}, 0))
    trace = trace_load(model, entries, model.load_weights)
    assert trace.refused == {"v": "the loader stopped before it"}
