"""Prometheus metrics of pulls and live updates: of the HTTP server, and of any process that asks for them.

A serving process calls :func:`export_metrics` once; without it gpusync never imports ``prometheus_client``. Every process
counts for itself: with several workers, each exports its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import get_args

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from gpusync.errors import GpuSyncError
from gpusync.observers import Operation, observe
from gpusync.types import PullReport, UpdateReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATHS = ("cpu", "cuda", "emulated", "host_decode")
_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


def export_metrics(registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Have every pull and every live update of this process counted from now on.

    Parameters
    ----------
    registry
        Where the metrics go: by default prometheus_client's own, which ``prometheus_client.start_http_server`` and most
        engines serve.

    Returns
    -------
    Callable
        Ends the counting; the metrics stay in the registry.

    Raises
    ------
    ValueError
        The registry has gpusync's metrics already.
    """
    return observe(Metrics(registry))


class Metrics:
    """gpusync's metrics in one registry, fed by reports. Implements :class:`gpusync.observers.Observer`.

    Parameters
    ----------
    registry
        Where they are registered; None: in one of their own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = CollectorRegistry() if registry is None else registry
        self._registry = registry
        self._pull_seconds = Histogram(
            "gpusync_pull_seconds",
            "Seconds per stage of a pull; stage total is the whole pull",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._update_seconds = Histogram(
            "gpusync_update_seconds",
            "Seconds per stage of a live update; stages prepare, pause and finish are the whole of each",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._failures = Counter(
            "gpusync_failures_total",
            "Operations that raised an error",
            ["operation", "error"],
            registry=registry,
        )
        self._tensors = Counter(
            "gpusync_tensors_total",
            "Tensors that live updates changed, by the path that they took",
            ["path"],
            registry=registry,
        )
        self._begin_at_zero()
        self._applied_version = _gauge(
            registry, "applied_version", "Version of the local checkpoint after the last pull"
        )
        self._live_version = _gauge(
            registry, "live_version", "Version of the live model after the last update"
        )
        for version in (self._applied_version, self._live_version):
            version.set(math.nan)  # not known yet: 0 would be the base, far behind every other host
        self._change_lists = _gauge(
            registry, "change_list_bytes", "Memory of the last update's change lists"
        )
        self._last_success = Gauge(
            "gpusync_last_success_timestamp_seconds",
            "When the last pull or update ended well",
            ["operation"],
            registry=registry,
        )
        self._healed = _counter(
            registry, "healed_tensors", "Damaged local tensors that pulls rebuilt"
        )
        self._read_bytes = _counter(
            registry, "read_bytes", "Published bytes that were gone through"
        )
        self._written_bytes = _counter(
            registry, "written_bytes", "Bytes written to local checkpoints"
        )

    def _begin_at_zero(self) -> None:
        """Prometheus sees an increase between two samples only: a counter that began at its first failure would hide it."""
        for operation, error in product(get_args(Operation), _error_names(GpuSyncError)):
            self._failures.labels(operation, error)
        for path in _PATHS:
            self._tensors.labels(path)

    def pulled(self, report: PullReport) -> None:
        """Take in a pull that ended well."""
        self._applied_version.set(report.to_version)
        self._healed.inc(len(report.tensors_healed))
        self._read_bytes.inc(report.wire_bytes)
        self._written_bytes.inc(report.written_bytes)
        self._pull_seconds.labels("total").observe(report.seconds)
        for stage, seconds in report.stages.seconds.items():
            self._pull_seconds.labels(stage).observe(seconds)
        self._last_success.labels("pull").set_to_current_time()

    def updated(self, report: UpdateReport) -> None:
        """Take in a live update that ended well; its write-back comes by :meth:`pulled`."""
        self._live_version.set(report.to_version)
        self._read_bytes.inc(report.wire_bytes)
        self._change_lists.set(report.change_list_bytes)
        for path, count in report.tensors_by_path.items():
            self._tensors.labels(path).inc(count)
        whole = {
            "prepare": report.prepare_seconds,
            "pause": report.pause_seconds,
            "finish": report.finish_seconds,
        }
        for stage, seconds in {**report.stages.seconds, **whole}.items():
            self._update_seconds.labels(stage).observe(seconds)
        self._last_success.labels("update").set_to_current_time()

    def failed(self, operation: Operation, error: Exception) -> None:
        """Count a failure by its class. A ``finish`` that failed still tells which version is live."""
        self._failures.labels(operation, type(error).__name__).inc()
        live = getattr(error, "live_version", None)
        if operation == "finish" and live is not None:
            self._live_version.set(live)

    def count_in_flight(self, count: Callable[[], int]) -> None:
        """Add ``gpusync_pulls_in_flight``, which asks ``count`` whenever it is read."""
        gauge = _gauge(self._registry, "pulls_in_flight", "Pulls that are running now")
        gauge.set_function(count)

    def render(self) -> bytes:
        """Return the registry's metrics in Prometheus's text format."""
        return generate_latest(self._registry)


def _error_names(root: type[GpuSyncError]) -> Iterator[str]:
    for kind in root.__subclasses__():
        yield kind.__name__
        yield from _error_names(kind)


def _gauge(registry: CollectorRegistry, name: str, text: str) -> Gauge:
    return Gauge(f"gpusync_{name}", text, registry=registry)


def _counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
    return Counter(f"gpusync_{name}_total", text, registry=registry)
