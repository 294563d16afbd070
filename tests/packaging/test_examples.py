"""The examples run, as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_example(repository: Path, name: str, *args: str) -> str:
    """Run an example in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(repository / "docs" / "examples" / name), *args],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_torch_loop(repository: Path, tmp_path: Path) -> None:
    printed = run_example(repository, "torch_loop.py", str(tmp_path / "run"), "--steps", "3")
    assert printed.splitlines()[-1] == "trainer, live model and restarted host agree at version 3"
