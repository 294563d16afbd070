"""The usual receiver, written plainly: what gpusync is measured against.

It does what today's receivers do: read each delta shard whole, one task per tensor on a pool, decode the blob in
2 MiB steps, XOR each step into a shared map of the local file in place, digest as it goes, write a marker. No
journal, no second copy, no fsync, and a failure half-way leaves a mixed folder. A new host copies the base
checkpoint, file after file, and then patches version by version. A live model is reloaded from the files.

It decodes into a reused buffer, which is faster than the fresh bytes object per step that the usual loop makes,
and it checks nothing but the digests: it is meant to be hard to beat.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash
import zstandard
from common import map_tensors, read_header
from numpy.typing import NDArray
from safetensors.torch import load_file

_STEP_BYTES = 2 << 20
_INDEX = "model.safetensors.index.json"
_SPARSE = {"overwrite": (4, "<u4"), "xor_sparse": (8, "<u8")}
"""Encoding -> bytes of the count, type of a position."""

ENCODINGS = ("xor", *_SPARSE)
"""What this receiver reads."""


def seed(local_dir: Path, base_dir: Path) -> None:
    """Copy the base checkpoint, one file after the other."""
    local_dir.mkdir(parents=True)
    for path in sorted(base_dir.iterdir()):
        shutil.copyfile(path, local_dir / path.name)


def pull(local_dir: Path, source_dir: Path, version: int) -> None:
    """Patch the local checkpoint in place, from ``version - 1`` to ``version``."""
    folder = source_dir / f"weight_v{version:06d}"
    weight_map: dict[str, str] = json.loads((folder / _INDEX).read_bytes())["weight_map"]
    targets = map_tensors(local_dir, "r+")
    shards = {file: (folder / file).read_bytes() for file in sorted(set(weight_map.values()))}
    headers = {file: read_header(folder / file) for file in shards}

    def patch(name: str, file: str) -> None:
        start, rows = headers[file]
        begin, end = rows[name]["data_offsets"]
        blob = memoryview(shards[file])[start + begin : start + end]
        digest = _xor_into(targets[name], blob)
        if digest != rows["__metadata__"][name]:
            raise ValueError(f"digest mismatch: tensor={name} version={version}")

    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        for task in [pool.submit(patch, name, file) for name, file in weight_map.items()]:
            task.result()
    marker = local_dir / ".weight_sync" / "state.json"
    marker.parent.mkdir(exist_ok=True)
    marker.write_text(json.dumps({"version": f"{version:06d}"}))


def reload(module: torch.nn.Module, local_dir: Path) -> None:
    """Load every safetensors file and copy it into the live parameters of the same names."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for path in sorted(local_dir.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                parameters[name].copy_(tensor)


def _xor_into(target: NDArray[np.uint8], blob: memoryview) -> str:
    """XOR the decoded blob into ``target``; return the xxh3-128 hex of the result."""
    hasher = xxhash.xxh3_128()
    for piece in xor_pieces(target, blob):
        hasher.update(piece)
    return hasher.hexdigest()


def xor_pieces(target: NDArray[np.uint8], blob: bytes | memoryview) -> Iterator[NDArray[np.uint8]]:
    """XOR the decoded blob into ``target`` in 2 MiB steps; yield each piece of the target when it is done."""
    buffer = np.empty(_STEP_BYTES, dtype=np.uint8)
    done = 0
    with zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True) as reader:
        while count := reader.readinto(buffer):
            piece = target[done : done + count]
            np.bitwise_xor(piece, buffer[:count], out=piece)
            yield piece
            done += count
    if done != len(target):
        raise ValueError(f"decoded {done} bytes for a tensor of {len(target)}")


def apply_blob(encoding: str, target: NDArray[np.uint8], blob: bytes) -> None:
    """Change a tensor's bytes by a blob of any encoding that receivers of the format know, without a digest."""
    if encoding == "xor":
        for _ in xor_pieces(target, blob):
            pass
        return
    with zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True) as reader:
        payload = reader.read()
    count_nbytes, position_type = _SPARSE[encoding]
    count = int.from_bytes(payload[:count_nbytes], "little")
    places = np.frombuffer(payload, position_type, count, count_nbytes)
    values = np.frombuffer(payload, np.uint8, count, count_nbytes + places.nbytes)
    if encoding == "overwrite":
        target[places] = values
    else:
        target[places] ^= values
