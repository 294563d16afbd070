"""A published file that is unlinked, replaced, cut or rewritten at any moment while it is read: never a mixture."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harness import DELTA, FULL, SEED, Case, Scene, Scenes
from tests.faults.campaign import Prepared, Pulled, inject_at_every_call
from tests.faults.kinds import EVERYTHING, Fault
from tests.faults.layer import Real, SystemCall

READS = frozenset({"open", "fstat", "preadv", "stat", "lstat"})
# Bytes of a base and of a full version have no digest: a file counts as it is when it is opened.
READS_OF_AN_OPEN_FILE = frozenset({"preadv", "stat"})


def unlink(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    """Another file of the same size takes the name."""
    other = path.with_name(".other")
    other.write_bytes(_bent(path.read_bytes()))
    os.replace(other, path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path: Path) -> None:
    """The same file, with other bytes in its last part."""
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(_bent(data))


def _bent(data: bytes) -> bytes:
    last = max(1, len(data) // 8)
    return data[:-last] + bytes(byte ^ 0x55 for byte in data[-last:])


def moving(change: Callable[[Path], None], at: frozenset[str]) -> Fault:
    def act(call: SystemCall, real: Real) -> Any:
        path = call.path
        # Nothing vouches for a side file but that it is whole: any of them that is there counts.
        if path.is_file() and (path.suffix == ".safetensors" or path.name.endswith("index.json")):
            change(path)
        return real(*call.arguments)

    return Fault(change.__name__, act, at, "source")


@dataclass
class _Restored:
    """Puts published versions and base back before each run and before it is healed."""

    scene: Scene

    def put_back(self) -> None:
        for folder in (self.scene.stream.source, self.scene.stream.base):
            saved = folder.with_name(f"{folder.name}_saved")
            if not saved.exists():
                shutil.copytree(folder, saved)
            shutil.rmtree(folder)
            shutil.copytree(saved, folder)


class Pulling(Pulled):
    def begin(self) -> None:
        _Restored(self.scene).put_back()
        super().begin()

    def heal(self, when: str) -> None:
        _Restored(self.scene).put_back()
        super().heal(when)


class Preparing(Prepared):
    def begin(self) -> None:
        _Restored(self.scene).put_back()
        super().begin()

    def heal(self, when: str) -> None:
        _Restored(self.scene).put_back()
        super().heal(when)


RUNS: dict[str, tuple[str, Case, type[Pulled] | type[Prepared]]] = {
    "pull": ("staged", DELTA, Pulling),
    "rolling pull": ("rolling", DELTA, Pulling),
    "seed": ("staged", SEED, Pulling),
    "full version": ("staged", FULL, Pulling),
    "prepare": ("staged", DELTA, Preparing),
}


@pytest.mark.parametrize("change", [unlink, replace, cut, rewrite])
@pytest.mark.parametrize("name", RUNS)
def test_a_file_that_moves_while_it_is_read(
    scenes: Scenes,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Path], None],
) -> None:
    """The result is the target, byte for byte, or an error with nothing changed; with the files back it heals."""
    swap, case, kind = RUNS[name]
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    at = READS if case is DELTA else READS_OF_AN_OPEN_FILE
    stride = 1 if EVERYTHING else 4
    run = kind(scenes(case))
    inject_at_every_call(run, moving(change, at), lasting=False, stride=stride, any_class=True)
