"""Traces of the loaders of fused and sharded models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gpusync.placement.trace import Copy, trace_load
from gpusync.types import TensorEntry
from tests.tracing import (
    BF16,
    Awkward,
    Weights,
    check,
    entries_of,
    parameter,
    plain,
    random_tensors,
)

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB, EXPERTS = 16, 24, 8, 2, 2, 100, 4

SHAPES = {
    "q": (HEADS * HEAD, HIDDEN),
    "k": (KV_HEADS * HEAD, HIDDEN),
    "v": (KV_HEADS * HEAD, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "embed": (VOCAB, HIDDEN),
    "norm": (HIDDEN,),
    "conv": (INNER, HIDDEN),
    "even": (INNER, HIDDEN),
    "odd": (INNER, HIDDEN),
    "stack": (3, INNER, HIDDEN),
    "empty": (0, HIDDEN),
    "one": (),
    **{
        f"experts.{e}.{kind}": (HIDDEN, INNER) if kind == "w2" else (INNER, HIDDEN)
        for e in range(EXPERTS)
        for kind in ("w1", "w2", "w3")
    },
}


class Sharded(nn.Module):
    """One rank of a fused, sharded model; with ``expert_parallel`` the experts are spread over the ranks whole."""

    def __init__(self, rank: int, ranks: int, expert_parallel: bool) -> None:
        super().__init__()
        self.rank, self.ranks, self.expert_parallel = rank, ranks, expert_parallel
        self.nq, self.nkv = HEADS // ranks * HEAD, max(1, KV_HEADS // ranks) * HEAD
        self.qkv = parameter(self.nq + 2 * self.nkv, HIDDEN)
        self.o = parameter(HIDDEN, HEADS * HEAD // ranks)
        self.inner = INNER // ranks
        self.gate_up = parameter(2 * self.inner, HIDDEN)
        self.down = parameter(HIDDEN, self.inner)
        self.embed = parameter(-(-VOCAB // 64) * 64 // ranks, HIDDEN)
        self.tied = nn.Module()
        self.tied.weight = self.embed
        self.register_buffer("norm", torch.zeros(HIDDEN, dtype=BF16))
        self.conv = parameter(HIDDEN, INNER)
        self.mixed = parameter(2 * INNER, HIDDEN)
        self.stack = parameter(3, HIDDEN, INNER)
        self.empty = parameter(0, HIDDEN)
        self.one = parameter(1)
        here = EXPERTS // ranks if expert_parallel else EXPERTS
        self.expert_inner = INNER if expert_parallel else self.inner
        self.first_expert = rank * here if expert_parallel else 0
        self.w13 = parameter(here, 2 * self.expert_inner, HIDDEN)
        self.w2 = parameter(here, HIDDEN, self.expert_inner)
        self.w13.loader = self.load_expert  # type: ignore[attr-defined]
        self.loaded: set[str] = set()

    def load_weights(self, weights: Weights) -> set[str]:
        for name, w in weights:
            if name in ("q", "k", "v"):
                self.load_qkv(name, w)
            elif name.startswith("experts."):
                _, number, kind = name.split(".")
                self.w13.loader(int(number), kind, w)  # type: ignore[attr-defined]
            else:
                getattr(self, f"load_{name}")(w)
            self.loaded.add(name)
        return self.loaded

    def load_qkv(self, name: str, w: torch.Tensor) -> None:
        begin = {"q": 0, "k": self.nq, "v": self.nq + self.nkv}[name]
        size = self.nq if name == "q" else self.nkv
        at = self.rank if name == "q" else self.rank // max(1, self.ranks // KV_HEADS)
        target, w = self.qkv.data.narrow(0, begin, size), w.narrow(0, at * size, size)
        assert target.shape == w.shape
        target.copy_(w)

    def load_o(self, w: torch.Tensor) -> None:
        self.o.data.copy_(w.chunk(self.ranks, 1)[self.rank])

    def load_gate(self, w: torch.Tensor) -> None:
        self.gate_up.data[: self.inner].copy_(w[self.rank * self.inner :][: self.inner])

    def load_up(self, w: torch.Tensor) -> None:
        self.gate_up.data[self.inner :] = w.split(self.inner)[self.rank]

    def load_down(self, w: torch.Tensor) -> None:
        self.down.data.copy_(w.narrow(1, self.rank * self.inner, self.inner))

    def load_embed(self, w: torch.Tensor) -> None:
        rows = self.embed.shape[0]
        w = w[self.rank * rows : (self.rank + 1) * rows]
        self.tied.weight[: w.shape[0]].data.copy_(w)  # type: ignore[index, union-attr]
        self.embed[w.shape[0] :].data.fill_(0)

    def load_norm(self, w: torch.Tensor) -> None:
        self.norm.copy_(w.to("cpu"))  # type: ignore[operator]

    def load_conv(self, w: torch.Tensor) -> None:
        self.conv.copy_(w.t().contiguous())

    def load_even(self, w: torch.Tensor) -> None:
        self.mixed.data[::2].copy_(w)

    def load_odd(self, w: torch.Tensor) -> None:
        self.mixed.data[1::2].copy_(w)

    def load_stack(self, w: torch.Tensor) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda at: self.stack[at].copy_(w[at].transpose(0, 1)), range(3)))

    def load_empty(self, w: torch.Tensor) -> None:
        self.empty.data.copy_(w)

    def load_one(self, w: torch.Tensor) -> None:
        self.one.data.copy_(w)

    def load_expert(self, number: int, kind: str, w: torch.Tensor) -> None:
        at = number - self.first_expert
        if not 0 <= at < self.w13.shape[0]:
            return
        begin = 0 if self.expert_parallel else self.rank * self.inner
        size = self.expert_inner
        if kind == "w2":
            self.w2.data[at].copy_(w.narrow(1, begin, size))
        else:
            target = self.w13.data[at].narrow(0, 0 if kind == "w1" else size, size)
            target.copy_(w.narrow(0, begin, size))


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_of_a_sharded_model(ranks: int, expert_parallel: bool) -> None:
    dropped: list[str] = []
    for rank in range(ranks):
        trace = check(lambda rank=rank: Sharded(rank, ranks, expert_parallel), SHAPES)  # type: ignore[misc]
        assert not trace.refused
        assert trace.passes == 1
        dropped += trace.dropped
        if trace.fills:
            assert trace.fills == {"embed": ("aten.fill_",)}
    experts = 3 * EXPERTS if expert_parallel else 0
    assert len(dropped) == experts * (ranks - 1)


def test_forms_of_copies() -> None:
    trace = trace_load(
        (model := Sharded(1, 2, False)), entries_of(random_tensors(SHAPES, 0)), model.load_weights
    )
    row = HIDDEN * 2
    (gate,) = trace.copies["gate"]
    assert gate == Copy("gate", "gate_up", 2, (12 * row,), 12 * row, (1,), 0, (1,))
    (down,) = trace.copies["down"]
    assert down == Copy("down", "down", 2, (HIDDEN, 24), 24, (48, 1), 0, (24, 1))
    (odd,) = trace.copies["odd"]
    assert odd == Copy("odd", "mixed", 2, (INNER, row), 0, (row, 1), row, (2 * row, 1))
    (conv,) = trace.copies["conv"]
    assert conv == Copy("conv", "conv", 2, (INNER, HIDDEN, 2), 0, (row, 2, 1), 0, (2, 48, 1))
    (empty,) = trace.copies["empty"]
    assert empty.shape == (0,)
    (one,) = trace.copies["one"]
    assert one == Copy("one", "one", 2, (2,), 0, (1,), 0, (1,))
    assert [copy.shape for copy in trace.copies["stack"]] == [(INNER, HIDDEN, 2)] * 3


class Recursive(nn.Module):
    """Sorts names by prefix and hands each group, unread, to the child of that name; generators all the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({n: nn.Linear(3, 5, dtype=BF16) for n in ("x", "y")})
        self.norm = nn.LayerNorm(4, dtype=BF16)

    def load_weights(self, weights: Weights) -> set[str]:
        return set(self.load_module(self, "", ((name.split("."), w) for name, w in weights)))

    def load_module(
        self, module: nn.Module, prefix: str, weights: Iterable[tuple[list[str], torch.Tensor]]
    ) -> Iterator[str]:
        for head, group in itertools.groupby(weights, key=lambda item: item[0][0]):
            rest = ((name[1:], w) for name, w in group)
            if head in dict(module.named_children()):
                yield from self.load_module(module.get_submodule(head), f"{prefix}{head}.", rest)
            elif head in dict(module.named_parameters(recurse=False)):
                for _, w in rest:
                    module.get_parameter(head).data.copy_(w)
                    yield prefix + head


