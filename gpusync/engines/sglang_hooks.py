"""Hooks on SGLang's updates of weights and on the release of their memory: ours are done in place, others are noticed.

Each is called with the original and its arguments (``HookType.AROUND`` in SGLang's registry).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpusync.config import Settings
from gpusync.engines.sglang_follower import Follower, follower_of
from gpusync.engines.sglang_requests import Request, parse_path, takes
from gpusync.engines.sglang_weights import option
from gpusync.errors import GpuSyncError, ModelPoisonedError
from gpusync.folder.marker import read_marker
from gpusync.outcome import advice_for

log = logging.getLogger(__name__)

LOADER = "gpusync.engines.sglang.load"


def update_from_disk(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    model_path: str,
    load_format: str,
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, str]:
    """Around ``update_weights_from_disk``: ours in place, else SGLang's."""
    source_dir = Settings.from_env().source_dir
    follower = follower_of(_model_of(updater))
    if takes(model_path, load_format, source_dir):
        return _reported(lambda: follower.take(parse_path(model_path, source_dir)))
    followed = bool(source_dir) or follower.session.version is not None
    follower.replaced()
    succeeded, message = original(updater, model_path, load_format, *args, **kwargs)
    if succeeded and followed:
        follower = follower_of(_model_of(updater))
        _attach_to(follower, model_path)
    return succeeded, message


def update_from_tensor(
    original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``update_weights_from_tensor``: what the loader refuses is reported."""
    load_format = kwargs.get("load_format", args[1] if len(args) > 1 else None)
    if load_format != LOADER:
        follower_of(_model_of(updater)).replaced()
        return original(updater, *args, **kwargs)
    done: list[Any] = []

    def call() -> str:
        done.append(original(updater, *args, **kwargs))
        return ""

    succeeded, message = _reported(call)
    return done[0] if succeeded else (False, message)


def load_from_distributed(
    original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around a load of weights that were received; a receiver's round ends with none."""
    if any((*args, *kwargs.values())):
        follower_of(_model_of(updater)).replaced()
    return original(updater, *args, **kwargs)


def replace(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a method that loads other weights."""
    follower_of(_model_of(updater)).replaced()
    return original(updater, *args, **kwargs)


def begin(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``begin_weight_update``, which may unpack weights in place."""
    follower_of(_model_of(updater)).session.discard()
    return original(updater, *args, **kwargs)


def release(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``release_memory_occupation``: with a backup on the host the same bytes come back, without none do."""
    if _is_of_weights(args, kwargs):
        follower = follower_of(_model_of(manager))
        follower.session.discard()
        follower.mount.is_released = True
        if not option("enable_weights_cpu_backup"):
            follower.replaced()
    return original(manager, *args, **kwargs)


def resume(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``resume_memory_occupation``."""
    result = original(manager, *args, **kwargs)
    if _is_of_weights(args, kwargs):
        follower_of(_model_of(manager)).mount.is_released = False
    return result


def _reported(step: Callable[[], str]) -> tuple[bool, str]:
    """Return how a step ended, as SGLang's updates do: an exception would end the scheduler, and the engine with it.

    That is what a poisoned model has coming: it must not serve.
    """
    try:
        return True, step()
    except ModelPoisonedError:
        raise
    except GpuSyncError as err:
        kind = type(err).__name__
        text = str(err) if str(err).startswith(kind) else f"{kind}: {err}"
        log.error("update_refused reason=%s", text)
        return False, f"{text} ({advice_for(err)})"
    except Exception as err:
        log.exception("update_failed")
        return False, f"{type(err).__name__}: {err}"


def _attach_to(follower: Follower, model_path: str) -> None:
    """Prove weights that SGLang just loaded from a local checkpoint, before a pull moves it on."""
    try:
        if read_marker(Path(model_path)).marker is not None:
            log.info(
                "loaded_and_attached said=%s",
                follower.take(Request("attach", checkpoint=model_path)),
            )
    except (GpuSyncError, OSError, ValueError) as err:
        log.warning("not_attached folder=%s reason=%s", model_path, err)


def _is_of_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a request to release or resume memory is about the weights; without tags it is about everything."""
    request = args[0] if args else next(iter(kwargs.values()), None)
    tags = getattr(request, "tags", None)
    return not tags or "weights" in tags


def _model_of(owner: Any) -> torch.nn.Module:
    """Return the model that a weight updater, a model runner or a scheduler's part updates."""
    if hasattr(owner, "get_model") and callable(owner.get_model):
        model: torch.nn.Module = owner.get_model()
        return model
    worker = getattr(owner, "tp_worker", None)
    runner = getattr(worker, "model_runner", None) or getattr(worker, "worker", owner)
    model = getattr(runner, "model_runner", runner).model
    return model
