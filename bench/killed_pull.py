"""The child of recovery.py: a pull that kills its own process at one instant. It loads no more than a pull does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import gpusync
from gpusync import fsio

KILLS = ("staged, no journal", "before the first rename", "after the first rename")


def pull_and_die(kill: str, local: Path, base: str, source: str, version: int) -> None:
    """Pull, and be killed at the instant of that name."""
    rename = fsio.rename

    def rename_or_die(old: Path, new: Path) -> None:
        into_folder = new.parent == local and new.suffix == ".safetensors"
        if kill == KILLS[0] or (kill == KILLS[1] and into_folder):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new)
        if into_folder:
            os.kill(os.getpid(), signal.SIGKILL)

    fsio.rename = rename_or_die
    gpusync.pull(local, base, source, version, durable=False)


if __name__ == "__main__":
    kill, local, base, source, version = sys.argv[1:]
    pull_and_die(kill, Path(local), base, source, int(version))
