"""What every bench shares: arguments, machine, workspace, alternating timed rounds, checks, tables, JSON."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

_PACKAGES = ("gpusync", "numpy", "torch", "zstandard", "xxhash", "safetensors")
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Sizes:
    """How large a bench runs: bytes of the model, share of elements moved per version, timed rounds."""

    model_nbytes: int
    density: float
    rounds: int


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


class CheckError(SystemExit):
    """A result was wrong, so nothing was timed: the process ends with status 1 and this message."""


# ---- arguments and workspace ------------------------------------------------------------------------


def parse_args(description: str, full: Sizes, smoke: Sizes) -> tuple[argparse.Namespace, Sizes]:
    """Parse the arguments that all benches take; return them and the sizes to run at."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--smoke", action="store_true", help="small sizes, for CI: checks, not figures"
    )
    parser.add_argument(
        "--json-out", type=Path, help="write the JSON here, and a table beside it as .md"
    )
    parser.add_argument("--temp-dir", type=Path, help="folder for the streams (default: TMPDIR)")
    parser.add_argument(
        "--model-bytes", type=int, help="bytes of the model, instead of the default"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds, instead of the default")
    args = parser.parse_args()
    sizes = smoke if args.smoke else full
    return args, Sizes(
        model_nbytes=args.model_bytes or sizes.model_nbytes,
        density=sizes.density,
        rounds=args.rounds or sizes.rounds,
    )


@contextlib.contextmanager
def workspace(parent: Path | None) -> Iterator[Path]:
    """Yield an empty folder that is removed at the end, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="gpusync-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- the page cache ---------------------------------------------------------------------------------


def files_under(paths: Iterable[Path]) -> list[Path]:
    """Return the regular files at or under the given paths; missing ones are left out."""
    found: list[Path] = []
    for path in paths:
        found.extend(sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path])
    return [path for path in found if path.is_file()]


def settle(*paths: Path) -> None:
    """Write dirty pages out, so that no run pays for the one before it."""
    for path in files_under(paths):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def warm(*paths: Path) -> None:
    """Read the files once, so that every run finds them in the page cache."""
    buffer = bytearray(_READ_BYTES)
    for path in files_under(paths):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


# ---- checks -----------------------------------------------------------------------------------------


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return (offset of the data, tensor rows) of a safetensors file that this bench's own run has written."""
    with open(path, "rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        rows = json.loads(file.read(nbytes))
    return 8 + nbytes, rows


def digests_of_checkpoint(folder: Path) -> dict[str, str]:
    """Return tensor -> xxh3-128 hex over the folder's safetensors files, read through maps."""
    digests: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        start, rows = read_header(path)
        data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        for name, row in rows.items():
            if name != "__metadata__":
                begin, end = row["data_offsets"]
                digests[name] = xxhash.xxh3_128_hexdigest(data[start + begin : start + end])
    return digests


def check_digests(what: str, expected: Mapping[str, str], got: Mapping[str, str]) -> None:
    """Stop the bench unless every tensor has the expected digest."""
    if set(expected) != set(got):
        raise CheckError(
            f"wrong result: {what}: tensors {sorted(set(expected) ^ set(got))[:5]} differ"
        )
    for name, digest in expected.items():
        if got[name] != digest:
            raise CheckError(
                f"wrong result: {what}: tensor={name} expected={digest} got={got[name]}"
            )


# ---- timing -----------------------------------------------------------------------------------------


class Parts:
    """Wall and CPU seconds of the parts of one case."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time the block as ``part``."""
        begin, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds[part] = time.perf_counter() - begin
        self.cpu_seconds[part] = time.process_time() - cpu


@dataclass(frozen=True)
class Timings:
    """Timed rounds: wall seconds, and CPU seconds of this process, by case and by its parts.

    ``others_cores`` is how many cores the rest of the machine kept busy while cases ran: figures taken next to
    other work say little, and this tells.
    """

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    others_cores: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": {name: spread(values) for name, values in self.seconds.items()},
            "cpu_seconds": {name: spread(values) for name, values in self.cpu_seconds.items()},
            "others_cores": self.others_cores,
        }

    def table(self) -> str:
        """Return wall seconds, and the median of CPU seconds, as a table."""
        rows = []
        for name, values in self.seconds.items():
            summary = spread(values)
            rows.append(
                [
                    name,
                    *(f"{summary[key]:.3f}" for key in ("median", "min", "max")),
                    f"{statistics.median(self.cpu_seconds[name]):.3f}",
                    str(len(values)),
                ]
            )
        return (
            table(["seconds", "median", "min", "max", "CPU", "runs"], rows)
            + f"\n\nOther processes kept {self.others_cores:.2f} cores busy meanwhile."
        )


Case = Callable[[int], Parts | None]
"""Runs one round, given its number; returns its parts where it has any."""


def run_rounds(
    cases: Mapping[str, Case],
    rounds: int,
    *,
    before: Callable[[str, int], None],
    check: Callable[[str, int], None],
) -> Timings:
    """Run every case once per round, in alternating order, and time all rounds but the first.

    Round 0 is run and checked but not timed. ``before`` (settle, warm), ``check`` and a garbage
    collection run outside the clock. A case that returns parts is timed by their sum.
    """
    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    wall = others = 0.0
    for number in range(rounds + 1):
        for name in cases if number % 2 == 0 else reversed(list(cases)):
            before(name, number)
            gc.collect()
            begin, cpu, machine = time.perf_counter(), time.process_time(), _machine_cpu_seconds()
            parts = cases[name](number)
            total, cpu = time.perf_counter() - begin, time.process_time() - cpu
            machine = _machine_cpu_seconds() - machine
            check(name, number)
            if number == 0:
                continue
            wall += total
            others += machine - cpu
            if parts is not None:
                total, cpu = sum(parts.seconds.values()), sum(parts.cpu_seconds.values())
            rows = {name: (total, cpu)}
            for part in parts.seconds if parts is not None else ():
                rows[f"{name}.{part}"] = (parts.seconds[part], parts.cpu_seconds[part])
            for row, (value, cpu_value) in rows.items():
                seconds.setdefault(row, []).append(value)
                cpu_seconds.setdefault(row, []).append(cpu_value)
    order = list(cases)
    ordered = sorted(seconds.items(), key=lambda item: order.index(item[0].partition(".")[0]))
    return Timings(dict(ordered), cpu_seconds, round(max(0.0, others / wall), 2))


def _machine_cpu_seconds() -> float:
    """Return the CPU seconds that all processes have used, guests and interrupts included, idle and I/O wait not."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def ratios(top: Sequence[float], bottom: Sequence[float]) -> list[float]:
    """Return the ratios of paired runs."""
    return [a / b for a, b in zip(top, bottom, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, min and max."""
    return {
        "median": round(statistics.median(values), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
    }


# ---- reporting --------------------------------------------------------------------------------------


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table that is Markdown as well; the first column is left-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *(line(row) for row in rows)])


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
