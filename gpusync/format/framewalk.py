"""A walk over zstd frames that judges every header before a decoder sees the bytes.

It follows RFC 8878 (3.1: frames, block headers, skippable frames) and decodes nothing. It knows each frame's
exact extent, so junk, truncation, dictionaries, huge windows and floods of empty blocks are refused by counters,
not by what a decoder makes of them. Entropy-coded content is libzstd's to judge.
"""

from __future__ import annotations

from collections.abc import Callable

from gpusync.errors import FrameFormatError
from gpusync.format.frameruns import (
    BLOCK_HEADER_NBYTES,
    CHECKSUM_NBYTES,
    COMPRESSED,
    FRAME_MAGIC,
    MAX_BLOCK_NBYTES,
    MIN_COMPRESSED_NBYTES,
    RESERVED,
    RLE,
    WINDOW_NBYTES,
    OpenFrame,
    Totals,
    pass_ordinary,
)
from gpusync.format.where import Where
from gpusync.types import Frame

__all__ = [
    "MAX_BLOCK_NBYTES",
    "MAX_WINDOW",
    "READ_NBYTES",
    "FrameWalker",
    "ReadBytes",
    "WalkedSource",
]

MAX_WINDOW = 128 << 20
"""Largest window, in bytes, that a published frame may ask for."""

ReadBytes = Callable[[int], bytes]
"""Returns a blob's next bytes, at most as many as asked for; b"" at its end."""

READ_NBYTES = 256 << 10
"""Compressed bytes handed to a decoder at a time: many frames, for each hand-over costs a read, a walk and the lock."""

_SKIPPABLE_MAGIC = 0x184D2A50
_START_NBYTES = 5  # magic, and the frame header descriptor or a skippable frame's first size byte
_DICTIONARY_ID_NBYTES = (0, 1, 2, 4)
# By descriptor: bytes of the frame header after it, which are window, dictionary id and content size.
_FIELDS_NBYTES = tuple(
    (0 if byte & 0x20 else 1)
    + _DICTIONARY_ID_NBYTES[byte & 3]
    + (0, 2, 4, 8)[byte >> 6]
    + (1 if byte & 0xE0 == 0x20 else 0)
    for byte in range(256)
)
# Content is bounded by what a u64 can say where nothing else bounds it.
_NO_CAP = 1 << 64
# An all-zero start this long is a mount that shows sizes before bytes, not a publisher's mistake.
_ZEROS_NBYTES = 16
# Real writers put 64 KiB and more in a frame and some KiB in a block. The walk costs about a microsecond for each,
# so a blob may not hold many more of them than its content explains.
_FREE_ITEMS = 1024
_CONTENT_NBYTES_PER_ITEM = 256
_FREE_IDLE_FRAMES = 64


