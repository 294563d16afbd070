"""Digests: of whole tensors, and of tensors that ranks hold in slices, against the libraries alone and memory itself.

Whole tensors are digested piece by piece, as they are folded, against one call of the library. Slices are summed on the
host, as ranks do that prove a tensor together: what each slice adds to the tensor's blocks, and the digest that the sums
make, which must be the whole tensor's. Floors: one call of xxh3 over the same bytes, a copy of them, a copy by torch, and a
read of a file of them through the page cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import floors
import numpy as np
import torch
import xxhash
from common import CheckError, Sizes, parse_args, warm, workspace
from report import Section, machine_info, publish_sections
from rounds import Case, Parts, run_rounds, spread

from gpusync.config import Settings
from gpusync.format.digest import new_hasher
from gpusync.format.sums import (
    BLOCK_NBYTES,
    SUMS_NBYTES,
    SummedDigest,
    add_sums,
    sums_of,
    tail_begin,
    whole_blocks,
)

FULL = Sizes(model_nbytes=1_000_000_000, density=0.0, rounds=5)
SMOKE = Sizes(model_nbytes=12_000_000, density=0.0, rounds=1)
_TENSORS = 8
_RANKS = 2
_ROWS = {"rows of 4096 bytes": 4096, "rows of 1408 bytes": 1408}
"""What a rank holds of each row of a tensor: whole blocks of the digest; and runs that cut them."""
_LIBRARY: dict[str, Callable[[floors.Bytes], str]] = {
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}
_EXCLUSIONS = "cutting a tensor into slices; exchanging sums between ranks; files"


class _Whole:
    """Eight tensors of random bytes, digested."""

    def __init__(self, sizes: Sizes, settings: Settings) -> None:
        self._threads, self._step = settings.workers, settings.piece_bytes
        nbytes = sizes.model_nbytes // _TENSORS // 2 * 2
        rng = np.random.default_rng(0)
        self.tensors = [np.frombuffer(rng.bytes(nbytes), np.uint8) for _ in range(_TENSORS)]
        for algorithm, library in _LIBRARY.items():
            for tensor in self.tensors:
                _hold(algorithm, library(tensor), self._pieces(algorithm, tensor))

    def cases(self) -> dict[str, Case]:
        return {
            name: case
            for algorithm in _LIBRARY
            for name, case in (
                (algorithm, self._ours(algorithm)),
                (f"{algorithm}, one call", self._one_call(algorithm)),
            )
        }

    def _ours(self, algorithm: str) -> Case:
        return lambda _: floors.in_threads(
            lambda tensor: self._pieces(algorithm, tensor), self.tensors, self._threads
        )

    def _one_call(self, algorithm: str) -> Case:
        return lambda _: floors.in_threads(_LIBRARY[algorithm], self.tensors, self._threads)

    def _pieces(self, algorithm: str, tensor: floors.Bytes) -> str:
        hasher = new_hasher(algorithm)
        for begin in range(0, tensor.size, self._step):
            hasher.update(tensor[begin : begin + self._step])
        return hasher.digest().hex


class _Sliced:
    """One tensor, cut into columns that ranks hold; summed slice by slice, then digested from the sums."""

    def __init__(self, tensor: floors.Bytes, run_nbytes: int, settings: Settings) -> None:
        row = run_nbytes * _RANKS
        self._rows = tensor.size // row
        self._run = run_nbytes
        self._nbytes = self._rows * row
        self._settings = settings
        whole = tensor[: self._nbytes].reshape(self._rows, _RANKS, run_nbytes)
        self._slices = [np.ascontiguousarray(whole[:, rank]).reshape(-1) for rank in range(_RANKS)]
        self._tail = tensor[tail_begin(self._nbytes) : self._nbytes]
        self._expected = xxhash.xxh3_128_hexdigest(tensor[: self._nbytes])
        self.run(0)

    def run(self, number: int) -> Parts:
        """Run one round and hold its digest against the whole tensor's."""
        parts = Parts()
        with parts.timed("sums"):
            sums = np.zeros((whole_blocks(self._nbytes), SUMS_NBYTES // 8), np.uint64)
            for rank, data in enumerate(self._slices):
                self._add(sums, data, rank)
        with parts.timed("digest of sums"):
            digest = SummedDigest(self._nbytes)
            digest.add(sums)
            got = digest.finish(self._tail).hex
        _hold("sums", self._expected, got)
        return parts

    def _add(self, sums: Any, data: floors.Bytes, rank: int) -> None:
        """Add what a slice holds of the tensor's whole blocks, some rows at a time."""
        limit = whole_blocks(self._nbytes) * BLOCK_NBYTES
        step = max(1, self._settings.piece_bytes // self._run)
        for first in range(0, self._rows, step):
            rows = np.arange(first, min(self._rows, first + step))
            begins = (rows * _RANKS + rank) * self._run
            ends = np.minimum(begins + self._run, limit)
            begins, ends = begins[ends > begins], ends[ends > begins]
            if not begins.size:
                return
            at = first * self._run
            piece = data[at : at + int((ends - begins).sum())]
            blocks, added = sums_of(begins, ends, piece)
            add_sums(sums, 0, blocks, added)


def _hold(what: str, expected: str, got: str) -> None:
    if got != expected:
        raise CheckError(f"wrong result: {what}: expected={expected} got={got}")


def _floors(tensors: list[floors.Bytes], file: Path) -> Case:
    with open(file, "wb") as out:
        for tensor in tensors:
            out.write(tensor.data)
    target = np.ones_like(tensors[0])  # faulted in

    def run(number: int) -> Parts:
        parts = Parts()
        with parts.timed("page-cache read"):
            warm(file)
        with parts.timed("memcpy"):
            for tensor in tensors:
                np.copyto(target, tensor)
        with parts.timed("torch copy"):
            for source in torch_tensors:
                torch_target.copy_(source)
        return parts

    torch_tensors = [torch.from_numpy(tensor.copy()) for tensor in tensors]
    torch_target = torch.from_numpy(target)
    return run


def main() -> None:
    args, sizes = parse_args("Digests of whole tensors and of slices.", FULL, SMOKE)
    settings = Settings.from_env()
    with workspace(args.temp_dir) as root:
        machine = machine_info(root)
        whole = _Whole(sizes, settings)
        cases = whole.cases() | {"alone": _floors(whole.tensors, root / "bytes")}
        nothing: Any = lambda name, number: None  # noqa: E731
        timings = run_rounds(cases, sizes.rounds, before=nothing, check=nothing)
        slices = {name: _Sliced(whole.tensors[0], n, settings).run for name, n in _ROWS.items()}
        slices["xxh3-128 of the whole"] = lambda _: floors.xxh3(whole.tensors[:1], 1)
        summed = run_rounds(slices, sizes.rounds, before=nothing, check=nothing)
    pairs = {f"{name} / one call": timings.ratio(name, f"{name}, one call") for name in _LIBRARY}
    against = {
        f"{name} / xxh3-128 of the whole": summed.ratio(name, "xxh3-128 of the whole")
        for name in _ROWS
    }
    rates = {
        name: round(sizes.model_nbytes / 1e9 / spread(seconds)["median"], 2)
        for name, seconds in timings.seconds.items()
    }
    sections = [
        Section("whole tensors", timings, pairs, {"GB per second": rates}),
        Section("one tensor in slices, one thread", summed, against),
    ]
    publish_sections("digest", args, machine, sizes, sections, [], _EXCLUSIONS)


if __name__ == "__main__":
    main()
