"""bench/gpu_check.py at its smallest on the emulated device: every section runs, what is wrong or late is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SECTIONS = {
    "machine": "done",
    "decoding": "done",
    "odd": "done",
    "decode": "done",
    "kernels": "done",
    "apply": "done",
    "graphs": "needs CUDA",
    "sanitizer": "needs CUDA",
    "tests": "needs CUDA",
}


def run_check(repository: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/gpu_check.py", "--device", "emulated", "--smoke", *args]
    paths = os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=110,
    )


def run_isolated(repository: Path, body: str, seconds: float = 30.0) -> dict[str, Any]:
    """Run ``body`` as the work of an isolated process, in an interpreter of its own; return what came of it."""
    script = "\n".join(
        [
            "import json, os, signal, subprocess, sys, time",
            "from gpu_isolate import run_isolated",
            "def work(tell):",
            *(f"    {line}" for line in body.splitlines()),
            "records = []",
            f"outcome = run_isolated(work, {seconds}, records.append)",
            "print(json.dumps([outcome.state, outcome.reason, outcome.seconds, records]))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=repository / "bench",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return dict(
        zip(("state", "reason", "seconds", "records"), json.loads(done.stdout), strict=True)
    )


@pytest.mark.usefixtures("needs_compiler")
def test_every_section_runs_without_a_gpu(repository: Path, tmp_path: Path) -> None:
    before = sorted((repository / "bench/results").iterdir())
    out = tmp_path / "found.json"
    done = run_check(repository, "--json-out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text())
    assert found["device"] == "emulated" and found["smoke"]
    sections = found["sections"]
    assert {name: section["state"] for name, section in sections.items()} == SECTIONS
    assert all(section["ok"] for section in sections.values())
    told = [
        record
        for section in sections.values()
        for kind in ("checks", "rows", "targets")
        for record in section[kind]
    ]
    assert {record["device"] for record in told} == {"emulated"}
    assert not any(section["targets"] for section in sections.values())
    assert "nothing here was run on a GPU" in out.with_suffix(".md").read_text()
    assert sorted((repository / "bench/results").iterdir()) == before


def test_what_the_time_does_not_allow_is_said(repository: Path) -> None:
    done = run_check(repository, "--budget-seconds", "0", "--only", "kernels", "apply")
    assert done.returncode == 1
    sections = json.loads(done.stdout.splitlines()[-1])["sections"]
    assert {name: section["state"] for name, section in sections.items()} == {
        "kernels": "not run",
        "apply": "not run",
    }


def test_a_process_that_hangs_is_stopped_with_what_it_started(
    repository: Path, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    body = (
        "tell({'before': 1})\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    found = run_isolated(repository, body, seconds=2)
    assert (found["state"], found["records"]) == ("over time", [{"before": 1}])
    assert found["seconds"] < 20
    state = Path(f"/proc/{pid.read_text()}/status")
    assert not state.exists() or "zombie" in state.read_text()


def test_a_process_that_dies_is_reported(repository: Path) -> None:
    found = run_isolated(repository, "tell({'before': 1})\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert (found["state"], found["records"]) == ("died", [{"before": 1}])
    assert "SIGSEGV" in found["reason"]


def test_an_exception_is_reported(repository: Path) -> None:
    found = run_isolated(repository, "raise ValueError('no such luck')")
    assert (found["state"], found["reason"]) == ("failed", "ValueError: no such luck")


def test_a_process_that_ends_well(repository: Path) -> None:
    found = run_isolated(repository, "tell({'a': 1})\ntell({'b': 2})")
    assert (found["state"], found["reason"]) == ("done", "")
    assert found["records"] == [{"a": 1}, {"b": 2}]
