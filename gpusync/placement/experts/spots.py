"""Spots: the contiguous runs of live bytes that could be one tensor, found by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gpusync.format.digest import new_hasher
from gpusync.placement.regions import byte_view
from gpusync.placement.tensors import DTYPE_NAMES
from gpusync.placement.trace import Copy
from gpusync.types import TensorEntry

Read = Callable[[str, int, int], bytes | bytearray | memoryview]
"""Reads bytes of a checkpoint tensor: its name, an offset from its first byte, and how many."""

_WINDOWS, _WINDOW_NBYTES = 4, 32
_PIECE_NBYTES = 4 << 20

_MOST_PARTS = 2
"""Tensors of one shape that share a row of a stack: gate and up."""


@dataclass(frozen=True, eq=False)
class Spot:
    """A contiguous run of a parameter's bytes: part ``part`` of the ``parts`` of one of its rows, or all of it."""

    live_name: str
    data: torch.Tensor
    row: int = 0
    part: int = 0
    parts: int = 1

    def copy(self, name: str, itemsize: int) -> Copy:
        """Return the copy of a whole tensor to here."""
        offset = int(self.data.storage_offset())
        return Copy(name, self.live_name, itemsize, (self.data.numel(),), 0, (1,), offset, (1,))


@dataclass
class Found:
    """What is known so far: a spot for each placed tensor, a reason for each that is not."""

    spots: dict[str, Spot] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def place(self, name: str, spot: Spot) -> None:
        self.spots[name] = spot
        self.reasons.pop(name, None)

    def refuse(self, name: str, reason: str) -> None:
        """Note why a tensor has no place; the first reason stands."""
        self.reasons.setdefault(name, reason)
        self.spots.pop(name, None)


class Spots:
    """The runs of some parameters that tensors of one shape could be.

    Parameters
    ----------
    tensors
        Parameters by name, each a byte image of one storage; those that are tied count once.
    shape
        Of the tensors that are looked for.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        self._live_names = tuple(tensors)
        self._by_sample: dict[bytes, list[Spot]] = {}
        self._digests: dict[Spot, str] = {}
        once: dict[int, str] = {}
        for live_name, tensor in tensors.items():
            once.setdefault(tensor.data_ptr(), live_name)
        for live_name in once.values():
            self._add(live_name, tensors[live_name], shape)

    def __str__(self) -> str:
        return " and ".join(self._live_names)

    def holding(self, entry: TensorEntry, read: Read) -> Sequence[Spot]:
        """Return the runs that hold a tensor's bytes: one by samples of them, several by all of them."""
        windows = _windows(entry.nbytes)
        sample = b"".join(bytes(read(entry.name, at, size)) for at, size in windows)
        spots = self._by_sample.get(sample, [])
        if len(spots) < 2:
            return spots
        digest = _digest(read(entry.name, at, size) for at, size in _pieces(entry.nbytes))
        return [spot for spot in spots if self._digest_of(spot) == digest]

    def _add(self, live_name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        rows, parts = cut(tuple(tensor.shape), shape) or (0, 0)
        if not rows:
            return
        runs = byte_view(tensor).view(rows * parts, tensor.nbytes // (rows * parts))
        windows = [runs[:, at : at + size] for at, size in _windows(runs.shape[1])]
        for number, sample in enumerate(torch.cat(windows, dim=1).cpu().numpy()):
            spot = Spot(live_name, runs[number], number // parts, number % parts, parts)
            self._by_sample.setdefault(sample.tobytes(), []).append(spot)

    def _digest_of(self, spot: Spot) -> str:
        if spot not in self._digests:
            pieces = _pieces(spot.data.numel())
            self._digests[spot] = _digest(
                spot.data[at : at + size].cpu().numpy() for at, size in pieces
            )
        return self._digests[spot]


def cut(live: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return in how many rows of how many parts a parameter holds tensors of a shape, or None where it does not."""
    if live == shape:
        return 1, 1
    if live and live[1:] == shape:
        return live[0], 1
    merged = (live[0], _MOST_PARTS * shape[0], *shape[1:]) if shape else ()
    return (live[0], _MOST_PARTS) if live == merged else None


def dtype_fits(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    return tensor.dtype == getattr(torch, DTYPE_NAMES.get(entry.dtype, ""), None)


def misfit(entry: TensorEntry, near: Mapping[str, torch.Tensor]) -> str:
    """Return why none of the parameters that a tensor's name allows can hold it."""
    for live_name, tensor in near.items():
        if cut(tuple(tensor.shape), entry.shape) and not dtype_fits(tensor, entry):
            return f"cast: {live_name} is {tensor.dtype} live, {entry.dtype} in the checkpoint"
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in near.items())
    return f"no contiguous run of {shapes} has its shape {list(entry.shape)}"


def ambiguous(spots: Sequence[Spot]) -> str:
    where = " and ".join(sorted({spot.live_name for spot in spots}))
    return (
        f"{len(spots)} runs of {where} hold its bytes, and nothing shows which of them is its own"
    )


def _windows(nbytes: int) -> list[tuple[int, int]]:
    """Return where a tensor is sampled: (offset, size), spread from its begin to its end."""
    if nbytes <= _WINDOWS * _WINDOW_NBYTES:
        return [(0, nbytes)]
    last = nbytes - _WINDOW_NBYTES
    return [(last * number // (_WINDOWS - 1), _WINDOW_NBYTES) for number in range(_WINDOWS)]


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for at in range(0, nbytes, _PIECE_NBYTES):
        yield at, min(_PIECE_NBYTES, nbytes - at)


def _digest(pieces: Iterable[object]) -> str:
    hasher = new_hasher("xxh3-128")
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest().hex
