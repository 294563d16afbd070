"""Errors of vLLM's workers, so that its executor stays in step with them.

The executor reads the workers' answers in the order of their ranks and stops at the first error; what it has not read it
takes for the answers to its next call, and is behind from then on. So workers that run a method together raise together,
in the last of them.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import distributed

from gpusync.engines.session import named_errors
from gpusync.errors import GpuSyncError

log = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


def answers_together(method: Method) -> Method:
    """Let every rank's error be raised by the last rank alone; a rank that failed before it returns None.

    For methods that all workers of an engine run at once; the object has its ``vllm_config``. The text of an error begins with
    its class. Where no executor reads the answers of several workers, each raises its own.
    """

    @wraps(method)
    def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = _group_of(self.vllm_config)
        result, error = None, None
        try:
            with named_errors():
                result = method(self, *args, **kwargs)
        except Exception as err:
            error = err
            if group is None:
                raise
        if group is None:
            return result
        texts: list[str | None] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(texts, _text_of(error), group=group)
        failed = [text for text in texts if text is not None]
        if not failed:
            return result
        if distributed.get_rank(group) == len(texts) - 1:
            raise GpuSyncError(failed[0]) from error
        log.error("call_failed method=%s reason=%s", method.__name__, texts)
        return None

    return cast(Method, answer)


def _text_of(error: Exception | None) -> str | None:
    if error is None or isinstance(error, GpuSyncError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"


def _group_of(vllm_config: Any) -> Any:
    """Return the group of exactly the workers that one executor calls; None where there is one, or no executor."""
    parallel = vllm_config.parallel_config
    if parallel.world_size <= 1 or parallel.distributed_executor_backend == "external_launcher":
        return None
    state = importlib.import_module("vllm.distributed.parallel_state")
    for ranks in (state.get_world_group(), state.get_tp_group()):
        if ranks.world_size == parallel.world_size:
            return ranks.cpu_group
    return None
