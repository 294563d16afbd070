"""Live model: ``prepare`` + ``commit`` against the usual receiver's in-place pull and reload, in turns.

Three modules of the same parameters are kept: ours without a checkpoint (``write_back="none"``), ours that keeps
its checkpoint durably (``write_back="sync"``), and the baseline's. Opening the chain is counted in our total. The
pause is ``commit``; the baseline's pause is its reload. Floors are measured beside them. Of prepare: the same blobs
decoded, as many bytes digested and XORed, each alone. Of the pause: the same share of the words of the same parameters
read and written back XORed, at as many random places, without any check. And a copy by torch of all parameters, which
is the least that a reload is.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import baseline
import floors
import numpy as np
import torch
import xxhash
from common import Sizes, check_digests, parse_args, settle, warm, workspace
from numpy.typing import NDArray
from report import Section, Target, machine_info, publish_sections
from rounds import Case, Parts, run_rounds
from safetensors.torch import load_file
from stream import Stream, make_stream

import gpusync
from gpusync.config import Settings

FULL = Sizes(model_nbytes=1_000_000_000, density=0.01, rounds=5)
SMOKE = Sizes(model_nbytes=12_000_000, density=0.01, rounds=1)
_EXCLUSIONS = (
    "parameters on the CPU; page cache warm; dirty pages of earlier runs written out before each run; the engine's"
    " own pausing and cache flush; attach (once per model); the baseline never fsyncs"
)


def build_module(checkpoint_dir: Path) -> torch.nn.Module:
    """Return a module whose parameters are copies of the checkpoint's tensors, under the same names."""
    root = torch.nn.Module()
    for path in sorted(checkpoint_dir.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            *parents, leaf = name.split(".")
            owner = root
            for part in parents:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            parameter = torch.nn.Parameter(tensor.clone(), requires_grad=False)
            owner.register_parameter(leaf, parameter)
    return root


def digests_of_module(module: torch.nn.Module) -> dict[str, str]:
    """Return parameter -> xxh3-128 hex of its bytes."""
    return {
        name: xxhash.xxh3_128_hexdigest(_bytes_of(parameter))
        for name, parameter in module.named_parameters()
    }


def _bytes_of(parameter: torch.nn.Parameter) -> floors.Bytes:
    return parameter.detach().reshape(-1).view(torch.int16).numpy().view(np.uint8)


class _Floors:
    """The floors of prepare and of the pause, on as many threads as ours."""

    _PART = 4096

    def __init__(self, module: torch.nn.Module, density: float) -> None:
        rng = np.random.default_rng(0)
        self._settings = Settings.from_env()
        self._parameters = list(module.parameters())
        self._copies = [torch.ones_like(parameter) for parameter in self._parameters]  # faulted in
        self._arrays = floors.largest_first(map(_bytes_of, self._parameters))
        self._parts = []
        for array in self._arrays:
            words = array.view(np.uint16)
            places = np.flatnonzero(rng.random(words.size, np.float32) < density).astype(np.uint32)
            for at in range(0, places.size, self._PART):
                self._parts.append((words, places[at : at + self._PART]))

    def prepare(self, version_dir: Path) -> Parts:
        """Decode a version's blobs; digest the parameters; XOR them with a buffer: one after the other."""
        threads, step = self._settings.workers, self._settings.piece_bytes
        parts = Parts()
        with parts.timed("decode"):
            floors.decode(floors.read_blobs(version_dir).values(), threads, step)
        with parts.timed("xxh3"):
            floors.xxh3(self._arrays, threads)
        with parts.timed("XOR"):
            floors.xor(self._arrays, threads, step)
        return parts

    def pause(self) -> Parts:
        """Change every word under the places, and change them back outside the clock."""
        parts = Parts()
        with parts.timed("gather + scatter"):
            self._scatter()
        self._scatter()
        return parts

    def copy(self) -> Parts:
        """Copy all parameters by torch."""
        parts = Parts()
        with parts.timed("torch copy"), torch.no_grad():
            for copied, parameter in zip(self._copies, self._parameters, strict=True):
                copied.copy_(parameter)
        return parts

    def _scatter(self) -> None:
        step = -(-len(self._parts) // (4 * self._settings.workers))
        runs = [self._parts[at : at + step] for at in range(0, len(self._parts), step)]
        floors.in_threads(_change_all, runs, self._settings.workers)


def _change_all(parts: list[tuple[NDArray[np.uint16], NDArray[np.uint32]]]) -> None:
    for words, places in parts:
        floors.change_words(words, places)


class _Live:
    """Round r takes every module from version r to r + 1."""

    def __init__(self, root: Path, stream: Stream, density: float) -> None:
        self.stream, self.source = stream, stream.sources["seekable"]
        self.locals = {name: root / name for name in ("live", "live durable", "baseline")}
        self.modules = {name: build_module(stream.base_dir) for name in self.locals}
        self.reports: dict[str, list[gpusync.UpdateReport]] = {}
        baseline.seed(self.locals["baseline"], stream.base_dir)
        baseline.seed(self.locals["live"], stream.base_dir)
        gpusync.pull(self.locals["live durable"], stream.base_dir, self.source, 0)
        gpusync.attach(self.modules["live"], self.locals["live"], version=0)
        self.floors = _Floors(self.modules["live"], density)
        gpusync.attach(self.modules["live durable"], self.locals["live durable"], version=0)

    def cases(self) -> dict[str, Case]:
        return {
            "live": self._live,
            "live durable": self._durable,
            "baseline": self._baseline,
            "floor of prepare": lambda r: self.floors.prepare(self.source / f"weight_v{r + 1:06d}"),
            "floor of the pause": lambda _: self.floors.pause(),
            "floor of a reload": lambda _: self.floors.copy(),
        }

    def _live(self, number: int) -> Parts:
        return self._update("live", number, checkpoint=None, write_back="none")

    def _durable(self, number: int) -> Parts:
        name = "live durable"
        return self._update(name, number, checkpoint=self.locals[name], write_back="sync")

    def _update(self, name: str, number: int, *, checkpoint: Path | None, write_back: str) -> Parts:
        parts = Parts()
        with parts.timed("open"):
            chain = gpusync.open_chain(
                self.source, number + 1, checkpoint=checkpoint, base_dir=self.stream.base_dir
            )
        with parts.timed("prepare"):
            update = gpusync.prepare(self.modules[name], chain, device="cpu", write_back=write_back)
        with parts.timed("commit"):
            update.commit()
        with parts.timed("finish"):
            report = update.finish()
        self.reports.setdefault(name, []).append(report)
        return parts

    def _baseline(self, number: int) -> Parts:
        parts = Parts()
        with parts.timed("pull"):
            baseline.pull(self.locals["baseline"], self.source, number + 1)
        with parts.timed("reload"):
            baseline.reload(self.modules["baseline"], self.locals["baseline"])
        return parts

    def before(self, name: str, number: int) -> None:
        warm(self.source / f"weight_v{number + 1:06d}")
        if name in self.locals:
            settle(self.locals[name])
            warm(self.locals[name], self.stream.base_dir)

    def check(self, name: str, number: int) -> None:
        if name not in self.locals:
            return
        expected = self.stream.digests[number + 1]
        check_digests(
            f"{name}, version {number + 1}", expected, digests_of_module(self.modules[name])
        )

    def report_values(self) -> dict[str, Any]:
        """Return what our own reports say, median over the timed rounds."""
        values = {}
        for name, (_, *reports) in self.reports.items():
            stages = reports[0].stages.seconds
            values[name] = {
                "change_list_bytes": reports[-1].change_list_bytes,
                "stages": {
                    key: round(
                        statistics.median(r.stages.seconds.get(key, 0.0) for r in reports), 4
                    )
                    for key in stages
                },
            }
        return values


def main() -> None:
    args, sizes = parse_args("Live model: prepare and commit against pull and reload.", FULL, SMOKE)
    with workspace(args.temp_dir) as root:
        machine = machine_info(root)
        stream = make_stream(
            root,
            model_nbytes=sizes.model_nbytes,
            density=sizes.density,
            versions=sizes.rounds + 1,
            framings=("seekable",),
        )
        live = _Live(root, stream, sizes.density)
        timings = run_rounds(live.cases(), sizes.rounds, before=live.before, check=live.check)
        reports = live.report_values()
    pairs = {
        "pause / reload": timings.ratio("live.commit", "baseline.reload"),
        "open + prepare + commit / (pull + reload)": timings.ratio("live", "baseline"),
        "prepare / (decode + xxh3 + XOR)": timings.ratio("live.prepare", "floor of prepare"),
        "pause / floor": timings.ratio("live.commit", "floor of the pause"),
        "pause / torch copy": timings.ratio("live.commit", "floor of a reload"),
        "floor of the pause / reload": timings.ratio("floor of the pause", "baseline.reload"),
        "durable pause / reload": timings.ratio("live durable.commit", "baseline.reload"),
        "durable, all / (pull + reload)": timings.ratio("live durable", "baseline"),
    }
    section = Section("one version", timings, pairs, {"our reports": reports})
    targets = [
        Target(name, section.median(name), limit)
        for name, limit in (
            ("pause / reload", 0.3),
            ("open + prepare + commit / (pull + reload)", 1.0),
            ("prepare / (decode + xxh3 + XOR)", 1.3),
        )
    ]
    publish_sections(
        "live_apply", args, machine, sizes, [section], targets, _EXCLUSIONS, stream.to_dict()
    )


if __name__ == "__main__":
    main()
