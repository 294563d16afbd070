"""Publisher: ``Publisher.publish`` against a plain loop that finds the same deltas, and against its floors.

Every round moves the weights on by one version and publishes it. The plain loop does what trainers' writers do:
per tensor XOR with the last weights, zstd level 1 in one frame, xxh3-128 of the new bytes, one shard of blobs and an
index, the last weights kept in memory; on one thread, as they run beside training, and on as many threads as the
publisher uses. The publisher also keeps its last tensors in a file, and fsyncs what it publishes.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from common import (
    CheckError,
    Sizes,
    check_digests,
    digests_of_checkpoint,
    parse_args,
    settle,
    workspace,
)
from numpy.typing import NDArray
from report import Section, Target, machine_info, publish_sections
from rounds import Parts, run_rounds
from safetensors.numpy import save_file
from stream import Weights, plan_tensors

import gpusync
from gpusync.config import Settings

FULL = Sizes(model_nbytes=1_000_000_000, density=0.01, rounds=5)
SMOKE = Sizes(model_nbytes=12_000_000, density=0.01, rounds=1)
_EXCLUSIONS = (
    "weights in host memory; page cache warm; dirty pages of earlier runs written out before each run; the plain loop"
    " neither fsyncs nor keeps its last weights in files"
)


class PlainWriter:
    """The usual trainer-side writer, written plainly."""

    def __init__(self, folder: Path, weights: Weights, threads: int) -> None:
        self._folder = folder
        self._threads = threads
        self._last = {name: bits.copy() for name, bits in weights.bits.items()}

    def publish(self, version: int, weights: Weights) -> None:
        """Write one version."""
        folder = self._folder / f"weight_v{version:06d}"
        folder.mkdir(parents=True)
        blobs, digests = {}, {}
        with ThreadPoolExecutor(self._threads) as pool:
            done = pool.map(lambda name: self._encode(name, weights.bits[name]), weights.bits)
            for name, (blob, digest) in zip(weights.bits, done, strict=True):
                blobs[name], digests[name] = np.frombuffer(blob, np.uint8), digest
        save_file(blobs, folder / "model-00001-of-00001.safetensors", digests)
        index = {"weight_map": dict.fromkeys(blobs, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def _encode(self, name: str, bits: NDArray[np.uint16]) -> tuple[bytes, str]:
        delta = np.bitwise_xor(bits, self._last[name])
        blob = zstandard.ZstdCompressor(level=1).compress(delta.data.cast("B"))
        np.copyto(self._last[name], bits)
        return blob, xxhash.xxh3_128_hexdigest(bits)


class _Bench:
    """Round r publishes version r + 1 by every writer."""

    def __init__(self, root: Path, sizes: Sizes) -> None:
        self._root, self._density = root, sizes.density
        self.weights = Weights(root / "base", plan_tensors(sizes.model_nbytes))
        self._moved_to = 0
        workers = Settings.from_env().workers
        self._publisher = gpusync.Publisher(root / "source", root / "base", state_dir=root / "kept")
        self._plain = PlainWriter(root / "plain", self.weights, 1)
        self._threaded = PlainWriter(root / "threaded", self.weights, workers)

    def cases(self) -> dict[str, Any]:
        return {
            "publisher": self._publish,
            "plain loop": lambda number: self._plain.publish(number + 1, self.weights),
            "plain loop, threads": lambda number: self._threaded.publish(number + 1, self.weights),
            "floor": self._floor,
        }

    def _publish(self, number: int) -> None:
        version = self._publisher.publish(self.weights.tensors())
        if version != number + 1:
            raise CheckError(f"wrong result: version {version} published, {number + 1} expected")

    def _floor(self, number: int) -> Parts:
        """The digests alone, and a copy of the weights into a new file alone: what the publisher cannot do without."""
        parts = Parts()
        with parts.timed("xxh3"):
            self.weights.digests()
        with parts.timed("copy"), open(self._root / "copy", "wb") as file:
            for bits in self.weights.bits.values():
                file.write(bits.data.cast("B"))
        return parts

    def before(self, name: str, number: int) -> None:
        if self._moved_to <= number:
            self._moved_to = number + 1
            self.weights.move(self._density, self._moved_to)
        settle(self._root)

    def check(self, name: str, number: int) -> None:
        """Pull what the publisher wrote, and hold it against the weights."""
        if name != "publisher":
            return
        local = self._root / "local"
        gpusync.pull(local, self._root / "base", self._root / "source", number + 1, durable=False)
        check_digests(
            f"publisher, version {number + 1}", self.weights.digests(), digests_of_checkpoint(local)
        )


def main() -> None:
    args, sizes = parse_args("Publisher against a plain loop.", FULL, SMOKE)
    torch.set_num_threads(1)
    with workspace(args.temp_dir) as root:
        machine = machine_info(root)
        bench = _Bench(root, sizes)
        timings = run_rounds(bench.cases(), sizes.rounds, before=bench.before, check=bench.check)
        shutil.rmtree(root / "local")
    pairs = {
        "plain loop / publisher": timings.ratio("plain loop", "publisher"),
        "plain loop, threads / publisher": timings.ratio("plain loop, threads", "publisher"),
        "publisher / (xxh3 + copy)": timings.ratio("publisher", "floor"),
    }
    section = Section("one version", timings, pairs)
    median = section.median("plain loop / publisher")
    targets = [Target("plain loop / publisher", median, 2.0, at_most=False)]
    publish_sections("publisher", args, machine, sizes, [section], targets, _EXCLUSIONS)


if __name__ == "__main__":
    main()
