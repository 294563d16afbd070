"""Models that hold slices of the checkpoint's tensors, as the ranks of a tensor-parallel engine do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import gpusync
from gpusync.errors import DigestMismatchError, PlacementError
from tests import live, wire

HIDDEN, HEADS, WIDTH, INNER, VOCABULARY = 64, 4, 16, 96, 20


def row(name: str, file: str, *shape: int, dtype: str = "BF16") -> wire.Row:
    size = {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
    return wire.Row(file, name, dtype, shape, size * math.prod(shape))


ROWS = (
    row("q.weight", wire.FIRST, HEADS * WIDTH, HIDDEN),
    row("k.weight", wire.FIRST, 2 * WIDTH, HIDDEN),
    row("v.weight", wire.SECOND, 2 * WIDTH, HIDDEN),
    row("o.weight", wire.SECOND, HIDDEN, HEADS * WIDTH),
    row("gate.weight", wire.FIRST, INNER, HIDDEN),
    row("up.weight", wire.SECOND, INNER, HIDDEN),
    row("down.weight", wire.FIRST, HIDDEN, INNER),
    row("conv.weight", wire.SECOND, 24, HIDDEN),
    row("norm.weight", wire.FIRST, HIDDEN, dtype="F32"),
    row("odd.weight", wire.SECOND, 12, 35, dtype="F8_E4M3"),
    row("embed.weight", wire.SECOND, VOCABULARY, HIDDEN),
)


class Shard(nn.Module):
    """One rank's part: fused rows, columns, a transposed weight, a padded vocabulary, a tensor held twice."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.kv_ranks = min(ranks, 2)
        bf16, f8 = torch.bfloat16, torch.float8_e4m3fn
        self.qkv = self._parameter(
            HEADS * WIDTH // ranks + 4 * WIDTH // self.kv_ranks, HIDDEN, dtype=bf16
        )
        self.o = self._parameter(HIDDEN, HEADS * WIDTH // ranks, dtype=bf16)
        self.gate_up = self._parameter(2 * INNER // ranks, HIDDEN, dtype=bf16)
        self.down = self._parameter(HIDDEN, INNER // ranks, dtype=bf16)
        self.conv = self._parameter(HIDDEN, 24 // ranks, dtype=bf16)
        self.norm = self._parameter(HIDDEN, dtype=torch.float32)
        self.norm_again = self._parameter(HIDDEN, dtype=torch.float32)
        self.odd = self._parameter(12, 35 // 5, dtype=f8)
        self.embed = self._parameter(32 // ranks, HIDDEN, dtype=bf16)

    @staticmethod
    def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=torch.uint8).to(dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            getattr(self, f"_load_{name.split('.')[0]}")(weight)

    def _mine(self, weight: torch.Tensor, dim: int, ranks: int = 0) -> torch.Tensor:
        ranks = ranks or self.ranks
        size = weight.shape[dim] // ranks
        return weight.narrow(dim, self.rank * ranks // self.ranks * size, size)

    def _load_q(self, weight: torch.Tensor) -> None:
        self.qkv.data[: HEADS * WIDTH // self.ranks].copy_(self._mine(weight, 0))

    def _load_k(self, weight: torch.Tensor) -> None:
        begin, size = HEADS * WIDTH // self.ranks, 2 * WIDTH // self.kv_ranks
        self.qkv.data.narrow(0, begin, size).copy_(self._mine(weight, 0, self.kv_ranks))

    def _load_v(self, weight: torch.Tensor) -> None:
        size = 2 * WIDTH // self.kv_ranks
        begin = HEADS * WIDTH // self.ranks + size
        self.qkv.data.narrow(0, begin, size).copy_(self._mine(weight, 0, self.kv_ranks))

    def _load_o(self, weight: torch.Tensor) -> None:
        self.o.data.copy_(self._mine(weight, 1))

    def _load_gate(self, weight: torch.Tensor) -> None:
        self.gate_up.data[: INNER // self.ranks].copy_(self._mine(weight, 0))

    def _load_up(self, weight: torch.Tensor) -> None:
        self.gate_up.data[INNER // self.ranks :].copy_(self._mine(weight, 0))

    def _load_down(self, weight: torch.Tensor) -> None:
        self.down.data.copy_(self._mine(weight, 1))

    def _load_conv(self, weight: torch.Tensor) -> None:
        self.conv.data.copy_(self._mine(weight, 0).t())

    def _load_norm(self, weight: torch.Tensor) -> None:
        self.norm.data.copy_(weight)
        self.norm_again.data.copy_(weight)

    def _load_odd(self, weight: torch.Tensor) -> None:
        self.odd.data.copy_(weight.narrow(1, 7 * (self.rank % 5), 7))

    def _load_embed(self, weight: torch.Tensor) -> None:
        size = 32 // self.ranks
        mine = weight[self.rank * size : (self.rank + 1) * size]
        self.embed.data[: mine.shape[0]].copy_(mine)
        self.embed.data[mine.shape[0] :].fill_(0)


SHARDS = [(0, 1), (0, 2), (1, 2), (3, 4)]


def loaded(state: wire.State, shard: tuple[int, int], device: str = "cpu") -> Shard:
    """What a fresh load of these bytes gives on one rank."""
    live.need(device)
    model = Shard(*shard)
    model.load_weights(
        (each.name, live.tensor_of(state[each.name], each.dtype, each.shape)) for each in ROWS
    )
    return model.to("cuda") if device == "cuda" else model


@pytest.fixture(params=["xor", "overwrite", "xor_sparse", "xor_rows"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> wire.Stream:
    made = wire.Stream(tmp_path / "stream", ROWS)
    for checksum in ("xxh3-128", "blake3"):
        new = made.changed([each.name for each in ROWS], made.states[made.last], 40)
        made.delta(new=new, encoding=request.param, checksum=checksum)
    return made


def open_chain(stream: wire.Stream, version: int, **options: object) -> gpusync.Chain:
    return gpusync.open_chain(
        stream.source,
        version,
        base_dir=stream.base,
        **options,  # type: ignore[arg-type]
    )


def check_equal(model: Shard, state: wire.State) -> None:
    assert live.bytes_of(model) == live.bytes_of(loaded(state, (model.rank, model.ranks)))


@pytest.mark.parametrize("device", live.DEVICES)
@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_updates_equal_a_fresh_load(
    stream: wire.Stream, shard: tuple[int, int], device: str
) -> None:
    model = loaded(stream.states[0], shard, device)
    pointers = live.pointers_of(model)
    report = gpusync.attach(model, stream.base, load_weights=model.load_weights)
    assert not report.refused
    assert set(report.placed) | set(report.dropped) == {each.name for each in ROWS}
    gpusync.pull(stream.local, stream.base, stream.source, 0)
    for version in (1, 2):
        chain = open_chain(stream, version, checkpoint=stream.local)
        done = gpusync.apply_to_model(model, chain, device=device)
        assert done.device == device
        check_equal(model, stream.states[version])
    assert live.pointers_of(model) == pointers


@pytest.mark.parametrize("device", live.DEVICES)
def test_straight_through_and_back_to_the_base(stream: wire.Stream, device: str) -> None:
    model = loaded(stream.states[0], (1, 2), device)
    options = {"load_weights": model.load_weights, "device": device}
    gpusync.apply_to_model(model, open_chain(stream, 2), **options)  # type: ignore[arg-type]
    check_equal(model, stream.states[2])
    gpusync.apply_to_model(model, open_chain(stream, 0), device=device)
    check_equal(model, stream.states[0])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_full_version_goes_into_the_slices(tmp_path: Path, device: str) -> None:
    stream = wire.Stream(tmp_path / "stream", ROWS)
    stream.full([each.name for each in ROWS])
    stream.delta(["o.weight", "conv.weight"])
    model = loaded(stream.states[0], (1, 2), device)
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    gpusync.apply_to_model(model, open_chain(stream, 2), device=device)
    check_equal(model, stream.states[2])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_wrong_digest_of_the_whole_is_noticed_though_the_slice_is_right(
    tmp_path: Path, device: str
) -> None:
    stream = wire.Stream(tmp_path / "stream", ROWS)
    old = stream.states[0]
    new = {**old, "o.weight": bytes([old["o.weight"][0] ^ 1]) + old["o.weight"][1:]}
    stream.delta(new=new, bend=wire.Bend(digest={"o.weight": "0" * 32}))
    model = loaded(old, (1, 2))  # it holds the other columns
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    with pytest.raises(DigestMismatchError):
        gpusync.apply_to_model(model, open_chain(stream, 1), device=device)
    check_equal(model, old)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_whole_may_come_from_the_base_with_every_delta_since(
    stream: wire.Stream, device: str
) -> None:
    model = loaded(stream.states[0], (1, 2))
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    for version in (1, 2):
        gpusync.apply_to_model(model, open_chain(stream, version), device=device)
        check_equal(model, stream.states[version])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_whole_may_come_from_a_folder_that_is_ahead(stream: wire.Stream, device: str) -> None:
    """Another rank of the host has written it back."""
    model = loaded(stream.states[0], (1, 2))
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    gpusync.apply_to_model(model, open_chain(stream, 1), device=device)
    gpusync.pull(stream.local, stream.base, stream.source, 2)
    chain = gpusync.open_chain(stream.source, 2, checkpoint=stream.local)
    gpusync.apply_to_model(model, chain, device=device)
    check_equal(model, stream.states[2])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_slices_are_refused_where_nothing_has_the_whole(stream: wire.Stream, device: str) -> None:
    model = loaded(stream.states[0], (1, 2))
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    gpusync.apply_to_model(model, open_chain(stream, 1), device=device)
    chain = gpusync.open_chain(stream.source, 2)
    with pytest.raises(PlacementError, match="no local checkpoint"):
        gpusync.apply_to_model(model, chain, device=device)
    check_equal(model, stream.states[1])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("when", ["before prepare", "before commit"])
def test_a_parameter_that_moves_within_its_storage_is_followed_or_noticed(
    stream: wire.Stream, device: str, when: str
) -> None:
    model = loaded(stream.states[0], (1, 2))
    size = model.down.numel()
    pool = torch.zeros(3 * size, dtype=torch.bfloat16)
    pool[:size].copy_(model.down.data.reshape(-1))
    model.down.data = pool[:size].view(model.down.shape)
    gpusync.attach(model, stream.base, load_weights=model.load_weights)

    def move() -> None:
        pool[2 * size :].copy_(pool[:size])
        model.down.data = pool[2 * size :].view(model.down.shape)

    if when == "before prepare":
        move()
        gpusync.apply_to_model(model, open_chain(stream, 1), device=device)
        check_equal(model, stream.states[1])
        return
    update = gpusync.prepare(model, open_chain(stream, 1), device=device)
    move()
    with pytest.raises(PlacementError, match="moved"):
        update.commit()
    check_equal(model, stream.states[0])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_parameters_that_were_tied_after_attach_are_refused(
    stream: wire.Stream, device: str
) -> None:
    model = loaded(stream.states[0], (1, 2))
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    model.norm_again.data = model.norm.data
    before = live.bytes_of(model)
    with pytest.raises(PlacementError, match="tied"):
        gpusync.apply_to_model(model, open_chain(stream, 1), device=device)
    assert live.bytes_of(model) == before


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_sliced_parameter_that_is_another_before_commit_is_noticed(
    stream: wire.Stream, device: str
) -> None:
    model = loaded(stream.states[0], (1, 2))
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    update = gpusync.prepare(model, open_chain(stream, 1), device=device)
    model.o.data = model.o.data.clone()
    with pytest.raises(PlacementError, match="moved"):
        update.commit()
    check_equal(model, stream.states[0])


def test_the_first_update_attaches_to_the_version_that_the_model_holds(tmp_path: Path) -> None:
    """The local folder is ahead of the model, and nearly all of it is as in the base."""
    stream = wire.Stream(tmp_path / "stream", ROWS)
    stream.delta(["q.weight"])
    stream.delta(["k.weight"])
    gpusync.pull(stream.local, stream.base, stream.source, 1)
    model = loaded(stream.states[0], (0, 1))
    chain = open_chain(stream, 2, checkpoint=stream.local)
    report = gpusync.apply_to_model(model, chain, load_weights=model.load_weights)
    assert report.from_version == 0
    check_equal(model, stream.states[2])


def test_the_first_update_refuses_a_model_of_neither_version(tmp_path: Path) -> None:
    stream = wire.Stream(tmp_path / "stream", ROWS)
    for _ in range(3):
        stream.delta(["q.weight"])
    gpusync.pull(stream.local, stream.base, stream.source, 2)
    model = loaded(stream.states[1], (0, 1))
    chain = open_chain(stream, 3, checkpoint=stream.local)
    with pytest.raises(PlacementError, match=r"q\.weight"):
        gpusync.apply_to_model(model, chain, load_weights=model.load_weights)
    check_equal(model, stream.states[1])
    assert gpusync.live_version(model) is None


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_full_version_of_another_shape_or_dtype_is_refused(tmp_path: Path, device: str) -> None:
    stream = wire.Stream(tmp_path / "stream", ROWS)
    model = loaded(stream.states[0], (1, 2))
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    other = tuple(
        row("down.weight", wire.FIRST, INNER, HIDDEN) if each.name == "down.weight" else each
        for each in ROWS
    )
    reshaped = wire.Stream(tmp_path / "reshaped", other)
    reshaped.full(["q.weight"])
    chain = gpusync.open_chain(reshaped.source, 1)
    with pytest.raises(PlacementError, match=r"down\.weight"):
        gpusync.apply_to_model(model, chain, device=device)
    check_equal(model, stream.states[0])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_live_bytes_that_are_not_the_checkpoints_never_end_wrong(
    stream: wire.Stream, device: str
) -> None:
    """A slice that rotted after attach: refused, or made right; never served wrong."""
    model = loaded(stream.states[0], (1, 2))
    gpusync.attach(model, stream.base, load_weights=model.load_weights)
    model.down.data.view(torch.uint8)[3, 5] ^= 4
    rotten = live.bytes_of(model)
    try:
        gpusync.apply_to_model(model, open_chain(stream, 1), device=device)
    except gpusync.GpuSyncError:
        assert live.bytes_of(model) == rotten
    else:
        check_equal(model, stream.states[1])


def test_attaching_to_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    """One parameter is as in that checkpoint; it takes more than that to be the model's."""
    stream = wire.Stream(tmp_path / "stream", ROWS)
    stream.delta([each.name for each in ROWS if each.name != "norm.weight"])
    gpusync.pull(stream.local, stream.base, stream.source, 1)
    model = loaded(stream.states[0], (0, 2))
    with pytest.raises(PlacementError, match="live bytes differ"):
        gpusync.attach(model, stream.local, load_weights=model.load_weights)
    assert gpusync.live_version(model) is None
