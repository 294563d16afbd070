"""SGLang: an update from disk that is applied to the live weights in place. Nothing of SGLang is patched.

SGLang loads :func:`register` by its entry point ``sglang.srt.plugins`` in each of its processes. From then on
``/update_weights_from_disk`` with ``load_format="gpusync"`` updates in place, on all ranks or on none; every other update is
SGLang's own, and is noticed. The other mounts are ``--custom-weight-loader gpusync.engines.sglang.load`` and, in releases that
have it, ``--weight-update-receivers gpusync.engines.sglang.receiver``. Pausing, flushing of caches and the served version stay
with SGLang and whoever calls it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gpusync.config import Settings
from gpusync.engines import sglang_hooks
from gpusync.engines.session import named_errors
from gpusync.engines.sglang_follower import follower_of
from gpusync.engines.sglang_requests import encode_message, merge_payload, parse_message
from gpusync.local.pull import pull as pull_checkpoint

__all__ = ["encode_message", "load", "pull", "receiver", "register"]

log = logging.getLogger(__name__)

Hooks = Mapping[str, Callable[..., Any]]

_UPDATERS = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater",
    "sglang.srt.model_executor.model_runner.ModelRunner",
)
_SCHEDULERS = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin",
)
"""Where releases have the methods that are hooked."""

_OF_UPDATER: Hooks = {
    "update_weights_from_disk": sglang_hooks.update_from_disk,
    "update_weights_from_tensor": sglang_hooks.update_from_tensor,
    "load_weights_from_distributed": sglang_hooks.load_from_distributed,
    "update_weights_from_distributed": sglang_hooks.load_from_distributed,
    "update_weights_from_ipc": sglang_hooks.replace,
    "begin_weight_update": sglang_hooks.begin,
}
_OF_SCHEDULER: Hooks = {
    "release_memory_occupation": sglang_hooks.release,
    "resume_memory_occupation": sglang_hooks.resume,
}
_PULL_MODULE = "sglang.srt.weight_sync.local_checkpoint"


def register() -> None:
    """Hook SGLang's updates of weights; SGLang's entry point ``sglang.srt.plugins`` calls it in every process."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    for owners, hooks in ((_UPDATERS, _OF_UPDATER), (_SCHEDULERS, _OF_SCHEDULER)):
        needed = next(iter(hooks))
        owner, found = _first_with(owners, needed)
        if owner is None:
            log.warning("sglang_not_hooked reason=this SGLang has no %s where it is known", needed)
            continue
        for method, hook in hooks.items():
            if hasattr(found, method):
                registry.HookRegistry.register(f"{owner}.{method}", hook, registry.HookType.AROUND)
    if Settings.from_env().source_dir and hasattr(_imported(_PULL_MODULE), "pull"):
        registry.HookRegistry.register(f"{_PULL_MODULE}.pull", pull, registry.HookType.REPLACE)


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Take one step of an update: a custom weight loader, which SGLang calls in every rank.

    Parameters
    ----------
    named_tensors
        The message of :func:`encode_message`, on any device; no weights.

    Raises
    ------
    GpuSyncError
        The weights are as before. With the plugin, SGLang reports it as a failed update; without, it ends the engine.
    """
    with named_errors():
        done = follower_of(model).take(parse_message(named_tensors))
    log.info("update_taken said=%s", done)


class Receiver:
    """Updates driven by ``/update_weights_from_distributed``: each round's payload is a request."""

    def __init__(self, context: Any) -> None:
        self._model: torch.nn.Module = context.model
        self._first = context.init_payload

    def receive(self, payload: Any) -> None:
        """Take one step of an update.

        Parameters
        ----------
        payload
            The keys of a request, over those of the ``receiver_init_payload``.

        Raises
        ------
        GpuSyncError
            The weights are as before.
        """
        with named_errors():
            done = follower_of(self._model).take(merge_payload(self._first, payload))
        log.info("update_taken said=%s", done)

    def destroy(self) -> None:
        """Forget an update that is prepared."""
        follower_of(self._model).session.discard()


def receiver(context: Any) -> Receiver:
    """Return a receiver for one rank: the factory for ``--weight-update-receivers``."""
    return Receiver(context)


def pull(
    local_checkpoint_dir: str,
    base_dir: str | None,
    source_dir: str,
    target_version: int,
    pre_read_hook: str | None = None,
) -> None:
    """Bring a local checkpoint to a version, in the place of the function of this name in SGLang's ``local_checkpoint``.

    Called by every rank of a host at once; one of them pulls. Parameters and errors are those of :func:`gpusync.pull`.
    """
    pull_checkpoint(local_checkpoint_dir, base_dir, source_dir, target_version, pre_read_hook)


def _first_with(owners: Iterable[str], method: str) -> tuple[str | None, Any]:
    """Return the name of the first class that is there and has a method, and the class; None and None where none has."""
    for owner in owners:
        module, _, name = owner.rpartition(".")
        found = getattr(_imported(module), name, None)
        if hasattr(found, method):
            return owner, found
    return None, None


def _imported(module: str) -> Any:
    """Return a module; None where this release has it not."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
