"""What a profiler sees: a range per stage of the device path, from the thread that works, and none on the CPU path."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest

import gpusync
from gpusync.live import devices
from gpusync.testing import EmulatedRuntime
from tests import live, wire
from tests.driver import model_at, open_chain

BATCH = ("feed", "decode", "digest", "count", "list")


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    made = wire.Stream(tmp_path / "stream")
    made.delta()
    return made


def stages_of(stream: wire.Stream, device: str) -> list[tuple[str, ...]]:
    live.need("emulated")
    emulated = EmulatedRuntime()
    model = model_at(stream, 0)
    with (
        mock.patch.object(devices, "emulated_runtime", lambda: emulated),
        open_chain(stream, 1, checkpoint=None) as chain,
    ):
        gpusync.apply_to_model(model, chain, device=device)
    assert live.bytes_of(model) == stream.states[1]
    return list(emulated.ledger.stages)


def test_an_update_marks_its_stages_in_order(stream: wire.Stream) -> None:
    inside = [("prepare", stage) for stage in ("dry_pass", *BATCH)]
    assert stages_of(stream, "emulated") == [("prepare",), *inside, ("check",), ("store",)]


def test_the_cpu_path_marks_nothing(stream: wire.Stream) -> None:
    assert stages_of(stream, "cpu") == []


def test_a_stage_that_fails_is_closed() -> None:
    emulated = EmulatedRuntime()
    with pytest.raises(KeyError), emulated.marked("prepare"), emulated.marked("feed"):
        raise KeyError
    with emulated.marked("check"):
        pass
    assert list(emulated.ledger.stages) == [("prepare",), ("prepare", "feed"), ("check",)]


def test_the_document_names_every_range(stream: wire.Stream, repository: Path) -> None:
    text = (repository / "docs" / "DEVICE.md").read_text(encoding="utf-8")
    named = set(
        re.findall(r"`gpusync\.(\w+)`", text.split("NVTX ranges")[1].split("marks nothing")[0])
    )
    assert named == {stages[-1] for stages in stages_of(stream, "emulated")}
