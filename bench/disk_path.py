"""Disk path: ``gpusync.pull`` against its floors and against the usual receiver, in one process, in turns.

Floors: the same blobs decoded and nothing else, with as many threads as the product uses; and the shard files
copied to new files and nothing else. Every round pulls the next version of the stream, so that no folder is ever
put back; the late joiner starts from an empty folder each time.
"""

from __future__ import annotations

import json
import queue
import shutil
import statistics
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import baseline
import zstandard
from common import (
    Case,
    Parts,
    Sizes,
    Target,
    check_digests,
    digests_of_checkpoint,
    machine_info,
    parse_args,
    publish_result,
    ratios,
    ratios_table,
    read_header,
    run_rounds,
    settle,
    spread,
    targets_table,
    warm,
    workspace,
)
from stream import FRAMINGS, Stream, make_stream

import gpusync
from gpusync.config import Settings

FULL = Sizes(model_nbytes=1_000_000_000, density=0.01, rounds=5)
SMOKE = Sizes(model_nbytes=24_000_000, density=0.01, rounds=2)
LATE_VERSION = 3
_EXCLUSIONS = (
    "page cache warm; dirty pages of earlier runs written out before each run; floors copy with one thread; the"
    " baseline keeps no second copy, no journal and never fsyncs; pulls run as one call in a process that has"
    " imported everything"
)


def decode_alone(version_dir: Path, threads: int, piece_nbytes: int) -> None:
    """Read and decode every blob of a version into one reused buffer per thread, largest first."""
    blobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    found = []
    for path in sorted(version_dir.glob("*.safetensors")):
        start, rows = read_header(path)
        data = path.read_bytes()
        spans = [row["data_offsets"] for name, row in rows.items() if name != "__metadata__"]
        found.extend(data[start + begin : start + end] for begin, end in spans)
    for blob in sorted(found, key=len, reverse=True):
        blobs.put(blob)

    def work() -> None:
        buffer = bytearray(piece_nbytes)
        while True:
            try:
                blob = blobs.get_nowait()
            except queue.Empty:
                return
            with zstandard.ZstdDecompressor().stream_reader(
                blob, read_across_frames=True
            ) as reader:
                while reader.readinto(buffer):
                    pass

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def copy_alone(base_dir: Path, folder: Path) -> None:
    """Copy the shard files to new files."""
    folder.mkdir()
    for path in sorted(base_dir.glob("*.safetensors")):
        shutil.copyfile(path, folder / path.name)


class _OneVersion:
    """One version after the other: round r goes from version r to r + 1; round 0 seeds as well."""

    def __init__(self, root: Path, stream: Stream, framing: str, settings: Settings) -> None:
        self.stream, self.source = stream, stream.sources[framing]
        self.settings = settings
        self.copies = root / "copies"
        self.folders = {name: root / name for name in ("pull", "pull durable", "baseline")}
        self.stages: dict[str, list[Mapping[str, float]]] = {}

    def cases(self) -> dict[str, Case]:
        return {
            "floor": self._floor,
            "pull": lambda number: self._pull("pull", number, durable=False),
            "pull durable": lambda number: self._pull("pull durable", number, durable=True),
            "baseline": self._baseline,
        }

    def _floor(self, number: int) -> Parts:
        parts = Parts()
        with parts.timed("decode"):
            decode_alone(
                self.source / f"weight_v{number + 1:06d}",
                self.settings.workers,
                self.settings.piece_bytes,
            )
        with parts.timed("copy"):
            copy_alone(self.stream.base_dir, self.copies)
        return parts

    def _pull(self, name: str, number: int, *, durable: bool) -> None:
        report = gpusync.pull(
            self.folders[name], self.stream.base_dir, self.source, number + 1, durable=durable
        )
        self.stages.setdefault(name, []).append(report.stages.seconds)

    def _baseline(self, number: int) -> None:
        if number == 0:
            baseline.seed(self.folders["baseline"], self.stream.base_dir)
        baseline.pull(self.folders["baseline"], self.source, number + 1)

    def before(self, name: str, number: int) -> None:
        folder = self.stream.base_dir if name == "floor" else self.folders[name]
        settle(folder)
        warm(folder, self.source / f"weight_v{number + 1:06d}")

    def check(self, name: str, number: int) -> None:
        if name == "floor":
            shutil.rmtree(self.copies)
            return
        got = digests_of_checkpoint(self.folders[name])
        check_digests(f"{name}, version {number + 1}", self.stream.digests[number + 1], got)

    def stage_table(self) -> dict[str, dict[str, float]]:
        """Return the product's own seconds per stage, median over the timed rounds."""
        return {
            name: {
                stage: round(statistics.median(r.get(stage, 0.0) for r in timed), 4)
                for stage in timed[0]
            }
            for name, (_, *timed) in self.stages.items()
        }

    def remove(self) -> None:
        for folder in self.folders.values():
            shutil.rmtree(folder)


