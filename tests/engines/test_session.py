"""An update over several calls of an engine's worker, without an engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gpusync
from gpusync.engines.session import Session, named_errors, to_plain
from gpusync.engines.vllm import WeightTransferBackend, WorkerExtension
from gpusync.engines.vllm_weights import check_derived, why_not
from gpusync.host.changes import RegionChanges


class Fused(nn.Module):
    """Two checkpoint tensors in one parameter, as engines have them."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(8, 4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            first = 0 if name == "up" else 4
            self.both.data[first : first + 4].copy_(tensor)


class FakeMount:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.reason: str | None = None

    def model(self) -> nn.Module:
        return self._model

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return self._model.load_weights(weights)  # type: ignore[operator]

    def why_not(self) -> str | None:
        return self.reason

    def group(self) -> Any:
        return None


class Run:
    """A published run of two versions, and a loaded model."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.base = root / "base"
        self.base.mkdir()
        (self.base / "config.json").write_text("{}")
        self.source = str(root / "source")
        weights = {"up": torch.randn(4, 4), "gate": torch.randn(4, 4)}
        save_file(weights, self.base / "model.safetensors")
        self.weights = [weights]
        publisher = gpusync.Publisher(self.source, self.base)
        for _ in range(2):
            self.weights.append({name: t + 1 for name, t in self.weights[-1].items()})
            publisher.publish(self.weights[-1].items())
        self.model = Fused()
        self.model.load_weights(weights.items())
        self.where = {"checkpoint": str(root / "local"), "base_dir": str(self.base)}

    def holds(self, version: int) -> bool:
        both = torch.cat([self.weights[version]["up"], self.weights[version]["gate"]])
        return torch.equal(self.model.both, both)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_prepare_commit_finish(run: Run) -> None:
    session = Session(FakeMount(run.model))
    assert session.version is None
    session.prepare(run.source, 1, **run.where)
    assert (session.phase, session.version) == ("prepared", 0)
    assert run.holds(0)
    assert session.commit().to_version == 1
    assert session.phase == "committed" and run.holds(1)
    with pytest.raises(gpusync.PlacementError, match="committed; finish or discard"):
        session.prepare(run.source, 2, **run.where)
    report = to_plain(session.finish())
    assert report["disk_version"] == 1 and json.loads(json.dumps(report)) == report
    assert (session.phase, session.version) == ("idle", 1)


def test_discard_and_out_of_turn_calls(run: Run) -> None:
    session = Session(FakeMount(run.model))
    session.discard()
    for call in (session.commit, session.finish):
        with pytest.raises(gpusync.DeviceError, match="the session is idle"):
            call()
    session.prepare(run.source, 2, **run.where)
    session.discard()
    assert session.phase == "idle" and run.holds(0)
    assert session.apply(run.source, 2, **run.where).versions == (1, 2)
    assert run.holds(2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_a_request_cancelled_in_commit_keeps_nobody_from_preparing(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    session = Session(FakeMount(run.model))
    session.prepare(run.source, 1, **run.where)

    def store(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(RegionChanges, "store", store)
        with pytest.raises(error):
            session.commit()
    assert (session.phase, session.version) == ("idle", 0) and run.holds(0)
    assert session.apply(run.source, 2, **run.where).to_version == 2
    assert run.holds(2)


def test_in_the_background_after_attach_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(FakeMount(run.model))
    with pytest.raises(gpusync.PlacementError, match="attach the model before"):
        session.prepare(run.source, 1, **run.where, background=True)
    assert session.attach(str(run.base)).version == 0
    go_on = threading.Event()
    import gpusync.engines.session as module

    opened = module.open_chain

    def slow(*args: Any, **kwargs: Any) -> Any:
        go_on.wait(30)
        return opened(*args, **kwargs)

    monkeypatch.setattr(module, "open_chain", slow)
    session.prepare(run.source, 1, **run.where, background=True)
    assert session.phase == "preparing"
    with pytest.raises(gpusync.PlacementError, match="is preparing"):
        session.prepare(run.source, 1, **run.where)
    go_on.set()
    assert session.commit().to_version == 1  # waits
    session.finish()
    session.prepare(run.source, 9, **run.where, background=True)
    with pytest.raises(gpusync.SourceNotReadyError):
        session.commit()
    assert session.phase == "idle" and session.version == 1


def test_what_is_refused_before_commit_is_not_stored(run: Run) -> None:
    mount = FakeMount(run.model)
    session = Session(mount)
    session.prepare(run.source, 1, **run.where)
    mount.reason = "the weights are asleep"
    with pytest.raises(gpusync.PlacementError, match="asleep"):
        session.commit()
    assert run.holds(0) and session.phase == "prepared"
    mount.reason = None
    session.commit()
    assert run.holds(1)


def worker_of(model: nn.Module) -> Any:
    class Worker(WorkerExtension):
        def __init__(self) -> None:
            self.vllm_config = config_of()
            self.model_runner = SimpleNamespace(get_model=lambda: model)
            self.asked: list[int] = []

        def sleep(self, level: int = 1) -> None:
            self.asked.append(level)

    return Worker()


def config_of(**values: Any) -> Any:
    parallel = SimpleNamespace(world_size=1, enable_eplb=values.pop("eplb", False))
    return SimpleNamespace(parallel_config=parallel, lora_config=None, **values)


def test_an_engine_that_replaces_weights_has_to_attach_again(run: Run) -> None:
    worker = worker_of(run.model)
    worker.gpusync_apply(run.source, 1, **run.where)
    worker.gpusync_prepare(run.source, 2, **run.where)
    worker.sleep(level=2)
    assert worker.asked == [2]
    assert worker.gpusync_version() is None and worker.gpusync_phase() == {"phase": "idle"}
    with pytest.raises(
        gpusync.PlacementError, match=r"^PlacementError: vLLM put the weights to sle"
    ):
        worker.gpusync_apply(run.source, 2, **run.where)
    run.model.load_weights(run.weights[0].items())
    assert worker.gpusync_attach(run.where["base_dir"])["version"] == 0
    worker.gpusync_apply(run.source, 2, **run.where)
    assert worker.gpusync_version() == 2 and run.holds(2)


def test_the_steps_of_the_weight_transfer(run: Run) -> None:
    backend = WeightTransferBackend(None, config_of(), torch.device("cpu"), run.model)
    with pytest.raises(gpusync.DeviceError, match=r"^DeviceError: an update needs init_weight"):
        backend.update_weights({"target_version": 1})
    backend.init_transfer_engine(
        backend.parse_init_info({"source_dir": run.source, **run.where, "options": {}})
    )
    with pytest.raises(gpusync.DeviceError, match="needs target_version"):
        backend.update_weights({})
    with pytest.raises(gpusync.DeviceError, match="phase is not"):
        backend.update_weights({"phase": "load"})
    backend.start_weight_update()
    backend.update_weights({"phase": "prepare", "target_version": 1})
    backend.finish_weight_update()
    assert run.holds(0)
    backend.update_weights({"phase": "discard"})
    backend.update_weights({"target_version": 2, "options": {"write_back": "none"}})
    assert run.holds(2)
    backend.finish_weight_update()
    assert backend.report is not None and backend.report.write_back == "none"
    with pytest.raises(gpusync.DeviceError, match="draft"):
        backend.set_weight_update_target(run.model, None)
    backend.shutdown()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (config_of(eplb=True), "--enable-eplb"),
        (config_of(offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=4))), "offlo"),
        (config_of(cache_config=SimpleNamespace(cpu_offload_gb=4)), "--cpu-offload-gb"),
    ],
)
def test_configurations_that_are_refused(config: Any, says: str) -> None:
    assert says in (why_not(Fused(), config) or "")


def test_states_of_a_model_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    assert why_not(Fused(), config) is None
    lora = config_of()
    lora.lora_config = SimpleNamespace()
    assert "--enable-lora" in (why_not(Fused(), lora) or "")

    asleep = SimpleNamespace(tag="weights", is_asleep=True, cpu_backup_tensor=None)
    allocator = SimpleNamespace(instance=SimpleNamespace(pointer_to_data={1: asleep}))
    with monkeypatch.context() as patch:
        module = SimpleNamespace(CuMemAllocator=allocator)
        patch.setitem(__import__("sys").modules, "vllm.device_allocator.cumem", module)
        assert "wake_up" in (why_not(Fused(), config) or "")
        asleep.tag = "kv_cache"
        assert why_not(Fused(), config) is None

    packed = Fused()
    handle = object()
    packed.cpu_linear = lambda x: (x, handle)
    assert "packed copies" in (why_not(packed, config) or "")

    wrapped = Fused()
    wrapped.base_layer, wrapped.lora_a_stacked = nn.Linear(1, 1), ()
    assert "wrapped for LoRA" in (why_not(wrapped, config) or "")


def test_tensors_with_derived_copies_raise() -> None:
    model = Fused()
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    check_derived(model, name)
    model.kv_b_proj, model.process_weights_after_loading = nn.Linear(1, 1), lambda dtype: None
    check_derived(model, "model.layers.0.self_attn.o_proj.weight")
    with pytest.raises(gpusync.PlacementError, match="derived from it"):
        check_derived(model, name)
    for scale in ("attn.k_scale", "k_proj.output_scale"):
        with pytest.raises(gpusync.PlacementError, match="scales of the KV cache"):
            check_derived(model, f"model.layers.0.self_attn.{scale}")


def test_errors_say_their_class() -> None:
    with pytest.raises(gpusync.DigestMismatchError) as caught, named_errors():
        raise gpusync.DigestMismatchError("other bytes", tensor="a")
    assert str(caught.value) == "DigestMismatchError: other bytes [tensor a]"
