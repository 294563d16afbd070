"""Decoding: every encoding, framing and density, applied to tensors in memory, against a plain receiver and zstd alone.

Nothing is read from files and nothing is digested here: blobs and tensors are in memory, and a tensor is changed in
place, piece by piece. Floors: the same blobs through zstd and nothing else, and a copy of the tensors. The share of the
model that goes over the wire is counted beside.
"""

from __future__ import annotations

import functools
import io
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import baseline
import floors
import numpy as np
import xxhash
from common import Sizes, check_digests, map_tensors, parse_args, workspace
from report import Section, machine_info, publish_sections
from rounds import Case, run_rounds, spread
from stream import FRAMINGS, make_stream

from gpusync.config import Settings
from gpusync.format.decode_xor import loops
from gpusync.format.encodings import open_layer
from gpusync.format.frames import MAX_WINDOW
from gpusync.format.where import Where
from gpusync.types import ENCODINGS

FULL = Sizes(model_nbytes=256_000_000, density=0.01, rounds=5)
SMOKE = Sizes(model_nbytes=6_000_000, density=0.01, rounds=1)
DENSITIES = (0.0005, 0.002, 0.01, 0.05)
_EXCLUSIONS = (
    "files, digests, and the walk of a plain receiver, which has none; sparse payloads over 4 MiB go through a"
    " temporary file in ours, and through memory in the baseline"
)

Tensors = dict[str, floors.Bytes]


class _Blobs:
    """One published version in memory, and how it is applied."""

    def __init__(self, version_dir: Path, encoding: str, settings: Settings) -> None:
        self._encoding, self._settings = encoding, settings
        self._blobs = floors.read_blobs(version_dir)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._blobs.values()))

    def apply(self, tensors: Tensors) -> None:
        """Apply every blob by the product's decoder."""
        floors.in_threads(
            functools.partial(self._apply_one, tensors), self._blobs, self._settings.workers
        )

    def apply_plainly(self, tensors: Tensors) -> None:
        """Apply every blob as a plain receiver does."""

        def one(name: str) -> None:
            baseline.apply_blob(self._encoding, tensors[name], self._blobs[name])

        floors.in_threads(one, self._blobs, self._settings.workers)

    def decode(self) -> None:
        """Decode every blob and drop what it holds."""
        floors.decode(self._blobs.values(), self._settings.workers, self._settings.piece_bytes)

    def _apply_one(self, tensors: Tensors, name: str) -> None:
        tensor, blob = tensors[name], self._blobs[name]
        layer = open_layer(
            self._encoding,
            lambda: io.BytesIO(blob).read,
            blob_nbytes=len(blob),
            nbytes=tensor.size,
            max_window=MAX_WINDOW,
            where=Where(tensor=name),
            spill=tempfile.TemporaryFile,
        )
        step = self._settings.piece_bytes
        for begin in range(0, tensor.size, step):
            layer.apply(tensor[begin : begin + step], begin)
        layer.finish()


def measure(root: Path, sizes: Sizes, encoding: str, densities: Sequence[float]) -> Section:
    """Check, then time, all framings and the densities of one encoding."""
    settings = Settings.from_env()
    tensors: Tensors = {}
    cases: dict[str, Case] = {}
    wire: dict[str, float] = {}
    for density in densities:
        stream = make_stream(
            root,
            model_nbytes=sizes.model_nbytes,
            density=density,
            versions=1,
            encoding=encoding,
        )
        tensors = {name: data.copy() for name, data in map_tensors(stream.base_dir).items()}
        for framing in FRAMINGS:
            what = f"{density:.2%}, {framing}"
            blobs = _Blobs(stream.sources[framing] / "weight_v000001", encoding, settings)
            _check(what, blobs, encoding, tensors, stream.digests[1])
            wire[what] = round(blobs.nbytes / stream.nbytes, 6)
            cases |= _cases(what, blobs, encoding, tensors)
        shutil.rmtree(root)
        root.mkdir()
    cases["memcpy"] = _memcpy(tensors)
    timings = run_rounds(cases, sizes.rounds, before=_nothing, check=_nothing)
    pairs = {}
    for what in wire:
        pairs[f"{what}: ours / zstd alone"] = timings.ratio(f"{what}: ours", f"{what}: zstd alone")
        if encoding in baseline.ENCODINGS:
            pairs[f"{what}: ours / baseline"] = timings.ratio(f"{what}: ours", f"{what}: baseline")
    nbytes = sum(data.size for data in tensors.values())
    rates = {
        name: round(nbytes / 1e9 / spread(seconds)["median"], 2)
        for name, seconds in timings.seconds.items()
    }
    notes = {"wire bytes / model bytes": wire, "GB of weights per second": rates}
    return Section(encoding, timings, pairs, notes)


def _check(
    what: str, blobs: _Blobs, encoding: str, tensors: Tensors, expected: dict[str, str]
) -> None:
    """Stop the bench unless the product and the plain receiver both make the version of the base."""
    makers = [blobs.apply] + [blobs.apply_plainly] * (encoding in baseline.ENCODINGS)
    for make in makers:
        made = {name: data.copy() for name, data in tensors.items()}
        make(made)
        got = {name: xxhash.xxh3_128_hexdigest(data) for name, data in made.items()}
        check_digests(f"{encoding}, {what}, {make.__name__}", expected, got)


def _cases(what: str, blobs: _Blobs, encoding: str, tensors: Tensors) -> dict[str, Case]:
    cases: dict[str, Case] = {
        f"{what}: ours": lambda _: blobs.apply(tensors),
        f"{what}: zstd alone": lambda _: blobs.decode(),
    }
    if encoding in baseline.ENCODINGS:
        cases[f"{what}: baseline"] = lambda _: blobs.apply_plainly(tensors)
    return cases


def _memcpy(tensors: Tensors) -> Case:
    copies = {name: np.ones_like(data) for name, data in tensors.items()}  # faulted in

    def run(number: int) -> None:
        for name, data in tensors.items():
            np.copyto(copies[name], data)

    return run


def _nothing(*_: Any) -> None:
    """Blobs and tensors stay in memory, and results were checked before."""


def main() -> None:
    args, sizes = parse_args("Decoding, by encoding, framing and density.", FULL, SMOKE)
    densities = [sizes.density] if args.smoke else DENSITIES
    loops.load()
    sections = []
    for encoding in ENCODINGS:
        with workspace(args.temp_dir) as root:
            machine = machine_info(root)
            sections.append(measure(root, sizes, encoding, densities))
    publish_sections("decode", args, machine, sizes, sections, [], _EXCLUSIONS)


if __name__ == "__main__":
    main()
