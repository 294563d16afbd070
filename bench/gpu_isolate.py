"""Work in a process of its own, with a time limit: what hangs or ends its process takes nothing else with it.

The processes are forked, so that they need not import torch again; the process that forks must never have touched
CUDA, which does not survive a fork. A process tells what it finds as it goes: what it told before it was stopped counts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

_FORK = multiprocessing.get_context("fork")
_LEAVE_SECONDS = 5.0

Record = dict[str, Any]
Tell = Callable[[Record], None]
State = Literal["done", "failed", "over time", "died", "needs CUDA", "not run"]


class NeedsCudaError(Exception):
    """What was asked for is about CUDA itself, and the device is emulated."""


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and why if it did not end well."""

    state: State
    reason: str
    seconds: float


def run_isolated(
    work: Callable[[Tell], None], seconds: float, on_record: Tell, *, nested: bool = False
) -> Outcome:
    """Run ``work`` in a forked process; kill it, and what it started, after ``seconds``.

    Parameters
    ----------
    work
        Gets a function that sends a record: a dict of plain values.
    on_record
        Called here with each record, as it comes.
    nested
        This process is one of these itself: the new one is ended with it.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_work, args=(work, sender, nested))
    begin = time.monotonic()
    process.start()
    sender.close()
    ended_well = False
    try:
        state, reason = _listen(receiver, begin + seconds, on_record)
        ended_well = state not in ("over time", "died")
        if state == "over time":
            reason = f"stopped after {seconds:.0f} s"
    finally:
        _end(process, ended_well, nested)
        receiver.close()
    if state == "died":
        reason = _describe_exit(process.exitcode)
    return Outcome(state, reason, time.monotonic() - begin)


def _listen(
    receiver: multiprocessing.connection.Connection, deadline: float, on_record: Tell
) -> tuple[State, str]:
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            kind, value = receiver.recv()
        except EOFError:
            return "died", ""
        if kind == "record":
            on_record(value)
        else:
            return kind, value
    return "over time", ""


def _work(
    work: Callable[[Tell], None], sender: multiprocessing.connection.Connection, nested: bool
) -> None:
    if not nested:
        os.setpgid(0, 0)  # so that what it starts can be ended with it
    state: State = "done"
    reason = ""
    try:
        work(lambda record: sender.send(("record", record)))
    except NeedsCudaError as err:
        state, reason = "needs CUDA", str(err)
    except Exception as err:
        state, reason = "failed", f"{type(err).__name__}: {err}"
        traceback.print_exc()
    sender.send((state, reason))
    sender.close()


def _end(process: multiprocessing.context.ForkProcess, ended_well: bool, nested: bool) -> None:
    """Wait for a process that has told its end; kill any other, and what it started."""
    if ended_well:
        process.join(_LEAVE_SECONDS)
        if process.exitcode is not None:
            return
    # Not waited for yet, so that the number is still its own. One that died says so by its exit code all the same.
    if not nested and process.pid is not None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.join(_LEAVE_SECONDS)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "its process does not end"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}"
