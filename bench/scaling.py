"""Scaling: how prepare, the pause, a pull and a reload grow with the model, with what changed, with the chain.

One variable at a time: the model from 0.25 to 4 GB, the density from 0.05 to 5 %, 1 to 16 versions, 10 to 20,000
tensors, and every number of cores. The others stay at 1 GB (a quarter of it for versions and tensors), 1 %, one version,
all cores. Every point runs in a process of its own, pinned to its number of cores. Per round: open + prepare + commit on a
live module, a pull of the same versions, and the usual receiver's patches and reload, all checked. bench/plot.py draws
the result.

What is done can be kept: with ``--resume FILE`` every finished point is a line of FILE, and points that are there are not
run again. ``--axis`` picks axes, ``--points N`` the first N points of each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import baseline
from common import (
    Sizes,
    check_digests,
    digests_of_checkpoint,
    parse_args,
    settle,
    warm,
    workspace,
)
from live_apply import build_module, digests_of_module
from report import machine_info, publish_result
from rounds import Case, Parts, run_rounds
from stream import Stream, make_stream
from tables import table

import gpusync

FULL = Sizes(model_nbytes=1_000_000_000, density=0.01, rounds=2)
SMOKE = Sizes(model_nbytes=8_000_000, density=0.01, rounds=1)
AXES = ("model", "density", "versions", "tensors", "cores")
_SHOWN = ("prepare", "commit", "pull", "baseline.pull", "baseline.reload")
_EXCLUSIONS = (
    "page cache warm; dirty pages of earlier runs written out before each run; nothing is fsynced; attach (once per"
    " model)"
)


@dataclass(frozen=True)
class Point:
    """One setting. ``axis`` is the variable that differs from the others of its series."""

    axis: str
    model_nbytes: int
    density: float
    versions: int
    tensors: int | None
    cores: int
    rounds: int

    @property
    def value(self) -> float:
        """The variable's value."""
        named = {"model": self.model_nbytes, "tensors": self.tensors or 0}
        return float(named[self.axis] if self.axis in named else getattr(self, self.axis))


def plan_points(sizes: Sizes, axes: Sequence[str], most: int | None) -> list[Point]:
    """Return the points of the axes, at most so many of each, the cheapest first."""
    cores = len(os.sched_getaffinity(0))
    middle = Point("", sizes.model_nbytes, sizes.density, 1, None, cores, sizes.rounds)
    quarter = sizes.model_nbytes // 4
    series = {
        "model": [replace(middle, model_nbytes=quarter * n) for n in (1, 2, 4, 8, 16)],
        "density": [replace(middle, density=d) for d in (0.0005, 0.002, 0.01, 0.05)],
        "versions": [replace(middle, model_nbytes=quarter, versions=n) for n in (1, 2, 4, 8, 16)],
        "tensors": [
            replace(middle, model_nbytes=quarter, tensors=n) for n in (10, 100, 1000, 20_000)
        ],
        "cores": [replace(middle, cores=n) for n in range(1, cores + 1)],
    }
    return [replace(point, axis=axis) for axis in axes for point in series[axis][:most]]


class _Series:
    """Round r takes the module, the folder and the baseline's folder from r to r + 1 times the point's versions."""

    def __init__(self, root: Path, stream: Stream, point: Point) -> None:
        self._stream, self._point = stream, point
        self._source = stream.sources["seekable"]
        self._local, self._patched = root / "local", root / "patched"
        self.module = build_module(stream.base_dir)
        self._reloaded = build_module(stream.base_dir)
        baseline.seed(self._patched, stream.base_dir)
        gpusync.pull(self._local, stream.base_dir, self._source, 0, durable=False)
        gpusync.attach(self.module, stream.base_dir, version=0)

    def cases(self) -> dict[str, Case]:
        return {"live": self._live, "pull": self._pull, "baseline": self._baseline}

    def _target(self, number: int) -> int:
        return (number + 1) * self._point.versions

    def _live(self, number: int) -> Parts:
        parts = Parts()
        base_dir = self._stream.base_dir
        with parts.timed("open"):
            chain = gpusync.open_chain(self._source, self._target(number), base_dir=base_dir)
        with parts.timed("prepare"):
            update = gpusync.prepare(self.module, chain, write_back="none")
        with parts.timed("commit"):
            update.commit()
        update.finish()
        return parts

    def _pull(self, number: int) -> None:
        target = self._target(number)
        gpusync.pull(self._local, self._stream.base_dir, self._source, target, durable=False)

    def _baseline(self, number: int) -> Parts:
        parts = Parts()
        with parts.timed("pull"):
            for version in range(self._target(number - 1) + 1, self._target(number) + 1):
                baseline.pull(self._patched, self._source, version)
        with parts.timed("reload"):
            baseline.reload(self._reloaded, self._patched)
        return parts

    def before(self, name: str, number: int) -> None:
        folder = {"pull": self._local, "baseline": self._patched}.get(name)
        if folder is not None:
            settle(folder)
            warm(folder)
        for version in range(self._target(number - 1) + 1, self._target(number) + 1):
            warm(self._source / f"weight_v{version:06d}")

    def check(self, name: str, number: int) -> None:
        expected = self._stream.digests[self._target(number)]
        got = {
            "live": lambda: digests_of_module(self.module),
            "pull": lambda: digests_of_checkpoint(self._local),
            "baseline": lambda: digests_of_module(self._reloaded),
        }[name]()
        check_digests(f"{name}, version {self._target(number)}", expected, got)


