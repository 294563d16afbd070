"""Seeding: a pull into an empty folder, against a plain copy; and a host that joins late, against copy and patches.

A seed is a copy of the base of which every tensor is digested. A late joiner folds the base and three versions in one
pass; the usual receiver copies the base and patches it three times.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import baseline
import floors
from common import (
    Sizes,
    check_digests,
    digests_of_checkpoint,
    parse_args,
    settle,
    warm,
    workspace,
)
from report import Section, Target, machine_info, publish_sections
from rounds import Case, Parts, run_rounds
from stream import Stream, make_stream

import gpusync
from gpusync.config import Settings

FULL = Sizes(model_nbytes=1_000_000_000, density=0.01, rounds=5)
SMOKE = Sizes(model_nbytes=12_000_000, density=0.01, rounds=1)
LATE_VERSION = 3
_EXCLUSIONS = (
    "page cache warm; dirty pages of earlier runs written out before each run; plain copies use one thread and check"
    " nothing; the baseline keeps no second copy, no journal and never fsyncs"
)


class _Joiner:
    """An empty folder goes to a version; it is removed after every run."""

    def __init__(self, root: Path, stream: Stream, version: int) -> None:
        self._stream, self._source = stream, stream.sources["seekable"]
        self._version = version
        self._folder = root / "joined"
        self._alone = floors.Alone(stream.base_dir)

    def cases(self) -> dict[str, Case]:
        return {
            "pull": lambda _: self._pull(durable=False),
            "pull durable": lambda _: self._pull(durable=True),
            "baseline": lambda _: self._baseline(),
            "floor": lambda _: self._floor(),
            "alone": self._alone.run,
        }

    def _pull(self, *, durable: bool) -> None:
        base_dir = self._stream.base_dir
        gpusync.pull(self._folder, base_dir, self._source, self._version, durable=durable)

    def _baseline(self) -> Parts:
        parts = Parts()
        with parts.timed("copy"):
            baseline.seed(self._folder, self._stream.base_dir)
        with parts.timed("patch"):
            for version in range(1, self._version + 1):
                baseline.pull(self._folder, self._source, version)
        return parts

    def _floor(self) -> Parts:
        """The copy alone, and every version decoded alone."""
        parts, settings = Parts(), Settings.from_env()
        with parts.timed("copy"):
            floors.copy_files(self._stream.base_dir, self._folder)
        with parts.timed("decode"):
            for version in range(1, self._version + 1):
                blobs = floors.read_blobs(self._source / f"weight_v{version:06d}")
                floors.decode(blobs.values(), settings.workers, settings.piece_bytes)
        return parts

    def before(self, name: str, number: int) -> None:
        settle(self._stream.base_dir)
        warm(self._stream.base_dir, self._source)

    def check(self, name: str, number: int) -> None:
        if name in ("pull", "pull durable", "baseline"):
            expected = self._stream.digests[self._version]
            check_digests(f"{name}, {self._version}", expected, digests_of_checkpoint(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)


def measure(root: Path, stream: Stream, version: int, rounds: int) -> Section:
    """Run a joiner of one version."""
    joiner = _Joiner(root, stream, version)
    timings = run_rounds(joiner.cases(), rounds, before=joiner.before, check=joiner.check)
    pairs = {
        "baseline / pull": timings.ratio("baseline", "pull"),
        "baseline / pull durable": timings.ratio("baseline", "pull durable"),
        "pull / (copy + decode)": timings.ratio("pull", "floor"),
    }
    title = f"late joiner, {version} versions" if version else "seed"
    return Section(title, timings, pairs)


def main() -> None:
    args, sizes = parse_args("Seeding, and joining late, in one pass.", FULL, SMOKE)
    with workspace(args.temp_dir) as root:
        machine = machine_info(root)
        stream = make_stream(
            root,
            model_nbytes=sizes.model_nbytes,
            density=sizes.density,
            versions=LATE_VERSION,
            framings=("seekable",),
        )
        seeded, late = (measure(root, stream, to, sizes.rounds) for to in (0, LATE_VERSION))
    median = late.median("baseline / pull")
    targets = [Target("late baseline / late pull", median, 2.0, at_most=False)]
    publish_sections(
        "seed",
        args,
        machine,
        sizes,
        [seeded, late],
        targets,
        _EXCLUSIONS,
        stream.to_dict(),
    )


if __name__ == "__main__":
    main()
