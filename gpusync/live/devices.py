"""Which device's path each tensor takes: the one that its live bytes are on, or the one asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch

from gpusync.config import Settings
from gpusync.device.applier import DeviceCaps, prepare_on_device
from gpusync.device.cuda_runtime import cuda_runtime
from gpusync.device.runtime import Runtime
from gpusync.device.warmup import warm_up
from gpusync.errors import DeviceError
from gpusync.folding.fold import Fold
from gpusync.folding.plan import TensorPlan
from gpusync.host.applier import prepare_host
from gpusync.host.changes import ListBudget
from gpusync.host.parts import PreparedPart
from gpusync.live.lists import LivePlan, check_shared
from gpusync.live.relaid import prepare_relaid
from gpusync.placement.regions import refused
from gpusync.testing import emulated_runtime
from gpusync.timing import Meter
from gpusync.types import Digest, ProgressCallback

Path = Literal["cpu", "cuda", "emulated"]

_ON: dict[Path, str] = {"cpu": "cpu", "cuda": "cuda", "emulated": "cpu"}
"""The kind of memory that each path works on."""


def check_device(device: str) -> None:
    """Refuse what is not the name of a device, or a CUDA device where there is none.

    Raises
    ------
    DeviceError
        It is not "auto", "cuda", "cpu" or "emulated".
    MissingDependencyError
        It is "cuda", and a GPU, its driver or a package is missing.
    """
    if device not in ("auto", *_ON):
        raise DeviceError("device is not auto, cuda, cpu or emulated", got=device)
    if device == "cuda":
        cuda_runtime(torch.device("cuda"))


def warm_up_device(device: str) -> None:
    """Build and try whatever the first update on a device would build and try.

    Raises
    ------
    MissingDependencyError
        The device, or what its path needs, is not here.
    """
    check_device(device)
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        warm_up(cuda_runtime(torch.device("cuda")))
    elif device == "emulated":
        warm_up(emulated_runtime())


class PathRunner:
    """Prepares the live side of one update, device by device.

    Parameters
    ----------
    device
        "auto": every tensor on the device that its live bytes are on.
    scratch_bytes
        Cap on the scratch memory of each device, on that of a relaid module, and on the change lists in host memory; None for
        the settings'.
    """

    def __init__(
        self,
        device: str,
        settings: Settings,
        *,
        scratch_bytes: int | None,
        untrusted_source: bool,
        progress: ProgressCallback | None,
    ) -> None:
        self._device = device
        self._settings = settings
        self._scratch_bytes = scratch_bytes
        self._untrusted_source = untrusted_source
        self._progress = progress

    def prepare(self, plan: LivePlan) -> list[PreparedPart]:
        """Verify every planned tensor and list its changes. Live memory is read, never written.

        Raises
        ------
        GpuSyncError
            As for :func:`gpusync.prepare`.
        """
        fold = Fold(self._settings.piece_bytes, self._settings.workers)
        meter = Meter("decode", plan.nbytes, self._progress)
        on_host = self._settings.change_list_bytes
        if self._scratch_bytes is not None and not self._uses_device(plan):
            on_host = self._scratch_bytes
        budget = ListBudget(on_host)
        parts = [
            self._part(plan, path, where, tensors, fold, budget, meter)
            for (path, where), tensors in self._paths(plan).items()
        ]
        if plan.relaid is not None:
            cap = self._scratch_bytes or self._settings.relayout_bytes
            parts.append(prepare_relaid(plan.relaid, fold, budget, cap, meter))
        digests: dict[str, Digest] = {}
        for part in parts:
            digests.update(part.digests)
        work = plan.work(plan.tensors)
        check_shared(work.shared, work.regions.keys(), digests)
        return parts

    def _part(
        self,
        plan: LivePlan,
        path: Path,
        where: torch.device,
        tensors: Sequence[TensorPlan],
        fold: Fold,
        budget: ListBudget,
        meter: Meter,
    ) -> PreparedPart:
        work = plan.work(tensors)
        if path == "cpu":
            return prepare_host(work, fold, budget, meter)
        runtime: Runtime = emulated_runtime() if path == "emulated" else cuda_runtime(where)
        caps = DeviceCaps(
            scratch_bytes=self._scratch_bytes or self._settings.scratch_bytes,
            list_bytes=self._settings.device_list_bytes,
            ring_bytes=self._settings.ring_bytes,
            host_lists=budget,
        )
        return prepare_on_device(
            work, runtime, caps, fold, meter, untrusted_source=self._untrusted_source
        )

    def _paths(self, plan: LivePlan) -> dict[tuple[Path, torch.device], list[TensorPlan]]:
        found = plan.by_device()
        if self._device == "auto":
            return {(cast(Path, where.type), where): found[where] for where in found}
        path = cast(Path, self._device)
        reasons = {
            tensor.name: f"on {where}, and device {path!r} was asked for"
            for where, tensors in found.items()
            if where.type != _ON[path]
            for tensor in tensors
        }
        if plan.relaid is not None and path == "cuda":
            for name in plan.relaid.regions:
                reasons[name] = "relaid, which is host work, and device 'cuda' was asked for"
        if reasons:
            raise refused(reasons)
        return {(path, where): tensors for where, tensors in found.items()}

    def _uses_device(self, plan: LivePlan) -> bool:
        return any(path != "cpu" for path, _ in self._paths(plan))
