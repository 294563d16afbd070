"""What every bench shares: arguments, workspace, page cache, checks."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Sizes:
    """How large a bench runs: bytes of the model, share of elements moved per version, timed rounds."""

    model_nbytes: int
    density: float
    rounds: int


class CheckError(SystemExit):
    """A result was wrong, so nothing was timed: the process ends with status 1 and this message."""


# ---- arguments and workspace ------------------------------------------------------------------------


def parse_args(
    description: str,
    full: Sizes,
    smoke: Sizes,
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[argparse.Namespace, Sizes]:
    """Parse the arguments that all benches take, and what ``extend`` adds; return them and the sizes to run at."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--smoke", action="store_true", help="small sizes, for CI: checks, not figures")
    add("--json-out", type=Path, help="write the JSON here, and a table beside it as .md")
    add("--temp-dir", type=Path, help="folder for the streams (default: TMPDIR)")
    add("--model-bytes", type=int, help="bytes of the model, instead of the default")
    add("--rounds", type=int, help="timed rounds, instead of the default")
    if extend is not None:
        extend(parser)
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


def map_tensors(folder: Path, mode: Literal["r", "r+"] = "r") -> dict[str, NDArray[np.uint8]]:
    """Return tensor -> its bytes in the folder's safetensors files, mapped."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        start, rows = read_header(path)
        data = np.asarray(np.memmap(path, dtype=np.uint8, mode=mode))
        for name, row in rows.items():
            if name != "__metadata__":
                begin, end = row["data_offsets"]
                tensors[name] = data[start + begin : start + end]
    return tensors


def digests_of_checkpoint(folder: Path) -> dict[str, str]:
    """Return tensor -> xxh3-128 hex over the folder's safetensors files."""
    return {name: xxhash.xxh3_128_hexdigest(data) for name, data in map_tensors(folder).items()}


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
