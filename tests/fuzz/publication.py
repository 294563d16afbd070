"""A published version as a structure that can be bent and written back, its outer layers made to fit or not.

Nothing here uses gpusync: `expected_state` reads a bent version on its own, so that the two can disagree.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import xxhash

from tests import support, wire
from tests.fuzz import mutations

MANIFEST = "gpusync.manifest.json"


@dataclass
class Blob:
    """A row of a delta's shard."""

    name: str
    data: bytes
    dtype: str = "U8"
    shape: tuple[int, ...] | None = None


@dataclass
class Publication:
    """A delta version: index and manifest as JSON values, shards as rows and metadata."""

    folder: Path
    index: dict[str, Any]
    shards: dict[str, tuple[list[Blob], dict[str, str]]]
    manifest: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Publication:
        """Read a version; raises ValueError and the like where there is none to be read."""
        if not (folder / wire.INDEX).is_file():
            raise ValueError("no index")
        index = json.loads((folder / wire.INDEX).read_bytes())
        shards = {}
        for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
            header, start = wire.raw_header(path)
            data = path.read_bytes()[start:]
            metadata = header.pop("__metadata__", {})
            rows = [
                Blob(name, data[slice(*row["data_offsets"])])
                for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
            ]
            shards[path.name] = rows, metadata
        path = folder / MANIFEST
        manifest = json.loads(path.read_bytes()) if path.is_file() else None
        return cls(folder, index, shards, manifest)

    def write(self, *, fit_manifest: bool = True) -> None:
        """Write it back; the manifest's digests are made to fit unless told otherwise."""
        for file, (rows, metadata) in self.shards.items():
            packed = [
                (row.name, row.dtype, row.shape or (len(row.data),), row.data) for row in rows
            ]
            _replace(self.folder / file, wire.pack(packed, metadata))
        if self.manifest is not None:
            if fit_manifest:
                for rows, _ in self.shards.values():
                    for row in rows:
                        stated = self.manifest["tensors"].get(row.name)
                        if isinstance(stated, dict):
                            stated["blob_digest"] = xxhash.xxh3_128_hexdigest(row.data)
            raw = json.dumps(self.manifest).encode()
            _replace(self.folder / MANIFEST, raw)
            if fit_manifest:
                self.index["metadata"]["gpusync_manifest"] = xxhash.xxh3_128_hexdigest(raw)
        _replace(self.folder / wire.INDEX, json.dumps(self.index).encode())

    def all_rows(self) -> list[tuple[str, Blob]]:
        return [(file, row) for file, (rows, _) in self.shards.items() for row in rows]


def _replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# ---- what a version stands for, read loosely --------------------------------------------------------


def expected_state(folder: Path, old: wire.State) -> wire.State:
    """Return the bytes after a delta or full version, by the format's plain reading.

    Raises
    ------
    Exception
        Of any kind: the version stands for nothing. A result that misses its published digest is an error too.
    """
    index_path = folder / wire.INDEX
    index = json.loads(index_path.read_bytes()) if index_path.exists() else {}
    metadata = index.get("metadata", {})
    if "delta_encoding" not in metadata:
        files = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
        return {
            name: data
            for file in files
            for name, (_, _, data) in support.read_safetensors(folder / file)[0].items()
        }
    new = dict(old)
    for name, file in index["weight_map"].items():
        header, start = wire.raw_header(folder / file)
        begin, end = header[name]["data_offsets"]
        blob = (folder / file).read_bytes()[start + begin : start + end]
        payload = support.decode_blob(blob)
        new[name] = support.apply_payload(metadata["delta_encoding"], payload, old[name])
        got = wire.digest(metadata["checksum_format"], new[name])
        if got != header["__metadata__"][name].lower():
            raise ValueError(f"{name} misses its digest")
    return new


# ---- structured mutations ---------------------------------------------------------------------------

Bend = Callable[[Publication, Random], None]


def _pick(pub: Publication, random: Random) -> tuple[str, Blob]:
    return random.choice(pub.all_rows())


def bend_blob(pub: Publication, random: Random) -> None:
    """Change a blob; every size and digest around it fits, so that the decoder's side is what judges."""
    _, row = _pick(pub, random)
    others = [other.data for _, other in pub.all_rows()]
    row.data = mutations.mutate_blob(row.data, random, others)


