"""Placement: a trace of a loader, and the proof by bytes, of a synthetic mixture of experts with many tensors.

The model fuses gate and up of every expert, and q, k and v, as engines do. Timed in a child process, whose growth in
anonymous memory is taken by its own high-water mark; the baseline is what the trace stands in for, one real load.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from common import Sizes, parse_args, workspace
from report import Target, machine_info, publish_result, targets_table
from safetensors import safe_open
from safetensors.torch import save_file
from tables import table
from torch import nn

FULL = Sizes(model_nbytes=20_000, density=0.0, rounds=1)  # tensors, not bytes
SMOKE = Sizes(model_nbytes=400, density=0.0, rounds=1)
_HIDDEN, _INNER, _EXPERTS = 64, 32, 64
_EXCLUSIONS = "page cache warm; tensors of 4 KiB, so that what counts is their number; interpreter and imports"


class Model(nn.Module):
    """Layers of fused experts and fused attention."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for layer in self.layers:
            for name, shape in {
                "qkv": (3 * _HIDDEN, _HIDDEN),
                "w13": (_EXPERTS, 2 * _INNER, _HIDDEN),
                "w2": (_EXPERTS, _HIDDEN, _INNER),
            }.items():
                weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), False)
                layer.register_parameter(name, weight)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            _, number, *rest = name.split(".")
            layer = self.layers[int(number)]
            if rest[0] != "experts":
                begin = "qkv".index(rest[0]) * _HIDDEN
                layer.qkv.data[begin : begin + _HIDDEN].copy_(weight)
            elif rest[2] == "down":
                layer.w2.data[int(rest[1])].copy_(weight)
            else:
                begin = _INNER if rest[2] == "up" else 0
                layer.w13.data[int(rest[1]), begin : begin + _INNER].copy_(weight)


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write a checkpoint of random bytes, a shard per layer, and return its number of tensors."""
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    folder.mkdir()
    for number in range(layers):
        shapes = {f"layers.{number}.{part}": (_HIDDEN, _HIDDEN) for part in "qkv"}
        for expert in range(_EXPERTS):
            prefix = f"layers.{number}.experts.{expert}"
            shapes |= {f"{prefix}.{part}": (_INNER, _HIDDEN) for part in ("gate", "up")}
            shapes[f"{prefix}.down"] = (_HIDDEN, _INNER)
        tensors = {
            name: torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=generator).view(
                torch.bfloat16
            )
            for name, shape in shapes.items()
        }
        file = f"model-{number + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(weight_map)


def read_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                yield name, file.get_tensor(name)


def measure(folder: Path, layers: int) -> dict[str, float]:
    """Load, then attach, in this process; return seconds and the growth of the high-water mark in bytes."""
    import gpusync

    model = Model(layers)
    start = time.perf_counter()
    model.load_weights(read_checkpoint(folder))
    loaded = time.perf_counter()
    before = _peak_bytes()
    report = gpusync.attach(model, folder, load_weights=model.load_weights)
    attached = time.perf_counter()
    if report.refused or report.dropped:
        raise SystemExit(f"not every tensor was placed: {dict(list(report.refused.items())[:3])}")
    return {
        "tensors": len(report.placed),
        "load_seconds": loaded - start,
        "attach_seconds": attached - loaded,
        "extra_bytes": _peak_bytes() - before,
    }


def _peak_bytes() -> int:
    """Return the most anonymous memory so far: the present, and then what the kernel has seen of all since."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")  # the next high-water mark starts here
    return int(fields["VmHWM"].split()[0]) * 1024


def main() -> None:
    args, sizes = parse_args("Trace and proof of a model with many tensors.", FULL, SMOKE)
    layers = -(-sizes.model_nbytes // (3 + 3 * _EXPERTS))
    with workspace(args.temp_dir) as root:
        machine = machine_info(root)
        write_checkpoint(root / "base", layers)
        child = [sys.executable, __file__, "--child", str(root / "base"), str(layers)]
        found = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE).stdout)
    targets = [
        Target("trace + proof, seconds", found["attach_seconds"], 15.0),
        Target("extra memory, MB", found["extra_bytes"] / 1e6, 200.0),
    ]
    rows = [
        ["tensors", f"{found['tensors']}"],
        ["a real load, seconds", f"{found['load_seconds']:.2f}"],
        ["attach: trace and proof, seconds", f"{found['attach_seconds']:.2f}"],
        ["extra memory, MB", f"{found['extra_bytes'] / 1e6:.0f}"],
    ]
    document = {
        "sizes": {"tensors": found["tensors"]},
        "found": found,
        "targets": [target.to_dict() for target in targets],
        "exclusions": _EXCLUSIONS,
    }
    tables = [table(["", "value"], rows), "## Targets", targets_table(targets)]
    publish_result("placement", args, machine, document, tables)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
