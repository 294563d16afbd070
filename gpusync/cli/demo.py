"""``gpusync demo``: the whole job on one machine, in a temporary folder, with every result checked.

A trainer moves about one percent of a small Llama-like model's bf16 elements by one unit in the last place, five
times. Each step is published, applied to a live torch model and to its local checkpoint, and compared byte for byte
with a full reload. Then a second host is killed half-way through its pull, and heals.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

import gpusync
from gpusync.errors import GpuSyncError
from gpusync.types import Progress, ProgressCallback, PullReport, Report, UpdateReport

STEPS = 5
CHANGED_FRACTION = 0.01
_RELOADS = 3
_SHARD_BYTES = 40_000_000
_CHILD_TIMEOUT_SECONDS = 120.0

_KILLED_CHILD = """
import sys
from gpusync.cli.demo import pull_and_hang_half_way
pull_and_hang_half_way(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
"""


class DemoError(GpuSyncError):
    """The demo's own comparison failed: bytes differ that must be equal."""


@dataclass(frozen=True)
class Step:
    """One published version, applied and checked.

    ``reload_seconds`` is a full reload of the same version, the best of three: read from the page cache into warm
    memory.
    """

    version: int
    publish_seconds: float
    update: UpdateReport
    reload_seconds: float


@dataclass(frozen=True)
class DemoResult(Report):
    """What the demo measured; it exists only if every comparison held.

    Parameters
    ----------
    device
        Where the updates ran.
    tensors, nbytes
        Of the model.
    changed_fraction
        Share of the bf16 elements that a step changes.
    steps
        One per version.
    pause_seconds, reload_seconds
        Medians over the steps after the first, which warms up caches and finds the parameters.
    killed_at, healed
        Where the second host was when it was killed, and what its next pull reported.
    """

    verified: bool
    device: str
    tensors: int
    nbytes: int
    changed_fraction: float
    steps: tuple[Step, ...]
    pause_seconds: float
    reload_seconds: float
    killed_at: str
    healed: PullReport


def run_demo(megabytes: int, keep: Path | None, progress: ProgressCallback) -> DemoResult:
    """Run the demo in a temporary folder, or in ``keep``, which must not hold anything yet.

    Raises
    ------
    DemoError
        A comparison failed.
    CheckpointError
        ``keep`` holds something already.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="gpusync-demo-") as folder:
            return _run(Path(folder), megabytes, progress)
    if keep.exists() and any(keep.iterdir()):
        raise gpusync.CheckpointError("the folder to keep the demo in is not empty", file=str(keep))
    keep.mkdir(parents=True, exist_ok=True)
    return _run(keep, megabytes, progress)


@dataclass(frozen=True)
class _Lab:
    """A trainer, its publisher, one serving host, and a second model that reloads the slow way."""

    base: Path
    source: Path
    local: Path
    trainer: dict[str, torch.Tensor]
    publisher: gpusync.Publisher
    model: nn.Module
    reloaded: nn.Module
    progress: ProgressCallback

    def step(self, number: int) -> Step:
        """Train, publish, apply, reload beside it, compare all three."""
        move_some_elements(self.trainer, np.random.default_rng(number))
        start = time.perf_counter()
        version = self.publisher.publish(self.trainer.items())
        publish_seconds = time.perf_counter() - start
        with gpusync.open_chain(
            self.source, version, checkpoint=self.local, base_dir=self.base
        ) as chain:
            update = gpusync.apply_to_model(self.model, chain, progress=self.progress)
        reload_seconds = min(reload_model(self.reloaded, self.local) for _ in range(_RELOADS))
        check_equal(f"live model at version {version}", self.model.state_dict(), self.trainer)
        check_equal(f"reload of version {version}", self.reloaded.state_dict(), self.trainer)
        return Step(version, publish_seconds, update, reload_seconds)


def _run(folder: Path, megabytes: int, progress: ProgressCallback) -> DemoResult:
    base, source, local = folder / "base", folder / "published", folder / "local"
    trainer = dict(make_state(megabytes))
    save_checkpoint(base, trainer)
    gpusync.pull(local, base, source, 0, progress=progress)
    publisher = gpusync.Publisher(source, base, state_dir=folder / "publisher", run_id="demo")
    lab = _Lab(
        base, source, local, trainer, publisher, make_model(local), make_model(local), progress
    )
    steps = tuple(lab.step(number) for number in range(1, STEPS + 1))
    killed_at, healed = _kill_and_heal(folder / "second_host", lab)
    return DemoResult(
        verified=True,
        device=steps[-1].update.device,
        tensors=len(trainer),
        nbytes=sum(tensor.nbytes for tensor in trainer.values()),
        changed_fraction=CHANGED_FRACTION,
        steps=steps,
        pause_seconds=statistics.median(step.update.pause_seconds for step in steps[1:]),
        reload_seconds=statistics.median(step.reload_seconds for step in steps[1:]),
        killed_at=killed_at,
        healed=healed,
    )


# ---- the killed host -----------------------------------------------------------------------------------


def _kill_and_heal(second: Path, lab: _Lab) -> tuple[str, PullReport]:
    """Kill -9 a process that is half-way through a late host's pull; pull again; compare with the first host."""
    arguments = [str(second), str(lab.base), str(lab.source), str(STEPS)]
    child = subprocess.Popen(
        [sys.executable, "-c", _KILLED_CHILD, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        killed_at = child.stdout.readline().strip() if child.stdout is not None else ""
    finally:
        child.kill()
        child.communicate(timeout=_CHILD_TIMEOUT_SECONDS)
    if not killed_at:
        raise DemoError("the second host's pull ended before it could be killed half-way")
    healed = gpusync.pull(second, lab.base, lab.source, STEPS, progress=lab.progress)
    check_equal("second host", load_tensors(second), lab.trainer)
    return killed_at, healed


def pull_and_hang_half_way(local: str, base: str, source: str, target: int) -> None:
    """Pull, and once half of the new bytes are written print where, then wait to be killed."""

    def hang(progress: Progress) -> None:
        half = progress.total_bytes and progress.done_bytes * 2 >= progress.total_bytes
        if progress.stage == "materialize" and half:
            print(
                f"{progress.stage} {progress.done_bytes} of {progress.total_bytes} bytes",
                flush=True,
            )
            time.sleep(_CHILD_TIMEOUT_SECONDS)

    gpusync.pull(local, base, source, target, progress=hang)


# ---- a small model and its trainer -----------------------------------------------------------------------


def make_state(megabytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named bf16 tensors of a Llama-like model of about this size."""
    hidden = 512 if megabytes >= 50 else 64
    narrow, wide = hidden // 4, hidden * 11 // 4
    elements = megabytes * 1_000_000 // 2
    layer_elements = 2 * hidden * hidden + 2 * narrow * hidden + 3 * wide * hidden
    layers = max(1, elements // 3 // layer_elements)
    vocabulary = max(64, (elements - layers * layer_elements) // (2 * hidden) // 64 * 64)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", narrow), ("v", narrow), ("o", hidden)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (wide, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, wide)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        values = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        yield name, (values + 1.0 if len(shape) == 1 else values).to(torch.bfloat16)


def move_some_elements(state: Mapping[str, torch.Tensor], random: np.random.Generator) -> None:
    """Move about one percent of every tensor's elements by one unit in the last place, in place."""
    for tensor in state.values():
        bits: NDArray[np.uint16] = tensor.view(torch.int16).numpy().reshape(-1).view(np.uint16)
        count = max(1, int(bits.size * CHANGED_FRACTION))
        where = np.unique(random.integers(0, bits.size, count))
        up = (bits[where] & 0x7FFF == 0) | (
            random.integers(0, 2, where.size) == 1
        )  # zero has none below
        bits[where] = np.where(up, bits[where] + 1, bits[where] - 1)


def save_checkpoint(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a Hugging Face checkpoint: shards, index, config.json."""
    folder.mkdir(parents=True)
    groups: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in state.items():
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + tensor.nbytes > _SHARD_BYTES:
            groups.append({})
        groups[-1][name] = tensor
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(group, file))
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def make_model(folder: Path) -> nn.Module:
    """Return a torch module that owns a copy of every tensor, under the checkpoint's names."""
    model = nn.Module()
    for name, tensor in load_tensors(folder).items():
        *parents, leaf = name.split(".")
        module = model
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.register_parameter(leaf, nn.Parameter(tensor.clone(), requires_grad=False))
    return model


def reload_model(model: nn.Module, folder: Path) -> float:
    """Load every tensor from disk into the live parameters, as an engine's full reload does; return the seconds."""
    start = time.perf_counter()
    parameters = dict(model.named_parameters())
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            parameters[name].copy_(tensor)
    return time.perf_counter() - start


def check_equal(
    what: str, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """Compare two sets of tensors byte for byte.

    Raises
    ------
    DemoError
        They differ.
    """
    if got.keys() != expected.keys():
        raise DemoError(f"{what}: other tensors", expected=len(expected), got=len(got))
    for name, tensor in expected.items():
        if not torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)):
            raise DemoError(f"{what}: bytes differ", tensor=name)
