"""What a publisher writes, of tensors of every kind, in every encoding and framing."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
import torch
import xxhash
import zstandard

from gpusync import Publisher, pull
from gpusync.format import encode
from gpusync.format.index import MANIFEST_NAME, parse_manifest
from gpusync.publisher import delta_options
from gpusync.publisher.delta_options import DeltaOptions
from gpusync.publisher.diff import ArrayBytes, TensorDiff, diff_tensors
from gpusync.publisher.publish import PublishReport
from tests.publisher.versions import open_version
from tests.support import (
    Tensors,
    apply_version,
    as_arrays,
    as_torch,
    bytes_of,
    decode_blob,
    make_checkpoint,
    make_stream,
    move_one_ulp,
    publish_steps,
    read_checkpoint,
    read_tensors,
    read_version,
    replay,
    snapshot,
    tiny_llama_tensors,
    version_dir,
)

# ---- what is written ----------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ("seekable", "single"))
@pytest.mark.parametrize("encoding", ("xor", "overwrite", "xor_sparse", "xor_rows"))
def test_published_versions_rebuild_every_step(tmp_path: Path, encoding: str, framing: str) -> None:
    base_dir, source_dir, states = make_stream(tmp_path, 3, encoding=encoding, framing=framing)
    tensors = read_tensors(base_dir)
    for version in (1, 2, 3):
        tensors = apply_version(tensors, source_dir, version)
        assert tensors == states[version]


@pytest.mark.parametrize("checksum", ("xxh3-128", "blake3", "adler32"))
def test_digests_are_of_the_complete_new_tensors(tmp_path: Path, checksum: str) -> None:
    import zlib

    hex_of = {
        "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
        "blake3": lambda data: blake3.blake3(data).hexdigest(),
        "adler32": lambda data: f"{zlib.adler32(data, 1):08x}",
    }[checksum]
    _, source_dir, states = make_stream(tmp_path, 1, checksum=checksum)
    index, blobs, digests = read_version(source_dir, 1)
    assert index["metadata"]["checksum_format"] == checksum
    assert digests == {name: hex_of(states[1][name][2]) for name in blobs}


def test_a_delta_is_laid_out_as_trainers_write_it(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    names = ["model.norm.weight", "model.vocab_lut", "model.layers.0.self_attn.k_scale"]
    publish_steps(
        tmp_path / "s", base_dir, [states[1], move_one_ulp(states[1], 0.1, only=names)], run_id="r"
    )
    index, blobs, digests = read_version(tmp_path / "s", 2)
    metadata = dict(index["metadata"])
    manifest_digest = metadata.pop("gpusync_manifest")
    assert metadata == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    assert sorted(index["weight_map"]) == sorted(blobs) == sorted(digests) == sorted(names)
    assert set(index["weight_map"].values()) == {"model-00000-of-00001.safetensors"}
    assert all(dtype == "U8" and shape == (len(blob),) for dtype, shape, blob in blobs.values())
    raw = (version_dir(tmp_path / "s", 2) / MANIFEST_NAME).read_bytes()
    assert xxhash.xxh3_128_hexdigest(raw) == manifest_digest


def test_the_manifest_says_what_the_blobs_and_tensors_are(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    publish_steps(source_dir, base_dir, states[1:3], run_id="run-1")
    for version, base_fingerprint in ((1, None), (2, open_version(source_dir, 1).fingerprint)):
        raw = (version_dir(source_dir, version) / MANIFEST_NAME).read_bytes()
        manifest = parse_manifest(raw, file=MANIFEST_NAME)
        _, blobs, _ = read_version(source_dir, version)
        assert (manifest.version, manifest.run_id) == (version, "run-1")
        assert manifest.base_fingerprint == base_fingerprint
        assert manifest.tensors.keys() == blobs.keys()
        for name, entry in manifest.tensors.items():
            dtype, shape, data = states[version][name]
            assert (entry.dtype, entry.shape, entry.nbytes) == (dtype, shape, len(data))
            assert entry.blob_digest == xxhash.xxh3_128_hexdigest(blobs[name][2])
            assert entry.framing == "seekable"


def test_sparse_blobs_are_single_frames_and_the_manifest_says_so(tmp_path: Path) -> None:
    _, source_dir, _ = make_stream(tmp_path, 1, encoding="xor_sparse", framing="seekable")
    _, blobs, _ = read_version(source_dir, 1)
    for _, _, blob in blobs.values():
        content = decode_blob(blob)
        assert zstandard.get_frame_parameters(blob).content_size == len(content)
        assert zstandard.ZstdDecompressor().decompress(blob) == content
    manifest = open_version(source_dir, 1).manifest
    assert {entry.framing for entry in manifest.tensors.values()} == {"single"}


@pytest.mark.parametrize("framing", ("seekable", "single"))
def test_sizes_around_frames_and_blocks(tmp_path: Path, framing: str) -> None:
    frame = 64 << 10
    block = DeltaOptions("xor", "xxh3-128", "seekable", frame).block_nbytes
    sizes = [0, 1, 3, 15, 16, 17, 1023, 1024, 1025]
    sizes += [at + step for at in (frame, block, 2 * block) for step in (-1, 0, 1)]
    rng = np.random.default_rng(0)
    old = {f"t{size}": ("U8", (size,), rng.bytes(size)) for size in sizes}
    new = move_one_ulp(old, 0.001)
    make_checkpoint(tmp_path / "base", old)
    publish_steps(tmp_path / "s", tmp_path / "base", [new], framing=framing, frame_bytes=frame)
    assert replay(tmp_path / "base", tmp_path / "s", 1) == new
    _, blobs, _ = read_version(tmp_path / "s", 1)
    assert "t0" not in blobs
    for name, (_, (size,), _) in old.items():
        if size and framing == "seekable":
            count = int.from_bytes(blobs[name][2][-9:-5], "little")
            assert count == -(-size // frame)
        elif size:
            assert zstandard.get_frame_parameters(blobs[name][2]).content_size == size


def test_a_step_that_changes_nothing_is_an_empty_delta(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    publish_steps(tmp_path / "s", base_dir, [states[1], states[1], states[2]])
    index, _, _ = read_version(tmp_path / "s", 2)
    assert index["weight_map"] == {}
    assert not list(version_dir(tmp_path / "s", 2).glob("*.safetensors"))
    assert open_version(tmp_path / "s", 2).index.base_version == 1
    assert replay(base_dir, tmp_path / "s", 3) == states[3 - 1]


def test_minus_zero_and_nan_payloads_are_changes(tmp_path: Path) -> None:
    old: Tensors = {"w": ("F32", (2,), np.array([0.0, np.nan], "<f4").tobytes())}
    new: Tensors = {"w": ("F32", (2,), np.array([0x80000000, 0x7FC00001], "<u4").tobytes())}
    make_checkpoint(tmp_path / "base", old, shards=1)
    publish_steps(tmp_path / "s", tmp_path / "base", [new])
    assert replay(tmp_path / "base", tmp_path / "s", 1) == new


def test_large_deltas_are_split_into_shards(
    tmp_path: Path, base_dir: Path, states: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpusync.publisher.version_writer.SHARD_NBYTES", 300)
    publish_steps(tmp_path / "s", base_dir, [states[1]])
    index, _, _ = read_version(tmp_path / "s", 1)
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert replay(base_dir, tmp_path / "s", 1) == states[1]


@pytest.mark.parametrize("encoding", ("xor", "overwrite"))
def test_the_same_input_gives_the_same_bytes_on_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    old: Tensors = {"big": ("U8", (5 << 20,), bytes(5 << 20)), **tiny_llama_tensors()}
    make_checkpoint(tmp_path / "base", old)
    found = []
    for threads in ("1", "8"):
        monkeypatch.setenv("GPUSYNC_THREADS", threads)
        source_dir = tmp_path / threads
        publish_steps(
            source_dir, tmp_path / "base", [move_one_ulp(old, 0.01)], encoding=encoding, run_id="r"
        )
        found.append(snapshot(version_dir(source_dir, 1)))
    assert found[0] == found[1]


@pytest.mark.parametrize("encoding", ["xor", "xor_rows"])
def test_blocks_in_which_nothing_changed_are_encoded_as_if_by_themselves(
    tmp_path: Path, encoding: str
) -> None:
    """They are taken from a cache: the blob still has every frame, and decodes to the delta."""
    nbytes = (5 << 20) + 777
    old: Tensors = {"a": ("U8", (nbytes,), bytes(nbytes)), "b": ("U8", (nbytes,), bytes(nbytes))}
    data = bytearray(nbytes)
    data[(3 << 20) + 5] = 1
    new = {**old, "a": ("U8", (nbytes,), bytes(data))}
    base = make_checkpoint(tmp_path / "base", old)
    publish_steps(tmp_path / "s", base, [new], encoding=encoding)
    index, blobs, _ = read_version(tmp_path / "s", 1)
    assert set(index["weight_map"]) == {"a"}
    if encoding == "xor":
        assert decode_blob(blobs["a"][2]) == bytes(data)
    pull(tmp_path / "local", base, tmp_path / "s", 1)
    assert read_checkpoint(tmp_path / "local") == bytes_of(new)


def test_the_error_of_a_block_is_not_hidden_by_those_that_waited_for_an_earlier_one() -> None:
    """Block 1 waits for block 0's turn when block 2 fails: it is sent away, and is not the cause."""
    options = DeltaOptions("xor", "xxh3-128", "seekable", 1 << 20)
    nbytes = 3 * options.block_nbytes
    failed = threading.Event()

    class Old:
        def block(self, offset: int, scratch: Any) -> Any:
            if offset == 0:
                failed.wait(20)
                time.sleep(0.05)
            if offset == 2 * options.block_nbytes:
                failed.set()
                raise OSError(errno.EIO, "made by the test")
            return scratch

    diff = TensorDiff("a", nbytes, Old(), ArrayBytes(np.zeros(nbytes, np.uint8)), options)
    with ThreadPoolExecutor(3) as pool, pytest.raises(OSError, match="made by the test"):
        list(diff_tensors([diff], pool, 3))


