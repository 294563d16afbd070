"""Places in plain modules that stack or rename a checkpoint's tensors: the rules, and bytes that prove too little."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from gpusync.errors import PlacementError
from gpusync.placement.experts import match_slices
from gpusync.placement.places import Places
from gpusync.placement.regions import live_tensors
from gpusync.types import TensorEntry

HIDDEN, INNER, EXPERTS = 16, 24, 4
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}

Tensors = dict[str, torch.Tensor]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def module(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return nested modules with these parameters, not copied."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        at = model
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return model


def match(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Places:
    """Match a checkpoint in memory, and check that every place holds its tensor's bytes and the model is as it was."""
    data = {name: raw(tensor) for name, tensor in tensors.items()}
    entries = {
        name: TensorEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape), 0, len(data[name]))
        for name, tensor in tensors.items()
    }
    before = {name: raw(tensor) for name, tensor in live_tensors(model).items()}
    places = match_slices(model, entries, lambda name, at, size: data[name][at : at + size])
    assert {name: raw(tensor) for name, tensor in live_tensors(model).items()} == before
    assert places.copies.keys() | places.refused.keys() == tensors.keys()
    assert not places.copies.keys() & places.refused.keys()
    for name, copies in places.copies.items():
        (copy,) = copies
        storage = live_tensors(model)[copy.live_name].untyped_storage()
        assert copy.nbytes == len(data[name])
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        assert raw(flat[copy.live_offset : copy.live_offset + copy.nbytes]) == data[name]
    return places


def where(places: Places, name: str) -> tuple[str, int]:
    (copy,) = places.copies[name]
    return copy.live_name, copy.live_offset