def run_point(point: Point, temp_dir: Path | None) -> dict[str, Any]:
    """Run one point in this process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: point.cores])
    with workspace(temp_dir) as root:
        stream = make_stream(
            root,
            model_nbytes=point.model_nbytes,
            density=point.density,
            versions=point.versions * (point.rounds + 1),
            framings=("seekable",),
            tensors=point.tensors,
        )
        series = _Series(root, stream, point)
        timings = run_rounds(series.cases(), point.rounds, before=series.before, check=series.check)
    return {**asdict(point), "stream": stream.to_dict(), **timings.to_dict()}


def _in_child(point: Point, temp_dir: Path | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point))]
    if temp_dir is not None:
        command += ["--temp-dir", str(temp_dir)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class _Done:
    """Finished points, as lines of a file where one is given."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._results: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def find(self, point: Point) -> dict[str, Any] | None:
        """Return the result of a point; None where it has not been run."""
        return next((found for found in self._results if _point_of(found) == point), None)

    def add(self, result: dict[str, Any]) -> None:
        if self._file is not None:
            with open(self._file, "a") as file:
                file.write(json.dumps(result) + "\n")


def _point_of(result: dict[str, Any]) -> Point:
    return Point(**{key: result[key] for key in Point.__dataclass_fields__})


def _table(axis: str, results: list[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        seconds = result["seconds"]
        shown = [seconds["live.prepare"], seconds["live.commit"], seconds["pull"]]
        shown += [seconds["baseline.pull"], seconds["baseline.reload"]]
        value = _point_of(result).value
        rows.append([f"{value:g}", *(f"{one['median']:.4f}" for one in shown)])
    return table([axis, *_SHOWN], rows)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--axis", action="append", choices=AXES, help="this axis; may be repeated")
    parser.add_argument("--points", type=int, help="at most so many points per axis")
    parser.add_argument(
        "--resume", type=Path, help="keep finished points here, and do not run those again"
    )
    parser.add_argument("--point", help=argparse.SUPPRESS)


def main() -> None:
    args, sizes = parse_args("Scaling: one variable at a time.", FULL, SMOKE, _add_arguments)
    if args.point:
        print(json.dumps(run_point(Point(**json.loads(args.point)), args.temp_dir)))
        return
    machine = machine_info(args.temp_dir or Path.cwd())
    done = _Done(args.resume)
    series: dict[str, list[dict[str, Any]]] = {}
    for point in plan_points(sizes, args.axis or AXES, args.points or (2 if args.smoke else None)):
        result = done.find(point)
        if result is None:
            begin = time.monotonic()
            result = _in_child(point, args.temp_dir)
            result["point_seconds"] = round(time.monotonic() - begin, 1)
            done.add(result)
        print(f"{point.axis} {point.value:g}: {result['point_seconds']} s", file=sys.stderr)
        series.setdefault(point.axis, []).append(result)
    document = {"sizes": vars(sizes), "exclusions": _EXCLUSIONS, "series": series}
    tables = ["Median seconds.", *(_table(axis, results) for axis, results in series.items())]
    publish_result("scaling", args, machine, document, [*tables, f"Excluded: {_EXCLUSIONS}."])


if __name__ == "__main__":
    main()
