"""One of SGLang's live models in one rank, and the versions that it follows."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gpusync.engines.session import Session
from gpusync.engines.sglang_requests import Request
from gpusync.engines.sglang_weights import check_derived, launch_path, why_not
from gpusync.errors import ChainError, CheckpointError, DeviceError, PlacementError
from gpusync.live.state import forget_state
from gpusync.types import UpdateReport

log = logging.getLogger(__name__)


class SglangMount:
    """A session's view of one of SGLang's models."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self.is_released = False
        """Whether SGLang has given the memory of the weights back."""

    def model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise PlacementError("SGLang has dropped this model")
        return model

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        model: Any = self.model()
        return model.load_weights(_checked(model, weights))

    def why_not(self) -> str | None:
        if self.is_released:
            return "the memory of the weights is released; call /resume_memory_occupation first"
        return why_not(self.model())

    def group(self) -> Any:
        group = importlib.import_module("sglang.srt.distributed").get_tp_group()
        return group.cpu_group if group.world_size > 1 else None


class Follower:
    """One live model in one rank, and the version that it follows."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.mount = SglangMount(model)
        self.session = Session(self.mount)

    def take(self, request: Request) -> str:
        """Take a step of an update, and return what was done, in words.

        Raises
        ------
        ChainError
            The live version is above the one that was asked for.
        GpuSyncError
            The weights are as before.
        """
        session = self.session
        if request.phase == "discard":
            session.discard()
            return "nothing is prepared"
        if request.phase == "attach":
            return self._attach(request)
        if request.phase in ("apply", "prepare"):
            self._prepare(request)
        if request.phase == "prepare":
            return f"an update to version {request.target_version} is {session.phase}"
        report = session.commit()
        try:
            report = session.finish()
            disk = (
                f"; the local checkpoint is at {report.disk_version}" if report.disk_version else ""
            )
        except CheckpointError as err:  # the weights are new, and whoever serves has to know
            log.error("checkpoint_not_updated reason=%s", err)
            disk = f"; the local checkpoint did not follow: {type(err).__name__}: {err}"
        return _describe(report) + disk

    def replaced(self) -> None:
        """Take note that the weights are not those that were proven: they are proven again by the next update."""
        self.session.discard()
        forget_state(self.mount.model())

    def _prepare(self, request: Request) -> None:
        if request.source_dir is None or request.target_version is None:
            raise DeviceError(
                f"a request to {request.phase} an update needs source_dir and target_version"
            )
        self.session.prepare(
            request.source_dir,
            request.target_version,
            request.checkpoint,
            self._base_of(request),
            **request.options,
        )

    def _attach(self, request: Request) -> str:
        folder = request.checkpoint or self._base_of(request)
        if folder is None:
            raise PlacementError(
                "attaching needs a checkpoint: this engine was not launched from a folder"
            )
        report = self.session.attach(folder)
        for name, reason in report.refused.items():
            log.warning("tensor_refused name=%s reason=%s", name, reason)
        return (
            f"version {report.version} is proven: {len(report.placed)} tensors placed, "
            f"{len(report.refused)} refused, {len(report.dropped)} not of this rank"
        )

    def _base_of(self, request: Request) -> str | None:
        """Return the base that a request names, else the folder that SGLang was launched from, else None."""
        if request.base_dir is not None:
            return request.base_dir
        launched = launch_path()
        if launched is None or not os.path.isdir(launched):
            return None
        local = request.checkpoint
        if local is not None and os.path.realpath(local) == os.path.realpath(launched):
            return None
        return launched


_followers: weakref.WeakKeyDictionary[torch.nn.Module, Follower] = weakref.WeakKeyDictionary()


def follower_of(model: torch.nn.Module) -> Follower:
    """Return the follower of a model; it goes when the model goes."""
    if model not in _followers:
        _followers[model] = Follower(model)
    return _followers[model]


def _describe(report: UpdateReport) -> str:
    if report.outcome == "stale":
        raise ChainError(
            "the live weights are at a later version than the one asked for; reset to version 0 first, or load a "
            "checkpoint",
            version=report.target_version,
            got=report.from_version,
        )
    if report.outcome == "unchanged":
        return f"version {report.to_version} is live already"
    return (
        f"version {report.to_version} is live, after {report.from_version}: {report.changed_bytes} bytes changed in "
        f"{report.tensors_changed} tensors, in {report.pause_seconds:.3f} s"
    )


def _checked(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        check_derived(model, name)
        yield name, tensor
