"""Strided copies in bytes: their normal form, and whether two of them write one byte.

Pure arithmetic. Sizes, strides and offsets are bytes unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

_STEPS = 20_000
"""Candidates looked at for one pair of boxes. Slices of tensors need a few tens; beyond it they count as overlapping."""

_PAIRS = 2_000_000
"""Pairs of boxes looked at in all, about two seconds; later pairs whose spans meet count as overlapping."""


@dataclass(frozen=True, slots=True)
class Walk:
    """How the bytes of one copy are laid out on both sides: the same ``shape``, a stride per dimension and side.

    The last dimension is a run of bytes with stride 1 on both sides; the others are in row-major order of the source.
    Without bytes the shape is (0,).
    """

    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    live_strides: tuple[int, ...]


@lru_cache(maxsize=8192)
def normal_walk(
    itemsize: int,
    shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    live_strides: tuple[int, ...],
) -> Walk | str:
    """Return the normal form of an element-wise copy, or why it has none.

    Parameters
    ----------
    itemsize
        Bytes per element.
    shape
        Elements per dimension, of both sides.
    source_strides, live_strides
        Elements.

    Returns
    -------
    Walk or str
        Equal copies have equal walks: dimensions of size 1 are gone, those that follow each other on both sides are
        merged. The reason where one side visits a byte twice, or cannot be shown not to.
    """
    if 0 in shape:
        return Walk((0,), (1,), (1,))
    dims = sorted(
        (
            (source * itemsize, live * itemsize, size)
            for size, source, live in zip(shape, source_strides, live_strides, strict=True)
            if size > 1
        ),
        key=lambda dim: dim[0],
    )
    if not _visits_once(itemsize, [(stride, size) for stride, _, size in dims]):
        return "broadcast: the loader copies a byte of it to several places at once"
    if not _visits_once(itemsize, sorted((stride, size) for _, stride, size in dims)):
        return "its destination overlaps itself"
    merged = [(1, 1, itemsize)]
    for source, live, size in dims:
        inner_source, inner_live, inner_size = merged[-1]
        if source == inner_source * inner_size and live == inner_live * inner_size:
            merged[-1] = (inner_source, inner_live, inner_size * size)
        else:
            merged.append((source, live, size))
    merged.reverse()
    sources, lives, sizes = zip(*merged, strict=True)
    return Walk(sizes, sources, lives)


def _visits_once(itemsize: int, dims: Sequence[tuple[int, int]]) -> bool:
    """True where each (stride, size), by increasing stride, steps over all that the smaller ones reach."""
    reach = itemsize
    for stride, size in dims:
        if stride < reach:
            return False
        reach += stride * (size - 1)
    return True


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy from a checkpoint tensor to live memory, in bytes.

    Parameters
    ----------
    source
        The checkpoint tensor.
    live_name
        A parameter or buffer over the storage that is written; the one that contains the destination, where one does.
    itemsize
        Bytes per element, the same on both sides.
    shape
        Bytes in the last dimension, steps in the others. The last is a run of bytes with stride 1 on both sides; the order
        is row-major in the source. A contiguous tensor is one run, a copy of nothing has shape (0,).
    source_offset, source_strides
        From the tensor's first byte; no byte is read twice.
    live_offset, live_strides
        From the first byte of the live *storage*, not of the parameter; no byte is written twice.
    """

    source: str
    live_name: str
    itemsize: int
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    live_offset: int
    live_strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        nbytes = 1
        for size in self.shape:
            nbytes *= size
        return nbytes


def span_nbytes(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the distance from a box's first byte to behind its last."""
    if 0 in shape:
        return 0
    return 1 + sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that a loader writes.

    Parameters
    ----------
    begin, end
        Addresses of the first byte and behind the last.
    shape, strides
        The box between them.
    name
        The tensor whose plain copy it is; None for any other write.
    what
        What wrote, in words.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    name: str | None
    what: str


@dataclass(frozen=True, slots=True)
class Collision:
    """Two writes of one byte; ``later`` came after ``earlier``. At least one is a plain copy."""

    earlier: Write
    later: Write


def find_collisions(writes: Sequence[Write]) -> Iterator[Collision]:
    """Yield the pairs of writes that share a byte and make a copy's destination not the copy's alone.

    Parameters
    ----------
    writes
        In the order in which they happened. Another write that a copy replaces later does no harm.
    """
    order = sorted(range(len(writes)), key=lambda number: (writes[number].begin, number))
    open_numbers: list[int] = []
    looked_at = 0
    for number in order:
        write = writes[number]
        if write.begin == write.end:
            continue
        open_numbers = [other for other in open_numbers if writes[other].end > write.begin]
        for other in open_numbers:
            earlier, later = writes[min(other, number)], writes[max(other, number)]
            if earlier.name is None:
                continue
            looked_at += 1
            if looked_at > _PAIRS or _share_a_byte(earlier, later):
                yield Collision(earlier, later)
        open_numbers.append(number)


def _share_a_byte(first: Write, second: Write) -> bool:
    if first.begin == second.begin:
        return True
    return boxes_meet(
        second.begin - first.begin, first.shape, first.strides, second.shape, second.strides
    )


@lru_cache(maxsize=65536)
def boxes_meet(
    distance: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_shape: tuple[int, ...],
    other_strides: tuple[int, ...],
) -> bool:
    """Return whether two boxes of bytes have a byte in common.

    Parameters
    ----------
    distance
        From the first byte of the one to the first byte of the other.

    Notes
    -----
    A common byte is a solution of ``sum(stride * index) - sum(other_stride * other_index) == distance``. Equal strides
    share one unknown, the difference of the indexes; the unknowns are tried from the largest stride down, each only
    as far as the smaller strides can make up for.
    """
    bounds: dict[int, tuple[int, int]] = {}
    for size, stride in zip(shape, strides, strict=True):
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = (low, high + size - 1)
    for size, stride in zip(other_shape, other_strides, strict=True):
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = (low - size + 1, high)
    terms = sorted(bounds.items(), reverse=True)
    lows, highs = [0], [0]
    for stride, (low, high) in reversed(terms):
        lows.append(lows[-1] + stride * low)
        highs.append(highs[-1] + stride * high)
    lows.reverse()
    highs.reverse()
    left, todo = _STEPS, [(0, distance)]
    while todo:
        level, rest = todo.pop()
        if level == len(terms):
            if rest == 0:
                return True
            continue
        stride, (low, high) = terms[level]
        first = max(low, -((highs[level + 1] - rest) // stride))
        last = min(high, (rest - lows[level + 1]) // stride)
        left -= max(last - first + 1, 0)
        if left < 0:
            return True
        todo.extend((level + 1, rest - stride * factor) for factor in range(first, last + 1))
    return False
