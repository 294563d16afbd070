"""The publisher: what it writes, what it refuses, and what a failure or a kill at any file operation leaves."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import time
import tracemalloc
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

from gpusync import Publisher, fsio, pull
from gpusync.config import Settings
from gpusync.errors import (
    BaseMismatchError,
    ChainError,
    CheckpointError,
    CheckpointIOError,
    VersionConflictError,
)
from gpusync.format import encode
from gpusync.format.index import MANIFEST_NAME, parse_manifest
from gpusync.published.source import Source
from gpusync.publisher import delta_options
from gpusync.publisher.delta_options import DeltaOptions
from gpusync.publisher.diff import ArrayBytes, TensorDiff, diff_tensors
from gpusync.publisher.publication import publish_lock, worker_threads
from gpusync.publisher.publish import PublishReport, publish_checkpoint
from gpusync.types import Progress
from tests.support import (
    INDEX,
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


@pytest.fixture(scope="module", autouse=True, params=[False, True], ids=["libzstd", "runs"])
def encoder_of_frames(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of this module's tests run with either encoder of seekable frames."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(delta_options, "_LARGE_CHECKPOINT_NBYTES", 0)
        yield


@pytest.fixture
def states() -> list[Tensors]:
    """Four versions of a small checkpoint."""
    found = [tiny_llama_tensors(7)]
    for version in (1, 2, 3):
        found.append(move_one_ulp(found[-1], 0.02, seed=version))
    return found


@pytest.fixture
def base_dir(tmp_path: Path, states: list[Tensors]) -> Path:
    return make_checkpoint(tmp_path / "base", states[0])


def visible(source_dir: Path) -> list[str]:
    return sorted(path.name for path in source_dir.glob("[!.]*"))


def open_version(source_dir: Path, version: int) -> Any:
    source = Source(source_dir, Settings())
    try:
        return source.open_version(version)
    finally:
        source.close()


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


# ---- what is refused ----------------------------------------------------------------------------------


def _without(tensors: Tensors, name: str) -> list[tuple[str, np.ndarray]]:
    return [pair for pair in as_arrays(tensors) if pair[0] != name]


@pytest.mark.parametrize(
    ("bend", "word"),
    [
        (lambda t: _without(t, "model.norm.weight"), "not given"),
        (lambda t: [*as_arrays(t), ("lm_head.weight", np.zeros(3, np.uint16))], "not in"),
        (lambda t: [*as_arrays(t), as_arrays(t)[0]], "twice"),
        (
            lambda t: [
                *_without(t, "model.norm.weight"),
                ("model.norm.weight", np.zeros((2, 12), "u2")),
            ],
            "dtype and shape",
        ),
        (
            lambda t: [
                *_without(t, "model.norm.weight"),
                ("model.norm.weight", np.zeros(24, "f2")),
            ],
            "dtype and shape",
        ),
        (
            lambda t: [*_without(t, "model.norm.weight"), ("model.norm.weight", torch.zeros(24))],
            "dtype and shape",
        ),
        (
            lambda t: [
                *_without(t, "model.norm.weight"),
                ("model.norm.weight", torch.zeros(24, device="meta", dtype=torch.bfloat16)),
            ],
            "no dense bytes",
        ),
        (lambda t: [*_without(t, "model.norm.weight"), ("model.norm.weight", [1.0])], "neither"),
    ],
    ids=["missing", "unknown", "twice", "shape", "dtype", "torch dtype", "meta", "list"],
)
def test_another_set_of_tensors_is_refused(
    tmp_path: Path, base_dir: Path, states: list[Tensors], bend: Any, word: str
) -> None:
    publisher = Publisher(tmp_path / "s", base_dir)
    with pytest.raises(ChainError, match=word) as caught:
        publisher.publish(bend(states[1]))
    assert caught.value.tensor is not None
    assert visible(tmp_path / "s") == []
    assert publisher.publish(as_arrays(states[1])) == 1
    assert replay(base_dir, tmp_path / "s", 1) == states[1]


def test_an_error_of_the_iterable_reaches_the_caller_and_publishes_nothing(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    def gather() -> Iterator[tuple[str, np.ndarray]]:
        yield as_arrays(states[1])[0]
        raise TimeoutError("a rank is gone")

    with pytest.raises(TimeoutError, match="a rank is gone"):
        Publisher(tmp_path / "s", base_dir).publish(gather())
    assert visible(tmp_path / "s") == []
    assert [path.name for path in (tmp_path / "s").glob(".*tmp")] == []


@pytest.mark.parametrize(
    "option",
    [{"encoding": "delta"}, {"checksum": "md5"}, {"framing": "both"}, {"frame_bytes": 4096}],
    ids=lambda option: next(iter(option)),
)
def test_unknown_options_are_refused_before_any_work(tmp_path: Path, option: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Publisher(tmp_path / "s", tmp_path / "base", **option)
    assert not (tmp_path / "s").exists()


def test_a_base_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for base_dir in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(CheckpointError, match=str(base_dir)):
            Publisher(tmp_path / "s", base_dir).publish([])
    assert visible(tmp_path / "s") == []


def test_a_version_of_another_publisher_stops_this_one(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    first = Publisher(source_dir, base_dir)
    first.publish(as_arrays(states[1]))
    make_checkpoint(tmp_path / "one", states[1])
    make_checkpoint(tmp_path / "two", states[2])
    publish_checkpoint(tmp_path / "one", tmp_path / "two", source_dir)
    with pytest.raises(VersionConflictError) as caught:
        first.publish(as_arrays(states[3]))
    assert (caught.value.expected, caught.value.got) == (1, 2)
    with pytest.raises(VersionConflictError, match="Publish a full version"):
        Publisher(source_dir, base_dir).publish(as_arrays(states[3]))
    assert len(visible(source_dir)) == 2


def test_a_publisher_at_work_keeps_others_out(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    with (
        publish_lock(source_dir),
        pytest.raises(VersionConflictError, match="another publisher is at work"),
    ):
        Publisher(source_dir, base_dir).publish(as_arrays(states[1]))
    assert Publisher(source_dir, base_dir).publish(as_arrays(states[1])) == 1


def test_no_thread_is_at_work_any_more_after_an_interrupt_while_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutdown, interrupts = ThreadPoolExecutor.shutdown, [KeyboardInterrupt]

    def interrupted(pool: ThreadPoolExecutor, *args: Any, **options: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        shutdown(pool, *args, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt), worker_threads(Settings(threads=1)) as pool:
        pool.submit(work)
        dropped = pool.submit(work)
        assert begun.wait(60)
    assert ended.is_set() and dropped.cancelled()


def test_a_file_system_without_locks_is_published_to_with_a_warning(
    tmp_path: Path, base_dir: Path, states: list[Tensors], monkeypatch: Any, caplog: Any
) -> None:
    def no_locks(fd: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fsio, "try_flock", no_locks)
    publish_steps(tmp_path / "s", base_dir, [states[1]])
    assert replay(base_dir, tmp_path / "s", 1) == states[1]
    assert "publish_lock_unsupported" in caplog.text


def test_losing_the_race_for_a_version_leaves_the_winner_alone(
    tmp_path: Path, base_dir: Path, states: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another host, where the lock may exclude nobody: its folder appears just before our rename."""
    source_dir = tmp_path / "s"
    rename = fsio.rename

    def race(old: Path, new: Path) -> None:
        if new.name == "weight_v000001":
            new.mkdir()
            (new / "theirs").write_bytes(b"1")
        rename(old, new)

    monkeypatch.setattr(fsio, "rename", race)
    with pytest.raises(VersionConflictError) as caught:
        Publisher(source_dir, base_dir).publish(as_arrays(states[1]))
    assert caught.value.version == 1
    assert snapshot(source_dir / "weight_v000001") == {"theirs": b"1"}
    assert [path.name for path in source_dir.glob(".*tmp")] == []