def bend_payload(pub: Publication, random: Random) -> None:
    """Change what a blob decodes to."""
    _, row = _pick(pub, random)
    row.data = mutations.recompressed(row.data, lambda data: mutations.mutate_bytes(data, random))


def splice_blob(pub: Publication, random: Random) -> None:
    """Give a tensor another one's blob, digest or both."""
    (_, left), (file, right) = _pick(pub, random), _pick(pub, random)
    if random.random() < 0.7:
        left.data = right.data
    if random.random() < 0.5:
        for _, metadata in pub.shards.values():
            if left.name in metadata and right.name in pub.shards[file][1]:
                metadata[left.name] = pub.shards[file][1][right.name]


def bend_digest(pub: Publication, random: Random) -> None:
    """Change a digest, leave it out, or write it in capitals."""
    file, row = _pick(pub, random)
    metadata = pub.shards[file][1]
    text = metadata.get(row.name, "")
    kind = random.randrange(5)
    if kind == 0:
        metadata.pop(row.name, None)
    elif kind == 1:
        metadata[row.name] = text.upper()
    elif kind == 2:
        metadata[row.name] = text[::-1]
    elif kind == 3:
        metadata[row.name] = (
            random.choice(mutations.TEXTS).replace("\ud800", "").replace("\udcff", "")
        )
    else:
        metadata[random.choice(("x", "__version__", "format"))] = random.choice(
            ("000002", "9" * 5000, "\u0663")
        )


def bend_row(pub: Publication, random: Random) -> None:
    """Rename, retype, reshape, double, move or drop a row of a shard."""
    file, row = _pick(pub, random)
    rows, metadata = pub.shards[file]
    kind = random.randrange(7)
    if kind == 0:
        row.name = random.choice(("x", "lm_head.weight", random.choice(pub.all_rows())[1].name))
    elif kind == 1:
        row.dtype = random.choice(("I8", "BF16", "F4", "F64", "Q9", ""))
    elif kind == 2:
        row.shape = random.choice(
            (
                (),
                (len(row.data), 1),
                (1, len(row.data)),
                (0,),
                (2**63, 2),
                (2**64 - 1, 2**64 - 1, 0),
            )
        )
    elif kind == 3:
        rows.append(Blob(row.name, row.data))
    elif kind == 4:
        rows.remove(row)
    elif kind == 5:
        other = random.choice(list(pub.shards))
        pub.shards[other][0].append(Blob(row.name, row.data))
        pub.shards[other][1][row.name] = metadata.get(row.name, "")
    else:
        rows.reverse()


def bend_map(pub: Publication, random: Random) -> None:
    """Drop, add, move or misspell a row of weight_map; forget a whole shard."""
    rows = pub.index["weight_map"]
    name = random.choice(list(rows) or ["x"])
    kind = random.randrange(6)
    if kind == 0:
        rows.pop(name, None)
    elif kind == 1:
        rows[random.choice(("x", "lm_head.weight", "c.weight"))] = random.choice(list(pub.shards))
    elif kind == 2:
        rows[name] = random.choice(list(pub.shards))
    elif kind == 3:
        rows[name] = random.choice(mutations.TEXTS)
    elif kind == 4:
        gone = rows.get(name)
        pub.index["weight_map"] = {key: file for key, file in rows.items() if file != gone}
    else:
        pub.index["weight_map"] = {}


def bend_metadata(pub: Publication, random: Random) -> None:
    """Change what the index says of the version."""
    metadata = pub.index["metadata"]
    key = random.choice(
        (
            "version",
            "base_version",
            "delta_encoding",
            "compression_format",
            "checksum_format",
            "gpusync_manifest",
        )
    )
    kind = random.randrange(4)
    if kind == 0:
        metadata.pop(key, None)
    elif kind == 1:
        metadata[key] = random.choice((0, 1, 2, 3, 2**63, -1, 1.5, True, None, [], {}, "2", "1"))
    elif kind == 2:
        metadata[key] = random.choice(
            (
                "xor",
                "overwrite",
                "xor_sparse",
                "xor_rows",
                "zstd",
                "xxh3-128",
                "blake3",
                "adler32",
                "lz4",
            )
        )
    else:
        metadata[key] = random.choice(mutations.TEXTS)


