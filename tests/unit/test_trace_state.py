"""Traces of loaders that keep things, rebind things and start threads."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from gpusync.placement.trace import trace_load
from tests.tracing import (
    BF16,
    Awkward,
    Weights,
    check,
    entries_of,
    plain,
    random_tensors,
    trace_of,
)


def test_state_across_names() -> None:
    def keep(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.pending[name] = w
        if len(model.pending) == 2:
            model.long.data.copy_(torch.cat([model.pending.pop("x"), model.pending.pop("y")]))

    def keep_apart(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.pending[name] = w
        if len(model.pending) == 2:
            model.a.data.copy_(model.pending.pop("x"))
            model.b.data.copy_(model.pending.pop("y"))

    assert [*trace_of({"x": keep, "y": keep}).refused] == ["x", "y"]
    assert [*trace_of({"x": keep_apart, "y": keep_apart}).copies] == ["x", "y"]


def test_a_partner_that_waits_for_a_refused_tensor_is_not_taken_for_dropped() -> None:
    def keep(model: Awkward, name: str, w: torch.Tensor) -> None:
        if name == "scale":
            model.inner.scale.fill_(w[0, 0].item())  # type: ignore[operator, union-attr]
        model.pending[name] = w
        if {"w", "scale"} <= model.pending.keys():
            model.a.data.copy_(model.pending.pop("w"))
            model.pending.clear()

    trace = trace_of({"w": keep, "scale": keep, "v": plain("b")})
    assert [*trace.refused] == ["w", "scale"]


def test_a_partner_held_by_the_loader_alone_is_not_taken_for_dropped() -> None:
    class Local(Awkward):
        def load_weights(self, weights: Weights) -> None:
            pending = {}
            for name, w in weights:
                if name == "scale":
                    self.inner.scale.fill_(w[0, 0].item())  # type: ignore[operator, union-attr]
                    self.a.data.copy_(pending["w"])
                elif name == "w":
                    pending[name] = w
                elif name != "skipped":
                    self.b.data.copy_(w)

    shapes = dict.fromkeys(("skipped", "w", "scale", "v", "x", "y", "z"), (6, 6))
    trace = check(
        lambda: Local({}), {name: shapes[name] for name in ("skipped", "w", "scale", "v")}
    )
    assert [*trace.refused] == ["w", "scale"]
    assert trace.dropped == ("skipped",)


def test_live_values_that_go_on_elsewhere_are_refused() -> None:
    def tie(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.copy_(w)
        model.b.data.copy_(model.a.data)

    def absorb(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.c.data.copy_(w)
        model.cache = model.c.data.t().float()

    trace = trace_of({"w": tie, "x": absorb})
    assert trace.refused == {
        "w": "b takes a value made of a, by a copy",
        "x": "the loader keeps a value made of c, which it is copied to",
    }


def test_kept_tensors_are_refused() -> None:
    def keep(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.copy_(w)
        model.cache = w

    def keep_derived(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.b.data.copy_(w)
        model.inner.scales = [w.sum(0)]  # type: ignore[assignment]

    trace = trace_of({"w": keep, "x": keep_derived})
    assert trace.refused == dict.fromkeys(("w", "x"), "the loader keeps it, or a value made of it")


def test_rebinding_is_undone_and_refused() -> None:
    def rebind_data(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.copy_(w)
        model.a.data = model.a.data.clone()

    def rebind_parameter(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.b.data.copy_(w)
        model.b = nn.Parameter(model.b.data.clone(), requires_grad=False)

    def rebind_meta(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.c.data = w

    def new_parameter(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.long = nn.Parameter(w, requires_grad=False)

    def transpose_itself(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.inner.scale.copy_(w[0])  # type: ignore[operator, union-attr]
        model.inner.scale.unsqueeze_(0).squeeze_(0)  # type: ignore[operator, union-attr]

    trace = trace_of(
        {
            "w": rebind_data,
            "x": rebind_parameter,
            "y": rebind_meta,
            "z": new_parameter,
            "v": transpose_itself,
        }
    )
    assert [*trace.refused] == ["w", "x", "y", "z"]
    assert trace.refused["w"] == "the loader puts another tensor in the place of a"


def test_attributes_are_put_back() -> None:
    def load(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.a.data.copy_(w)
        model.fresh = True  # type: ignore[assignment]
        model.cache = torch.ones(1)
        model.a.is_loaded = True  # type: ignore[attr-defined]
        model.inner.extra = nn.ReLU()
        model.pending["x"] = torch.ones(1)

    assert [*trace_of({"w": load}).copies] == ["w"]


def test_plain_tensor_attributes_are_not_written() -> None:
    model = Awkward(
        {
            "w": lambda model, name, w: model.cache.copy_(w),
            "v": lambda model, name, w: model.cache.fill_(1),
        }
    )
    model.cache = torch.zeros(6, 6, dtype=BF16)
    shapes = {"w": (6, 6), "v": (6, 6)}
    trace = trace_load(model, entries_of(random_tensors(shapes, 0)), model.load_weights)
    assert trace.refused == {"w": "cache: neither a parameter nor a buffer"}
    assert trace.dropped == ("v",)
    assert not model.cache.any()


def test_thread_pools_run_inline_and_threads_are_refused() -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()

    def pooled(model: Awkward, name: str, w: torch.Tensor) -> None:
        pool.submit(model.a.data.copy_, w).result()
        with concurrent.futures.ThreadPoolExecutor() as other:
            done = [other.submit(model.b.data[n].copy_, w[n]) for n in range(6)]
            assert len([*concurrent.futures.as_completed(done)]) == 6

    def pooled_item(model: Awkward, name: str, w: torch.Tensor) -> None:
        model.c.data.fill_(pool.submit(w[0, 0].item).result())

    def threaded(model: Awkward, name: str, w: torch.Tensor) -> None:
        thread = threading.Thread(target=model.long.data.fill_, args=(1,))
        thread.start()
        thread.join()

    submit, start = ThreadPoolExecutor.submit, threading.Thread.start
    trace = trace_of({"w": pooled, "x": pooled_item, "y": threaded})
    pool.shutdown()
    assert [*trace.refused] == ["x", "y"]
    assert trace.refused["y"] == "the loader starts a thread of its own"
    assert submit is ThreadPoolExecutor.submit and start is threading.Thread.start
