"""A cancelled request, or a signal's exception, at any line that prepare, commit, finish and discard run."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import gpusync
from gpusync.errors import CheckpointError, GpuSyncError, ModelPoisonedError
from gpusync.folder.lock import FolderLock
from tests import live, wire
from tests.driver import check_at, model_at, open_chain
from tests.engine_side.scene import (
    Interrupt,
    check_next_updates,
    check_nothing_is_left,
    nothing_stays_open,
    prepare,
)

POINTS = 60
"""Lines at which a long call is interrupted, evenly spread over all that it runs."""
FIRST = 20
"""And every one of so many at its begin, where a verb takes its turn."""


class Folder:
    """The local checkpoint as it stands at version 1, to be put back."""

    def __init__(self, stream: wire.Stream) -> None:
        self._stream = stream
        self._saved = stream.root / "saved"
        shutil.copytree(stream.local, self._saved)

    def restore(self) -> None:
        shutil.rmtree(self._stream.local)
        shutil.copytree(self._saved, self._stream.local)


@pytest.fixture
def folder(stream: wire.Stream) -> Folder:
    return Folder(stream)


@pytest.fixture(autouse=True)
def _in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSYNC_THREADS", "1")


def spread(lines: int) -> Iterator[int]:
    assert lines > POINTS
    return iter(sorted({*range(FIRST), *range(0, lines, max(1, lines // POINTS))}))


def count_of_lines(stream: wire.Stream, device: str, verb: str) -> int:
    counted = Interrupt(1 << 30, KeyboardInterrupt)
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    if verb == "prepare":
        with counted:
            update = prepare(stream, model, device=device)
        update.discard()
        return counted.lines
    update = prepare(stream, model, device=device)
    if verb == "finish":
        update.commit()
    with counted:
        getattr(update, verb)()
    return counted.lines


def test_prepare_stopped_at_any_line_leaves_both_sides_as_they_were(
    stream: wire.Stream, device: str
) -> None:
    error = KeyboardInterrupt if device == "cpu" else asyncio.CancelledError
    lines = count_of_lines(stream, device, "prepare")
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    before = wire.snapshot(stream.local)
    stopped = 0
    leaks: list[str] = []
    for number in spread(lines):
        with nothing_stays_open(leaks):
            with Interrupt(number, error) as interrupt:
                try:
                    prepare(stream, model, device=device).discard()
                except (error, GpuSyncError):
                    stopped += 1
            assert interrupt.happened, f"{number} of {lines} lines"
        where = f"stopped at {interrupt.where}"
        assert live.bytes_of(model) == stream.states[1], where
        assert gpusync.live_version(model) == 1, where
        assert wire.snapshot(stream.local) == before, where
        check_nothing_is_left(stream)
    assert stopped > POINTS * 0.9
    assert len(leaks) <= 2, leaks
    check_next_updates(stream, model, device)


def test_commit_stopped_at_any_line_is_whole_or_poisoned(
    stream: wire.Stream, folder: Folder, device: str
) -> None:
    """The update is discarded or still prepared, the new weights are live under their version, or nobody serves them."""
    lines = count_of_lines(stream, device, "commit")
    folder.restore()
    ends = dict.fromkeys(("old", "new", "poisoned"), 0)
    leaks: list[str] = []
    for number in spread(lines):
        model = model_at(stream, 1)
        with nothing_stays_open(leaks):
            update = prepare(stream, model, device=device)
            with Interrupt(number, asyncio.CancelledError) as interrupt:
                try:
                    update.commit()
                except (asyncio.CancelledError, GpuSyncError):
                    pass
            assert interrupt.happened, f"{number} of {lines} lines"
            end = check_end_of_commit(stream, model, update, f"stopped at {interrupt.where}")
            del update
        ends[end] += 1
        check_nothing_is_left(stream)
        if end != "poisoned" and number % 7 == 0:
            check_next_updates(stream, model, device)
            folder.restore()
    assert len(leaks) <= 2, leaks
    assert ends["old"] and ends["new"] and ends["poisoned"], ends


def check_end_of_commit(
    stream: wire.Stream, model: nn.Module, update: gpusync.Update, where: str
) -> str:
    held, version = live.bytes_of(model), gpusync.live_version(model)
    if version is None:
        with pytest.raises(ModelPoisonedError):
            prepare(stream, model)
        return "poisoned"
    assert held == stream.states[version], where
    if version == 1:
        with update:  # discards it, where it is still prepared
            pass
        prepare(stream, model).discard()
        return "old"
    assert version == 2
    return "new"


@pytest.mark.parametrize("then", ["finish again", "the next update"])
def test_finish_stopped_at_any_line_is_caught_up_with(
    stream: wire.Stream, folder: Folder, then: str
) -> None:
    lines = count_of_lines(stream, "cpu", "finish")
    leaks: list[str] = []
    for number in spread(lines):
        folder.restore()
        model = model_at(stream, 1)
        with nothing_stays_open(leaks):
            update = prepare(stream, model)
            update.commit()
            with Interrupt(number, KeyboardInterrupt) as interrupt:
                try:
                    update.finish()
                except (KeyboardInterrupt, CheckpointError):
                    pass
            where = f"stopped at {interrupt.where}"
            assert live.bytes_of(model) == stream.states[2], where
            assert gpusync.live_version(model) == 2, where
            if then == "finish again":
                try:
                    update.finish()
                except gpusync.DeviceError as err:
                    assert "finished" in str(err), where
                check_at(stream, 2)
            del update
            target = 2 if then == "finish again" else 3
            with open_chain(stream, target) as chain:
                gpusync.apply_to_model(model, chain, device="cpu")
            check_at(stream, target)
        check_nothing_is_left(stream)


def test_discard_stopped_at_any_line_gives_the_model_back(stream: wire.Stream, device: str) -> None:
    lines = count_of_lines(stream, device, "discard")
    model = model_at(stream, 1)
    gpusync.attach(model, stream.local)
    leaks: list[str] = []
    for number in spread(lines):
        with nothing_stays_open(leaks):
            update = prepare(stream, model, device=device)
            with Interrupt(number, KeyboardInterrupt) as interrupt:
                try:
                    update.discard()
                except KeyboardInterrupt:
                    pass
            assert interrupt.happened
            update.discard()
            del update
        assert live.bytes_of(model) == stream.states[1]
        # What little is left of a removal that was stopped, the next pull clears.
        assert not (stream.local / ".weight_sync" / "staging" / "files").exists()
        with FolderLock(stream.local, 0.0):
            pass
    check_next_updates(stream, model, device)


def test_an_exception_out_of_progress_in_prepare_and_in_finish(
    stream: wire.Stream, device: str, tmp_path: Path
) -> None:
    """A callback sees events of both sides; from whichever it raises, nothing has happened yet."""
    raised = 0
    for number in range(200):
        events = 0

        def count(event: gpusync.Progress, number: int = number) -> None:
            nonlocal events
            events += 1
            if events > number:
                raise asyncio.CancelledError

        model, update = model_at(stream, 1), None
        before = wire.snapshot(stream.local)
        with nothing_stays_open():
            try:
                with prepare(stream, model, device=device, progress=count) as update:
                    update.commit()
                    update.finish()
            except asyncio.CancelledError:
                raised += 1
            ended = update is not None and gpusync.live_version(model) == 2 and events <= number
            update = None
            if ended:
                break
            live_version = gpusync.live_version(model)
            assert live.bytes_of(model) == stream.states[live_version or 1]
            if wire.marker_version(stream.local) == 1:
                assert wire.snapshot(stream.local) == before
        check_nothing_is_left(stream)
    assert raised > 2
    check_at(stream, 2)
    check_next_updates(stream, model, device)