class _LateJoiner:
    """An empty folder goes to version 3: base and three deltas in one pass, against seed copy and three patches."""

    def __init__(self, root: Path, stream: Stream, framing: str) -> None:
        self.stream, self.source = stream, stream.sources[framing]
        self.folder = root / "late"

    def cases(self) -> dict[str, Case]:
        return {
            "late pull": lambda _: self._pull(durable=False),
            "late pull durable": lambda _: self._pull(durable=True),
            "late baseline": lambda _: self._baseline(),
        }

    def _pull(self, *, durable: bool) -> None:
        gpusync.pull(self.folder, self.stream.base_dir, self.source, LATE_VERSION, durable=durable)

    def _baseline(self) -> Parts:
        parts = Parts()
        with parts.timed("seed"):
            baseline.seed(self.folder, self.stream.base_dir)
        with parts.timed("patch"):
            for version in range(1, LATE_VERSION + 1):
                baseline.pull(self.folder, self.source, version)
        return parts

    def before(self, name: str, number: int) -> None:
        warm(self.stream.base_dir, self.source)

    def check(self, name: str, number: int) -> None:
        check_digests(name, self.stream.digests[LATE_VERSION], digests_of_checkpoint(self.folder))
        shutil.rmtree(self.folder)


def measure(root: Path, stream: Stream, framing: str, rounds: int) -> dict[str, Any]:
    """Run both parts for one framing; return their timings, paired ratios and the product's own stages."""
    one = _OneVersion(root, stream, framing, Settings.from_env())
    step = run_rounds(one.cases(), rounds, before=one.before, check=one.check)
    one.remove()
    late = _LateJoiner(root, stream, framing)
    join = run_rounds(late.cases(), rounds, before=late.before, check=late.check)
    seconds = step.seconds | join.seconds
    pairs = {
        "pull / (decode + copy)": ratios(seconds["pull"], seconds["floor"]),
        "pull / baseline": ratios(seconds["pull"], seconds["baseline"]),
        "pull durable / baseline": ratios(seconds["pull durable"], seconds["baseline"]),
        "late baseline / late pull": ratios(seconds["late baseline"], seconds["late pull"]),
        "late baseline / late pull durable": ratios(
            seconds["late baseline"], seconds["late pull durable"]
        ),
    }
    return {"one version": step, "late joiner": join, "ratios": pairs, "stages": one.stage_table()}


def main() -> None:
    args, sizes = parse_args("Disk path: pull against floors and the usual receiver.", FULL, SMOKE)
    with workspace(args.temp_dir) as root:
        machine = machine_info(root)
        stream = make_stream(
            root,
            model_nbytes=sizes.model_nbytes,
            density=sizes.density,
            versions=max(sizes.rounds + 1, LATE_VERSION),
        )
        measured = {framing: measure(root, stream, framing, sizes.rounds) for framing in FRAMINGS}
    medians = {name: spread(v)["median"] for name, v in measured["seekable"]["ratios"].items()}
    targets = [
        Target("pull / (decode + copy)", medians["pull / (decode + copy)"], 1.5),
        Target("pull / baseline, seekable frames", medians["pull / baseline"], 1.2),
        Target(
            "late baseline / late pull", medians["late baseline / late pull"], 1.5, at_most=False
        ),
    ]
    tables = []
    for framing, part in measured.items():
        tables += [f"## {framing} frames", part["one version"].table(), part["late joiner"].table()]
        tables.append(ratios_table(part["ratios"]))
        tables.append("Stages of pull, seconds (they overlap): " + json.dumps(part["stages"]))
    document = {
        "sizes": vars(sizes),
        "stream": stream.to_dict(),
        "exclusions": _EXCLUSIONS,
        "framings": {
            framing: {
                "one_version": part["one version"].to_dict(),
                "late_joiner": part["late joiner"].to_dict(),
                "ratios": {name: spread(v) for name, v in part["ratios"].items()},
                "stages": part["stages"],
            }
            for framing, part in measured.items()
        },
        "targets": [target.to_dict() for target in targets],
    }
    tables += ["## Targets", targets_table(targets), f"Excluded: {_EXCLUSIONS}."]
    publish_result("disk_path", args, machine, document, tables)


if __name__ == "__main__":
    main()
