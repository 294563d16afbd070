"""A process that pulls and is killed, again and again: ``python -m tests.crash.victim``.

It imports gpusync once and forks for every request, so that one kill costs milliseconds. Requests and answers are
lines of JSON on its standard input and output.

request  ``{"job": "...", "paths": [...], "options": {...}, "environment": {...}, "fault": {...}}``
answer   ``{"exit": code or -signal, "steps": [...], "operations": [...], "outcome": "...", "error": "...", "seconds": x}``

Jobs: "pull" and "update", of the paths local, base, source and target; an update prepares, commits and finishes one of a
module that holds the local folder's tensors. "publish" and "publish full", of the paths source, base, state and new
checkpoint; "publish folders", of source, the checkpoint of the last version, and the new one.

A fault is one of: ``{"step": n}``, die when that step is reached; ``{"operation": n}``, die before the n-th write
operation; ``{"operation": n, "half": true}``, die within it, with half of its bytes written; ``{"rename": n}``, die
after the n-th shard was renamed into the folder; ``{"after_seconds": x}``, be killed from outside, wherever that is. ``"signal": n`` is died of in place of SIGKILL; ``"free_bytes": n`` is what the file system says is free.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import gpusync
from gpusync import fsio
from gpusync.local import advance, swap
from gpusync.local import pull as disk
from gpusync.publisher.publish import publish_checkpoint
from tests import live, support

STEP_USERS = (swap, advance, disk)


class Watch:
    """Notes each step and write operation in a pipe, and dies where it is told to."""

    def __init__(self, fault: dict[str, Any], folder: Path, notes: int) -> None:
        self._fault = fault
        self._folder = folder
        self._notes = notes
        self._operations = 0
        self._renames = 0
        for user in STEP_USERS:
            user.reached = self.step  # type: ignore[attr-defined]
        for name in fsio.WRITE_OPERATIONS:
            setattr(fsio, name, self.operation(name, getattr(fsio, name)))
        if "free_bytes" in fault:
            fsio.free_bytes = lambda path: int(fault["free_bytes"])

    def die(self) -> None:
        os.kill(os.getpid(), self._fault.get("signal", signal.SIGKILL))

    def note(self, kind: str, value: object) -> None:
        os.write(self._notes, json.dumps([kind, value]).encode() + b"\n")

    def step(self, step: swap.Step) -> None:
        self.note("steps", int(step))
        if self._fault.get("step") == step:
            self.die()

    def operation(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            number, self._operations = self._operations, self._operations + 1
            self.note("operations", name)
            if self._fault.get("operation") == number:
                if self._fault.get("half") and name == "pwrite":
                    fd, buffer, offset = arguments
                    real(fd, buffer[: len(buffer) // 2], offset)
                self.die()
            result = real(*arguments, **options)
            if name == "rename":
                target = Path(arguments[1])
                if target.parent == self._folder and target.suffix == ".safetensors":
                    self._renames += 1
                    if self._fault.get("rename") == self._renames:
                        self.die()
            return result

        return wrapper


Job = Callable[[], str]


def job_of(request: dict[str, Any]) -> Job:
    """Return what is to be done, with everything made that is no part of it."""
    kind, paths, options = request["job"], request["paths"], request["options"]
    if kind == "update":
        local, base, source, target = paths
        model = live.model_from(Path(local))
        return lambda: update(model, local, base, source, target, options)
    if kind == "publish":
        tensors = support.as_arrays(support.read_tensors(Path(paths[3])))
        return lambda: str(publisher(paths, options).publish(tensors))
    return {
        "pull": lambda: gpusync.pull(*paths, **options).outcome,
        "publish full": lambda: str(publisher(paths, options).publish_full(paths[3])),
        "publish folders": lambda: str(publish_checkpoint(paths[1], paths[2], paths[0]).version),
    }[kind]


def publisher(paths: list[str], options: dict[str, Any]) -> gpusync.Publisher:
    return gpusync.Publisher(paths[0], paths[1], state_dir=paths[2], **options)


def update(
    model: nn.Module, local: str, base: str, source: str, target: int, options: dict[str, Any]
) -> str:
    chain = gpusync.open_chain(source, target, checkpoint=local, base_dir=base)
    prepared = gpusync.prepare(model, chain, device="cpu", **options)
    prepared.commit()
    return prepared.finish().outcome


def child(request: dict[str, Any], notes: int) -> None:
    os.environ.update(request["environment"])
    job = job_of(request)
    watch = Watch(request["fault"], Path(request["paths"][0]), notes)
    watch.note("begun", time.monotonic())
    try:
        outcome = job()
        watch.note("ended", time.monotonic())
        watch.note("outcome", outcome)
    except gpusync.GpuSyncError as err:
        watch.note("error", f"{type(err).__name__}: {err}")
        os._exit(3)
    os._exit(0)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(request, writer)
        finally:
            os._exit(7)
    os.close(writer)
    answer: dict[str, Any] = {"steps": [], "operations": [], "outcome": "", "error": ""}
    times = {}
    with os.fdopen(reader) as lines:
        for line in lines:
            kind, value = json.loads(line)
            if kind in ("begun", "ended"):
                times[kind] = value
                if kind == "begun" and "after_seconds" in request["fault"]:
                    time.sleep(request["fault"]["after_seconds"])
                    os.kill(pid, signal.SIGKILL)
                continue
            if kind in ("steps", "operations"):
                answer[kind].append(value)
            else:
                answer[kind] = value
    answer["seconds"] = times.get("ended", 0.0) - times.get("begun", 0.0)
    answer["exit"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return answer


def main() -> None:
    # Resolves the names, and with them every import that the jobs need.
    gpusync.pull, gpusync.open_chain, gpusync.prepare, gpusync.Publisher  # noqa: B018
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
