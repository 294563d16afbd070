"""Makes an RL-like stream: a Llama-like bf16 checkpoint, and versions that move a share of its elements by one ulp.

The base checkpoint has one tensor (the embedding) of a quarter of its bytes. Every version moves ``density`` of
the elements of every tensor, at uniformly random places, up or down by one unit in the last place: places without
any structure, which is the hard case for zstd. Digests of every version are taken here, from the weights
themselves, so that a receiver's result is checked against something that no receiver has written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from common import map_tensors, settle
from numpy.typing import NDArray
from safetensors.torch import save_file

import gpusync

FRAMINGS = ("seekable", "single")
_SHARDS = 3
_SEED = 7
_PIECE = 4 << 20  # elements drawn at a time


@dataclass(frozen=True)
class Stream:
    """A published stream. ``digests[v]`` maps tensor to xxh3-128 hex at version v; ``sources`` maps framing to folder."""

    base_dir: Path
    sources: dict[str, Path]
    digests: tuple[dict[str, str], ...]
    nbytes: int
    wire_nbytes: dict[str, int]

    @property
    def versions(self) -> int:
        return len(self.digests) - 1

    def to_dict(self) -> dict[str, object]:
        """Return what a report should say about the stream; wire bytes are of one version, on average."""
        return {
            "model_bytes": self.nbytes,
            "tensors": len(self.digests[0]),
            "versions": self.versions,
            "wire_bytes_per_version": {k: v // self.versions for k, v in self.wire_nbytes.items()},
        }


def plan_tensors(model_nbytes: int, tensors: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return tensor -> shape of a bf16 model of about ``model_nbytes``.

    Llama-like, the embedding a quarter of it; or, with ``tensors``, that many of one size.
    """
    if tensors is not None:
        return {
            f"model.t{number}.weight": (model_nbytes // tensors // 2,) for number in range(tensors)
        }
    hidden = 2048 if model_nbytes >= 500_000_000 else 1024 if model_nbytes >= 100_000_000 else 256
    kv, ffn = hidden // 4, hidden * 11 // 4
    block = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    layer_nbytes = 2 * sum(int(np.prod(shape)) for shape in block.values())
    layers = max(1, round(0.75 * model_nbytes / layer_nbytes))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (round(layers * layer_nbytes / 3 / 2 / hidden), hidden)
    }
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes | {"model.norm.weight": (hidden,)}


class Weights:
    """A trainer's weights: bits in a mapped working copy beside the base checkpoint that is written from them.

    Parameters
    ----------
    base_dir
        Where the base checkpoint is written; the working copy is its sibling ``work``.
    shapes
        Tensor -> shape.
    """

    def __init__(self, base_dir: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self._folder = base_dir.with_name("work")
        _write_base(base_dir, shapes)
        shutil.copytree(base_dir, self._folder)
        self.bits = {
            name: data.view(np.uint16).reshape(shapes[name])
            for name, data in map_tensors(self._folder, "r+").items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(bits.nbytes for bits in self.bits.values())

    def move(self, density: float, version: int) -> None:
        """Move a share of the elements of every tensor by one unit in the last place."""
        for number, bits in enumerate(self.bits.values()):
            rng = np.random.default_rng([_SEED, version, number])
            flat = bits.reshape(-1).view(np.int16)
            places = rng.integers(0, len(flat), max(1, round(len(flat) * density)))
            flat[places] += rng.integers(0, 2, len(places), dtype=np.int16) * 2 - 1

    def digests(self) -> dict[str, str]:
        """Return tensor -> xxh3-128 hex."""
        return {name: xxhash.xxh3_128_hexdigest(bits) for name, bits in self.bits.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by name; they share the weights' memory."""
        for name, bits in self.bits.items():
            yield name, _as_bf16(bits.reshape(-1), bits.shape)

    def remove(self) -> None:
        """Remove the working copy; the maps stay readable until they are dropped."""
        shutil.rmtree(self._folder, ignore_errors=True)


def make_stream(
    root: Path,
    *,
    model_nbytes: int,
    density: float,
    versions: int,
    framings: tuple[str, ...] = FRAMINGS,
    encoding: str = "xor",
    tensors: int | None = None,
) -> Stream:
    """Write the base checkpoint and one source folder per framing under ``root``, and settle them.

    Memory is bounded by the largest shard; the weights live in a mapped working copy that is removed at the end.
    """
    base_dir = root / "base"
    weights = Weights(base_dir, plan_tensors(model_nbytes, tensors))
    digests = [weights.digests()]
    publishers = {
        framing: gpusync.Publisher(
            root / f"source-{framing}",
            base_dir,
            state_dir=root / f"state-{framing}",
            encoding=encoding,
            framing=framing,
        )
        for framing in framings
    }
    for version in range(1, versions + 1):
        weights.move(density, version)
        digests.append(weights.digests())
        for publisher in publishers.values():
            publisher.publish(weights.tensors())
    sources = {framing: root / f"source-{framing}" for framing in framings}
    weights.remove()
    for framing in framings:
        shutil.rmtree(root / f"state-{framing}", ignore_errors=True)
    settle(base_dir, *sources.values())
    return Stream(
        base_dir=base_dir,
        sources=sources,
        digests=tuple(digests),
        nbytes=weights.nbytes,
        wire_nbytes={
            framing: sum(p.stat().st_size for p in source.rglob("*.safetensors"))
            for framing, source in sources.items()
        },
    )


def _write_base(folder: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    folder.mkdir(parents=True)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    total = sum(int(np.prod(shape)) for shape in tensors.values())
    filled = 0
    for name, shape in tensors.items():
        if filled >= len(shards) * total / _SHARDS:
            shards.append({})
        shards[-1][name] = shape
        filled += int(np.prod(shape))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        rng = np.random.default_rng([_SEED, 0, number])
        save_file(
            {name: _draw(shape, rng) for name, shape in shard.items()},
            folder / file,
            {"format": "pt"},
        )
    index = {"metadata": {"total_size": 2 * total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _draw(shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Return normal weights (sigma 0.02) in bf16, none of them zero, so that an ulp down never leaves the number line."""
    bits = np.empty(int(np.prod(shape)), dtype=np.uint16)
    for begin in range(0, len(bits), _PIECE):
        piece = bits[begin : begin + _PIECE]
        values = rng.standard_normal(len(piece), dtype=np.float32) * np.float32(0.02)
        np.right_shift(values.view(np.uint32), 16, out=piece, casting="unsafe")
        piece[piece & 0x7FFF == 0] = 0x3A00
    return _as_bf16(bits, shape)


def _as_bf16(bits: NDArray[np.uint16], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(shape)
