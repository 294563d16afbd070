"""What a live update takes, whatever is published: few descriptors, and memory that the chain does not grow."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import gpusync
from tests import live, wire
from tests.crash.harness import open_descriptors
from tests.driver import check_at
from tests.warm import Warm

MIB = 1 << 20
DESCRIPTORS = 256
"""What a process may have open by default on some systems."""

# A live update, and what its process took on top of the model.
UPDATER = """
import hashlib, json, resource, sys
from pathlib import Path
import gpusync
from tests import live
from tests.crash.frugal import Watch
local, base, source, target, device, descriptors = sys.argv[1:]
model = live.model_from(Path(base))
gpusync.live_version, gpusync.apply_to_model
resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
watch = Watch()
chain = gpusync.open_chain(source, int(target), checkpoint=local, base_dir=base)
report = gpusync.apply_to_model(model, chain, device=device, durable=False)
took = watch.stop()
total = hashlib.sha256()
for name, data in sorted(live.bytes_of(model).items()):
    total.update(data)
print(json.dumps({
    "to": report.to_version, "sha256": total.hexdigest(), "descriptors": watch.descriptors, "anonymous_bytes": took,
}))
"""


def check_update(warm: Warm, stream: wire.Stream, target: int, device: str, at_most: int) -> None:
    live.need(device)
    arguments = (stream.local, stream.base, stream.source, target, device, DESCRIPTORS)
    took = warm.run(UPDATER, *arguments, GPUSYNC_THREADS="4").json()
    total = hashlib.sha256()
    for _, data in sorted(stream.states[target].items()):
        total.update(data)
    assert (took["to"], took["sha256"]) == (target, total.hexdigest())
    check_at(stream, target)
    assert took["descriptors"] <= 200
    assert took["anonymous_bytes"] < at_most, f"{took['anonymous_bytes'] / MIB:.0f} MiB"


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_10000_tensors_in_500_shards_reach_a_live_model(
    fast_path: Path, warm: Warm, device: str
) -> None:
    shards, each = 500, 20
    layout = tuple(
        wire.Row(f"model-{s:05d}-of-{shards:05d}.safetensors", f"l{s}.t{t}", "U8", (64,), 64)
        for s in range(1, shards + 1)
        for t in range(each)
    )
    stream = wire.Stream(fast_path / "wide", layout)
    stream.delta([row.name for row in layout], shards=shards)
    check_update(warm, stream, 1, device, 192 * MIB)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_chain_of_64_versions_reaches_a_live_model(
    fast_path: Path, warm: Warm, device: str
) -> None:
    layout = tuple(
        wire.Row(
            f"model-{n % 2 + 1:05d}-of-00002.safetensors", f"t{n}", "U8", (MIB // 4,), MIB // 4
        )
        for n in range(8)
    )
    stream = wire.Stream(fast_path / "long", layout)
    for version in range(64):
        encoding = ("xor", "overwrite", "xor_sparse", "xor")[version % 4]
        stream.delta([row.name for row in layout], encoding=encoding)
    check_update(warm, stream, 64, device, 256 * MIB)


def test_update_after_update_of_one_model_leaves_no_descriptor(fast_path: Path) -> None:
    stream = wire.Stream(fast_path / "stream")
    for _ in range(6):
        stream.delta()
    model = live.model_from(stream.base)
    held = []
    for version in range(1, 7):
        chain = gpusync.open_chain(
            stream.source, version, checkpoint=stream.local, base_dir=stream.base
        )
        gpusync.apply_to_model(model, chain, durable=False)
        del chain
        held.append(open_descriptors())
    assert held[1:] == held[:-1]
    assert live.bytes_of(model) == stream.states[6]
