"""What is called in SGLang's ranks: a scheduler's requests about weights, with gpusync's plugin as SGLang loads it.

Real: SGLang's plugin loader, its hook registry, WeightUpdater, SchedulerWeightUpdaterManager, requests, serializer and loaders.
Stand-ins: the model runner and the worker around it (attributes only), the memory saver, which on a GPU unmaps memory, and the
scheduler's caches, of which there is a count of flushes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import gpusync
from tests.engines.sglang_models import bits, fresh

_ROOT = Path(__file__).parents[2]
LOADER = "gpusync.engines.sglang.load"


class Saver:
    """Stands in for the memory saver."""

    def pause(self, tag: str) -> None:
        pass

    resume = pause


@dataclass
class Engine:
    """One rank's model, and what a scheduler has of it."""

    manager: Any
    runner: Any
    served_version: str = "default"
    flushes: int = 0
    before: dict[str, bytes] = field(default_factory=dict)

    def record_weight_version_change(self, new_version: str | None) -> None:
        if new_version is not None:
            self.served_version = new_version

    def flush_cache(self, empty_cache: bool = False) -> bool:
        self.flushes += 1
        return True

    _engine_paused = True
    disaggregation_mode = None


_engine: list[Engine] = []


def load_plugins(where: str, source_dir: str = "") -> list[str]:
    """Let SGLang load its plugins as at its start, and return what they hooked.

    Parameters
    ----------
    where
        An empty folder. gpusync's entry points are written into it as an installation does, from pyproject.toml: the tests
        run from a checkout as well.
    source_dir
        The setting.
    """
    declared = (_ROOT / "pyproject.toml").read_text()
    sections = re.findall(r'^\[project.entry-points."(.+)"\]\n((?:.+\n)+)', declared, re.M)
    lines = [f"[{group}]\n{points.replace(chr(34), '')}" for group, points in sections]
    site = Path(where) / str(os.getpid())
    info = site / f"gpusync-{gpusync.__version__}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: gpusync\nVersion: {gpusync.__version__}\n"
    )
    (info / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, str(site))
    os.environ["GPUSYNC_SOURCE_DIR"] = source_dir
    from sglang.srt import plugins

    plugins.load_plugins()
    return sorted(plugins.HookRegistry._patched)


def with_a_pull_of_its_own(where: str, source_dir: str) -> str:
    """Load the plugins in a release that has ``/pull_weights``, and return whose pull it calls then."""
    package = ModuleType("sglang.srt.weight_sync.local_checkpoint")
    package.pull = lambda: None  # type: ignore[attr-defined]
    sys.modules[package.__name__] = package
    import sglang.srt.weight_sync as parent

    parent.local_checkpoint = package
    load_plugins(where, source_dir)
    return f"{package.pull.__wrapped__.__module__} {package.pull.__closure__[0].cell_contents.__module__}"