def bend_manifest(pub: Publication, random: Random) -> None:
    """Change the manifest; its digest in the index fits."""
    if pub.manifest is None:
        bend_metadata(pub, random)
        return
    raw = mutations.mutate_json(json.dumps(pub.manifest).encode(), random)
    try:
        pub.manifest = json.loads(raw)
    except (ValueError, RecursionError):
        pub.manifest = {"tensors": {}}
    if not isinstance(pub.manifest, dict) or not isinstance(pub.manifest.get("tensors"), dict):
        pub.manifest = {"tensors": {}}


def redigest(pub: Publication, old: wire.State) -> None:
    """Make the published digests those of what the blobs make of ``old``, where they make anything."""
    metadata = pub.index["metadata"]
    for rows, digests in pub.shards.values():
        for row in rows:
            try:
                payload = support.decode_blob(row.data)
                new = support.apply_payload(metadata["delta_encoding"], payload, old[row.name])
                digests[row.name] = wire.digest(metadata["checksum_format"], new)
            except Exception:  # it stands for nothing: the old digest stays
                continue


BENDS: tuple[Bend, ...] = (
    bend_blob,
    bend_blob,
    bend_payload,
    bend_payload,
    splice_blob,
    bend_digest,
    bend_row,
    bend_map,
    bend_metadata,
    bend_manifest,
)


# ---- files ------------------------------------------------------------------------------------------


def bend_file(path: Path, random: Random, others: list[Path]) -> str:
    """Change one file's bytes; return what was done."""
    data, other = path.read_bytes(), random.choice(others).read_bytes()
    kind = random.randrange(8)
    if kind == 0 and path.name.endswith(".safetensors"):
        changed, what = mutations.mutate_shard_header(data, random), "header"
    elif kind <= 2 and path.name.endswith(".json"):
        changed, what = mutations.mutate_json(data, random), "json"
    elif kind == 3:
        cut = random.choice((0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, len(data)))
        changed, what = data[: max(0, cut)] + bytes(random.choice((0, 1, 4096))), f"cut at {cut}"
    elif kind == 4:
        changed, what = bytes(random.choice((len(data), 0, 8, 64))), "zeros"
    elif kind == 5:
        changed, what = other, "another file's bytes"
    else:
        changed, what = mutations.mutate_bytes(data, random, other), "bytes"
    _replace(path, changed)
    return f"{path.name}: {what}"


def bend_name(path: Path, random: Random, others: list[Path], outside: Path) -> str:
    """Make something else of a name: gone, a folder, a link, a FIFO, a socket, a device, another file's name."""
    kind = random.choice(
        (
            "gone",
            "folder",
            "fifo",
            "socket",
            "device",
            "dangling",
            "loop",
            "link out",
            "link in",
            "hard link",
            "swap",
            "copy",
        )
    )
    other = random.choice(others)
    if kind in ("link in", "hard link", "swap") and other == path:
        kind = "gone"
    if kind == "swap":
        spare = path.with_name("spare")
        os.rename(path, spare)
        os.rename(other, path)
        os.rename(spare, other)
        return f"{path.name}: swapped with {other.name}"
    if kind == "copy":
        names = {"x.safetensors", "x\udcff.safetensors", "\u212a.safetensors"} - {path.name}
        shutil.copyfile(path, path.with_name(random.choice(sorted(names))))
        return f"{path.name}: copied to another name"
    data = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        bind_socket(path)
    elif kind == "device":
        make_device(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "link out":
        (outside / path.name).write_bytes(data)
        path.symlink_to(outside / path.name)
    elif kind == "link in":
        path.symlink_to(other)
    elif kind == "hard link":
        os.link(other, path)
    return f"{path.name}: {kind}"


def make_device(path: Path) -> None:
    """Make a device node (zeros without an end), or a FIFO where this user may not."""
    try:
        os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        os.mkfifo(path)


def bind_socket(path: Path) -> None:
    """Make a socket of this name."""
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(path.parent)  # a socket's path may have 107 bytes only
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)
