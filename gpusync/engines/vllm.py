"""vLLM: methods for its workers, and a backend for its weight transfer. Nothing of vLLM is patched.

Workers: ``--worker-extension-cls gpusync.engines.vllm.WorkerExtension``, then ``collective_rpc("gpusync_apply", ...)``.
Weight transfer, vLLM 0.26 and later: ``--weight-transfer-config '{"backend": "gpusync"}'``, then vLLM's own calls. Pausing,
flushing of caches and setting the served version stay with whoever calls.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

import torch

from gpusync.engines.session import Session, named_errors, to_plain
from gpusync.engines.vllm_answers import answers_together
from gpusync.engines.vllm_relayout import VllmRelayout
from gpusync.engines.vllm_weights import check_derived, why_not
from gpusync.errors import DeviceError
from gpusync.placement.relayout import Relayout
from gpusync.types import UpdateReport

log = logging.getLogger(__name__)

BACKEND = "gpusync"

_REPLACING = {
    "sleep": "vLLM put the weights to sleep",
    "discard": "vLLM discarded memory",
    "reload_weights": "vLLM reloaded the weights",
    "load_model": "vLLM loaded a model",
}
"""Methods of a worker after which its weights may not be those that were proven."""

Phase = Literal["apply", "prepare", "commit", "discard"]


def register() -> None:
    """Register the weight-transfer backend; vLLM's entry point ``vllm.general_plugins`` calls it in every process."""
    try:
        # vLLM is only there where vLLM calls this.
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    except ImportError:
        log.info("weight_transfer_backend_unavailable reason=this vLLM has no weight transfer")
        return
    try:
        factory.WeightTransferEngineFactory.register_engine(BACKEND, WeightTransferBackend)
    except ValueError:
        log.debug("weight_transfer_backend_known")  # plugins may be loaded twice in a process


class VllmMount:
    """A session's view of vLLM.

    Parameters
    ----------
    get_model
        Returns the live model as it was built, without what vLLM wraps around it for graphs.
    vllm_config
        vLLM's configuration of the worker.
    """

    def __init__(self, get_model: Callable[[], torch.nn.Module], vllm_config: Any) -> None:
        self._get_model = get_model
        self._vllm_config = vllm_config

    def model(self) -> torch.nn.Module:
        return self._get_model()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        model: Any = self._get_model()
        return model.load_weights(_checked(model, weights))

    def why_not(self) -> str | None:
        return why_not(self._get_model(), self._vllm_config)

    def relayout(self) -> Relayout:
        """Return what vLLM does to layers after loading; for ``relayout=True``."""
        return VllmRelayout(self._get_model)

    def group(self) -> Any:
        if self._vllm_config.parallel_config.world_size <= 1:
            return None
        state = importlib.import_module("vllm.distributed.parallel_state")
        return state.get_world_group().cpu_group


