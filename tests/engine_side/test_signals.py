"""SIGTERM to a real process, at every stage of an update: with its default action, and with an engine's handler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpusync
from tests import wire
from tests.crash.figures import counted
from tests.crash.harness import OURS_AT_REST, state_files
from tests.driver import check_at, model_at, open_chain
from tests.engine_side.scene import check_nothing_is_left
from tests.warm import Ended, Warm

# Prints a line for each thing that it can still say, the last one where it stands.
ENGINE = """
import json, os, signal, sys, threading, time
from pathlib import Path
import gpusync
import torch
from gpusync import fsio
from gpusync.engines.session import Session
from gpusync.host.changes import RegionChanges
from tests import live

local, base, source, device, stage, how, where = sys.argv[1:]
model = live.model_from(Path(local))

def stop(*_):
    raise SystemExit(143)

if how == "handler":
    signal.signal(signal.SIGTERM, stop)

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

calls = 0

def after(module, name, number, only=lambda *_: True):
    real = getattr(module, name)
    def wrapper(*arguments):
        global calls
        result = real(*arguments)
        calls += only(*arguments)
        if calls == number:
            calls += 1
            terminate()
        return result
    setattr(module, name, wrapper)

def progress(event):
    global calls
    calls += stage == event.stage
    if calls == 2 and stage == event.stage:
        calls += 1
        terminate()

def serve():
    while True:  # a signal that comes just before a lock is waited for would be seen only once that is over
        time.sleep(0.05)

class Mount:
    def model(self):
        if stage in ("start", "torch") and threading.current_thread().name == "gpusync-prepare":
            if stage == "torch":
                terminate()
            some, end = torch.zeros(4096), time.monotonic() + 0.5
            while time.monotonic() < end:
                some.add_(1)
        return model

    def load_weights(self, weights):
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in weights:
            held[name].copy_(tensor)

    def why_not(self):
        return None

    def group(self):
        return None

def run():
    global update
    update = gpusync.prepare(
        model,
        gpusync.open_chain(source, 2, checkpoint=local, base_dir=base),
        device=device,
        progress=progress,
    )
    if stage == "prepared":
        terminate()
    if stage == "commit":
        after(RegionChanges, "store", 2)
    update.commit()
    if stage == "committed":
        terminate()
    if stage == "finish":
        after(fsio, "rename", 2)
    update.finish()

try:
    if where == "main":
        run()
    elif where == "thread":
        # Not joined: CPython up to 3.12 takes a thread for ended once a signal's exception ends a join.
        threading.Thread(target=run).start()
        serve()
    elif where == "waiting":
        mount = Mount()
        mount.group = threading.Event().wait
        sessions = [Session(mount) for _ in range(40)]
        sessions[0].attach(local)
        for session in sessions:
            session.prepare(source, 2, local, base, background=True)
        terminate()
        serve()
    else:
        session = Session(Mount())
        session.attach(local)
        if stage == "start":
            after(threading.Thread, "start", 1)
        session.prepare(source, 2, local, base, background=True, device=device, progress=progress)
        serve()
    print(json.dumps("not stopped"))
finally:
    held = {name: data.hex() for name, data in live.bytes_of(model).items()}
    print(json.dumps([gpusync.live_version(model), held]))
"""

STAGES = ("materialize", "decode", "prepared", "commit", "committed", "finish")


def run_engine(warm: Warm, stream: wire.Stream, stage: str, how: str, where: str = "main") -> Ended:
    arguments = (stream.local, stream.base, stream.source, "cpu", stage, how, where)
    ended = warm.run(ENGINE, *arguments)
    counted["SIGTERMs"] += 1
    if (
        where == "main"
    ):  # a thread that goes on while the interpreter ends is told that it is too late
        assert "Error" not in ended.errors, ended.errors
    return ended


@pytest.mark.parametrize("stage", STAGES)
def test_sigterm_with_its_default_action_leaves_a_folder_that_the_next_pull_brings_on(
    warm: Warm, stream: wire.Stream, stage: str
) -> None:
    ended = run_engine(warm, stream, stage, "default")
    assert (ended.code, ended.out) == (-15, ""), ended.errors
    if wire.marker_version(stream.local) is not None:
        check_at(stream, 1)
    gpusync.pull(stream.local, stream.base, stream.source, 3)
    check_at(stream, 3)
    check_nothing_is_left(stream)


@pytest.mark.parametrize("stage", STAGES)
def test_sigterm_with_a_handler_ends_the_process_and_leaves_nothing_staged(
    warm: Warm, stream: wire.Stream, stage: str
) -> None:
    """A handler raises SystemExit wherever the main thread is; in the swap, the next pull goes on from there."""
    ended = run_engine(warm, stream, stage, "handler")
    assert ended.code == 143, ended.errors
    version, held = json.loads(ended.out)
    may_be = {"commit": (1, 2, None), "committed": (2,), "finish": (2,)}.get(stage, (1,))
    assert version in may_be
    if version is not None:
        assert held == {name: data.hex() for name, data in stream.states[version].items()}
    if stage != "finish":
        assert state_files(stream.local) <= OURS_AT_REST
        check_at(stream, 1)
    model = model_at(stream, 1)
    gpusync.apply_to_model(model, open_chain(stream, 3), write_back="none")
    gpusync.pull(stream.local, stream.base, stream.source, 3)
    check_at(stream, 3)
    check_nothing_is_left(stream)


@pytest.mark.parametrize("stage", ["decode", "prepared", "committed"])
def test_sigterm_while_another_thread_updates_does_not_hang_the_exit(
    warm: Warm, stream: wire.Stream, stage: str
) -> None:
    ended = run_engine(warm, stream, stage, "handler", "thread")
    assert ended.code == 143, ended.errors
    gpusync.pull(stream.local, stream.base, stream.source, 3)
    check_at(stream, 3)
    check_nothing_is_left(stream)


@pytest.mark.parametrize("stage", ["start", "materialize", "decode", "torch"])
def test_sigterm_while_an_engine_prepares_in_the_background_ends_it_as_the_handler_says(
    warm: Warm, stream: wire.Stream, stage: str
) -> None:
    """Python would stop the session's thread where it is, and abort if that is in torch's code."""
    ended = run_engine(warm, stream, stage, "handler", "background")
    assert ended.code == 143, ended.errors
    check_at(stream, 1)
    gpusync.pull(stream.local, stream.base, stream.source, 3)
    check_at(stream, 3)
    check_nothing_is_left(stream)


def test_sigterm_while_many_sessions_wait_for_other_ranks_does_not_hang_the_exit(
    warm: Warm, stream: wire.Stream
) -> None:
    """All of them together are waited for as long as one: one by one it would be longer than this test may take."""
    ended = run_engine(warm, stream, "none", "handler", "waiting")
    assert ended.code == 143, ended.errors
    check_at(stream, 1)
    check_nothing_is_left(stream)


def test_stages_are_those_that_an_update_reports(stream: wire.Stream, tmp_path: Path) -> None:
    seen = set()
    model = model_at(stream, 1)
    gpusync.prepare(
        model, open_chain(stream, 2), progress=lambda event: seen.add(event.stage)
    ).discard()
    assert {"materialize", "decode"} <= seen