def test_recursive_loaders() -> None:
    shapes = {name: tuple(p.shape) for name, p in Recursive().named_parameters()}
    trace = check(Recursive, {**shapes, "outer.z.weight": (5, 3), "head.weight": (5, 3)})
    assert [*trace.copies] == [*shapes]
    assert trace.dropped == ("outer.z.weight", "head.weight")


def test_parameters_that_share_a_storage() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.zeros(10, 4, dtype=BF16)
            self.first = nn.Parameter(flat[:4], requires_grad=False)
            self.second = nn.Parameter(flat[4:], requires_grad=False)
            self.also_second = self.second

        def load_weights(self, weights: Weights) -> None:
            for name, w in weights:
                getattr(self, name).data.copy_(w)

    trace = check(Flat, {"first": (4, 4), "also_second": (6, 4)})
    assert trace.copies["first"] == (Copy("first", "first", 2, (32,), 0, (1,), 0, (1,)),)
    assert trace.copies["also_second"] == (
        Copy("also_second", "second", 2, (48,), 0, (1,), 32, (1,)),
    )


def test_inference_tensors() -> None:
    with torch.inference_mode():
        model = Sharded(1, 4, False)
        assert model.qkv.is_inference()
    trace = trace_load(model, entries_of(random_tensors(SHAPES, 0)), model.load_weights)
    other = Sharded(1, 4, False)
    expected = trace_load(other, entries_of(random_tensors(SHAPES, 0)), other.load_weights)
    assert trace == expected


