"""Fixtures of the crash tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.harness import Scenes, Victim

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def fast_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose fsync is cheap, if there is one: a killed process loses nothing that the kernel has."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < 1 << 30:
        yield tmp_path_factory.mktemp("crash")
        return
    root = Path(tempfile.mkdtemp(prefix="gpusync-crash-", dir=MEMORY))
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def scenes(fast_root: Path) -> Scenes:
    return Scenes(fast_root / "scenes")


@pytest.fixture(scope="session")
def victim() -> Iterator[Victim]:
    made = Victim()
    yield made
    made.close()


@pytest.fixture
def fast_path(fast_root: Path) -> Iterator[Path]:
    """Like ``tmp_path``, on the fast file system."""
    path = Path(tempfile.mkdtemp(dir=fast_root))
    yield path
    shutil.rmtree(path)
