"""Published deltas of given blobs, written by hand and opened as a receiver opens them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from gpusync.config import Settings
from gpusync.published.blobs import BlobSource
from gpusync.published.source import Source
from tests.support import INDEX, safetensors_bytes, version_dir


def write_delta(
    folder: Path,
    blobs: Mapping[str, bytes],
    *,
    version: int = 1,
    encoding: str = "xor",
    stated: Mapping[str, str] | None = None,
) -> None:
    """Write one version of one shard. ``stated`` maps tensors to the blob digests of a manifest; None: no manifest."""
    at = version_dir(folder, version)
    at.mkdir(parents=True)
    rows = {name: ("U8", (len(blob),), blob) for name, blob in blobs.items()}
    digests = dict.fromkeys(blobs, "0" * 32)
    (at / "m.safetensors").write_bytes(safetensors_bytes(rows, digests))
    metadata = {
        "version": version,
        "base_version": version - 1,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    if stated is not None:
        row = {"nbytes": 1, "dtype": "U8", "shape": [1], "framing": "seekable"}
        tensors = {name: {"blob_digest": digest, **row} for name, digest in stated.items()}
        manifest = {"version": version, "run_id": "r", "base_fingerprint": None, "tensors": tensors}
        raw = json.dumps(manifest).encode()
        (at / "gpusync.manifest.json").write_bytes(raw)
        metadata["gpusync_manifest"] = xxhash.xxh3_128_hexdigest(raw)
    weight_map = dict.fromkeys(blobs, "m.safetensors")
    (at / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def digests_of(blobs: Mapping[str, bytes]) -> dict[str, str]:
    """Return what a manifest states of the blobs."""
    return {name: xxhash.xxh3_128_hexdigest(blob) for name, blob in blobs.items()}


def open_blobs(folder: Path, version: int = 1) -> dict[str, BlobSource]:
    """Return a version's blobs by tensor. Files are closed with the last of them."""
    source = Source(folder, Settings())
    delta = source.open_version(version)
    return {name: BlobSource(source.files, delta, name) for name in delta.digests}
