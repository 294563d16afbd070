"""Processes in which SGLang's own classes run on the CPU: ranks of one tensor-parallel group, called like functions.

SGLang's loader, layers, models, plugins and weight updaters are real. What needs a GPU is not: kernels (see
``sglang_stubs``), and the model runner with its caches and graphs, of which there is as much as weights need.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

_LIMIT_SECONDS = 300.0
_SERVED = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2")


class RankFailed(AssertionError):
    """A call raised in a rank; with its traceback."""


class Ranks:
    """Ranks that wait for calls.

    Parameters
    ----------
    pipes
        One per rank.
    """

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def call(self, function: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``module:function`` in every rank, and return what each of them returned."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = [self._answer(pipe, function) for pipe in self._pipes]
        failed = [text for is_well, text in answers if not is_well]
        if failed:
            raise RankFailed("\n".join(failed))
        return [value for _, value in answers]

    def _answer(self, pipe: Connection, function: str) -> tuple[bool, Any]:
        if not pipe.poll(_LIMIT_SECONDS):
            return False, f"{function} did not return within {_LIMIT_SECONDS:g} s"
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except EOFError:
            return False, f"a rank died in {function}"
        return answer


@contextmanager
def ranks(size: int, *, ep_size: int = 1) -> Iterator[Ranks]:
    """Start SGLang's ranks; they end with the block."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes: list[Connection] = []
    processes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, size, ep_size, port, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield Ranks(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(20)
            process.kill()


# ---- in the ranks' processes ------------------------------------------------------------------------------


def _serve(rank: int, size: int, ep_size: int, port: int, pipe: Connection) -> None:
    try:
        _start(rank, size, ep_size, port)
        broken = ""
    except BaseException:
        broken = traceback.format_exc()
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)  # gloo's own teardown waits for ranks that died
        try:
            if broken:
                raise RuntimeError(broken)
            module, _, name = function.partition(":")
            pipe.send((True, getattr(importlib.import_module(module), name)(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _start(rank: int, size: int, ep_size: int, port: int) -> None:
    """Bring a process to where a scheduler of SGLang builds its model runner."""
    from tests.engines import sglang_stubs

    sglang_stubs.install()
    import sglang.srt.models as known

    folder = os.path.dirname(known.__path__[0] + "/")
    others = {name.removesuffix(".py") for name in os.listdir(folder)} - {*_SERVED}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(others))
    os.environ["LOCAL_RANK"] = str(rank)

    from sglang.srt.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    init_distributed_environment(
        backend="gloo",
        world_size=size,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    reset_context()
    arguments = ServerArgs(model_path="none", tp_size=size, ep_size=ep_size, device="cpu")
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=rank))
    get_parallel().override_permanently(world_group=parallel_state._WORLD)
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)
