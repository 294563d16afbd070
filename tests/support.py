"""Small builders that every test uses: checkpoints written and read by hand, RL-like steps, published streams.

Nothing here imports gpusync's own parsers, so that what a test builds or reads back is independent of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference import xor_rows

INDEX = "model.safetensors.index.json"
Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype as safetensors names it, shape, bytes."""
Tensors = dict[str, Tensor]

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip


def cases_dir(kind: str) -> Path:
    """Return ../shared/cases/KIND beside the repository, or skip the test where it is absent."""
    import pytest

    path = Path(__file__).resolve().parents[2] / "shared" / "cases" / kind
    if not path.is_dir():
        pytest.skip(f"../shared/cases/{kind} is absent: the project is checked out on its own")
    return path


# ---- checkpoints --------------------------------------------------------------------------------------


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Return a safetensors file with the tensors in the order given."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [begin, begin + len(data)],
        }
        begin += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def make_checkpoint(folder: Path, tensors: Mapping[str, Tensor], shards: int = 2) -> Path:
    """Write a checkpoint: ``shards`` files with an index (one file named model.safetensors: no index), config.json.

    Tensors are dealt to the shards in runs, in the order given. Returns ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    names = list(tensors)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
        return folder
    weight_map = {}
    for number in range(shards):
        run = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in run}
        (folder / file).write_bytes(safetensors_bytes(part, {"format": "pt"}))
        weight_map.update(dict.fromkeys(run, file))
    total = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Return a file's tensors and its ``__metadata__``."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    start = 8 + length
    return {
        name: (
            row["dtype"],
            tuple(row["shape"]),
            data[start + row["data_offsets"][0] : start + row["data_offsets"][1]],
        )
        for name, row in header.items()
    }, metadata


def read_tensors(folder: Path) -> Tensors:
    """Return the tensors of a checkpoint folder: those its index names, or all of its safetensors files."""
    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    tensors: Tensors = {}
    for file in files:
        tensors.update(read_safetensors(folder / file)[0])
    return tensors


def read_checkpoint(folder: Path) -> dict[str, bytes]:
    """Return tensor name to bytes of a checkpoint folder."""
    return {name: data for name, (_, _, data) in read_tensors(folder).items()}


def bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return tensor name to bytes."""
    return {name: data for name, (_, _, data) in tensors.items()}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, relative path to bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---- tensors and steps --------------------------------------------------------------------------------


