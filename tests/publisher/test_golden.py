"""Streams that trainers wrote, published again: the same indexes and tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from gpusync import Publisher
from tests.support import (
    apply_version,
    as_arrays,
    decode_blob,
    read_tensors,
    read_version,
    snapshot,
    version_dir,
)

GOLDEN = [
    "llama_xor_xxh3",
    "llama_overwrite_blake3",
    "llama_xor_adler32",
    "llama_xor_sparse",
    "llama_mixed_full",
    "moe_fp8_xor_xxh3",
]


@pytest.mark.parametrize("stream", GOLDEN)
def test_golden_streams_are_written_as_the_trainers_wrote_them(tmp_path: Path, stream: str) -> None:
    from tests.support import cases_dir

    golden = cases_dir("golden") / stream
    expected = json.loads((golden / "expected.json").read_bytes())
    publisher = Publisher(
        tmp_path / "s",
        golden / "base",
        encoding=expected["encoding"],
        checksum=expected["checksum_format"],
        framing="single",
    )
    tensors = read_tensors(golden / "base")
    for version in range(1, expected["final_version"] + 1):
        tensors = apply_version(tensors, golden / "published", version)
        theirs_dir = version_dir(golden / "published", version)
        if expected["versions"][version]["kind"] == "full":
            publisher.publish_full(theirs_dir)
            assert snapshot(version_dir(tmp_path / "s", version)) == snapshot(theirs_dir)
            continue
        publisher.publish(as_arrays(tensors))
        ours, our_blobs, our_digests = read_version(tmp_path / "s", version)
        theirs, their_blobs, their_digests = read_version(golden / "published", version)
        ours["metadata"].pop("gpusync_manifest")
        assert ours["metadata"] == theirs["metadata"]
        assert (
            our_blobs.keys() == their_blobs.keys() == set(expected["versions"][version]["changed"])
        )
        assert our_digests == their_digests
        for name, (_, _, blob) in our_blobs.items():
            assert zstandard.ZstdDecompressor().decompress(blob) == decode_blob(
                their_blobs[name][2]
            )
