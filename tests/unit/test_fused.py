"""Models whose own loader fuses tensors: placed by a trace of it, proven by bytes, updated in place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import gpusync
from gpusync.errors import PlacementError
from tests import live, wire

HIDDEN, INNER, EXPERTS = 16, 24, 3


def row(name: str, file: str, *shape: int) -> wire.Row:
    return wire.Row(file, name, "BF16", shape, 2 * math.prod(shape))


ROWS = (
    row("q.weight", wire.FIRST, HIDDEN, HIDDEN),
    row("k.weight", wire.FIRST, HIDDEN // 2, HIDDEN),
    row("v.weight", wire.SECOND, HIDDEN // 2, HIDDEN),
    row("norm.weight", wire.FIRST, HIDDEN),
    row("router.bias", wire.SECOND, EXPERTS),
    row("head.weight", wire.SECOND, 12, HIDDEN),
    *(
        row(f"experts.{number}.{part}.weight", wire.FIRST, INNER, HIDDEN)
        for number in range(EXPERTS)
        for part in ("gate", "up")
    ),
    row("mtp.weight", wire.SECOND, HIDDEN, HIDDEN),
)


class Fused(nn.Module):
    """Fuses q, k and v, and gate and up of every expert; casts the router's bias; pads the head; has no mtp."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = self._parameter(2 * HIDDEN, HIDDEN)
        self.norm = self._parameter(HIDDEN)
        self.head = self._parameter(16, HIDDEN)
        self.w13 = self._parameter(EXPERTS, 2 * INNER, HIDDEN)
        self.bias = nn.Parameter(torch.zeros(EXPERTS, dtype=torch.float32), requires_grad=False)

    @staticmethod
    def _parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rows = {"q": (0, HIDDEN), "k": (HIDDEN, HIDDEN // 2), "v": (HIDDEN * 3 // 2, HIDDEN // 2)}
        for name, weight in weights:
            kind, *rest = name.split(".")
            if kind in rows:
                self.qkv.data.narrow(0, *rows[kind]).copy_(weight)
            elif kind == "experts":
                begin = INNER if rest[1] == "up" else 0
                self.w13.data[int(rest[0])].narrow(0, begin, INNER).copy_(weight)
            elif kind == "head":
                self.head.data[:12].copy_(weight)
                self.head.data[12:].fill_(0)
            elif kind != "mtp":
                {"norm": self.norm, "router": self.bias}[kind].data.copy_(weight)


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    made = wire.Stream(tmp_path / "stream", ROWS)
    names = [row.name for row in ROWS if row.name != "router.bias"]
    made.delta(names)
    made.delta(["k.weight", "experts.1.up.weight", "mtp.weight"])
    return made


def loaded(state: wire.State) -> Fused:
    """What a fresh load of these bytes gives."""
    model = Fused()
    model.load_weights(
        (row.name, live.tensor_of(state[row.name], row.dtype, row.shape)) for row in ROWS
    )
    return model


def open_chain(stream: wire.Stream, version: int) -> gpusync.Chain:
    return gpusync.open_chain(stream.source, version, base_dir=stream.base)


def test_attach_reports_every_tensor(stream: wire.Stream) -> None:
    model = loaded(stream.states[0])
    before = live.bytes_of(model)
    report = gpusync.attach(model, stream.base, load_weights=model.load_weights)
    assert live.bytes_of(model) == before
    assert set(report.dropped) == {"mtp.weight"}
    assert set(report.refused) == {"router.bias"} and "float32" in report.refused["router.bias"]
    assert set(report.placed) == {row.name for row in ROWS} - {"mtp.weight", "router.bias"}
    assert report.placed["k.weight"] == ("qkv",)
    assert report.unmanaged == ("bias",)


@pytest.mark.parametrize("device", live.DEVICES)
@pytest.mark.parametrize("straight", [False, True])
def test_updates_equal_a_fresh_load(stream: wire.Stream, device: str, straight: bool) -> None:
    live.need(device)
    model = loaded(stream.states[0]).to("cuda" if device == "cuda" else "cpu")
    pointers = live.pointers_of(model)
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    for version in (2,) if straight else (1, 2):
        gpusync.apply_to_model(model, open_chain(stream, version), device=device)
        assert live.bytes_of(model) == live.bytes_of(loaded(stream.states[version]))
    assert live.pointers_of(model) == pointers


def test_the_first_update_attaches_through_the_loader(stream: wire.Stream) -> None:
    model = loaded(stream.states[0])
    gpusync.apply_to_model(model, open_chain(stream, 2), load_weights=model.load_weights)
    assert live.bytes_of(model) == live.bytes_of(loaded(stream.states[2]))


def test_a_refused_tensor_that_changes_stops_the_update(stream: wire.Stream) -> None:
    model = loaded(stream.states[0])
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    stream.delta(["router.bias", "q.weight"])
    gpusync.apply_to_model(model, open_chain(stream, 2))
    before = live.bytes_of(model)
    with pytest.raises(PlacementError, match=r"router\.bias"):
        gpusync.apply_to_model(model, open_chain(stream, 3))
    assert live.bytes_of(model) == before
    assert gpusync.live_version(model) == 2


def test_a_tensor_whose_live_bytes_were_changed_after_loading_is_refused_by_name(
    stream: wire.Stream,
) -> None:
    """As an engine does that swaps the halves of w13 for its kernel: the same shape, other bytes."""
    model = loaded(stream.states[0])
    halves = model.w13.data[1].clone()
    model.w13.data[1, :INNER], model.w13.data[1, INNER:] = halves[INNER:], halves[:INNER]
    report = gpusync.attach(model, stream.base, load_weights=model.load_weights)
    swapped = {"experts.1.gate.weight", "experts.1.up.weight"}
    assert {name for name in report.refused if "differ" in report.refused[name]} == swapped
    with pytest.raises(PlacementError, match=r"experts\.1\.(gate|up)"):
        gpusync.apply_to_model(model, open_chain(stream, 1))


def test_a_parameter_that_moved_is_found_and_proven_again(stream: wire.Stream) -> None:
    model = loaded(stream.states[0])
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    model.qkv.data = model.qkv.data.clone()
    gpusync.apply_to_model(model, open_chain(stream, 1))
    assert live.bytes_of(model) == live.bytes_of(loaded(stream.states[1]))
    model.w13.data = model.w13.data.clone()
    with pytest.raises(PlacementError, match="moved"):
        gpusync.apply_to_model(model, open_chain(stream, 2))


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_full_version_and_a_reset_go_through_the_placement(tmp_path: Path, device: str) -> None:
    stream = wire.Stream(tmp_path / "stream", tuple(r for r in ROWS if r.name != "router.bias"))
    stream.full(["q.weight", "experts.0.gate.weight", "head.weight"])

    def fresh(state: wire.State) -> Fused:
        model = Fused()
        model.load_weights(
            (row.name, live.tensor_of(state[row.name], row.dtype, row.shape))
            for row in stream.layout
        )
        return model

    model = fresh(stream.states[0])
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    gpusync.apply_to_model(model, open_chain(stream, 1), device=device)
    assert live.bytes_of(model) == live.bytes_of(fresh(stream.states[1]))
    gpusync.apply_to_model(model, open_chain(stream, 0), device=device)
    assert live.bytes_of(model) == live.bytes_of(fresh(stream.states[0]))
