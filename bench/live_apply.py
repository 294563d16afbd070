"""Live model: ``prepare`` + ``commit`` against the usual receiver's in-place pull and reload, in turns.

Three modules of the same parameters are kept: ours without a checkpoint (``write_back="none"``), ours that keeps
its checkpoint durably (``write_back="sync"``), and the baseline's. Opening the chain is counted in our total. The
pause is ``commit``; the baseline's pause is its reload. The floor of a pause is measured beside them: the same share of
the words of the same parameters read and written back XORed, at as many random places, without any check.
"""

from __future__ import annotations

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import baseline
import numpy as np
import torch
import xxhash
from common import (
    Case,
    Parts,
    Sizes,
    Target,
    check_digests,
    machine_info,
    parse_args,
    publish_result,
    ratios,
    ratios_table,
    run_rounds,
    settle,
    spread,
    targets_table,
    warm,
    workspace,
)
from numpy.typing import NDArray
from safetensors.torch import load_file
from stream import Stream, make_stream

import gpusync
from gpusync.config import Settings

FULL = Sizes(model_nbytes=1_000_000_000, density=0.01, rounds=5)
SMOKE = Sizes(model_nbytes=24_000_000, density=0.01, rounds=2)
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
        name: xxhash.xxh3_128_hexdigest(parameter.detach().view(torch.int16).numpy())
        for name, parameter in module.named_parameters()
    }


class _Floor:
    """The least that a pause does: gather words at random places, and scatter them changed, on as many threads."""

    _PART = 4096

    def __init__(self, module: torch.nn.Module, density: float) -> None:
        rng = np.random.default_rng(0)
        self._workers = Settings.from_env().workers
        self._parts = []
        for parameter in module.parameters():
            words = parameter.detach().reshape(-1).view(torch.int16).numpy().view(np.uint16)
            places = np.flatnonzero(rng.random(words.size, np.float32) < density).astype(np.uint32)
            for at in range(0, places.size, self._PART):
                self._parts.append((words, places[at : at + self._PART]))

    def run(self) -> None:
        """Change every word under the places; a second time changes them back."""
        with ThreadPoolExecutor(self._workers) as pool:
            step = -(-len(self._parts) // (4 * self._workers))
            runs = [self._parts[at : at + step] for at in range(0, len(self._parts), step)]
            list(pool.map(self._change, runs))

    @staticmethod
    def _change(parts: list[tuple[NDArray[np.uint16], NDArray[np.uint32]]]) -> None:
        for words, places in parts:
            index = places.astype(np.intp)
            words[index] = words.take(index, mode="clip") ^ np.uint16(1)


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
        self.floor = _Floor(self.modules["live"], density)
        gpusync.attach(self.modules["live durable"], self.locals["live durable"], version=0)

    def cases(self) -> dict[str, Case]:
        return {
            "live": self._live,
            "live durable": self._durable,
            "baseline": self._baseline,
            "floor": self._floor,
        }

    def _floor(self, number: int) -> Parts:
        parts = Parts()
        with parts.timed("gather + scatter"):
            self.floor.run()
        self.floor.run()  # as it was
        return parts

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
        if name not in self.locals:
            return
        settle(self.locals[name])
        warm(self.locals[name], self.stream.base_dir, self.source / f"weight_v{number + 1:06d}")

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
    seconds = timings.seconds
    pairs = {
        "pause / reload": ratios(seconds["live.commit"], seconds["baseline.reload"]),
        "open + prepare + commit / (pull + reload)": ratios(seconds["live"], seconds["baseline"]),
        "pause / floor": ratios(seconds["live.commit"], seconds["floor.gather + scatter"]),
        "floor / reload": ratios(seconds["floor.gather + scatter"], seconds["baseline.reload"]),
        "durable pause / reload": ratios(
            seconds["live durable.commit"], seconds["baseline.reload"]
        ),
        "durable, all / (pull + reload)": ratios(seconds["live durable"], seconds["baseline"]),
    }
    medians = {name: spread(values)["median"] for name, values in pairs.items()}
    targets = [
        Target("pause / reload", medians["pause / reload"], 0.3),
        Target(
            "prepare + commit / (pull + reload)",
            medians["open + prepare + commit / (pull + reload)"],
            1.0,
        ),
    ]
    document = {
        "sizes": vars(sizes),
        "stream": stream.to_dict(),
        "exclusions": _EXCLUSIONS,
        **timings.to_dict(),
        "ratios": {name: spread(values) for name, values in pairs.items()},
        "reports": reports,
        "targets": [target.to_dict() for target in targets],
    }
    tables = [
        timings.table(),
        ratios_table(pairs),
        "Our reports: " + json.dumps(reports),
        "## Targets",
        targets_table(targets),
        f"Excluded: {_EXCLUSIONS}.",
    ]
    publish_result("live_apply", args, machine, document, tables)


if __name__ == "__main__":
    main()
