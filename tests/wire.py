"""Tiny checkpoints and published versions, written byte by byte as slime's and miles's trainers write them.

Single zstd frames, no manifest, ``%06d`` folders, the index last. Every part of a delta can be bent: payloads,
blobs, digests, rows and bytes of a shard, the index. It shares no code with gpusync, so that the two can disagree.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from tests.reference import xor_rows

INDEX = "model.safetensors.index.json"
MARKER = ".weight_sync/state.json"

State = dict[str, bytes]


@dataclass(frozen=True)
class Row:
    """Where and as what a tensor stands in the base checkpoint."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LAYOUT = (
    Row(FIRST, "a.weight", "BF16", (32, 64), 4096),
    Row(FIRST, "s.scale", "F32", (), 4),
    Row(FIRST, "d.weight", "F16", (17, 5), 170),
    Row(SECOND, "b.lut", "U8", (2049,), 2049),
    Row(SECOND, "c.weight", "F8_E4M3", (16, 96), 1536),
    Row(SECOND, "e.g_idx", "I32", (0,), 0),
    Row(SECOND, "o.byte", "U8", (1,), 1),
)


# ---- bytes ------------------------------------------------------------------------------------------


def xor(left: bytes, right: bytes) -> bytes:
    return (np.frombuffer(left, np.uint8) ^ np.frombuffer(right, np.uint8)).tobytes()


def compress(payload: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(payload)


def digest(algorithm: str, data: bytes) -> str:
    if algorithm == "adler32":
        return f"{zlib.adler32(data, 1):08x}"
    if algorithm == "blake3":
        import blake3

        return str(blake3.blake3(data).hexdigest())
    return xxhash.xxh3_128_hexdigest(data)


def encode(encoding: str, old: bytes, new: bytes) -> bytes:
    """Return the payload of one tensor, before compression."""
    flipped = xor(old, new)
    if encoding == "xor":
        return flipped
    if encoding == "xor_rows":
        return b"".join(xor_rows.encode(flipped))
    positions = np.flatnonzero(np.frombuffer(flipped, np.uint8))
    if encoding == "overwrite":
        values = np.frombuffer(new, np.uint8)[positions]
        return struct.pack("<I", positions.size) + positions.astype("<u4").tobytes() + bytes(values)
    values = np.frombuffer(flipped, np.uint8)[positions]
    return struct.pack("<Q", positions.size) + positions.astype("<u8").tobytes() + bytes(values)


def pack(
    rows: Iterable[tuple[str, str, tuple[int, ...], bytes]], metadata: Mapping[str, str]
) -> bytes:
    """Return a safetensors file: rows of (name, dtype, shape, data) in file order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    body, offset = [], 0
    for name, dtype, shape, data in rows:
        end = offset + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        body.append(data)
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + b"".join(body)


def raw_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and the position of its data."""
    data = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + nbytes]), 8 + nbytes


def read_tensors(folder: Path) -> State:
    """Return every tensor's bytes in a checkpoint folder."""
    out: State = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, start = raw_header(path)
        data = path.read_bytes()
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                out[name] = data[start + begin : start + end]
    return out


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the bytes of everything an engine could see: top-level files, and the marker."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    marker = folder / MARKER
    files[MARKER] = marker.read_bytes() if marker.exists() else b"(none)"
    return files


