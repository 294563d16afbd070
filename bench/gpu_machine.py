"""The device, its driver and the libraries, and what the first update in a process pays once."""

from __future__ import annotations

import subprocess
import time
from importlib import metadata
from typing import Any

import torch
from gpu_lab import MIB, Lab, Task

from gpusync.device.warmup import warm_up

_QUERY = (
    "driver_version",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "clocks.max.sm",
    "memory.total",
)
_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "nvidia-libnvcomp-cu13", "nvidia-libnvcomp-cu12")


def run_machine(task: Task) -> None:
    """Describe the device, build the kernels, try the decoder, and time copies from the host."""
    begin = time.monotonic()
    lab = Lab(task.device)
    task.send("machine", values=_describe(lab))
    opened = time.monotonic()
    distrust = warm_up(lab.runtime)
    warm = time.monotonic()
    task.check("the decoder passes its self-test", distrust is None, distrust or "")
    task.row("start", what="opening the device", seconds=round(opened - begin, 2))
    task.row("start", what="kernels and self-test", seconds=round(warm - opened, 2))
    nbytes = MIB if task.smoke else 1024 * MIB
    device, pinned = lab.runtime.empty(nbytes), lab.pinned(nbytes)
    pinned.fill_(3)
    pageable = torch.full((nbytes,), 3, dtype=torch.uint8)
    for what, source in (("page-locked", pinned), ("pageable", pageable)):
        timing = lab.measure(
            lambda source=source: lab.stream.copy(device, source), task.sizes, together=1
        )
        task.row("copy from the host", memory=what, **timing.cells(nbytes))


def _describe(lab: Lab) -> dict[str, Any]:
    values: dict[str, Any] = {"name": lab.runtime.describe(), "nvcomp": lab.nvcomp.version}
    for package in _PACKAGES:
        try:
            values[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if lab.on_cuda:
        properties = torch.cuda.get_device_properties(lab.runtime.device)
        values |= {
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "torch_cuda": torch.version.cuda,
            **_ask_driver(),
        }
    return values


def _ask_driver() -> dict[str, str]:
    """Return what nvidia-smi tells of the first device; nothing where there is none."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_QUERY, (word.strip() for word in done.stdout.split(",")), strict=False))
