"""Disk path: ``gpusync.pull`` against its floors and against the usual receiver, in one process, in turns.

Floors: the same blobs decoded and nothing else, with as many threads as the product uses; and the shard files
copied to new files and nothing else. Every round pulls the next version of the stream, so that no folder is ever
put back. A chain of eight versions is folded in one pull, and pulled one by one, from the same start in every round.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
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
from stream import FRAMINGS, Stream, make_stream

import gpusync
from gpusync.config import Settings

FULL = Sizes(model_nbytes=1_000_000_000, density=0.01, rounds=5)
SMOKE = Sizes(model_nbytes=12_000_000, density=0.01, rounds=1)
CHAIN = 8
_EXCLUSIONS = (
    "page cache warm; dirty pages of earlier runs written out before each run; floors copy with one thread; the"
    " baseline keeps no second copy, no journal and never fsyncs; pulls run as one call in a process that has"
    " imported everything"
)


class _OneVersion:
    """One version after the other: round r goes from version r to r + 1; round 0 seeds as well."""

    def __init__(self, root: Path, stream: Stream, framing: str, settings: Settings) -> None:
        self.stream, self.source = stream, stream.sources[framing]
        self.settings = settings
        self.copies = root / "copies"
        self.alone = floors.Alone(stream.base_dir)
        self.folders = {name: root / name for name in ("pull", "pull durable", "baseline")}
        self.stages: dict[str, list[Mapping[str, float]]] = {}

    def cases(self) -> dict[str, Case]:
        return {
            "floor": self._floor,
            "pull": lambda number: self._pull("pull", number, durable=False),
            "pull durable": lambda number: self._pull("pull durable", number, durable=True),
            "baseline": self._baseline,
            "alone": self.alone.run,
        }

    def _floor(self, number: int) -> Parts:
        parts = Parts()
        with parts.timed("decode"):
            blobs = floors.read_blobs(self.source / f"weight_v{number + 1:06d}")
            floors.decode(blobs.values(), self.settings.workers, self.settings.piece_bytes)
        with parts.timed("copy"):
            floors.copy_files(self.stream.base_dir, self.copies)
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
        folder = self.folders.get(name, self.stream.base_dir)
        settle(folder)
        warm(folder, self.source / f"weight_v{number + 1:06d}")

    def check(self, name: str, number: int) -> None:
        if name == "floor":
            shutil.rmtree(self.copies)
        if name not in self.folders:
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


class _Chain:
    """Version 0 goes to version 8: folded in one pull, and in eight pulls."""

    def __init__(self, root: Path, stream: Stream) -> None:
        self._stream, self._source = stream, stream.sources[FRAMINGS[0]]
        self._folder = root / "chain"

    def cases(self) -> dict[str, Case]:
        return {
            "one pull": lambda _: self._pull(CHAIN),
            "eight pulls": lambda _: self._pull(*range(1, CHAIN + 1)),
        }

    def _pull(self, *versions: int) -> None:
        for version in versions:
            gpusync.pull(self._folder, self._stream.base_dir, self._source, version, durable=False)

    def before(self, name: str, number: int) -> None:
        self._pull(0)
        settle(self._folder)
        warm(self._folder, self._source)

    def check(self, name: str, number: int) -> None:
        check_digests(name, self._stream.digests[CHAIN], digests_of_checkpoint(self._folder))
        shutil.rmtree(self._folder)


def measure(root: Path, stream: Stream, framing: str, rounds: int) -> Section:
    """Pull one version after the other with one framing."""
    one = _OneVersion(root, stream, framing, Settings.from_env())
    step = run_rounds(one.cases(), rounds, before=one.before, check=one.check)
    one.remove()
    pairs = {
        "pull / (decode + copy)": step.ratio("pull", "floor"),
        "pull / baseline": step.ratio("pull", "baseline"),
        "pull durable / baseline": step.ratio("pull durable", "baseline"),
    }
    stages = {"stages of pull, seconds (they overlap)": one.stage_table()}
    return Section(f"one version, {framing} frames", step, pairs, stages)


def measure_chain(root: Path, stream: Stream, rounds: int) -> Section:
    """Pull a chain at once, and version by version."""
    chain = _Chain(root, stream)
    timings = run_rounds(chain.cases(), rounds, before=chain.before, check=chain.check)
    pairs = {"one pull / eight pulls": timings.ratio("one pull", "eight pulls")}
    return Section(f"chain of {CHAIN}, {FRAMINGS[0]} frames", timings, pairs)


def main() -> None:
    args, sizes = parse_args("Disk path: pull against floors and the usual receiver.", FULL, SMOKE)
    with workspace(args.temp_dir) as root:
        machine = machine_info(root)
        stream = make_stream(
            root,
            model_nbytes=sizes.model_nbytes,
            density=sizes.density,
            versions=max(sizes.rounds + 1, CHAIN),
        )
        one, single = (measure(root, stream, framing, sizes.rounds) for framing in FRAMINGS)
        chain = measure_chain(root, stream, sizes.rounds)
    targets = [
        Target("pull / (decode + copy)", one.median("pull / (decode + copy)"), 1.2),
        Target("pull / baseline", one.median("pull / baseline"), 1.2),
        Target("one pull / eight pulls", chain.median("one pull / eight pulls"), 0.5),
    ]
    publish_sections(
        "disk_path",
        args,
        machine,
        sizes,
        [one, chain, single],
        targets,
        _EXCLUSIONS,
        stream.to_dict(),
    )


if __name__ == "__main__":
    main()
