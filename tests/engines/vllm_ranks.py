"""Processes that are the ranks of one vLLM model: each holds its shard, built and loaded by vLLM's own classes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

import gpusync
from gpusync.engines.session import Session, to_plain
from tests.engines import models

_LIMIT_SECONDS = 500.0


class Ranks:
    """A world of ranks, each in a process of its own; one after another, models are loaded in it.

    Parameters
    ----------
    size
        Number of ranks: of tensor parallelism, and of expert parallelism where a model is loaded so.
    first
        A checkpoint with experts: only then has vLLM a group for them.
    """

    def __init__(self, size: int, first: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.engines.plain"])  # vLLM, once for all ranks
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, port, first, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every :class:`Shard` at once; return what each of them returned."""
        for pipe in self._pipes:
            pipe.send((method, args))
        answers = [_answer(pipe) for pipe in self._pipes]
        failed = [value for done, value in answers if not done]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


@contextmanager
def worlds(first: Path) -> Iterator[Callable[[int], Ranks]]:
    """Yield a function that returns as many ranks as asked for, those of the last call if there are as many already.

    ``first`` is a checkpoint with experts; see :class:`Ranks`.
    """
    running: dict[int, Ranks] = {}

    def ranks(size: int) -> Ranks:
        if size not in running:
            close()
            running[size] = Ranks(size, first)
        return running[size]

    def close() -> None:
        while running:
            running.popitem()[1].close()

    try:
        yield ranks
    finally:
        close()


def _answer(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(_LIMIT_SECONDS):
        raise TimeoutError("a rank hangs")
    answer: tuple[bool, Any] = pipe.recv()
    return answer


def digest_of(tensors: models.Tensors) -> str:
    """Return a digest of named tensors."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + b"\0" + bytes_of(tensors[name]))
    return whole.hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


# ---- in the ranks' processes ------------------------------------------------------------------------------


class Shard:
    """One rank's model."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._options: dict[str, Any] = {}

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        """Load the model that follows; ``options`` are those of vLLM."""
        from gpusync.engines.vllm import VllmMount

        self._options = options
        self._model, config = self._fresh(folder)
        self._mount = VllmMount(lambda: self._model, config)
        self._session = Session(self._mount, self._mount.relayout)
        self._pointers = {n: p.data_ptr() for n, p in self._model.named_parameters()}

    def why_not(self) -> str | None:
        return self._mount.why_not()

    def why_not_served(self, folder: Path, options: dict[str, Any]) -> str | None:
        """Return why a model that vLLM serves with these options would be refused, without serving it."""
        from gpusync.engines.vllm_weights import why_not

        return why_not(torch.nn.Module(), _config(folder, self._size, **options))

    def why_not_asleep(self, folder: Path, tag: str) -> str | None:
        """Return why a model is refused after vLLM's allocator has put memory to sleep."""
        from vllm.device_allocator import AllocationData
        from vllm.device_allocator.cumem import CuMemAllocator

        asleep = AllocationData((0, 0, 0, 0), tag, is_asleep=True)
        CuMemAllocator.instance = SimpleNamespace(pointer_to_data={0: asleep})
        try:
            return self.why_not_served(folder, {})
        finally:
            CuMemAllocator.instance = None

    def why_not_wrapped(self, folder: Path) -> str | None:
        """Return why a model is refused of which vLLM has wrapped a layer for LoRA."""
        from vllm.lora.layers import ColumnParallelLinearWithLoRA

        from gpusync.engines.vllm_weights import why_not

        layer = self._model.model.layers[0].mlp.gate_up_proj
        wrapped = ColumnParallelLinearWithLoRA(layer)
        wrapped.lora_a_stacked = ()
        self._model.model.layers[0].mlp.gate_up_proj = wrapped
        try:
            return why_not(self._model, _config(folder, self._size))
        finally:
            self._model.model.layers[0].mlp.gate_up_proj = layer

    def attach(self, folder: Path, relayout: bool) -> dict[str, Any]:
        self._relayout = relayout
        before = _bits(self._model)
        report = self._session.attach(str(folder), relayout=relayout)
        assert _bits(self._model) == before
        return to_plain(report)

    def follow(self, source: str, versions: Sequence[int], where: dict[str, str]) -> dict[str, Any]:
        """Update to each of the versions; return the last report, and what is not as a fresh load has it."""
        for version in versions:
            report = to_plain(
                self._session.apply(source, version, **where, relayout=self._relayout)
            )
        distributed.barrier()  # the rank that writes back has done so
        local = Path(where["checkpoint"])
        fresh = _bits(self._fresh(local)[0])
        live = _bits(self._model)
        distributed.barrier()
        assert live.keys() == fresh.keys()
        assert self._pointers == {n: p.data_ptr() for n, p in self._model.named_parameters()}
        return {
            "report": report,
            "differing": [name for name in live if live[name] != fresh[name]],
            "local": digest_of(models.read(local)),
        }

    def refusal(self, source: str, version: int, where: dict[str, str]) -> dict[str, Any]:
        """Return why a version is refused."""
        before, stood_at = _bits(self._model), self._session.version
        try:
            self._session.apply(source, version, **where, relayout=self._relayout)
        except gpusync.GpuSyncError as err:
            assert _bits(self._model) == before and self._session.version == stood_at
            return {"error": type(err).__name__, "text": str(err)}
        raise AssertionError("it was not refused")

    def _fresh(self, folder: Path) -> tuple[torch.nn.Module, Any]:
        """Return a model as vLLM's loader leaves it, and its configuration."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        config = _config(folder, self._size, **self._options)
        with set_current_vllm_config(config):
            return get_model(vllm_config=config), config


def _work(rank: int, size: int, port: int, first: Path, pipe: Connection) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    import tests.engines.plain  # noqa: F401

    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = str(port)  # as vLLM's CPU worker does
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.synchronize = lambda *device: None
    with set_current_vllm_config(_config(first, size)):
        init_distributed_environment(
            world_size=size,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend="gloo",
        )
        initialize_model_parallel(tensor_model_parallel_size=size)
    shard = Shard(rank, size)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(shard, method)(*args)
        except BaseException:
            answer = False, f"rank {rank}: {traceback.format_exc()}"
        pipe.send(answer)


def _config(folder: Path, size: int, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        tensor_parallel_size=size,
        distributed_executor_backend="mp" if size > 1 else None,
        **{"enforce_eager": True, **options},
    ).create_engine_config()


def _bits(model: torch.nn.Module) -> dict[str, bytes]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: bytes_of(value) for name, value in named}