def tiny_llama_tensors(seed: int = 0, layers: int = 2, hidden: int = 24) -> Tensors:
    """Return a small Llama-like set of tensors, with the awkward ones real checkpoints have.

    bf16 weights; an F32 scalar of shape (); a U8 tensor of odd length; an F8 weight; packed I32; an empty I32.
    """
    rng = np.random.default_rng(seed)

    def tensor(dtype: str, *shape: int) -> Tensor:
        count = int(np.prod(shape, dtype=np.int64))
        if dtype == "BF16":
            data = (
                (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
            )
        elif dtype == "F32":
            data = rng.standard_normal(count).astype("<f4").tobytes()
        else:
            data = rng.bytes(count * DTYPE_BYTES[dtype])
        return dtype, shape, data

    inner = 2 * hidden + 8
    tensors = {"model.embed_tokens.weight": tensor("BF16", 160, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = tensor("BF16", hidden)
        for part in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{at}.self_attn.{part}.weight"] = tensor("BF16", hidden, hidden)
        tensors[f"{at}.mlp.gate_proj.weight"] = tensor("BF16", inner, hidden)
        tensors[f"{at}.mlp.up_proj.weight"] = tensor("BF16", inner, hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = tensor(
            "F8_E4M3" if layer else "BF16", hidden, inner
        )
    tensors["model.layers.0.self_attn.k_scale"] = tensor("F32")
    tensors["model.layers.0.self_attn.o_proj.weight_packed"] = tensor("I32", hidden, 3)
    tensors["model.layers.0.self_attn.o_proj.weight_g_idx"] = tensor("I32", 0)
    tensors["model.norm.weight"] = tensor("BF16", hidden)
    tensors["model.vocab_lut"] = tensor("U8", 1021)
    return tensors


def move_one_ulp(
    tensors: Mapping[str, Tensor], fraction: float, seed: int = 0, only: Iterable[str] | None = None
) -> Tensors:
    """Return the tensors after an RL-like step: ``fraction`` of each one's elements moved by one in their bits.

    At least one element of each non-empty tensor moves where ``fraction`` > 0; ``only`` limits it to some names.
    """
    rng = np.random.default_rng(seed)
    chosen = set(tensors if only is None else only)
    moved = {}
    for name, (dtype, shape, data) in tensors.items():
        words = np.frombuffer(data, f"<u{DTYPE_BYTES[dtype]}").copy()
        if name in chosen and words.size and fraction > 0:
            count = min(words.size, max(1, round(fraction * words.size)))
            where = rng.choice(words.size, count, replace=False)
            words[where] += rng.choice(np.array([1, -1]).astype(words.dtype), count)
        moved[name] = (dtype, shape, words.tobytes())
    return moved


def as_arrays(tensors: Mapping[str, Tensor]) -> list[tuple[str, np.ndarray]]:
    """Return (name, array) pairs as Publisher.publish takes them: unsigned words of each tensor's shape."""
    plain = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I32": "<i4", "I64": "<i8", "I16": "<i2", "I8": "i1",
             "BOOL": "?", "C64": "<c8"}  # fmt: skip
    return [
        (name, np.frombuffer(data, plain.get(dtype, f"<u{DTYPE_BYTES[dtype]}")).reshape(shape))
        for name, (dtype, shape, data) in tensors.items()
    ]


def as_torch(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return name to a torch tensor that owns its bytes."""
    import torch

    kinds = {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
        "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
        "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "C64": torch.complex64,
    }  # fmt: skip
    result = {}
    for name, (dtype, shape, data) in tensors.items():
        kind = kinds[dtype]
        raw = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        result[name] = raw.clone().view(kind).reshape(shape)
    return result


# ---- published streams --------------------------------------------------------------------------------


def version_dir(source_dir: Path, version: int) -> Path:
    return source_dir / f"weight_v{version:06d}"


def publish_steps(
    source_dir: Path, base_dir: Path, steps: Sequence[Mapping[str, Tensor]], **options: Any
) -> list[int]:
    """Publish each step as one version with gpusync's own Publisher; return the version numbers."""
    from gpusync import Publisher

    publisher = Publisher(source_dir, base_dir, **options)
    return [publisher.publish(as_arrays(step)) for step in steps]


def make_stream(
    folder: Path, versions: int = 3, *, fraction: float = 0.02, seed: int = 0, **options: Any
) -> tuple[Path, Path, list[Tensors]]:
    """Make base and published folders with ``versions`` RL-like steps.

    Returns
    -------
    base_dir, source_dir, states
        ``states[v]`` are the tensors at version v.
    """
    states = [tiny_llama_tensors(seed)]
    for version in range(1, versions + 1):
        states.append(move_one_ulp(states[-1], fraction, seed=1000 * seed + version))
    base_dir = make_checkpoint(folder / "base", states[0])
    source_dir = folder / "published"
    publish_steps(source_dir, base_dir, states[1:], **options)
    return base_dir, source_dir, states


def read_version(source_dir: Path, version: int) -> tuple[dict[str, Any], Tensors, dict[str, str]]:
    """Return a published delta as written: its index, its blobs by tensor, its digests by tensor."""
    folder = version_dir(source_dir, version)
    index = json.loads((folder / INDEX).read_bytes())
    blobs: Tensors = {}
    digests: dict[str, str] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors, metadata = read_safetensors(folder / file)
        blobs.update(tensors)
        digests.update(metadata)
    return index, blobs, digests


def decode_blob(blob: bytes) -> bytes:
    """Return a blob's content, all frames of it, as python-zstandard's crossing reader gives it."""
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True).read()


def apply_payload(encoding: str, payload: bytes, old: bytes) -> bytes:
    """Return the new bytes of a tensor from a decoded payload."""
    new = np.frombuffer(old, np.uint8).copy()
    if encoding == "xor":
        return (new ^ np.frombuffer(payload, np.uint8)).tobytes()
    if encoding == "xor_rows":
        delta = np.frombuffer(xor_rows.decode(payload, new.size), np.uint8)
        return (new ^ delta).tobytes()
    head = 4 if encoding == "overwrite" else 8
    count = int.from_bytes(payload[:head], "little")
    positions = np.frombuffer(payload, f"<u{head}", count, head).astype(np.int64)
    values = np.frombuffer(payload, np.uint8, count, head + head * count)
    assert len(payload) == head + (head + 1) * count
    new[positions] = values if encoding == "overwrite" else new[positions] ^ values
    return new.tobytes()


def apply_version(tensors: Mapping[str, Tensor], source_dir: Path, version: int) -> Tensors:
    """Return the tensors after one published version, delta or full."""
    index_path = version_dir(source_dir, version) / INDEX
    if not index_path.exists() or "delta_encoding" not in json.loads(index_path.read_bytes()).get(
        "metadata", {}
    ):
        return read_tensors(version_dir(source_dir, version))
    index, blobs, _ = read_version(source_dir, version)
    assert set(blobs) == set(index["weight_map"])
    result = dict(tensors)
    for name, (_, _, blob) in blobs.items():
        dtype, shape, old = tensors[name]
        payload = decode_blob(blob)
        result[name] = (
            dtype,
            shape,
            apply_payload(index["metadata"]["delta_encoding"], payload, old),
        )
    return result


def replay(base_dir: Path, source_dir: Path, version: int) -> Tensors:
    """Return the tensors at a version: the base with versions 1 to ``version`` applied by the code above."""
    tensors = read_tensors(base_dir)
    for number in range(1, version + 1):
        tensors = apply_version(tensors, source_dir, number)
    return tensors
