"""Modules that an engine rearranges after loading: relaid where that is proven to be a pure relayout, refused otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpusync
from gpusync.engines.session import Session
from gpusync.errors import (
    DigestMismatchError,
    ModelPoisonedError,
    OutOfScratchError,
    PlacementError,
)
from tests import live, relaying, wire
from tests.relaying import EngineRelayout, Model, loaded_model

EXPERTS = {row.name for row in relaying.ROWS if ".experts." in row.name}
GATE = "layers.0.experts.1.gate"


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    return wire.Stream(tmp_path / "stream", relaying.ROWS)


def names() -> list[str]:
    return [row.name for row in relaying.ROWS]


def open_chain(stream: wire.Stream, version: int, **options: Any) -> gpusync.Chain:
    return gpusync.open_chain(stream.source, version, base_dir=stream.base, **options)


def attached(
    stream: wire.Stream, kind: str = "swap", **options: Any
) -> tuple[Model, EngineRelayout, gpusync.AttachReport]:
    process = relaying.PURE[kind]
    model, relayout = loaded_model(stream.states[0], process), EngineRelayout(process)
    report = gpusync.attach(
        model, stream.base, load_weights=model.load_weights, relayout=relayout, **options
    )
    return model, relayout, report


def check_equal(model: Model, state: wire.State, kind: str = "swap") -> None:
    assert live.bytes_of(model) == live.bytes_of(loaded_model(state, relaying.PURE[kind]))


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse", "xor_rows"])
@pytest.mark.parametrize("kind", relaying.PURE)
def test_updates_equal_a_fresh_load(stream: wire.Stream, kind: str, encoding: str) -> None:
    model, relayout, report = attached(stream, kind)
    assert report.relaid.keys() == EXPERTS
    assert report.relaid[GATE] == ("layers.0.experts.w13", "layers.0.experts.w2")
    assert report.placed.keys() == {"embed", "norm"} and not report.refused
    pointers = live.pointers_of(model)
    for number in range(5):
        checksum = ("xxh3-128", "adler32", "blake3")[number % 3]
        new = stream.changed(names(), stream.states[number], 20)
        stream.delta(new=new, encoding=encoding, checksum=checksum)
    for target in (1, 2, 5):
        chain = open_chain(stream, target, checkpoint=stream.local)
        done = gpusync.apply_to_model(model, chain, relayout=relayout)
        assert done.tensors_changed == len(names())
        assert done.tensors_by_path == {"cpu": 2, "relaid": len(EXPERTS)}
        check_equal(model, stream.states[target], kind)
        assert wire.read_tensors(stream.local) == stream.states[target]
    assert live.pointers_of(model) == pointers


@pytest.mark.parametrize("kind", relaying.IMPURE)
def test_what_is_no_pure_relayout_is_refused_by_name(stream: wire.Stream, kind: str) -> None:
    process, reason = relaying.IMPURE[kind]
    model = loaded_model(stream.states[0], process)
    before = live.bytes_of(model)
    report = gpusync.attach(
        model, stream.base, load_weights=model.load_weights, relayout=EngineRelayout(process)
    )
    assert report.refused.keys() == EXPERTS and not report.relaid
    assert all(re.search(reason, why) for why in report.refused.values()), report.refused
    assert live.bytes_of(model) == before
    stream.delta([GATE])
    with pytest.raises(PlacementError, match=re.escape(GATE)):
        gpusync.apply_to_model(model, open_chain(stream, 1), relayout=EngineRelayout(process))
    stream.delta(["norm"], version=1, base=0)
    gpusync.apply_to_model(model, open_chain(stream, 1))
    assert live.bytes_of(model)["norm"] == stream.states[1]["norm"]


def test_without_relayout_a_refusal_says_that_it_may_help(stream: wire.Stream) -> None:
    model = loaded_model(stream.states[0], relaying.swap)
    report = gpusync.attach(model, stream.base, load_weights=model.load_weights)
    assert report.refused.keys() == {name for name in EXPERTS if not name.endswith("down")}
    assert all("relayout=True may take it" in why for why in report.refused.values())


def test_a_module_that_is_live_as_it_was_loaded_is_placed(stream: wire.Stream) -> None:
    relayout = EngineRelayout(lambda loaded: loaded)
    model = loaded_model(stream.states[0], lambda loaded: loaded)
    report = gpusync.attach(model, stream.base, load_weights=model.load_weights, relayout=relayout)
    assert report.placed.keys() == set(names()) and not report.relaid and not relayout.processed


def test_only_the_modules_that_change_are_made_anew(stream: wire.Stream) -> None:
    model, relayout, _ = attached(stream)
    stream.delta([GATE, "embed"])
    stream.delta(["embed"])
    relayout.processed.clear()
    done = gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)
    assert relayout.processed == ["layers.0.experts"] and done.tensors_changed == 2
    check_equal(model, stream.states[1])
    gpusync.apply_to_model(model, open_chain(stream, 2))  # none: then it need not be given
    check_equal(model, stream.states[2])


def test_the_first_update_attaches_and_relays(stream: wire.Stream) -> None:
    model, relayout = loaded_model(stream.states[0], relaying.pad), EngineRelayout(relaying.pad)
    stream.delta(names())
    options = {"load_weights": model.load_weights, "relayout": relayout}
    gpusync.apply_to_model(model, open_chain(stream, 1), **options)
    check_equal(model, stream.states[1], "pad")


def test_full_versions_chains_on_them_and_the_way_back_to_the_base(stream: wire.Stream) -> None:
    model, relayout, _ = attached(stream, "pad")
    stream.delta(names())
    stream.full(names())
    stream.delta([GATE, "layers.1.experts.0.down"])
    for target in (2, 3, 0, 1, 3, 0, 1):
        chain = open_chain(stream, target, checkpoint=stream.local)
        gpusync.apply_to_model(model, chain, relayout=relayout)
        check_equal(model, stream.states[target], "pad")
        assert gpusync.live_version(model) == target


def test_prepare_writes_nothing_and_discard_is_as_if_nothing_happened(stream: wire.Stream) -> None:
    model, relayout, _ = attached(stream, "shuffle")
    stream.delta(names())
    before = live.bytes_of(model)
    with gpusync.prepare(model, open_chain(stream, 1), relayout=relayout):
        assert live.bytes_of(model) == before
    assert live.bytes_of(model) == before and gpusync.live_version(model) == 0
    gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)
    check_equal(model, stream.states[1], "shuffle")


def test_a_wrong_digest_changes_nothing(stream: wire.Stream) -> None:
    model, relayout, _ = attached(stream)
    stream.delta([GATE], bend=wire.Bend(digest={GATE: "0" * 32}))
    with pytest.raises(DigestMismatchError, match=re.escape(GATE)):
        gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)
    check_equal(model, stream.states[0])


def test_live_bytes_that_are_not_those_of_the_last_commit_are_noticed(stream: wire.Stream) -> None:
    model, relayout, _ = attached(stream)
    stream.delta([GATE])
    stream.delta([GATE])
    gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)
    w2 = model.layers[0].experts.w2.data.view(torch.int16)  # type: ignore[union-attr]
    w2[2, 7, 3] ^= 4
    before = live.bytes_of(model)
    with pytest.raises(PlacementError, match=r"last committed.*w2"):
        gpusync.apply_to_model(model, open_chain(stream, 2), relayout=relayout)
    assert live.bytes_of(model) == before
    w2[2, 7, 3] ^= 4
    gpusync.apply_to_model(model, open_chain(stream, 2), relayout=relayout)
    check_equal(model, stream.states[2])


def test_live_bytes_that_change_between_prepare_and_commit_are_noticed(
    stream: wire.Stream,
) -> None:
    model, relayout, _ = attached(stream)
    stream.delta(names(), encoding="overwrite")
    update = gpusync.prepare(model, open_chain(stream, 1), relayout=relayout)
    model.layers[1].experts.w13.data.view(torch.int16).bitwise_xor_(1)  # type: ignore[union-attr]
    before = live.bytes_of(model)
    with pytest.raises(PlacementError, match="changed since prepare"):
        update.commit()
    assert live.bytes_of(model) == before


def test_a_store_that_fails_is_taken_back_in_all_modules(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpusync.host.changes import RegionChanges

    model, relayout, _ = attached(stream)
    stream.delta(names())
    update = gpusync.prepare(model, open_chain(stream, 1), relayout=relayout)
    real, calls = RegionChanges.store, []

    def store(region: RegionChanges, *run: Any) -> bool:
        calls.append(run)
        if len(calls) == 5:
            raise OSError("no such memory")
        return real(region, *run)

    monkeypatch.setattr(RegionChanges, "store", store)
    with pytest.raises(gpusync.DeviceError, match="taken back"):
        update.commit()
    check_equal(model, stream.states[0])
    monkeypatch.undo()
    gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)
    check_equal(model, stream.states[1])


def test_an_unchanged_tensor_that_rotted_in_the_folder_is_not_put_live(
    stream: wire.Stream,
) -> None:
    model, relayout, _ = attached(stream)
    gpusync.pull(stream.local, stream.base, stream.source, 0)
    wire.flip_tensor_byte(stream.local, "layers.0.experts.2.down", 11)
    stream.delta([GATE])
    chain = gpusync.open_chain(stream.source, 1, checkpoint=stream.local)
    with pytest.raises(PlacementError, match=r"does not change.*layers\.0\.experts\.2\.down"):
        gpusync.apply_to_model(model, chain, relayout=relayout, write_back="none")
    check_equal(model, stream.states[0])


def test_moved_parameters_are_followed_before_prepare_and_noticed_after_it(
    stream: wire.Stream,
) -> None:
    model, relayout, _ = attached(stream)
    stream.delta(names())
    stream.delta(names())

    def move() -> None:
        for layer in model.layers:
            layer.experts.w13.data = layer.experts.w13.data.clone()  # type: ignore[union-attr]

    move()
    gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)
    check_equal(model, stream.states[1])
    update = gpusync.prepare(model, open_chain(stream, 2), relayout=relayout)
    move()
    with pytest.raises(PlacementError, match="moved since prepare"):
        update.commit()
    check_equal(model, stream.states[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("shape", "another shape"),
        ("dtype", "another shape, layout or dtype"),
        ("freed", "freed or offloaded"),
        ("tied", "shares its storage"),
    ],
)
def test_parameters_that_are_no_longer_what_was_attached_are_refused(
    stream: wire.Stream, change: str, reason: str
) -> None:
    model, relayout, _ = attached(stream)
    stream.delta([GATE])
    experts: Any = model.layers[0].experts
    if change == "shape":
        experts.w2.data = experts.w2.data.reshape(-1)
    elif change == "dtype":
        experts.w2.data = experts.w2.data.view(torch.float16)
    elif change == "freed":
        freed = torch.empty_like(experts.w2)
        freed.untyped_storage().resize_(0)
        experts.w2.data = freed
    else:
        model.norm.data = experts.w2.data.reshape(-1)[: relaying.HIDDEN]
    with pytest.raises(PlacementError, match=reason):
        gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)
    assert gpusync.live_version(model) == 0


def test_a_module_that_does_not_fit_into_scratch_is_refused_before_anything_changes(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, relayout, _ = attached(stream)
    stream.delta(names())
    before = live.bytes_of(model)
    with pytest.raises(OutOfScratchError, match=r"layers\.0\.experts does not fit"):
        gpusync.apply_to_model(
            model, open_chain(stream, 1), relayout=relayout, scratch_bytes=20_000
        )
    assert live.bytes_of(model) == before
    gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)
    check_equal(model, stream.states[1])
    monkeypatch.setenv("GPUSYNC_RELAYOUT_BYTES", "20000")
    with pytest.raises(OutOfScratchError, match="GPUSYNC_RELAYOUT_BYTES"):
        attached(stream)


def test_an_update_without_the_relayout_is_refused(stream: wire.Stream) -> None:
    model, _, _ = attached(stream)
    stream.delta(names())
    with pytest.raises(PlacementError, match="with relayout=True"):
        gpusync.apply_to_model(model, open_chain(stream, 1))
    check_equal(model, stream.states[0])


def test_without_the_whole_tensors_it_is_refused(stream: wire.Stream) -> None:
    model, relayout, _ = attached(stream)
    stream.delta([GATE])
    with pytest.raises(PlacementError, match="nothing has the whole tensor"):
        gpusync.apply_to_model(model, gpusync.open_chain(stream.source, 1), relayout=relayout)
    check_equal(model, stream.states[0])


def test_a_relayout_that_fails_or_makes_something_else_later_is_refused(
    stream: wire.Stream,
) -> None:
    model, _, _ = attached(stream)
    stream.delta([GATE])

    def raises(loaded: relaying.Tensors) -> relaying.Tensors:
        raise RuntimeError("no such kernel")

    cases: list[tuple[Callable[[relaying.Tensors], relaying.Tensors], str]] = [
        (raises, "no such kernel"),
        (relaying.pad, "makes another tensor"),
        (lambda loaded: {"w2": loaded["w2"]}, "makes another tensor"),
    ]
    for process, reason in cases:
        with pytest.raises(PlacementError, match=reason):
            gpusync.apply_to_model(model, open_chain(stream, 1), relayout=EngineRelayout(process))
        check_equal(model, stream.states[0])


def test_another_checkpoint_is_no_relayout(stream: wire.Stream) -> None:
    stream.delta(names())
    model = loaded_model(stream.states[1], relaying.swap)
    with pytest.raises(PlacementError, match="cannot be updated in place"):
        gpusync.attach(
            model,
            stream.base,
            load_weights=model.load_weights,
            relayout=EngineRelayout(relaying.swap),
        )
    assert gpusync.live_version(model) is None


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_relaid_modules_are_host_work_whatever_the_device(stream: wire.Stream, device: str) -> None:
    live.need(device)
    model, relayout, _ = attached(stream)
    stream.delta(names())
    chain = open_chain(stream, 1)
    if device == "cuda":
        with pytest.raises(PlacementError, match="host work"):
            gpusync.apply_to_model(model, chain, relayout=relayout, device=device)
        return
    done = gpusync.apply_to_model(model, chain, relayout=relayout, device=device)
    assert done.device == "emulated" and "on the host" in done.reasons["relaid"]
    check_equal(model, stream.states[1])


def test_the_report_can_be_read(stream: wire.Stream) -> None:
    _, _, report = attached(stream, "pad")
    whole = sum(row.nbytes for row in relaying.ROWS if row.name in ("embed", "norm"))
    padded = relaying.LAYERS * relaying.EXPERTS * 3 * 16 * relaying.HIDDEN * 2
    assert (report.placed_bytes, report.relaid_bytes) == (whole, padded)
    text = str(report)
    assert re.search(rf"placed +2 tensors +{whole:,} bytes live", text)
    assert re.search(rf"relaid +{len(EXPERTS)} tensors +{padded:,} bytes live", text)
    model = loaded_model(stream.states[0], relaying.halve)
    report = gpusync.attach(
        model,
        stream.base,
        load_weights=model.load_weights,
        relayout=EngineRelayout(relaying.halve),
    )
    assert report.refused_bytes == sum(r.nbytes for r in relaying.ROWS if r.name in EXPERTS)
    assert re.search(rf"refused +{len(EXPERTS)} tensors", str(report))
    assert re.search(
        r"18 \(layers\.0\.experts\.0\.down, \.\.\.\): .* no pure relayout", str(report)
    )
    assert report.to_dict()["refused_bytes"] == report.refused_bytes


def test_a_poisoned_model_stays_poisoned(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, relayout, _ = attached(stream)
    stream.delta(names())
    update = gpusync.prepare(model, open_chain(stream, 1), relayout=relayout)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpusync.live.update.commit_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        update.commit()
    monkeypatch.undo()
    with pytest.raises(ModelPoisonedError):
        gpusync.apply_to_model(model, open_chain(stream, 1), relayout=relayout)


class Mount:
    """An engine around a model, with as much as a session needs."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.load_weights = model.load_weights

    def model(self) -> Model:
        return self._model

    def why_not(self) -> str | None:
        return None

    def group(self) -> Any:
        return None


def test_a_session_relays_where_it_is_told_to(stream: wire.Stream) -> None:
    model, relayout = loaded_model(stream.states[0], relaying.swap), EngineRelayout(relaying.swap)
    stream.delta(names())
    stream.delta(names())
    source, base = str(stream.source), str(stream.base)
    session = Session(Mount(model), lambda: relayout)
    assert session.attach(base).refused
    with pytest.raises(PlacementError, match="relayout=True may take it"):
        session.apply(source, 1, base_dir=base, relayout=True)
    assert session.attach(base, relayout=True).relaid.keys() == EXPERTS
    for version in (1, 2):
        session.apply(source, version, base_dir=base, relayout=True)
        check_equal(model, stream.states[version])
    without = Session(Mount(loaded_model(stream.states[0], relaying.swap)))
    assert without.attach(base, relayout=True).refused  # that engine offers nothing