class WorkerExtension:
    """Methods that vLLM adds to its workers; each runs in every worker.

    An error of any worker reaches the caller, as text that begins with its class, for example ``PlacementError: ...``.
    """

    @answers_together
    def gpusync_attach(
        self, checkpoint_dir: str, version: int | None = None, relayout: bool = False
    ) -> dict[str, Any]:
        """Place and prove the model against the checkpoint it was loaded from; see :func:`gpusync.attach`.

        ``relayout`` takes experts that vLLM rearranges after loading as well; then every update is prepared with it, too.
        Without this call the first update does it. An update that is prepared in the background needs it.
        """
        return to_plain(_session_of(self).attach(checkpoint_dir, version, relayout))

    @answers_together
    def gpusync_prepare(
        self,
        source_dir: str,
        target_version: int,
        checkpoint: str | None = None,
        base_dir: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Prepare an update: nothing that serves is changed.

        ``background=True`` returns at once, so that the worker serves meanwhile: ask ``gpusync_phase`` until it is "prepared",
        pause, commit.
        Other options are those of :func:`gpusync.open_chain` and :func:`gpusync.prepare`.
        """
        session = _session_of(self)
        session.prepare(source_dir, target_version, checkpoint, base_dir, **options)
        return {"phase": session.phase}

    def gpusync_phase(self) -> dict[str, Any]:
        """Return where the update stands: "idle", "preparing", "prepared" (or failed: ``commit`` says), "committed"."""
        return {"phase": _session_of(self).phase}

    @answers_together
    def gpusync_commit(self) -> dict[str, Any]:
        """Make the prepared weights live. The engine is paused: no forward pass may run."""
        return to_plain(_session_of(self).commit())

    @answers_together
    def gpusync_finish(self) -> dict[str, Any]:
        """Let the local checkpoint follow, after the engine resumed, and return the report."""
        return to_plain(_session_of(self).finish())

    @answers_together
    def gpusync_apply(
        self,
        source_dir: str,
        target_version: int,
        checkpoint: str | None = None,
        base_dir: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Prepare, commit and finish in one call, and return the report. The engine is paused, or idle."""
        session = _session_of(self)
        report = session.apply(source_dir, target_version, checkpoint, base_dir, **options)
        return to_plain(report)

    def gpusync_version(self) -> int | None:
        """Return the version that is live; None before the model was attached, after a reload, or once it is poisoned."""
        return _session_of(self).version

    @answers_together
    def gpusync_discard(self) -> None:
        """Forget a prepared update; without one, nothing."""
        _session_of(self).discard()


@dataclass
class InitInfo:
    """Where updates come from. ``options`` are those of :func:`gpusync.open_chain` and :func:`gpusync.prepare`."""

    source_dir: str
    checkpoint: str | None = None
    base_dir: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo:
    """One step of an update.

    Parameters
    ----------
    target_version
        The version wanted; for "apply" and "prepare".
    phase
        "apply": prepare and commit. "prepare", while the engine serves; "commit", in its pause; "discard".
    options
        Over those of ``InitInfo``.
    """

    target_version: int | None = None
    phase: Phase = "apply"
    options: dict[str, Any] = field(default_factory=dict)


class WeightTransferBackend:
    """vLLM's weight-transfer engine "gpusync": an update is a few words, and each worker reads the published bytes.

    Its methods are those of vLLM's ``WeightTransferEngine``, which it does not derive from: that class has changed with almost
    every release.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    defers_processing = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        self.config = config
        self.device = device
        self.report: UpdateReport | None = None
        """Report of the last update."""
        mount = VllmMount(lambda: model, vllm_config)
        self._session = Session(mount, mount.relayout)
        self._init_info: InitInfo | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        return InitInfo(**init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(**update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._init_info = init_info

    def start_weight_update(self) -> None:
        """Nothing: the weights are changed in place."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take one step; see :class:`UpdateInfo`. Returns when it is done on the device."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        # On every rank: vLLM's workers each end their weight update by the error.
        with named_errors():
            if update_info.phase in ("apply", "prepare"):
                self._prepare(update_info)
            if update_info.phase in ("apply", "commit"):
                self.report = self._session.commit()
            elif update_info.phase == "discard":
                self._session.discard()
            elif update_info.phase != "prepare":
                raise DeviceError(
                    "phase is not apply, prepare, commit or discard", got=update_info.phase
                )

    def finish_weight_update(self) -> None:
        """Let the local checkpoint follow what was committed; an update that is only prepared stays prepared."""
        if self._session.phase == "committed":
            with named_errors():
                self.report = self._session.finish()

    def drain_pending(self) -> None:
        """Nothing is pending."""

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        with named_errors():
            raise DeviceError("draft models are not updated by gpusync; load a new one")

    def reset_weight_update_target(self) -> None:
        """Nothing: the target is always the model."""

    def shutdown(self) -> None:
        self._session.discard()

    def _prepare(self, update_info: UpdateInfo) -> None:
        init = self._init_info
        if init is None or update_info.target_version is None:
            missing = "init_weight_transfer_engine" if init is None else "target_version"
            raise DeviceError(f"an update needs {missing} first")
        self._session.prepare(
            init.source_dir,
            update_info.target_version,
            init.checkpoint,
            init.base_dir,
            **{**init.options, **update_info.options},
        )


def _checked(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        check_derived(model, name)
        yield name, tensor


def _session_of(worker: Any) -> Session:
    session: Session | None = vars(worker).get("_gpusync")
    if session is None:
        mount = VllmMount(lambda: worker.model_runner.get_model(), worker.vllm_config)
        session = worker._gpusync = Session(mount, mount.relayout)
        for method, reason in _REPLACING.items():
            if hasattr(worker, method):
                _notice(worker, method, session, reason)
    return session


def _notice(worker: Any, method: str, session: Session, reason: str) -> None:
    """Have a session told before a method of this one worker runs."""
    original = getattr(worker, method)

    @wraps(original)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        session.weights_replaced(reason)
        return original(*args, **kwargs)

    setattr(worker, method, noticed)
