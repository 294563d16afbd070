"""Recovery: how long the next pull takes after a kill -9, against the same pull undisturbed.

A child process pulls and kills itself at one of three instants, which is no matter of chance and so can be timed: when
everything is staged and no journal is there, so that all is lost; before its first shard is renamed into the folder; and
right after that. What is timed is the pull after it, in this process, which first finishes or undoes what it finds.
Floors: a copy of the shard files, and the usual receiver, which after a failure has to be seeded again.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import baseline
import floors
import killed_pull
from common import (
    CheckError,
    Sizes,
    check_digests,
    digests_of_checkpoint,
    parse_args,
    settle,
    warm,
    workspace,
)
from killed_pull import KILLS
from report import Section, Target, machine_info, publish_sections
from rounds import Case, Parts, run_rounds
from stream import Stream, make_stream

import gpusync

FULL = Sizes(model_nbytes=1_000_000_000, density=0.01, rounds=5)
SMOKE = Sizes(model_nbytes=12_000_000, density=0.01, rounds=1)
_EXCLUSIONS = (
    "the killed pull itself; starting a new process and its imports; page cache warm; dirty pages written out before"
    " each run; nothing is fsynced by pulls that are not durable, which a kill of the process does not matter to"
)


class _Killed:
    """Round r takes every folder from version r to r + 1."""

    def __init__(self, root: Path, stream: Stream) -> None:
        self._stream, self._source = stream, stream.sources["seekable"]
        self._folders = {
            name: root / f"folder-{n}" for n, name in enumerate(("undisturbed", *KILLS))
        }
        self._copies = root / "copies"
        for folder in self._folders.values():
            gpusync.pull(folder, stream.base_dir, self._source, 0, durable=False)

    def cases(self) -> dict[str, Case]:
        pulls: dict[str, Case] = {name: self._pull(name) for name in self._folders}
        return pulls | {"copy": self._copy, "baseline": self._baseline}

    def _pull(self, name: str) -> Case:
        def run(number: int) -> None:
            base_dir = self._stream.base_dir
            gpusync.pull(self._folders[name], base_dir, self._source, number + 1, durable=False)

        return run

    def _copy(self, number: int) -> None:
        floors.copy_files(self._stream.base_dir, self._copies)

    def _baseline(self, number: int) -> Parts:
        """A mixed folder is of no use to the usual receiver: a new copy of the base, and every version since."""
        parts = Parts()
        with parts.timed("copy"):
            baseline.seed(self._copies, self._stream.base_dir)
        with parts.timed("patch"):
            for version in range(1, number + 2):
                baseline.pull(self._copies, self._source, version)
        return parts

    def before(self, name: str, number: int) -> None:
        if name in KILLS:
            self._kill(name, number + 1)
        folder = self._folders.get(name, self._stream.base_dir)
        settle(folder)
        warm(folder, self._source / f"weight_v{number + 1:06d}")

    def _kill(self, name: str, version: int) -> None:
        paths = (self._folders[name], self._stream.base_dir, self._source)
        command = [sys.executable, killed_pull.__file__, name, *map(str, paths), str(version)]
        code = subprocess.run(command, check=False).returncode
        if code != -signal.SIGKILL:
            raise CheckError(f"wrong result: {name}: the child ended with {code}, not by a kill")

    def check(self, name: str, number: int) -> None:
        expected = self._stream.digests[number + 1]
        folder = self._folders.get(name, self._copies)
        if name != "copy":
            check_digests(f"{name}, version {number + 1}", expected, digests_of_checkpoint(folder))
        shutil.rmtree(self._copies, ignore_errors=True)


def main() -> None:
    args, sizes = parse_args("Recovery after a kill -9.", FULL, SMOKE)
    with workspace(args.temp_dir) as root:
        machine = machine_info(root)
        stream = make_stream(
            root,
            model_nbytes=sizes.model_nbytes,
            density=sizes.density,
            versions=sizes.rounds + 1,
            framings=("seekable",),
        )
        killed = _Killed(root, stream)
        timings = run_rounds(killed.cases(), sizes.rounds, before=killed.before, check=killed.check)
    pairs = {f"{kill} / undisturbed": timings.ratio(kill, "undisturbed") for kill in KILLS}
    pairs |= {f"{kill} / baseline": timings.ratio(kill, "baseline") for kill in KILLS}
    section = Section("after a kill", timings, pairs)
    targets = [
        Target(name, section.median(name), limit)
        for name, limit in zip(pairs, (1.5, 1.0, 1.0), strict=False)
    ]
    publish_sections(
        "recovery", args, machine, sizes, [section], targets, _EXCLUSIONS, stream.to_dict()
    )


if __name__ == "__main__":
    main()
