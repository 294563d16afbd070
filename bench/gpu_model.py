"""One gigabyte of bf16 weights and one step of training, published and placed many times under different names."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import xxhash
from gpu_lab import Bytes, make_delta
from stream import plan_tensors

from gpusync.format.encode import compress_seekable

FRAME_NBYTES = 256 << 10  # the publisher's default
_PIECE = 16 << 20


@dataclass(frozen=True)
class Weights:
    """Tensors one behind the other: where each begins, and the bytes of all, even numbers of them.

    Parameters
    ----------
    places
        Tensor to (begin, end) in ``data``.
    """

    places: dict[str, tuple[int, int]]
    data: Bytes

    @property
    def nbytes(self) -> int:
        return int(self.data.size)


@dataclass(frozen=True)
class Step:
    """One training step on the weights: a blob for every tensor, and the digest of its new bytes."""

    density: float
    new: Bytes
    blobs: dict[str, bytes]
    digests: dict[str, str]

    @property
    def wire_nbytes(self) -> int:
        return sum(map(len, self.blobs.values()))

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Return where each blob begins in the data of a shard."""
        ends = accumulate(map(len, self.blobs.values()), initial=0)
        return dict(zip(self.blobs, ends, strict=False))


def make_weights(model_nbytes: int) -> Weights:
    """Return weights like those of a small model: a quarter of them is one tensor."""
    places, end = {}, 0
    for name, shape in plan_tensors(model_nbytes).items():
        begin, end = end, end + 2 * int(np.prod(shape))
        places[name.replace(".", "_")] = (begin, end)
    normal = np.random.default_rng(41).standard_normal(min(_PIECE, end // 2), dtype=np.float32)
    words = ((normal * np.float32(0.02)).view(np.uint32) >> 16).astype(np.uint16)
    # Drawn once, and shifted by an odd number of elements for each copy: no two pieces are alike.
    repeats = -(-end // (2 * words.size))
    pieces = [np.roll(words, 1009 * number) for number in range(repeats)]
    return Weights(places, np.concatenate(pieces)[: end // 2].view(np.uint8))


def make_step(weights: Weights, density: float) -> Step:
    """Move ``density`` of the elements by one unit in the last place, and make the blobs, framed for seeking."""
    delta = make_delta(weights.nbytes, density, 42)
    new = weights.data ^ delta

    def encode(name: str) -> tuple[bytes, str]:
        begin, end = weights.places[name]
        blob = compress_seekable(delta[begin:end].data, FRAME_NBYTES)
        return blob, xxhash.xxh3_128_hexdigest(new[begin:end])

    largest_first = sorted(
        weights.places, key=lambda n: weights.places[n][0] - weights.places[n][1]
    )
    with ThreadPoolExecutor() as pool:
        made = dict(zip(largest_first, pool.map(encode, largest_first), strict=True))
    return Step(
        density,
        new,
        {name: made[name][0] for name in weights.places},
        {name: made[name][1] for name in weights.places},
    )


def full_name(number: int, name: str) -> str:
    """Return the published name of a tensor of one copy."""
    return f"copy{number:02d}_{name}"


def shard_name(number: int) -> str:
    """Return the file of one copy."""
    return f"model-{number:05d}.safetensors"


def publish(folder: Path, step: Step, copies: int, shards_of: Path | None = None) -> Path:
    """Write version 1 of a source: every tensor under the names of all copies, a shard for each copy.

    ``shards_of`` is a source of more copies of the same step, whose shards are linked instead of written.
    """
    version = folder / "weight_v000001"
    version.mkdir(parents=True)
    weight_map = {}
    for number in range(copies):
        shard = shard_name(number)
        weight_map |= {full_name(number, name): shard for name in step.blobs}
        if shards_of is not None:
            os.link(shards_of / version.name / shard, version / shard)
        else:
            _write_shard(version / shard, step, number)
    metadata = {
        "version": 1,
        "base_version": 0,
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    index = {"metadata": metadata, "weight_map": weight_map}
    (version / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_shard(path: Path, step: Step, number: int) -> None:
    header: dict[str, object] = {
        "__metadata__": {full_name(number, name): digest for name, digest in step.digests.items()}
    }
    for name, blob in step.blobs.items():
        begin = step.offsets[name]
        header[full_name(number, name)] = {
            "dtype": "U8",
            "shape": [len(blob)],
            "data_offsets": [begin, begin + len(blob)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(step.blobs.values())


def read_blob(shard: Path, step: Step, name: str) -> bytes:
    """Read a tensor's blob from the shard of one copy."""
    with open(shard, "rb", buffering=0) as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        return os.pread(file.fileno(), len(step.blobs[name]), data + step.offsets[name])


class Parameters:
    """Parameters on a device: every tensor of the weights, as many times as there are copies."""

    def __init__(self, weights: Weights, copies: int, device: torch.device) -> None:
        self.weights, self.copies = weights, copies
        self._by_name = {
            full_name(number, name): torch.nn.Parameter(
                torch.empty((end - begin) // 2, dtype=torch.bfloat16, device=device),
                requires_grad=False,
            )
            for number in range(copies)
            for name, (begin, end) in weights.places.items()
        }

    @property
    def nbytes(self) -> int:
        return self.copies * self.weights.nbytes

    def first(self, copies: int) -> Parameters:
        """Return the first copies of these."""
        found = copy.copy(self)
        found.copies = copies
        return found

    def each(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name in the weights, and the words, of every parameter, copy after copy."""
        for number in range(self.copies):
            for name in self.weights.places:
                yield name, self._by_name[full_name(number, name)].detach().view(torch.int16)

    def fill(self, data: torch.Tensor) -> None:
        """Copy bytes, ordered as the weights', into every copy; on the current stream."""
        words = data.view(torch.int16)
        for name, parameter in self.each():
            begin, end = self.weights.places[name]
            parameter.copy_(words[begin // 2 : end // 2], non_blocking=True)

    def are(self, data: torch.Tensor) -> bool:
        """Return whether every copy holds these bytes."""
        words = data.view(torch.int16)
        return all(
            torch.equal(parameter, words[begin // 2 : end // 2])
            for name, parameter in self.each()
            for begin, end in (self.weights.places[name],)
        )

    def module(self) -> torch.nn.Module:
        """Return a new module of these parameters, of which nothing is known: it is taken to hold version 0."""
        module = torch.nn.Module()
        for number in range(self.copies):
            for name in self.weights.places:
                full = full_name(number, name)
                module.register_parameter(full, self._by_name[full])
        return module