def test_an_unfinished_version_is_not_built_upon(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    publish_steps(source_dir, base_dir, [states[1]])
    folder = version_dir(source_dir, 2)
    folder.mkdir()
    (folder / "model-00000-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(VersionConflictError, match="not whole") as caught:
        Publisher(source_dir, base_dir).publish(as_arrays(states[2]))
    assert caught.value.version == 2


# ---- restarts and runs --------------------------------------------------------------------------------


def test_a_restarted_publisher_goes_on_with_the_same_run(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    for version in (1, 2, 3):
        assert Publisher(source_dir, base_dir).publish(as_arrays(states[version])) == version
    runs = {open_version(source_dir, version).manifest.run_id for version in (1, 2, 3)}
    assert len(runs) == 1
    assert replay(base_dir, source_dir, 3) == states[3]
    with pytest.raises(VersionConflictError) as caught:
        Publisher(source_dir, base_dir, run_id="other").publish(as_arrays(states[3]))
    assert (caught.value.expected, caught.value.got) == ("other", runs.pop())


def test_a_cleared_source_folder_is_a_new_run_and_never_the_same_one(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir = tmp_path / "s"
    publisher = Publisher(source_dir, base_dir, run_id="first")
    publisher.publish(as_arrays(states[1]))
    for path in sorted(version_dir(source_dir, 1).iterdir()):
        path.unlink()
    version_dir(source_dir, 1).rmdir()
    with pytest.raises(VersionConflictError, match="cleared"):
        publisher.publish(as_arrays(states[2]))
    with pytest.raises(VersionConflictError, match="gone"):
        Publisher(source_dir, base_dir, run_id="first").publish(as_arrays(states[2]))
    assert Publisher(source_dir, base_dir, run_id="second").publish(as_arrays(states[2])) == 1
    assert replay(base_dir, source_dir, 1) == states[2]
    assert open_version(source_dir, 1).manifest.run_id == "second"


def test_damaged_kept_tensors_are_never_published_from(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    source_dir, state_dir = tmp_path / "s", tmp_path / "state"
    Publisher(source_dir, base_dir, state_dir=state_dir).publish(as_arrays(states[1]))
    kept = state_dir / "version_000001" / "model.safetensors"
    assert read_checkpoint(kept.parent) == bytes_of(states[1])
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    publisher = Publisher(source_dir, base_dir, state_dir=state_dir)
    with pytest.raises(BaseMismatchError) as caught:
        publisher.publish(as_arrays(states[2]))
    assert caught.value.tensor == list(read_tensors(kept.parent))[-1]
    assert visible(source_dir) == ["weight_v000001"]

    make_checkpoint(tmp_path / "full", states[2])
    assert publisher.publish_full(tmp_path / "full") == 2
    assert publisher.publish(as_arrays(states[3])) == 3
    assert replay(base_dir, source_dir, 3) == states[3]


@pytest.mark.parametrize("damage", (b"", b"\0" * 40, b"{", b'{"version": 1, "digests": {}}'))
def test_a_damaged_state_file_is_refused_and_a_full_version_goes_on(
    tmp_path: Path, base_dir: Path, states: list[Tensors], damage: bytes
) -> None:
    source_dir, state_dir = tmp_path / "s", tmp_path / "state"
    Publisher(source_dir, base_dir, state_dir=state_dir).publish(as_arrays(states[1]))
    (state_dir / "version_000001" / "state.json").write_bytes(damage)
    (state_dir / "run.json").write_bytes(damage)
    publisher = Publisher(source_dir, base_dir, state_dir=state_dir)
    with pytest.raises(VersionConflictError):
        publisher.publish(as_arrays(states[2]))
    make_checkpoint(tmp_path / "full", states[2], shards=1)
    assert publisher.publish_full(tmp_path / "full") == 2
    assert Publisher(source_dir, base_dir, state_dir=state_dir).publish(as_arrays(states[3])) == 3
    assert replay(base_dir, source_dir, 3) == states[3]


# ---- faults at every file operation -------------------------------------------------------------------


class Killed(BaseException):
    """The process died: nothing after this touches a file."""


class Faults:
    """Fails the n-th file operation, once (``error``) or it and all after it (a kill)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: OSError | None) -> None:
        self.left = at
        self.error = error
        for name in fsio.WRITE_OPERATIONS:
            monkeypatch.setattr(fsio, name, self._wrap(getattr(fsio, name)))

    def _wrap(self, operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0 and self.error is not None:
                raise self.error
            if self.left <= 0 and self.error is None:
                raise Killed
            return operation(*args, **kwargs)

        return call

    @property
    def fired(self) -> bool:
        return self.left <= 0


@pytest.fixture
def small_stream(tmp_path: Path) -> tuple[Path, Path, list[Tensors]]:
    """Base and one published version of two tensors, with the states to come."""
    states: list[Tensors] = [{"a": ("U8", (9,), bytes(9)), "b": ("I32", (2,), bytes(8))}]
    for version in (1, 2, 3):
        states.append(move_one_ulp(states[-1], 0.5, seed=version))
    base_dir = make_checkpoint(tmp_path / "base", states[0])
    publish_steps(tmp_path / "s", base_dir, states[1:2])
    return base_dir, tmp_path / "s", states


def _copy_of(tmp_path: Path, number: int, source_dir: Path) -> Path:
    import shutil

    copy = tmp_path / f"try{number}" / "s"
    shutil.copytree(source_dir, copy)
    shutil.copytree(source_dir.with_name("s.publisher"), copy.with_name("s.publisher"))
    return copy


@pytest.mark.parametrize("kind", ("ENOSPC", "EIO", "kill"))
def test_a_fault_at_any_file_operation_leaves_old_or_new_and_the_run_goes_on(
    tmp_path: Path, small_stream: Any, kind: str
) -> None:
    base_dir, source_dir, states = small_stream
    number = 0
    while True:
        number += 1
        copy = _copy_of(tmp_path, number, source_dir)
        publisher = Publisher(copy, base_dir)
        error = None if kind == "kill" else OSError(getattr(errno, kind), "made by the test")
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, number, error)
            try:
                publisher.publish(as_arrays(states[2]))
            except CheckpointIOError as err:
                assert kind != "kill" and err.errno == getattr(errno, kind)
            except Killed:
                assert kind == "kill"
        if not faults.fired:
            break
        found = visible(copy)
        assert found in (["weight_v000001"], ["weight_v000001", "weight_v000002"])
        again = publisher if kind != "kill" else Publisher(copy, base_dir)
        if len(found) == 1:
            assert again.publish(as_arrays(states[2])) == 2
        assert again.publish(as_arrays(states[3])) == 3
        assert replay(base_dir, copy, 2) == states[2]
        assert replay(base_dir, copy, 3) == states[3]
        assert [path.name for path in copy.glob(".*tmp")] == []
        assert len(list(copy.with_name("s.publisher").glob("version_*"))) == 1
    assert number > 20


def test_files_are_durable_before_names_and_the_index_is_last(
    tmp_path: Path, base_dir: Path, states: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, str]] = []
    names: dict[int, str] = {}

    def note(name: str) -> None:
        operation = getattr(fsio, name)

        def call(*args: Any) -> Any:
            result = operation(*args)
            if name == "create":
                names[result] = Path(args[0]).name
            path = args[1] if name == "rename" else args[0]
            target = names.get(path) if isinstance(path, int) else path.name
            log.append((name, str(target)))
            return result

        monkeypatch.setattr(fsio, name, call)

    for name in ("create", "fsync", "fsync_dir", "rename"):
        note(name)
    Publisher(tmp_path / "s", base_dir).publish(as_arrays(states[1]))
    made = [target for name, target in log if name == "create"]
    synced = [target for name, target in log if name == "fsync"]
    assert made.index(MANIFEST_NAME) < made.index(INDEX)
    assert made.index(INDEX) == max(made.index(name) for name in (MANIFEST_NAME, INDEX, "shard-0"))
    visible_at = log.index(("rename", "weight_v000001"))
    assert log[visible_at - 1][0] == "fsync_dir"
    assert log[visible_at + 1] == ("fsync_dir", "s")
    for name in ("shard-0", MANIFEST_NAME, INDEX, "state.json.tmp"):
        assert name in synced
        assert log.index(("fsync", name)) < visible_at


# ---- from checkpoint folders --------------------------------------------------------------------------


def test_publish_checkpoint_writes_the_difference_of_two_folders(
    tmp_path: Path, states: list[Tensors]
) -> None:
    folders = [
        make_checkpoint(tmp_path / str(number), state, shards=number % 2 + 1)
        for number, state in enumerate(states)
    ]
    for version in (1, 2, 3):
        report = publish_checkpoint(folders[version - 1], folders[version], tmp_path / "s")
        assert (report.version, report.base_version, report.kind) == (version, version - 1, "delta")
        assert open_version(tmp_path / "s", version).manifest.run_id == report.run_id
    assert replay(folders[0], tmp_path / "s", 3) == states[3]


def test_both_ways_of_publishing_write_the_same_version(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    publish_steps(tmp_path / "p", base_dir, states[1:2], run_id="r")
    make_checkpoint(tmp_path / "new", states[1])
    publish_checkpoint(base_dir, tmp_path / "new", tmp_path / "c", run_id="r")
    assert snapshot(version_dir(tmp_path / "p", 1)) == snapshot(version_dir(tmp_path / "c", 1))


def test_a_base_that_is_not_the_last_published_version_is_refused(
    tmp_path: Path, states: list[Tensors]
) -> None:
    folders = [make_checkpoint(tmp_path / str(n), state) for n, state in enumerate(states)]
    publish_checkpoint(folders[0], folders[1], tmp_path / "s")
    for wrong in (0, 2):
        with pytest.raises(BaseMismatchError) as caught:
            publish_checkpoint(folders[wrong], folders[3], tmp_path / "s")
        assert caught.value.tensor in states[0]
        assert caught.value.expected != caught.value.got
    assert visible(tmp_path / "s") == ["weight_v000001"]
    publish_checkpoint(folders[1], folders[1], tmp_path / "s")
    with pytest.raises(BaseMismatchError):  # through the empty delta, to the one before
        publish_checkpoint(folders[2], folders[3], tmp_path / "s")
    assert publish_checkpoint(folders[1], folders[2], tmp_path / "s").version == 3


def test_another_tensor_set_dtype_or_shape_takes_a_full_version(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    norm = states[0]["model.norm.weight"]
    bent: list[Tensors] = [
        {**states[1], "extra": ("U8", (1,), b"1")},
        {name: tensor for name, tensor in states[1].items() if name != "model.norm.weight"},
        {**states[1], "model.norm.weight": ("F16", norm[1], norm[2])},
        {**states[1], "model.norm.weight": ("BF16", (2, 12), norm[2])},
    ]
    for number, tensors in enumerate(bent):
        new_dir = make_checkpoint(tmp_path / f"new{number}", tensors)
        with pytest.raises(ChainError, match="--full") as caught:
            publish_checkpoint(base_dir, new_dir, tmp_path / "s")
        assert caught.value.tensor in ("extra", "model.norm.weight")
    assert visible(tmp_path / "s") == []


@pytest.mark.parametrize("shards", (1, 2))
def test_a_full_version_is_a_copy_of_the_folder(
    tmp_path: Path, states: list[Tensors], shards: int
) -> None:
    new_dir = make_checkpoint(tmp_path / "new", states[1], shards=shards)
    (new_dir / "tokenizer.json").write_text("{}")
    (new_dir / "stray.safetensors").write_bytes(b"not in the index") if shards == 2 else None
    (new_dir / ".weight_sync").mkdir()
    (new_dir / ".weight_sync" / "state.json").write_text("{}")
    (new_dir / ".hidden").write_text("")
    report = publish_checkpoint(tmp_path / "unread", new_dir, tmp_path / "s", full=True)
    assert (report.kind, report.version, report.base_version) == ("full", 1, None)
    expected = {
        name: data
        for name, data in snapshot(new_dir).items()
        if not name.startswith((".", "stray"))
    }
    assert snapshot(version_dir(tmp_path / "s", 1)) == expected
    assert open_version(tmp_path / "s", 1).kind == "full"


def test_a_delta_on_a_full_version_is_checked_against_its_bytes(
    tmp_path: Path, states: list[Tensors]
) -> None:
    folders = [make_checkpoint(tmp_path / str(n), state) for n, state in enumerate(states)]
    first = publish_checkpoint(folders[0], folders[1], tmp_path / "s")
    full = publish_checkpoint(folders[1], folders[2], tmp_path / "s", full=True)
    with pytest.raises(BaseMismatchError):
        publish_checkpoint(folders[1], folders[3], tmp_path / "s")
    last = publish_checkpoint(folders[2], folders[3], tmp_path / "s")
    assert [first.run_id] * 2 == [full.run_id, last.run_id]
    assert replay(folders[0], tmp_path / "s", 3) == states[3]


def test_publisher_goes_on_from_a_full_version_with_other_tensors(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    other: Tensors = {"new.weight": ("U8", (300,), bytes(300)), "scale": ("F32", (), bytes(4))}
    publisher = Publisher(tmp_path / "s", base_dir)
    publisher.publish(as_arrays(states[1]))
    assert publisher.publish_full(make_checkpoint(tmp_path / "other", other)) == 2
    assert not list((tmp_path / "s.publisher").glob("version_*"))
    moved = move_one_ulp(other, 0.1)
    assert publisher.publish(as_arrays(moved)) == 3
    assert replay(base_dir, tmp_path / "s", 3) == moved


def test_folders_that_are_no_whole_checkpoint_are_refused(
    tmp_path: Path, base_dir: Path, states: list[Tensors]
) -> None:
    cut = make_checkpoint(tmp_path / "cut", states[1])
    shard = sorted(cut.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    for new_dir in (cut, tmp_path / "absent"):
        for full in (False, True):
            with pytest.raises(CheckpointError):
                publish_checkpoint(base_dir, new_dir, tmp_path / "s", full=full)
    relabelled = make_checkpoint(tmp_path / "relabelled", states[1])
    index = json.loads((relabelled / INDEX).read_bytes())
    index["metadata"]["version"] = "000009"
    (relabelled / INDEX).write_text(json.dumps(index))
    with pytest.raises(ChainError, match=r"metadata\.version"):
        publish_checkpoint(base_dir, relabelled, tmp_path / "s", full=True)
    assert visible(tmp_path / "s") == []


@pytest.mark.parametrize("full", (False, True))
def test_progress_counts_to_its_total_and_may_stop_the_work(
    tmp_path: Path, base_dir: Path, states: list[Tensors], full: bool
) -> None:
    new_dir = make_checkpoint(tmp_path / "new", states[1])
    events: list[Progress] = []

    def stop(event: Progress) -> None:
        raise BrokenPipeError("stop here")

    with pytest.raises(BrokenPipeError, match="stop here"):
        publish_checkpoint(base_dir, new_dir, tmp_path / "s", full=full, progress=stop)
    assert visible(tmp_path / "s") == []
    publish_checkpoint(base_dir, new_dir, tmp_path / "s", full=full, progress=events.append)
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total_bytes > 0
    assert {event.stage for event in events} == {"publish"}


# ---- memory -------------------------------------------------------------------------------------------

BIG = 32 << 20
PARTS = 3


@pytest.fixture
def big_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two checkpoints of PARTS tensors of BIG bytes; two threads, so that only the tensors are large."""
    monkeypatch.setenv("GPUSYNC_THREADS", "2")
    old: Tensors = {f"t{i}": ("U8", (BIG,), bytes([i]) * BIG) for i in range(PARTS)}
    make_checkpoint(tmp_path / "old", old)
    make_checkpoint(tmp_path / "new", move_one_ulp(old, 0.001))
    return tmp_path / "old", tmp_path / "new"


def _peak(work: Any) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("encoding", "framing"), [("xor", "seekable"), ("xor", "single"), ("overwrite", "single")]
)
def test_from_folders_no_tensor_is_in_memory_as_a_whole(
    tmp_path: Path, big_folders: tuple[Path, Path], encoding: str, framing: str
) -> None:
    old_dir, new_dir = big_folders
    peak = _peak(
        lambda: publish_checkpoint(
            old_dir, new_dir, tmp_path / "s", encoding=encoding, framing=framing
        )
    )
    assert peak < BIG // 2


@pytest.mark.parametrize("owned", (False, True))
def test_from_tensors_one_new_tensor_is_in_memory_and_no_old_one(
    tmp_path: Path, big_folders: tuple[Path, Path], owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each tensor has to be copied (``owned``: as from a GPU), those in flight stay within their cap too."""
    monkeypatch.setattr("gpusync.publisher.diff.IN_FLIGHT_NBYTES", BIG // 2)

    def gather() -> Iterator[tuple[str, np.ndarray]]:
        for number in range(PARTS):
            array = np.full(BIG * (2 if owned else 1), number + 1, np.uint8)
            yield f"t{number}", array[::2] if owned else array
            del array

    publisher = Publisher(tmp_path / "s", big_folders[0])
    peak = _peak(lambda: publisher.publish(gather()))
    given = 2 * BIG if owned else BIG
    assert peak < given + (BIG if owned else 0) + BIG // 2


# ---- golden streams -----------------------------------------------------------------------------------

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
