"""Engines that have the checkpoint mapped while the folder is seeded anew: no SIGBUS, no byte that changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpusync
from tests import wire
from tests.driver import REPOSITORY, check_at

READERS = 3
SHARD_NBYTES = 1 << 20
LAYOUT = tuple(
    wire.Row(f"model-{n:05d}-of-00003.safetensors", f"t{n}", "U8", (SHARD_NBYTES,), SHARD_NBYTES)
    for n in range(1, 4)
)


def start_reader(folder: Path) -> subprocess.Popen[str]:
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.reader", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert reader.stdout is not None and reader.stdout.readline() == "mapped\n"
    return reader


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_readers_see_no_sigbus_while_a_folder_is_seeded_patched_healed_and_reset(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    """Files of many pages: one that is cut short under its map would kill whoever reads past the cut."""
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    stream = wire.Stream(fast_path / "stream", LAYOUT)
    names = [row.name for row in LAYOUT]
    for _ in range(3):
        stream.delta(names)
    stream.full(single=True)

    def pull(target: int) -> Any:
        return gpusync.pull(stream.local, stream.base, stream.source, target, durable=False)

    pull(1)
    readers = [start_reader(stream.local) for _ in range(READERS)]
    seeds = []
    for _ in range(2):
        pull(2)
        (stream.local / wire.MARKER).unlink()  # nothing vouches for the folder: seeded anew
        seeds.append(pull(2).seed)
        wire.write_marker(stream.local, "{")
        seeds.append(pull(3).seed)
        pull(4)  # another sharding: the old files go
        check_at(stream, 4)
        pull(0)
        pull(1)
    check_at(stream, 1)
    assert seeds == ["base"] * 4
    for reader in readers:
        out, errors = reader.communicate("", timeout=60)
        assert reader.returncode == 0, errors
        assert json.loads(out)["mapped"] > 8
