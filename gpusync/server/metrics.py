"""Prometheus metrics of the HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gpusync.types import PullReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server, in a registry of their own.

    ``gpusync_applied_version`` is the version that the last successful pull left its folder at.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._update_seconds = Histogram(
            "gpusync_update_seconds",
            "Seconds per stage of a pull; stage total is the whole pull",
            ["stage"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._applied_version = Gauge(
            "gpusync_applied_version",
            "Version of the local checkpoint after the last successful pull",
            registry=self._registry,
        )
        self._failures = Counter(
            "gpusync_failures_total", "Pulls that failed", ["error"], registry=self._registry
        )
        self._in_flight = Gauge(
            "gpusync_pulls_in_flight", "Pulls that are running now", registry=self._registry
        )
        self._read_bytes = Counter(
            "gpusync_read_bytes_total", "Published bytes read", registry=self._registry
        )
        self._written_bytes = Counter(
            "gpusync_written_bytes_total",
            "Bytes written to local checkpoints",
            registry=self._registry,
        )

    @contextmanager
    def pull_in_flight(self) -> Iterator[None]:
        """Count a pull while it runs, and its failure by the class of the error."""
        with self._in_flight.track_inprogress():
            try:
                yield
            except Exception as err:
                self._failures.labels(type(err).__name__).inc()
                raise

    def pulled(self, report: PullReport) -> None:
        """Take in the report of a successful pull."""
        self._applied_version.set(report.to_version)
        self._read_bytes.inc(report.wire_bytes)
        self._written_bytes.inc(report.written_bytes)
        self._update_seconds.labels("total").observe(report.seconds)
        for stage, seconds in report.stages.seconds.items():
            self._update_seconds.labels(stage).observe(seconds)

    def render(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)
