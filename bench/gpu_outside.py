"""Sections that are programs of their own: the tests marked gpu, and the kernels under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import util
from pathlib import Path

from gpu_lab import Task

_ROOT = Path(__file__).resolve().parent.parent
_VERDICT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_SUMMARY = ("FAILED ", "ERROR ")  # lines at the end, which name again what failed
_LATE = 15.0  # seconds that ending a run may take
_SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


def run_tests(task: Task) -> None:
    """``pytest -m gpu``, ended in time, with a count of what passed until then."""
    task.needs_cuda()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "tests"]
    command += ["-p", "no:cacheprovider"]
    if util.find_spec("xdist") is not None:
        command += ["-n", str(min(6, os.cpu_count() or 1))]
    status, text = run_limited(command, task.left - _LATE)
    verdicts = Counter(
        match[1]
        for line in text.splitlines()
        if "::" in line and not line.startswith(_SUMMARY) and (match := _VERDICT.search(line))
    )
    ended = f"status {status}" if status is not None else "stopped: its time was over"
    said = ", ".join(f"{count} {name.lower()}" for name, count in verdicts.most_common())
    good = status == 0 and verdicts["PASSED"] > 0  # all skipped says nothing
    task.check("pytest -m gpu", good, f"{said or 'no test ran'}; {ended}")
    failed = sorted({line for line in text.splitlines() if line.startswith(_SUMMARY)})
    for line in failed[:20]:
        task.fact("pytest -m gpu", line[:300])
    if not verdicts:
        task.fact("pytest -m gpu", text[-1500:])


def run_sanitizer(task: Task) -> None:
    """The section of kernels at its smallest sizes under memcheck, where there is a compute-sanitizer."""
    task.needs_cuda()
    tool = next(filter(None, map(shutil.which, _SANITIZERS)), None)
    if tool is None:
        task.fact("memcheck of the kernels", "not run: compute-sanitizer is not installed")
        return
    script = Path(__file__).with_name("gpu_check.py")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    command += ["--device", "cuda", "--smoke", "--section", "kernels"]
    # Without torch's cache every buffer is an allocation of its own, whose end the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, text = run_limited(command, task.left - _LATE, environment)
    errors = re.findall(r"^=+ (?:ERROR SUMMARY.*|Invalid .*)$", text, re.MULTILINE)
    said = "; ".join(errors[-3:]) or text.strip()[-300:]
    ended = f"status {status}" if status is not None else "stopped: its time was over"
    task.check("memcheck of the kernels", status == 0, f"{said}; {ended}")


def run_limited(
    command: list[str], seconds: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a program in the checkout; return its status, None if it was stopped, and what it wrote."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command,
                cwd=_ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=max(seconds, 1.0),
            )
            status: int | None = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        output.seek(0)
        return status, output.read()
