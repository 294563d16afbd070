"""The walk's fast path: runs of ordinary frames and blocks, judged with local integers only.

Whoever walks holds the GIL, and the threads that decode wait for it: a blob of many small frames costs no more here
than reading its headers does. This path refuses nothing. It stops before the first header that is cut off, unusual
or wrong, with everything counted as if framewalk.py had come there step by step, and leaves that header to it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from gpusync.types import Frame

MAX_BLOCK_NBYTES = 128 << 10
"""Largest zstd block, in bytes."""

FRAME_MAGIC = 0xFD2FB528
RLE, COMPRESSED, RESERVED = 1, 2, 3
MIN_COMPRESSED_NBYTES = 2
BLOCK_HEADER_NBYTES = 3
CHECKSUM_NBYTES = 4
# By window descriptor byte: the window's size.
WINDOW_NBYTES = tuple(
    (1 << (10 + (byte >> 3))) + (1 << (7 + (byte >> 3))) * (byte & 7) for byte in range(256)
)

# Magic, descriptor, and 8 bytes that begin with an ordinary header's fields (5 at most).
_HEAD = struct.Struct("<IBQ")


def _fields_of(descriptor: int) -> tuple[int, int, int, int] | None:
    """Return how to read an ordinary frame header, or None for a descriptor that is not ordinary.

    That is: bytes of magic and header; then shift, mask and addend that make the content size out of the fields.
    """
    window_nbytes = 0 if descriptor & 0x20 else 1
    size_nbytes = (1 - window_nbytes, 2, 4, 8)[descriptor >> 6]
    if descriptor & 0x0B or not 0 < size_nbytes < 8:  # reserved bit, dictionary id; 4 GiB and more
        return None
    return (
        5 + window_nbytes + size_nbytes,
        8 * window_nbytes,
        (1 << 8 * size_nbytes) - 1,
        256 if size_nbytes == 2 else 0,
    )


_FIELDS = tuple(_fields_of(descriptor) for descriptor in range(256))


class OpenFrame:
    """The frame being walked; ``least`` and ``most`` bound what its blocks so far decode to."""

    __slots__ = (
        "blocks",
        "content_nbytes",
        "empty_blocks",
        "has_checksum",
        "largest_block",
        "least",
        "most",
        "offset",
        "skippable",
        "window_nbytes",
    )

    def __init__(self, offset: int, *, skippable: bool) -> None:
        self.offset = offset
        self.skippable = skippable
        self.content_nbytes: int | None = 0 if skippable else None
        self.window_nbytes = self.largest_block = 0
        self.has_checksum = False
        self.blocks = self.empty_blocks = 0
        self.least = self.most = 0

    def open(self, content_nbytes: int | None, window_nbytes: int, *, has_checksum: bool) -> None:
        """Take what the frame header says."""
        self.content_nbytes = content_nbytes
        self.window_nbytes = window_nbytes
        self.largest_block = window_nbytes if window_nbytes < MAX_BLOCK_NBYTES else MAX_BLOCK_NBYTES
        self.has_checksum = has_checksum

    def ended(self, position: int) -> Frame:
        """Describe the frame, which ended before the blob's byte ``position``."""
        return Frame(
            offset=self.offset,
            nbytes=position - self.offset,
            content_nbytes=self.content_nbytes,
            window_nbytes=self.window_nbytes,
            has_checksum=self.has_checksum,
            skippable=self.skippable,
            blocks=self.blocks,
        )


class Totals:
    """What a walk has counted over the frames that ended, and its limits."""

    __slots__ = (
        "cap",
        "data_frames",
        "filled_frames",
        "idle_frames",
        "items",
        "least",
        "max_items",
        "max_window",
        "most",
    )

    def __init__(self, *, max_window: int) -> None:
        self.max_window = max_window
        self.cap = self.max_items = 0
        self.least = self.most = 0  # what the frames decode to
        self.items = 0  # frames and blocks, those of the open frame too
        self.idle_frames = 0  # skippable or without content
        self.filled_frames = self.data_frames = 0

    def count_frame(self, frame: OpenFrame) -> None:
        """Count a frame that ended."""
        declared = frame.content_nbytes
        most = frame.most if declared is None else declared
        self.least += frame.least if declared is None else declared
        self.most += most
        if not frame.skippable:
            self.data_frames += 1
        if most:
            self.filled_frames += 1
        else:
            self.idle_frames += 1


def pass_ordinary(
    data: bytes | memoryview,
    at: int,
    position: int,
    totals: Totals,
    frame: OpenFrame | None,
    on_frame: Callable[[Frame], None] | None,
) -> tuple[int, OpenFrame | None, bool]:
    """Pass ordinary frames and blocks from ``at`` on, the blob's byte ``position``.

    A frame starts there or, within ``frame``, a block.

    Returns
    -------
    tuple
        Where it stopped (past the end of ``data``: within a block, that many bytes before its end), the frame that is
        open there, and whether that frame ends with the block.
    """
    end, base = len(data), position - at
    ending = False
    while True:
        if frame is None:
            if at + _HEAD.size > end:
                break
            magic, descriptor, word = _HEAD.unpack_from(data, at)
            fields = _FIELDS[descriptor]
            if magic != FRAME_MAGIC or fields is None or totals.items >= totals.max_items:
                break
            header_nbytes, shift, mask, addend = fields
            content = (word >> shift & mask) + addend
            window = WINDOW_NBYTES[word & 0xFF] if shift else content
            if content > totals.cap - totals.least or window > totals.max_window:
                break
            frame = OpenFrame(base + at, skippable=False)
            frame.open(content, window, has_checksum=descriptor & 0x04 != 0)
            at += header_nbytes
            totals.items += 1
        at, ending = _pass_blocks(data, at, end, totals, frame)
        if not ending or at > end:
            break
        totals.count_frame(frame)
        if on_frame is not None:
            on_frame(frame.ended(base + at))
        frame = None
        ending = False
    return at, frame, ending


def _pass_blocks(
    data: bytes | memoryview, at: int, end: int, totals: Totals, frame: OpenFrame
) -> tuple[int, bool]:
    """Pass ordinary blocks of a frame; return where, and whether the last was among them."""
    content, largest = frame.content_nbytes, frame.largest_block
    least, most, before = frame.least, frame.most, frame.blocks
    allowed = totals.cap - totals.least if content is None else content
    limit = before + totals.max_items - totals.items
    blocks, last = before, 0
    while not last and at + BLOCK_HEADER_NBYTES <= end:
        word = data[at] | data[at + 1] << 8 | data[at + 2] << 16
        kind, nbytes = word >> 1 & 3, word >> 3
        if nbytes > largest or blocks >= limit:
            break
        if kind == COMPRESSED:
            if nbytes < MIN_COMPRESSED_NBYTES:
                break
            stored, known, reach = nbytes, least, most + largest
        else:
            stored = 1 if kind == RLE else nbytes
            known, reach = least + nbytes, most + nbytes
            if kind == RESERVED or not nbytes or known > allowed:
                break
        if word & 1:
            if not content or reach < content:  # of unknown or no size
                break
            last = 1
            stored += CHECKSUM_NBYTES if frame.has_checksum else 0
        least, most = known, reach
        blocks += 1
        at += BLOCK_HEADER_NBYTES + stored
    frame.least, frame.most, frame.blocks = least, most, blocks
    totals.items += blocks - before
    return at, last == 1