def test_live_tensors_by_name() -> None:
    model = Awkward({"w": plain("a"), "v": plain("b")})
    entries = entries_of(random_tensors({"w": (6, 6), "v": (6, 6)}, 0))
    trace = trace_load(
        {"x": model.a.data}, entries, lambda weights: [model.a.copy_(w) for _, w in weights][:0]
    )
    assert [*trace.refused] == ["w", "v"]
    trace = trace_load({"x": model.a.data, "y": model.b}, entries, model.load_weights)
    assert [copies[0].live_name for copies in trace.copies.values()] == ["x", "y"]
    assert not model.a.any() and not model.seen


def test_dtypes_that_torch_lacks_are_refused() -> None:
    model = Awkward({"w": plain("a"), "v": plain("b")})
    entries = entries_of(random_tensors({"w": (6, 6), "v": (6, 6)}, 0))
    entries["w"] = TensorEntry("w", "F6_E2M3", (6, 6), 0, 27)
    trace = trace_load(model, entries, model.load_weights)
    assert trace.refused == {"w": "dtype F6_E2M3 has no torch equivalent here"}
    assert [*trace.copies] == ["v"]


def test_small_floats() -> None:
    model = Awkward({"w": plain("a")}, torch.float8_e4m3fn)
    entries = {"w": TensorEntry("w", "F8_E4M3", (6, 6), 0, 36)}
    trace = trace_load(model, entries, model.load_weights)
    assert trace.copies["w"] == (Copy("w", "a", 1, (36,), 0, (1,), 0, (1,)),)


@pytest.mark.parametrize("how", ["lazy", "freed", "meta"])
def test_parameters_without_memory_are_refused(how: str) -> None:
    model = Awkward({"w": plain("a"), "v": plain("b")})
    entries = entries_of(random_tensors({"w": (6, 6), "v": (6, 6)}, 0))
    if how == "lazy":
        model.a = nn.UninitializedParameter(requires_grad=False)  # type: ignore[assignment]
    elif how == "freed":
        model.a.untyped_storage().resize_(0)
    else:
        model.a = nn.Parameter(model.a.to("meta"), requires_grad=False)
    trace = trace_load(model, entries, model.load_weights)
    assert "w" in trace.refused
    assert ("v" in trace.copies) is (how != "lazy")