def experts(
    prefix: str = "layers.0.mlp.experts", *, bias: bool = False, count: int = EXPERTS
) -> Tensors:
    """Return a layer's experts as the hub keeps them."""
    tensors: Tensors = {}
    for number in range(count):
        for kind, rows, columns in (
            ("gate_proj", INNER, HIDDEN),
            ("up_proj", INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            tensors[f"{prefix}.{number}.{kind}.weight"] = random(rows, columns)
            if bias:
                tensors[f"{prefix}.{number}.{kind}.bias"] = random(rows)
    return tensors


def stack(
    tensors: Tensors,
    prefix: str = "layers.0.mlp.experts",
    live: str = "layers.0.mlp.experts",
    *,
    order: tuple[str, str] = ("gate_proj", "up_proj"),
    rows: tuple[int, ...] = tuple(range(EXPERTS)),
) -> Tensors:
    """Return the parameters that a library makes of them; ``rows`` are the experts in the order of the stack."""

    def of(number: int, kind: str, leaf: str) -> torch.Tensor:
        return tensors[f"{prefix}.{number}.{kind}.{leaf}"]

    stacked = {}
    for leaf, ending in (("weight", ""), ("bias", "_bias")):
        if f"{prefix}.0.up_proj.{leaf}" in tensors:
            both = [torch.cat([of(number, kind, leaf) for kind in order]) for number in rows]
            stacked[f"{live}.gate_up_proj{ending}"] = torch.stack(both)
            down = torch.stack([of(number, "down_proj", leaf) for number in rows])
            stacked[f"{live}.down_proj{ending}"] = down
    return stacked


# ---- what is found ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_slices_of_their_stacks(bias: bool) -> None:
    tensors = experts(bias=bias)
    places = match(module(stack(tensors)), tensors)
    assert not places.refused
    half = INNER * HIDDEN * 2
    base = "layers.0.mlp.experts"
    assert where(places, f"{base}.2.gate_proj.weight") == (f"{base}.gate_up_proj", 4 * half)
    assert where(places, f"{base}.2.up_proj.weight") == (f"{base}.gate_up_proj", 5 * half)
    assert where(places, f"{base}.2.down_proj.weight") == (f"{base}.down_proj", 2 * half)


def test_layers_do_not_mix() -> None:
    """Two layers of equal bytes: the number of a layer is part of a name, and bytes are not asked."""
    tensors = experts()
    second = {name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors.items()}
    model = module(stack(tensors) | stack(second, "layers.1.mlp.experts", "layers.1.mlp.experts"))
    places = match(model, tensors | second)
    assert not places.refused
    assert all(where(places, name)[0].split(".")[1] == name.split(".")[1] for name in places.copies)


def test_renamed_modules_and_w1_w3_w2() -> None:
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    source = experts()
    tensors = {}
    for name, tensor in source.items():
        kind = name.split(".")[-2]
        renamed = name.replace(".mlp.", ".block_sparse_moe.").replace(kind, names[kind])
        tensors[renamed] = tensor
    tensors["layers.0.block_sparse_moe.gate.weight"] = random(EXPERTS, HIDDEN)
    tensors["layers.0.norm.weight"] = random(HIDDEN)
    live = stack(source) | {
        "layers.0.mlp.gate.weight": tensors["layers.0.block_sparse_moe.gate.weight"],
        "layers.0.norm.weight": tensors["layers.0.norm.weight"],
    }
    places = match(module(live), tensors)
    assert not places.refused
    router = where(places, "layers.0.block_sparse_moe.gate.weight")
    assert router == ("layers.0.mlp.gate.weight", 0)
    assert where(places, "layers.0.norm.weight") == ("layers.0.norm.weight", 0)


def test_a_prefix_that_is_dropped_goes_by_names_where_bytes_are_equal() -> None:
    """Norms of a fresh model are all ones; their names say which is which."""
    tensors = {
        f"model.layers.{number}.{kind}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)
        for number in range(2)
        for kind in ("input_norm", "post_norm", "self_attn.q_norm", "self_attn.k_norm")
    }
    live = {name.removeprefix("model."): tensor.clone() for name, tensor in tensors.items()}
    places = match(module(live), tensors)
    assert not places.refused
    assert all(where(places, name)[0] == name.removeprefix("model.") for name in tensors)


@pytest.mark.parametrize("order", [("gate_proj", "up_proj"), ("up_proj", "gate_proj")])
def test_bytes_say_which_half_is_gate(order: tuple[str, str]) -> None:
    tensors = experts()
    places = match(module(stack(tensors, order=order)), tensors)
    assert not places.refused
    for number in range(EXPERTS):
        for kind in order:
            _, offset = where(places, f"layers.0.mlp.experts.{number}.{kind}.weight")
            assert offset // (INNER * HIDDEN * 2) % 2 == order.index(kind)


def test_bytes_say_which_row_is_whose() -> None:
    tensors = experts()
    rows = (2, 0, 3, 1)
    places = match(module(stack(tensors, rows=rows)), tensors)
    assert not places.refused
    for at, number in enumerate(rows):
        _, offset = where(places, f"layers.0.mlp.experts.{number}.down_proj.weight")
        assert offset == at * INNER * HIDDEN * 2


def test_shared_experts_keep_their_own_parameters_when_bytes_are_equal() -> None:
    tensors = experts()
    for kind in ("gate_proj", "up_proj", "down_proj"):
        shared = tensors[f"layers.0.mlp.experts.1.{kind}.weight"].clone()
        tensors[f"layers.0.mlp.shared_expert.{kind}.weight"] = shared
    own = {name: tensor for name, tensor in tensors.items() if "shared" in name}
    places = match(module(stack(tensors) | own), tensors)
    assert not places.refused
    assert all(where(places, name) == (name, 0) for name in own)


def test_parameters_that_are_views_of_one_storage() -> None:
    """As a map of a file holds them: an offset counts from the begin of the storage."""
    tensors = experts()
    stacks = stack(tensors)
    storage = torch.cat(
        [torch.zeros(40, dtype=torch.bfloat16), *(t.reshape(-1) for t in stacks.values())]
    )
    views, at = {}, 40
    for name, tensor in stacks.items():
        views[name] = storage[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    places = match(module(views), tensors)
    assert not places.refused
    assert where(places, "layers.0.mlp.experts.0.gate_proj.weight")[1] == 80


def test_tied_names_and_a_checkpoint_that_holds_both() -> None:
    embed = random(32, HIDDEN)
    tensors = {"embed.weight": embed, "head.weight": embed.clone()}
    model = module({"embed.weight": embed})
    model.add_module("head", nn.Module())
    model.head.weight = model.embed.weight
    places = match(model, tensors)
    assert {name: copy.live_offset for name, (copy,) in places.copies.items()} == {
        "embed.weight": 0,
        "head.weight": 0,
    }
    assert match(model, {"embed.weight": embed}).copies.keys() == {"embed.weight"}
    renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    assert match(model, renamed).copies.keys() == renamed.keys()


# ---- bytes that prove too little --------------------------------------------------------------------


def test_zeros_are_placed_where_neighbours_show_row_and_half() -> None:
    """All biases are zero, and down of two experts: weights of the same experts and kinds are not."""
    tensors = experts(bias=True)
    for name in tensors:
        if name.endswith("bias") or name.endswith((".0.down_proj.weight", ".3.down_proj.weight")):
            tensors[name].zero_()
    places = match(module(stack(tensors, rows=(1, 0, 2, 3))), tensors)
    assert not places.refused
    base = "layers.0.mlp.experts"
    row = 2 * INNER * 2
    assert where(places, f"{base}.0.gate_proj.bias") == (f"{base}.gate_up_proj_bias", row)
    assert where(places, f"{base}.1.up_proj.bias") == (f"{base}.gate_up_proj_bias", INNER * 2)
    assert where(places, f"{base}.3.down_proj.weight")[1] == 3 * INNER * HIDDEN * 2


def test_tensors_that_differ_where_no_sample_is_taken() -> None:
    """Nearly all zero: one byte each, between the samples."""
    tensors = experts()
    for number, tensor in enumerate(tensors.values()):
        tensor.zero_()
        tensor.reshape(-1)[100] = number + 1
    places = match(module(stack(tensors)), tensors)
    assert not places.refused


def test_equal_experts_are_refused() -> None:
    """As an upcycled model has them: no bytes show whose row is whose, and an update would tell them apart."""
    tensors = experts()
    for kind in ("gate_proj", "up_proj", "down_proj"):
        first = tensors[f"layers.0.mlp.experts.0.{kind}.weight"]
        tensors[f"layers.0.mlp.experts.2.{kind}.weight"] = first.clone()
    places = match(module(stack(tensors)), tensors)
    assert {name.split(".")[4] for name in places.refused} == {"0", "2"} and len(
        places.refused
    ) == 6
    assert all("nothing shows which" in reason for reason in places.refused.values())


def test_gate_that_equals_up_everywhere_is_refused_and_in_one_expert_is_not() -> None:
    tensors = experts()
    base = "layers.0.mlp.experts"
    tensors[f"{base}.1.up_proj.weight"] = tensors[f"{base}.1.gate_proj.weight"].clone()
    assert not match(module(stack(tensors)), tensors).refused
    for number in range(EXPERTS):
        tensors[f"{base}.{number}.up_proj.weight"] = tensors[f"{base}.{number}.gate_proj.weight"]
    places = match(module(stack(tensors)), tensors)
    assert {name.split(".")[5] for name in places.refused} == {"gate_proj", "up_proj"}
    assert {name.split(".")[5] for name in places.copies} == {"down_proj"}


def test_two_tensors_never_share_a_run() -> None:
    """The checkpoint's experts 0 and 1 are equal, the model holds these bytes once."""
    tensors = experts()
    live = stack(tensors)
    live["layers.0.mlp.experts.down_proj"][1] = random(HIDDEN, INNER)
    base = "layers.0.mlp.experts"
    tensors[f"{base}.1.down_proj.weight"] = tensors[f"{base}.0.down_proj.weight"].clone()
    places = match(module(live), tensors)
    both = {f"{base}.{number}.down_proj.weight" for number in (0, 1)}
    assert places.refused.keys() == both
    assert all("'s too" in reason for reason in places.refused.values())


def test_renames_that_bytes_alone_would_decide_and_cannot() -> None:
    zeros = torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16)
    tensors = {"ffn.fc.weight": zeros, "self.fc.weight": zeros.clone(), "x.fc.weight": random(8, 8)}
    live = {
        "mlp.fc.weight": zeros.clone(),
        "attn.fc.weight": zeros.clone(),
        "y.fc.weight": tensors["x.fc.weight"].clone(),
    }
    places = match(module(live), tensors)
    assert places.refused.keys() == {"ffn.fc.weight", "self.fc.weight"}
    tensors["self.fc.weight"][3, 3] = 1
    live["attn.fc.weight"][3, 3] = 1
    places = match(module(live), tensors)
    assert where(places, "self.fc.weight") == ("attn.fc.weight", 0)
    assert where(places, "ffn.fc.weight") == ("mlp.fc.weight", 0)


def test_two_tensors_whose_likest_name_is_the_same() -> None:
    """The likest takes it; the other has no place, whatever its bytes."""
    tensors = {"a.enc.fc.weight": random(8, 8)}
    tensors["b.fc.weight"] = tensors["a.enc.fc.weight"].clone()
    live = {"x.enc.fc.weight": tensors["b.fc.weight"].clone()}
    places = match(module(live), tensors)
    assert places.copies.keys() == {"a.enc.fc.weight"}
    assert "no parameter of that name" in places.refused["b.fc.weight"]


# ---- what is refused by name ------------------------------------------------------------------------


def _transposed(live: Tensors) -> None:
    name = "layers.0.mlp.experts.gate_up_proj"
    live[name] = live[name].transpose(1, 2).contiguous()


def _lazily_transposed(live: Tensors) -> None:
    name = "layers.0.mlp.experts.gate_up_proj"
    live[name] = live[name].transpose(1, 2).contiguous().transpose(1, 2)


def _interleaved(live: Tensors) -> None:
    name = "layers.0.mlp.experts.gate_up_proj"
    gate, up = live[name].chunk(2, dim=1)
    live[name] = torch.stack([gate, up], dim=2).reshape(live[name].shape)


def _cast(live: Tensors) -> None:
    name = "layers.0.mlp.experts.gate_up_proj"
    live[name] = live[name].float()


def _gone(live: Tensors) -> None:
    del live["layers.0.mlp.experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("bend", "reason"),
    [
        (_transposed, "no contiguous run of .*shape"),
        (_lazily_transposed, "no contiguous run of .*shape"),
        (_interleaved, "holds its bytes: transposed, interleaved"),
        (_cast, "cast: .*gate_up_proj is torch.float32 live, BF16"),
        (_gone, "no contiguous run of .*down_proj"),
    ],
)
def test_what_is_not_contiguous_bytes_is_refused_by_name(
    bend: Callable[[Tensors], None], reason: str
) -> None:
    tensors = experts()
    live = stack(tensors)
    bend(live)
    places = match(module(live), tensors)
    kinds = {name.split(".")[5] for name in places.refused}
    assert kinds == {"gate_proj", "up_proj"} and len(places.refused) == 2 * EXPERTS
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(next(iter(places.refused.values())))


def test_a_square_stack_that_is_transposed() -> None:
    """Shapes fit, bytes do not."""
    tensors = {f"mlp.experts.{number}.w.weight": random(8, 8) for number in range(EXPERTS)}
    live = torch.stack([tensor.t() for tensor in tensors.values()])
    tensors["norm.weight"] = random(8)
    model = module({"mlp.experts.w": live, "norm.weight": tensors["norm.weight"]})
    places = match(model, tensors)
    assert places.copies.keys() == {"norm.weight"}


def test_a_name_that_is_there_with_another_shape_or_dtype_is_not_looked_for_elsewhere() -> None:
    tensors = {"a.weight": random(8, 8), "b.weight": random(8), "c.weight": random(8)}
    live = {
        "a.weight": tensors["a.weight"].reshape(4, 16),
        "b.weight": tensors["b.weight"].float(),
        "c.weight": tensors["c.weight"],
        "other.a.weight": tensors["a.weight"].clone(),
    }
    places = match(module(live), tensors)
    assert "shape" in places.refused["a.weight"] and "cast" in places.refused["b.weight"]
    assert places.copies.keys() == {"c.weight"}


def test_nothing_has_a_place() -> None:
    with pytest.raises(PlacementError, match="no parameter of that name"):
        match(module({"a.weight": random(8)}), {"b.weight": random(8)})
    with pytest.raises(PlacementError, match=r"its bytes are not those of a\.weight"):
        match(module({"a.weight": random(8)}), {"model.a.weight": random(8)})


def test_unreachable_and_empty_parameters() -> None:
    tensors = experts() | {"model.empty.weight": random(0, 4)}
    live = stack(tensors) | {"empty.weight": random(0, 4)}
    live["layers.0.mlp.experts.down_proj"] = live["layers.0.mlp.experts.down_proj"].to("meta")
    model = module(live)
    data = {name: raw(tensor) for name, tensor in tensors.items()}
    entries = {
        name: TensorEntry(name, "BF16", tuple(tensor.shape), 0, len(data[name]))
        for name, tensor in tensors.items()
    }
    places = match_slices(model, entries, lambda name, at, size: data[name][at : at + size])
    assert where(places, "model.empty.weight") == ("empty.weight", 0)
    assert {name.split(".")[5] for name in places.refused} == {"down_proj"}


def test_the_copies_place_as_a_trace_does() -> None:
    tensors = experts()
    model = module(stack(tensors) | {"table": torch.zeros(3)})
    placement = match(model, tensors).place(model)
    assert placement.regions.keys() == tensors.keys()
    assert all(
        region.array.tobytes() == raw(tensors[name]) for name, region in placement.regions.items()
    )
    assert placement.unmanaged == ("table",)


def test_many_experts_take_seconds() -> None:
    tensors: Tensors = {}
    live: Tensors = {}
    for layer in range(10):
        prefix = f"layers.{layer}.mlp.experts"
        of_layer = experts(prefix, count=128)
        tensors |= of_layer
        live |= stack(of_layer, prefix, prefix, rows=tuple(range(128)))
    model = module(live)
    assert not match(model, tensors).refused