def test_the_report_counts_what_was_written(tmp_path: Path, base_dir: Path, states: Any) -> None:
    publisher = Publisher(tmp_path / "s", base_dir, run_id="r")
    publisher.publish(as_arrays(states[1]))
    report = publisher.report
    assert isinstance(report, PublishReport)
    files = snapshot(version_dir(tmp_path / "s", 1))
    changed = [name for name in states[0] if states[0][name] != states[1][name]]
    assert report.wire_bytes == sum(map(len, files.values()))
    assert (report.tensors, report.tensors_changed) == (len(states[0]), len(changed))
    assert report.nbytes == sum(len(data) for _, _, data in states[0].values())
    assert json.loads(json.dumps(report.to_dict()))["kind"] == "delta"


# ---- torch --------------------------------------------------------------------------------------------


def test_torch_tensors_of_every_kind_are_published_as_their_bytes(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    tensors = as_torch(states[1])
    tensors["model.norm.weight"].requires_grad_()
    transposed = tensors["model.layers.0.self_attn.q_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = transposed.t().contiguous().t()
    f8 = tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = f8.t().contiguous().t()
    assert not tensors["model.layers.0.self_attn.q_proj.weight"].is_contiguous()
    publisher = Publisher(tmp_path / "s", base_dir)
    publisher.publish(tensors.items())
    assert replay(base_dir, tmp_path / "s", 1) == states[1]
    publisher.publish(
        (name, torch.nn.Parameter(t, False)) for name, t in as_torch(states[2]).items()
    )
    assert replay(base_dir, tmp_path / "s", 2) == states[2]


def test_conjugate_views_big_endian_and_strided_arrays(tmp_path: Path) -> None:
    values = np.arange(6, dtype="<c8").reshape(2, 3) * (1 - 2j)
    words = np.arange(8, dtype="<i4")
    old: Tensors = {
        "c": ("C64", (2, 3), bytes(48)),
        "b": ("I32", (8,), bytes(32)),
        "s": ("I32", (4,), bytes(16)),
    }
    make_checkpoint(tmp_path / "base", old, shards=1)
    Publisher(tmp_path / "s", tmp_path / "base").publish(
        [
            ("c", torch.from_numpy(values).conj()),
            ("b", words.astype(">i4")),
            ("s", words[::2]),
        ]
    )
    assert bytes_of(replay(tmp_path / "base", tmp_path / "s", 1)) == {
        "c": values.conj().tobytes(),
        "b": words.tobytes(),
        "s": words[::2].tobytes(),
    }


@pytest.mark.parametrize(
    ("encoding", "framing"), [("xor", "seekable"), ("xor", "single"), ("overwrite", "single")]
)
@pytest.mark.parametrize("nbytes", (1000, 3 << 20))
def test_an_iterable_may_use_one_buffer_for_all_tensors(
    tmp_path: Path, nbytes: int, encoding: str, framing: str
) -> None:
    """Where the next tensor is asked for, no thread looks at this one any more; its blocks may still be compressed."""
    rng = np.random.default_rng(0)
    old: Tensors = {f"t{i}": ("U8", (nbytes,), rng.bytes(nbytes)) for i in range(4)}
    new = move_one_ulp(old, 0.01)
    make_checkpoint(tmp_path / "base", old)
    buffer = np.empty(nbytes, np.uint8)

    def gather() -> Iterator[tuple[str, np.ndarray]]:
        for name, (_, _, data) in new.items():
            buffer[:] = np.frombuffer(data, np.uint8)
            yield name, buffer
            buffer[:] = 0

    options = {"encoding": encoding, "framing": framing}
    Publisher(tmp_path / "s", tmp_path / "base", **options).publish(gather())
    assert replay(tmp_path / "base", tmp_path / "s", 1) == new


def test_publishing_arrays_loads_no_torch(tmp_path: Path, base_dir: Path) -> None:
    code = (
        "import sys; from tests.support import *; from gpusync import Publisher; import pathlib\n"
        f"base = pathlib.Path({str(base_dir)!r})\n"
        f"Publisher({str(tmp_path / 's')!r}, base).publish(as_arrays(read_tensors(base)))\n"
        "assert 'torch' not in sys.modules"
    )
    repository = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repository)


def test_where_loops_cannot_be_compiled_libzstd_makes_the_frames(
    tmp_path: Path,
    base_dir: Path,
    states: list[Tensors],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(module: str) -> None:
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(delta_options, "_LARGE_CHECKPOINT_NBYTES", 0)
    monkeypatch.setattr(encode, "compile_loops", broken)
    encode.can_make_runs.cache_clear()
    try:
        publish_steps(tmp_path / "source", base_dir, states[1:])
    finally:
        encode.can_make_runs.cache_clear()
    tensors = read_tensors(base_dir)
    for version in (1, 2, 3):
        tensors = apply_version(tensors, tmp_path / "source", version)
    assert tensors == states[3]
    assert sum("libzstd" in record.message for record in caplog.records) == 1
