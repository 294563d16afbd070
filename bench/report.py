"""A bench's result: what was measured, targets, the machine; as tables and, in the last line, as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from common import Sizes
from rounds import Timings, spread
from tables import table

_PACKAGES = ("gpusync", "numpy", "torch", "zstandard", "xxhash", "safetensors")


@dataclass(frozen=True)
class Target:
    """A promise: ``value`` must be at most (or at least) ``limit``."""

    name: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def to_dict(self) -> dict[str, Any]:
        sense = "<=" if self.at_most else ">="
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "sense": sense,
            "limit": self.limit,
            "met": self.met,
        }


@dataclass(frozen=True)
class Section:
    """Cases that ran in turns, what their paired runs compare to, and what else is worth knowing of them."""

    title: str
    timings: Timings
    pairs: Mapping[str, Sequence[float]]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def median(self, pair: str) -> float:
        """Return the median of a pair's ratios."""
        return spread(self.pairs[pair])["median"]

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.timings.to_dict(),
            "ratios": {name: spread(values) for name, values in self.pairs.items()},
            "notes": dict(self.notes),
        }

    def tables(self) -> list[str]:
        """Return the section as Markdown blocks."""
        blocks = [f"## {self.title}", self.timings.table(), ratios_table(self.pairs)]
        return blocks + [f"{name}: {json.dumps(value)}" for name, value in self.notes.items()]


def machine_info(temp_dir: Path) -> dict[str, Any]:
    """Return hardware, system and package versions, as one flat mapping."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "cpu": _first_match("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": _output("df", "--output=fstype", str(temp_dir)).rpartition("\n")[2],
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": versions,
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _first_match(path: str, key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def ratios_table(pairs: Mapping[str, Sequence[float]]) -> str:
    rows = []
    for name, values in pairs.items():
        summary = spread(values)
        rows.append([name, *(f"{summary[key]:.2f}" for key in ("median", "min", "max"))])
    return table(["ratio of paired runs", "median", "min", "max"], rows)


def targets_table(targets: Sequence[Target]) -> str:
    rows = []
    for target in targets:
        sense = "<=" if target.at_most else ">="
        verdict = "met" if target.met else "MISSED"
        rows.append([target.name, f"{target.value:.2f}", f"{sense} {target.limit:g}", verdict])
    return table(["target", "got", "wanted", "verdict"], rows)


def publish_sections(
    theme: str,
    args: argparse.Namespace,
    machine: Mapping[str, Any],
    sizes: Sizes,
    sections: Sequence[Section],
    targets: Sequence[Target],
    exclusions: str,
    stream: Mapping[str, Any] | None = None,
) -> None:
    """Publish the result of a bench that is made of sections; see :func:`publish_result`."""
    document = {
        "sizes": vars(sizes),
        "stream": dict(stream or {}),
        "exclusions": exclusions,
        "sections": {section.title: section.to_dict() for section in sections},
        "targets": [target.to_dict() for target in targets],
    }
    blocks = [block for section in sections for block in section.tables()]
    if targets:
        blocks += ["## Targets", targets_table(targets)]
    publish_result(theme, args, machine, document, [*blocks, f"Excluded: {exclusions}."])


def publish_result(
    theme: str,
    args: argparse.Namespace,
    machine: Mapping[str, Any],
    document: Mapping[str, Any],
    tables: Sequence[str],
) -> None:
    """Print machine, tables and, as the last line, one JSON object; write both to files where asked."""
    whole = {"bench": theme, "smoke": args.smoke, "machine": dict(machine), **document}
    head = (
        f"{theme}{' (smoke sizes: checks, not figures)' if args.smoke else ''}\n\n{machine['cpu']},"
        f" {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB, {machine['file_system']}, Linux"
        f" {machine['kernel']}, load {machine['load_average']}, Python {machine['python']},"
        f" {', '.join(f'{k} {v}' for k, v in machine['packages'].items())}, commit {machine['commit']},"
        f" {machine['utc']}"
    )
    text = "\n\n".join([head, *tables])
    print(text, end="\n\n")
    if args.json_out:
        args.json_out.parent.mkdir(parents=True, exist_ok=True)
        args.json_out.write_text(json.dumps(whole, indent=1) + "\n")
        args.json_out.with_suffix(".md").write_text(f"# {text}\n")
    sys.stdout.flush()
    print(json.dumps(whole))