class FrameWalker:
    """Walks a blob's frames as its bytes arrive; keeps counters and at most one header.

    Parameters
    ----------
    content_nbytes
        Bytes that the frames decode to together, where the caller knows.
    where
        For errors.
    max_window
        Largest window that the caller's decoder has memory for.
    content_cap
        The most that the content may be, where ``content_nbytes`` is None.
    on_frame
        Called with each frame once its last byte was fed.
    """

    def __init__(
        self,
        *,
        content_nbytes: int | None,
        where: Where,
        max_window: int = MAX_WINDOW,
        content_cap: int | None = None,
        on_frame: Callable[[Frame], None] | None = None,
    ) -> None:
        self._where = where
        self._totals = Totals(max_window=min(max_window, MAX_WINDOW))
        self._content_nbytes = content_nbytes
        self._limit_content(content_nbytes if content_nbytes is not None else content_cap)
        self._on_frame = on_frame
        self._position = 0  # in the blob, after the last byte taken
        self._skip = 0  # bytes of a block, checksum or skippable frame still to pass
        self._ending = False  # the frame ends where the skip does
        self._held = b""  # the part of a header that has arrived
        self._need = _START_NBYTES
        self._step: Callable[[bytes], None] = self._on_start
        self._descriptor = 0
        self._frame = OpenFrame(0, skippable=False)
        self._inside = False  # a frame has begun and not ended

    def feed(self, data: bytes | memoryview) -> None:
        """Walk the next bytes of the blob; raises before they may go to a decoder.

        Raises
        ------
        FrameFormatError
            Bad magic (junk after the last frame), reserved bit, dictionary, window over ``MAX_WINDOW``, reserved
            block type, block over 128 KiB or the window, more content than allowed, a second empty block in a frame,
            or more frames and blocks than the content explains.
        WindowTooLargeError
            A window over ``max_window``, but not over ``MAX_WINDOW``.
        SourceNotReadyError
            The blob starts with 16 zeros.
        """
        at, end = 0, len(data)
        while at < end:
            if self._skip:
                count = min(self._skip, end - at)
                at += count
                self._position += count
                self._skip -= count
                if self._ending and not self._skip:
                    self._end_frame()
                continue
            if not self._held and self._step != self._on_fields:
                at = self._run(data, at)
                if at == end or self._skip:
                    continue
            count = self._need - len(self._held)
            head = self._held + bytes(data[at : at + count])
            count = min(count, end - at)
            at += count
            self._position += count
            if len(head) < self._need:
                self._held = head
                return
            self._held = b""
            self._step(head)

    def _run(self, data: bytes | memoryview, at: int) -> int:
        """Take the fast path from a frame's or block's start; return where it stopped."""
        begin = at
        open_frame = self._frame if self._inside else None
        at, frame, ending = pass_ordinary(
            data, at, self._position, self._totals, open_frame, self._on_frame
        )
        if at == begin:
            return at
        if frame is None:
            self._inside = False
            self._need, self._step = _START_NBYTES, self._on_start
        else:
            self._frame, self._inside = frame, True
            self._need, self._step = BLOCK_HEADER_NBYTES, self._on_block
            self._skip, self._ending = max(0, at - len(data)), ending
        at = min(at, len(data))
        self._position += at - begin
        return at

    def expect(self, content_nbytes: int) -> None:
        """Say what the content's size must be, where the first bytes of the content told.

        Raises
        ------
        FrameFormatError
            The frames walked so far hold more.
        """
        self._content_nbytes = content_nbytes
        self._limit_content(content_nbytes)
        least = self._totals.least
        if self._inside:
            least += max(self._frame.content_nbytes or 0, self._frame.least)
        if least > content_nbytes:
            raise self._refused(
                "the frames hold more than their content's own count says",
                expected=content_nbytes,
                got=least,
            )

    def finish(self) -> None:
        """Check that the blob ends where a frame does, with its content complete.

        Raises
        ------
        FrameFormatError
            It is truncated, holds no frame, or cannot decode to ``content_nbytes``.
        SourceNotReadyError
            It is shorter than 16 bytes and all zeros.
        """
        if self._position == len(self._held) > 0 and not any(self._held):
            raise self._where.not_ready()
        if self._skip or self._held or self._inside:
            raise self._refused("the blob ends within a frame")
        if not self._totals.data_frames:
            raise self._refused("the blob holds no zstd frame")
        expected = self._content_nbytes
        if expected is not None and not self._totals.least <= expected <= self._totals.most:
            got = self._totals.least if expected < self._totals.least else self._totals.most
            raise self._refused(
                "the frames' content is not the expected size", expected=expected, got=got
            )

    def _refused(
        self, message: str, *, expected: object = None, got: object = None
    ) -> FrameFormatError:
        return self._where.refused(message, at=self._position, expected=expected, got=got)

    def _limit_content(self, cap: int | None) -> None:
        self._totals.cap = _NO_CAP if cap is None else cap
        self._totals.max_items = _FREE_ITEMS + self._totals.cap // _CONTENT_NBYTES_PER_ITEM

    def _count_item(self) -> None:
        self._totals.items += 1
        if self._totals.items > self._totals.max_items:
            raise self._refused(
                "more frames and blocks than the content explains",
                expected=self._totals.max_items,
                got=self._totals.items,
            )

    def _on_start(self, head: bytes) -> None:
        """Take a frame's magic and the byte after it."""
        magic = int.from_bytes(head[:4], "little")
        offset = self._position - _START_NBYTES
        if magic == FRAME_MAGIC:
            descriptor = head[4]
            if descriptor & 0x08:
                raise self._refused(
                    "a frame header's reserved bit is set", got=f"{descriptor:#04x}"
                )
            self._descriptor = descriptor
            self._need, self._step = _FIELDS_NBYTES[descriptor], self._on_fields
        elif magic & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
            self._held = head[4:]
            self._need, self._step = 4, self._on_skippable
        elif not any(head) and not offset:
            self._held = head
            self._need, self._step = _ZEROS_NBYTES, self._on_zeros
            return
        else:
            raise self._not_a_frame(offset, magic)
        self._frame = OpenFrame(offset, skippable=magic != FRAME_MAGIC)
        self._inside = True
        self._count_item()

    def _on_zeros(self, head: bytes) -> None:
        raise self._not_a_frame(0, 0) if any(head) else self._where.not_ready()

    def _not_a_frame(self, offset: int, magic: int) -> FrameFormatError:
        return self._where.refused(
            "bytes that are no zstd frame",
            at=offset,
            expected=f"{FRAME_MAGIC:#010x}",
            got=f"{magic:#010x}",
        )

    def _on_skippable(self, head: bytes) -> None:
        self._pass(int.from_bytes(head, "little"), ending=True)

    def _on_fields(self, head: bytes) -> None:
        """Take the frame header's fields: window, dictionary id, content size, each of 0 or more bytes."""
        descriptor = self._descriptor
        single_segment = descriptor & 0x20
        at = 0 if single_segment else 1
        content_at = at + _DICTIONARY_ID_NBYTES[descriptor & 3]
        if any(head[at:content_at]):
            raise self._refused("a frame needs a dictionary")
        content = None
        if content_at < len(head):
            content = int.from_bytes(head[content_at:], "little")
            content += 256 if descriptor >> 6 == 1 else 0
        window = (content or 0) if single_segment else WINDOW_NBYTES[head[0]]
        self._check_sizes(content, window)
        self._frame.open(content, window, has_checksum=descriptor & 0x04 != 0)
        self._need, self._step = BLOCK_HEADER_NBYTES, self._on_block

    def _check_sizes(self, content_nbytes: int | None, window_nbytes: int) -> None:
        if content_nbytes is not None and self._totals.least + content_nbytes > self._totals.cap:
            raise self._refused(
                "a frame's content size is more than is left",
                expected=self._totals.cap - self._totals.least,
                got=content_nbytes,
            )
        if window_nbytes > MAX_WINDOW:
            raise self._refused(
                "a frame's window is too large", expected=MAX_WINDOW, got=window_nbytes
            )
        if window_nbytes > self._totals.max_window:
            raise self._where.window_too_large(
                self._position, self._totals.max_window, window_nbytes
            )

    def _on_block(self, head: bytes) -> None:
        frame = self._frame
        word = int.from_bytes(head, "little")
        kind, nbytes = word >> 1 & 3, word >> 3
        largest = frame.largest_block
        if nbytes > largest:
            raise self._refused("a block is too large", expected=largest, got=nbytes)
        frame.blocks += 1
        self._count_item()
        stored = nbytes
        if kind == COMPRESSED:
            if nbytes < MIN_COMPRESSED_NBYTES:
                raise self._refused(
                    "a compressed block is too small", expected=MIN_COMPRESSED_NBYTES, got=nbytes
                )
            frame.most += largest
        elif kind == RESERVED:
            raise self._refused("a block's type is reserved")
        else:
            self._count_stored(frame, nbytes)
            stored = 1 if kind == RLE else nbytes
        if word & 1:
            self._pass(stored + (CHECKSUM_NBYTES if frame.has_checksum else 0), ending=True)
        else:
            self._pass(stored, ending=False)

    def _count_stored(self, frame: OpenFrame, nbytes: int) -> None:
        """Count a raw or RLE block, whose content size is known."""
        frame.least += nbytes
        frame.most += nbytes
        if not nbytes:
            frame.empty_blocks += 1
            if frame.empty_blocks > 1:
                raise self._refused("a frame holds more than one empty block")
        allowed = frame.content_nbytes
        if allowed is None:
            allowed = self._totals.cap - self._totals.least
        if frame.least > allowed:
            raise self._refused(
                "blocks decode to more than is left", expected=allowed, got=frame.least
            )

    def _pass(self, nbytes: int, *, ending: bool) -> None:
        self._skip, self._ending = nbytes, ending
        if ending and not nbytes:
            self._end_frame()

    def _end_frame(self) -> None:
        frame, totals = self._frame, self._totals
        self._inside = self._ending = False
        self._need, self._step = _START_NBYTES, self._on_start
        declared = frame.content_nbytes
        if declared is not None and frame.most < declared:
            raise self._refused(
                "a frame's blocks cannot fill its content size", expected=declared, got=frame.most
            )
        totals.count_frame(frame)
        # One skippable frame before each data frame is what parallel writers do.
        if totals.idle_frames > _FREE_IDLE_FRAMES + totals.filled_frames:
            raise self._refused("too many frames without content", got=totals.idle_frames)
        if self._on_frame is not None:
            self._on_frame(frame.ended(self._position))


class WalkedSource:
    """What a decoder reads from: a blob's bytes, once the walk has passed them."""

    def __init__(self, read: ReadBytes, nbytes: int, walker: FrameWalker) -> None:
        self._read = read
        self._walker = walker
        self.nbytes = nbytes
        self.position = 0

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes, at most as many as asked for, b"" at the blob's end; raises as the walk does."""
        nbytes = min(nbytes, self.nbytes - self.position)
        data = self._read(nbytes) if nbytes else b""
        # A short first read could hide whether the blob is zeros: the walk must know before the decoder judges.
        while 0 < len(data) < nbytes and self.position == 0:
            more = self._read(nbytes - len(data))
            if not more:
                break
            data += more
        self.position += len(data)
        self._walker.feed(data)
        if self.position == self.nbytes:
            self._walker.finish()
        return data