def tree_sha256(folder: Path) -> dict[str, str]:
    """Return the hash of every file under a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def marker_version(folder: Path) -> int | None:
    """Return the version that the marker gives, as another receiver would read it."""
    path = folder / MARKER
    return int(json.loads(path.read_bytes())["version"]) if path.exists() else None


def write_marker(folder: Path, text: str) -> None:
    (folder / ".weight_sync").mkdir(exist_ok=True)
    (folder / MARKER).write_text(text)


def flip_tensor_byte(folder: Path, tensor: str, position: int = 0) -> None:
    """Bit rot: change one byte of a tensor where it lies on the disk, and nothing else."""
    for path in folder.glob("*.safetensors"):
        header, start = raw_header(path)
        if tensor in header:
            at = start + header[tensor]["data_offsets"][0] + position
            with open(path, "r+b") as file:
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x5A]))
            return
    raise AssertionError(f"no {tensor} in {folder}")


# ---- streams ----------------------------------------------------------------------------------------


@dataclass
class Bend:
    """What to bend of one delta. Without any, the delta is what a trainer would write."""

    payload: Mapping[str, bytes] = field(default_factory=dict)
    blob: Mapping[str, bytes] = field(default_factory=dict)
    digest: Mapping[str, str | None] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, bytes] = field(default_factory=dict)
    shard: Callable[[str, bytes], bytes | None] = lambda file, data: data
    index: Callable[[dict[str, Any]], Any] = lambda index: index


class Stream:
    """One stream: a base checkpoint, published versions, and the bytes that each version stands for."""

    def __init__(self, root: Path, layout: tuple[Row, ...] = LAYOUT, seed: int = 0) -> None:
        self.root = root
        self.layout = layout
        self.base, self.source, self.local = (
            root / name for name in ("base", "published", "local")
        )
        self.random = np.random.default_rng(seed)
        self.states: dict[int, State] = {
            0: {row.name: self.random.bytes(row.nbytes) for row in layout}
        }
        self.last = 0
        self.source.mkdir(parents=True)
        self.write_checkpoint(self.base, self.states[0])

    @classmethod
    def continuing(cls, source: Path, version: int, state: State) -> Stream:
        """Return a stream that publishes on a version that stands already, whose bytes are ``state``."""
        stream = cls.__new__(cls)
        stream.source, stream.last, stream.states = source, version, {version: state}
        stream.random = np.random.default_rng(version)
        return stream

    # -- full checkpoints

    def write_checkpoint(self, folder: Path, state: State, *, single: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, list[Row]] = {}
        for row in self.layout:
            files.setdefault("model.safetensors" if single else row.file, []).append(row)
        for file, rows in files.items():
            packed = [(row.name, row.dtype, row.shape, state[row.name]) for row in rows]
            (folder / file).write_bytes(pack(packed, {"format": "pt"}))
        if not single:
            weight_map = {row.name: row.file for row in self.layout}
            total = sum(map(len, state.values()))
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
        (folder / "tokenizer.json").write_text("{}")

    def foreign_local(self, version: int, state: State | None = None) -> Path:
        """Write the local folder as another receiver leaves it: files and a bare marker."""
        shutil.rmtree(self.local, ignore_errors=True)
        self.write_checkpoint(self.local, self.states[version] if state is None else state)
        write_marker(self.local, json.dumps({"version": f"{version:06d}"}))
        return self.local

    # -- published versions

    def folder(self, version: int) -> Path:
        return self.source / f"weight_v{version:06d}"

    def changed(self, names: Iterable[str], old: State, nbytes: int = 9) -> State:
        """Return ``old`` with a few random bytes of each named tensor flipped."""
        new = dict(old)
        for name in names:
            data = np.frombuffer(old[name], np.uint8).copy()
            at = self.random.choice(data.size, min(nbytes, data.size), replace=False)
            data[at] ^= self.random.integers(1, 256, at.size, dtype=np.uint8)
            new[name] = data.tobytes()
        return new

    def delta(
        self,
        names: Iterable[str] = ("a.weight", "s.scale", "b.lut"),
        *,
        version: int | None = None,
        base: int | None = None,
        new: State | None = None,
        encoding: str = "xor",
        checksum: str = "xxh3-128",
        shards: int = 2,
        bend: Bend | None = None,
        into: Path | None = None,
        shard_metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Publish one delta and return its version."""
        bend = bend or Bend()
        version = self.last + 1 if version is None else version
        base = self.last if base is None else base
        old = self.states[base]
        new = self.changed(names, old) if new is None else new
        if into is None:
            self.states[version] = new
            self.last = version
        changed = [
            name for name in new if new[name] != old[name] or name in {*bend.blob, *bend.payload}
        ]
        blobs = {}
        for name in changed:
            payload = bend.payload.get(name)
            if payload is None:
                payload = encode(encoding, old[name], new[name])
            blobs[name] = bend.blob[name] if name in bend.blob else compress(payload)
        digests = {name: digest(checksum, new[name]) for name in changed}
        blobs.update(bend.extra)
        digests.update({name: digest(checksum, b"") for name in bend.extra})
        for name, text in bend.digest.items():
            digests[name] = text or ""
            if text is None:
                del digests[name]
        folder = self.folder(version) if into is None else into
        folder.mkdir(parents=True, exist_ok=True)
        weight_map = {}
        groups = [group for group in (list(blobs)[at::shards] for at in range(shards)) if group]
        for number, group in enumerate(groups):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            rows = [(name, "U8", (len(blobs[name]),), blobs[name]) for name in group]
            metadata = {name: digests[name] for name in group if name in digests}
            data = bend.shard(file, pack(rows, {**metadata, **(shard_metadata or {})}))
            if data is not None:
                (folder / file).write_bytes(data)
            weight_map.update(dict.fromkeys(group, file))
        self._write_index(folder, version, base, encoding, checksum, weight_map, bend)
        return version

    def _write_index(
        self,
        folder: Path,
        version: int,
        base: int,
        encoding: str,
        checksum: str,
        weight_map: dict[str, str],
        bend: Bend,
    ) -> None:
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{base:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": checksum,
            **bend.metadata,
        }
        index = bend.index({"metadata": metadata, "weight_map": weight_map})
        if index is not None:
            data = index if isinstance(index, bytes) else json.dumps(index).encode()
            (folder / INDEX).write_bytes(data)

    def full(self, names: Iterable[str] = (), *, single: bool = True) -> int:
        """Publish a full version and return its number."""
        version = self.last + 1
        self.states[version] = self.changed(
            names or [r.name for r in self.layout if r.nbytes], self.states[self.last]
        )
        self.write_checkpoint(self.folder(version), self.states[version], single=single)
        self.last = version
        return version

    def aggregate(self, version: int, *, stamp: str | None = None) -> Path:
        """Write ``aggregate/``: base XOR ``version`` as one delta, each shard stamped with the version."""
        folder = self.source / "aggregate"
        shutil.rmtree(folder, ignore_errors=True)
        self.delta(
            version=version,
            base=0,
            new=self.states[version],
            into=folder,
            shard_metadata={"__version__": stamp or f"{version:06d}"},
        )
        return folder

    def republish(self, version: int, names: Iterable[str] = ("a.weight",)) -> None:
        """Replace a published version by another one of the same number and other bytes."""
        last = self.last
        shutil.rmtree(self.folder(version))
        self.delta(names, version=version, base=version - 1)
        self.last = last

    def hide(self, version: int) -> None:
        """Take a version out of sight of a listing."""
        os.rename(self.folder(version), self.root / f"hidden_{version}")

    def show(self, version: int) -> None:
        os.rename(self.root / f"hidden_{version}", self.folder(version))
