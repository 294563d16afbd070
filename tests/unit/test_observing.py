"""What a process tells of its pulls and updates: metrics, log lines, and any observer's own."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpusync
from gpusync.observers import observe
from gpusync.types import PullReport, UpdateReport
from tests import wire
from tests.driver import check_at, model_at, open_chain

prometheus_client = pytest.importorskip(
    "prometheus_client", reason="the extra gpusync[server] is absent"
)


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    made = wire.Stream(tmp_path / "stream")
    made.delta()
    made.delta()
    gpusync.pull(made.local, made.base, made.source, 1)
    return made


@pytest.fixture
def registry() -> Iterator[Any]:
    from gpusync.metrics import export_metrics

    found = prometheus_client.CollectorRegistry()
    stop = export_metrics(found)
    yield found
    stop()


def sample(registry: Any, name: str, **labels: str) -> float | None:
    value: float | None = registry.get_sample_value(f"gpusync_{name}", labels)
    return value


def is_unknown(version: float | None) -> bool:
    return version is not None and math.isnan(version)


def apply(stream: wire.Stream, **options: Any) -> UpdateReport:
    with open_chain(stream, 2) as chain:
        return gpusync.apply_to_model(model_at(stream, 1), chain, **options)


# ---- metrics ------------------------------------------------------------------------------------------


def test_a_live_update_and_its_write_back_are_counted_once_each(
    stream: wire.Stream, registry: Any
) -> None:
    report = apply(stream)
    assert report.pull is not None
    assert sample(registry, "live_version") == 2
    assert sample(registry, "applied_version") == 2
    for stage in ("prepare", "pause", "finish", *report.stages.seconds):
        assert sample(registry, "update_seconds_count", stage=stage) == 1
    assert sample(registry, "update_seconds_sum", stage="pause") == report.pause_seconds > 0
    assert sample(registry, "pull_seconds_count", stage="total") == 1
    for stage, seconds in report.pull.stages.seconds.items():
        assert sample(registry, "pull_seconds_sum", stage=stage) == seconds
    assert sample(registry, "tensors_total", path="cpu") == report.tensors_changed > 0
    assert sample(registry, "change_list_bytes") == report.change_list_bytes > 0
    assert sample(registry, "written_bytes_total") == report.pull.written_bytes > 0
    read = report.wire_bytes + report.pull.wire_bytes
    assert sample(registry, "read_bytes_total") == read > 0
    for operation in ("pull", "update"):
        when = sample(registry, "last_success_timestamp_seconds", operation=operation)
        assert when is not None and when > 0


def test_a_write_back_that_has_to_pull_is_counted_once(stream: wire.Stream, registry: Any) -> None:
    model = model_at(stream, 1)
    with open_chain(stream, 2) as chain:
        update = gpusync.prepare(model, chain)
        update.commit()
        gpusync.pull(stream.local, None, stream.source, 2)  # the folder moves meanwhile
        report = update.finish()
    assert report.disk_version == 2
    assert sample(registry, "pull_seconds_count", stage="total") == 2


def test_rebuilt_tensors_are_counted(stream: wire.Stream, registry: Any) -> None:
    (shard, *_) = sorted(stream.local.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.unlink()
    shard.write_bytes(data)
    report = gpusync.pull(stream.local, None, stream.source, 2)
    check_at(stream, 2)
    assert sample(registry, "healed_tensors_total") == len(report.tensors_healed) > 0


def test_what_alerts_look_for_is_exported_before_it_happens(registry: Any) -> None:
    """Prometheus takes no first sample for an increase: these have to be there as zeros."""
    for operation, error in (("commit", "ModelPoisonedError"), ("pull", "FrameFormatError")):
        assert sample(registry, "failures_total", operation=operation, error=error) == 0
    assert sample(registry, "tensors_total", path="host_decode") == 0


def test_failures_are_counted_by_operation_and_class(stream: wire.Stream, registry: Any) -> None:
    def failures(operation: str, error: str) -> float | None:
        return sample(registry, "failures_total", operation=operation, error=error)

    with pytest.raises(gpusync.SourceNotReadyError):
        gpusync.pull(stream.local, None, stream.source, 9)
    assert failures("pull", "SourceNotReadyError") == 1

    model = model_at(stream, 1)
    with open_chain(stream, 2) as chain:
        with pytest.raises(gpusync.DeviceError):
            gpusync.prepare(model, chain, device="none")
        update = gpusync.prepare(model, chain)
        next(model.parameters()).data.reshape(-1).view(dtype=_bytes()).bitwise_not_()
        with pytest.raises(gpusync.PlacementError):
            update.commit()
        with pytest.raises(gpusync.DeviceError):
            update.finish()
    assert failures("prepare", "DeviceError") == 1
    assert failures("commit", "PlacementError") == 1
    assert failures("finish", "DeviceError") == 1
    assert is_unknown(sample(registry, "live_version"))


def test_a_folder_that_could_not_follow_still_shows_the_live_version(
    stream: wire.Stream, registry: Any
) -> None:
    model = model_at(stream, 1)
    with open_chain(stream, 2) as chain:
        update = gpusync.prepare(model, chain)
        update.commit()
        (stream.local / ".weight_sync" / "lock").unlink()
        (stream.local / ".weight_sync" / "lock").mkdir()
        with pytest.raises(gpusync.CheckpointError):
            update.finish()
    assert sample(registry, "live_version") == 2
    assert is_unknown(sample(registry, "applied_version"))


def test_without_being_asked_nothing_loads_prometheus_client(stream: wire.Stream) -> None:
    code = (
        "import sys, gpusync\n"
        "gpusync.pull(*sys.argv[1:4], 2)\n"
        "import gpusync.live.apply\n"
        "print('prometheus_client' in sys.modules, __import__('logging').getLogger().handlers)"
    )
    folders = (str(stream.local), str(stream.base), str(stream.source))
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.stderr) == ("False []\n", "")
    check_at(stream, 2)


# ---- observers ----------------------------------------------------------------------------------------


class Broken:
    """An observer that fails whenever it is called."""

    def pulled(self, report: PullReport) -> None:
        raise ValueError("pulled")

    def updated(self, report: UpdateReport) -> None:
        raise ValueError("updated")

    def failed(self, operation: str, error: Exception) -> None:
        raise ValueError("failed")


def test_an_observer_that_fails_changes_no_result(
    stream: wire.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    stop = observe(Broken())
    try:
        assert apply(stream).disk_version == 2
        with pytest.raises(gpusync.SourceNotReadyError):
            gpusync.pull(stream.local, None, stream.source, 9)
    finally:
        stop()
    failed = [line for line in caplog.messages if line.startswith("observer_failed")]
    assert failed == ["observer_failed observer=Broken"] * 3
    stop()  # again is fine


# ---- the log --------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("gpusync.") and record.levelno == logging.INFO
    ]


def fields(line: str) -> dict[str, str]:
    event, *pairs = line.split(" ")
    found = dict(pair.split("=", 1) for pair in pairs)
    assert len(found) == len(pairs), "a field is there twice"
    return {"event": event, **found}


def test_a_pull_is_one_line_of_its_reports_values(
    stream: wire.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpusync")
    report = gpusync.pull(stream.local, None, stream.source, 2)
    (line,) = lines(caplog)
    found = fields(line)
    assert found["event"] == "pull_done"
    assert (found["outcome"], found["from_version"], found["version"]) == ("applied", "1", "2")
    assert found["folder"] == str(stream.local)
    assert int(found["wire_bytes"]) == report.wire_bytes
    stages = [pair.split(":")[0] for pair in found["stages"].split(",")]
    assert stages == list(report.stages.seconds)
    caplog.clear()
    gpusync.pull(stream.local, None, stream.source, 2)
    (line,) = lines(caplog)
    assert fields(line)["outcome"] == "unchanged"


def test_an_update_is_one_line_and_its_write_back_another(
    stream: wire.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    caplog.set_level(logging.INFO, "gpusync")
    with open_chain(stream, 2) as chain:
        report = gpusync.apply_to_model(model, chain)
    update, pull = map(fields, lines(caplog))
    assert (update["event"], pull["event"]) == ("update_committed", "pull_done")
    assert (update["from_version"], update["version"], update["device"]) == ("1", "2", "cpu")
    assert int(update["tensors_changed"]) == report.tensors_changed
    assert int(update["changed_bytes"]) == report.changed_bytes
    assert re.fullmatch(r"\d+\.\d{4}", update["pause_seconds"])
    assert [pair.split(":")[0] for pair in update["stages"].split(",")] == list(
        report.stages.seconds
    )


def _bytes() -> Any:
    import torch

    return torch.uint8