def start(folder: str) -> None:
    """Build the rank's engine around a model that is loaded from a folder."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.managers.tp_worker import BaseTpWorker, TpModelWorker
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.runtime_context import get_parallel

    runner = SimpleNamespace(model=fresh(folder), is_draft_worker=False)
    runner.weight_updater = WeightUpdater(
        tp_rank=get_parallel().tp_rank,
        device="cpu",
        gpu_id=0,
        model_config=ModelConfig(folder, dtype="bfloat16"),
        custom_weight_loaders=[LOADER],
        get_model=lambda: runner.model,
        update_model_fields=lambda model, **fields: setattr(runner, "model", model),
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: runner,
    )
    worker = SimpleNamespace(_model_runner=runner, model_runner=runner)
    worker.weight_update_runners = lambda: TpModelWorker.weight_update_runners(worker)
    worker.deserialize_own_rank = lambda data: BaseTpWorker.deserialize_own_rank(worker, data)
    manager = SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=None,
        memory_saver_adapter=Saver(),
        flush_cache=lambda **kwargs: engine.flush_cache(**kwargs),
        is_fully_idle=lambda **kwargs: True,
    )
    engine = Engine(manager, runner)
    manager.scheduler = engine
    _engine[:] = [engine]


@dataclass(frozen=True)
class Answer:
    """How a request ended, and what the rank is like after it."""

    success: bool
    message: str
    served_version: str
    flushes: int
    live_version: int | None
    is_as_before: bool


@contextmanager
def _kept() -> Iterator[Engine]:
    (engine,) = _engine
    engine.before = bits(engine.runner.model)
    engine.flushes = 0
    with torch.inference_mode():  # as in a scheduler's loop
        yield engine


def _answer(engine: Engine, output: Any) -> Answer:
    model = engine.runner.model
    return Answer(
        success=output.success,
        message=output.message,
        served_version=engine.served_version,
        flushes=engine.flushes,
        live_version=gpusync.live_version(model),
        is_as_before=bits(model) == engine.before,
    )


def from_disk(model_path: str, load_format: str = "auto", version: str | None = None) -> Answer:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(
        model_path=model_path, load_format=load_format, weight_version=version
    )
    with _kept() as engine:
        return _answer(engine, engine.manager.update_weights_from_disk(request))


def from_tensors(tensors: Any, load_format: str | None, version: str | None = None) -> Answer:
    """Update from tensors, in a session as SGLang demands."""
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.runtime_context import get_parallel

    with _kept() as engine:
        assert engine.manager.begin_weight_update(BeginWeightUpdateReqInput()).success
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[_serialize(tensors)] * get_parallel().tp_size,
            load_format=load_format,
            weight_version=version,
        )
        output = engine.manager.update_weights_from_tensor(request)
        assert engine.manager.end_weight_update(EndWeightUpdateReqInput()).success
        return _answer(engine, output)


def _serialize(tensors: Any) -> bytes:
    """Serialize as a trainer does: SGLang's patch of torch, made by the first update, takes tensors of a GPU only."""
    from sglang.srt.utils import MultiprocessingSerializer
    from torch.multiprocessing import reductions

    patched = reductions.reduce_tensor
    plain = getattr(reductions, "_reduce_tensor_original", patched)
    ForkingPickler.register(torch.Tensor, plain)
    try:
        data: bytes = MultiprocessingSerializer.serialize(tensors)
    finally:
        ForkingPickler.register(torch.Tensor, patched)
    return data


def by_message(values: dict[str, Any], version: str | None = None) -> Answer:
    """Update by the custom weight loader."""
    from gpusync.engines.sglang import encode_message

    return from_tensors(encode_message(**values), LOADER, version)


def by_receiver(first: Any, *payloads: Any) -> list[str]:
    """Drive a receiver as releases that have receivers do; this one has none, so a namespace stands in for the context.

    Returns one error text per payload, "" for none.
    """
    from gpusync.engines.sglang import receiver

    (engine,) = _engine
    made = receiver(SimpleNamespace(model=engine.runner.model, init_payload=first))
    said = []
    with torch.inference_mode():
        for payload in payloads:
            try:
                made.receive(payload)
                engine.runner.weight_updater.load_weights_from_distributed([])
                said.append("")
            except gpusync.GpuSyncError as err:
                said.append(str(err))
    made.destroy()
    return said


def memory(action: str, tags: list[str] | None = None) -> None:
    from sglang.srt.managers.io_struct import (
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
    )

    (engine,) = _engine
    torch.get_device_module().synchronize = lambda: None  # type: ignore[attr-defined]
    with torch.inference_mode():
        if action == "release":
            engine.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
        else:
            engine.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))


def override(**values: Any) -> None:
    """Let server arguments be other than those that the rank was started with."""
    from sglang.srt.runtime_context import get_context

    get_context().override("test", **values)


def setting(source_dir: str) -> None:
    """Set where the engine's versions are published."""
    os.environ["GPUSYNC_SOURCE_DIR"] = source_dir


def break_one(rank: int, fault: str) -> None:
    """Let the next update fail in one rank, on its way."""
    from sglang.srt.runtime_context import get_parallel

    from gpusync.engines import session
    from gpusync.live import apply

    if get_parallel().tp_rank != rank:
        return
    owner, name = (session, "open_chain") if fault == "opening" else (apply, "_prepare")
    real = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, real)
        raise gpusync.SourceNotReadyError(f"broken while {fault}")

    setattr(owner, name, fail)


def live_version() -> int | None:
    return gpusync.live_version(_engine[0].runner.model)


def equals(folder: str) -> bool:
    """Return whether the live weights are those of a fresh load."""
    return bits(_engine[0].runner.model) == bits(fresh(folder))


def poison(request: str) -> str:
    """Let the model be in an unknown state, ask for an update, and return the class of the error that gets out."""
    from gpusync.live.state import known_state

    (engine,) = _engine
    state = known_state(engine.runner.model)
    assert state is not None
    state.poisoned = True
    try:
        from_disk(request, "gpusync")
    except BaseException as err:
        return type(err).__name__
    return "nothing"
