"""A walk over zstd frames that judges every header before a decoder sees the bytes.

It follows RFC 8878 (3.1: frames, block headers, skippable frames) and decodes nothing. It knows each frame's
exact extent, so junk, truncation, dictionaries, huge windows and floods of empty blocks are refused by counters,
not by what a decoder makes of them. Entropy-coded content is libzstd's to judge.
"""

from __future__ import annotations

from collections.abc import Callable

from gpusync.errors import FrameFormatError
from gpusync.types import Frame
from gpusync.where import Where

MAX_WINDOW = 128 << 20
"""Largest window, in bytes, that a published frame may ask for."""

MAX_BLOCK_NBYTES = 128 << 10
"""Largest zstd block, in bytes."""

_FRAME_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50
_RLE, _COMPRESSED, _RESERVED = 1, 2, 3
_MIN_COMPRESSED_NBYTES = 2
_START_NBYTES = 5  # magic, and the frame header descriptor or a skippable frame's first size byte
_BLOCK_HEADER_NBYTES = 3
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


class _OpenFrame:
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
        self.content_nbytes: int | None = None
        self.window_nbytes = self.largest_block = 0
        self.has_checksum = False
        self.blocks = self.empty_blocks = 0
        self.least = self.most = 0


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
        self._max_window = min(max_window, MAX_WINDOW)
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
        self._frame = _OpenFrame(0, skippable=False)
        self._inside = False  # a frame has begun and not ended
        self._least = 0  # what all ended frames decode to: at least, at most
        self._most = 0
        self._items = 0  # frames and blocks
        self._idle_frames = 0  # skippable or without content
        self._filled_frames = 0
        self._data_frames = 0

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

    def expect(self, content_nbytes: int) -> None:
        """Say what the content's size must be, where the first bytes of the content told.

        Raises
        ------
        FrameFormatError
            The frames walked so far hold more.
        """
        self._content_nbytes = content_nbytes
        self._limit_content(content_nbytes)
        least = self._least
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
        if not self._data_frames:
            raise self._refused("the blob holds no zstd frame")
        expected = self._content_nbytes
        if expected is not None and not self._least <= expected <= self._most:
            got = self._least if expected < self._least else self._most
            raise self._refused(
                "the frames' content is not the expected size", expected=expected, got=got
            )

    def _refused(
        self, message: str, *, expected: object = None, got: object = None
    ) -> FrameFormatError:
        return self._where.refused(message, at=self._position, expected=expected, got=got)

    def _limit_content(self, cap: int | None) -> None:
        self._cap = _NO_CAP if cap is None else cap
        self._max_items = _FREE_ITEMS + self._cap // _CONTENT_NBYTES_PER_ITEM

    def _count_item(self) -> None:
        self._items += 1
        if self._items > self._max_items:
            raise self._refused(
                "more frames and blocks than the content explains",
                expected=self._max_items,
                got=self._items,
            )

    def _on_start(self, head: bytes) -> None:
        """Take a frame's magic and the byte after it."""
        magic = int.from_bytes(head[:4], "little")
        offset = self._position - _START_NBYTES
        if magic == _FRAME_MAGIC:
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
        self._frame = _OpenFrame(offset, skippable=magic != _FRAME_MAGIC)
        self._inside = True
        self._count_item()

    def _on_zeros(self, head: bytes) -> None:
        raise self._not_a_frame(0, 0) if any(head) else self._where.not_ready()

    def _not_a_frame(self, offset: int, magic: int) -> FrameFormatError:
        return self._where.refused(
            "bytes that are no zstd frame",
            at=offset,
            expected=f"{_FRAME_MAGIC:#010x}",
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
        if single_segment:
            window = content or 0
        else:
            base = 1 << (10 + (head[0] >> 3))
            window = base + base // 8 * (head[0] & 7)
        self._check_sizes(content, window)
        frame = self._frame
        frame.content_nbytes = content
        frame.window_nbytes = window
        frame.largest_block = min(window, MAX_BLOCK_NBYTES)
        frame.has_checksum = bool(descriptor & 0x04)
        self._need, self._step = _BLOCK_HEADER_NBYTES, self._on_block

    def _check_sizes(self, content_nbytes: int | None, window_nbytes: int) -> None:
        if content_nbytes is not None and self._least + content_nbytes > self._cap:
            raise self._refused(
                "a frame's content size is more than is left",
                expected=self._cap - self._least,
                got=content_nbytes,
            )
        if window_nbytes > MAX_WINDOW:
            raise self._refused(
                "a frame's window is too large", expected=MAX_WINDOW, got=window_nbytes
            )
        if window_nbytes > self._max_window:
            raise self._where.window_too_large(self._position, self._max_window, window_nbytes)

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
        if kind == _COMPRESSED:
            if nbytes < _MIN_COMPRESSED_NBYTES:
                raise self._refused(
                    "a compressed block is too small", expected=_MIN_COMPRESSED_NBYTES, got=nbytes
                )
            frame.most += largest
        elif kind == _RESERVED:
            raise self._refused("a block's type is reserved")
        else:
            self._count_stored(frame, nbytes)
            stored = 1 if kind == _RLE else nbytes
        if word & 1:
            self._pass(stored + 4 if frame.has_checksum else stored, ending=True)
        else:
            self._pass(stored, ending=False)

    def _count_stored(self, frame: _OpenFrame, nbytes: int) -> None:
        """Count a raw or RLE block, whose content size is known."""
        frame.least += nbytes
        frame.most += nbytes
        if not nbytes:
            frame.empty_blocks += 1
            if frame.empty_blocks > 1:
                raise self._refused("a frame holds more than one empty block")
        allowed = frame.content_nbytes
        if allowed is None:
            allowed = self._cap - self._least
        if frame.least > allowed:
            raise self._refused(
                "blocks decode to more than is left", expected=allowed, got=frame.least
            )

    def _pass(self, nbytes: int, *, ending: bool) -> None:
        self._skip, self._ending = nbytes, ending
        if ending and not nbytes:
            self._end_frame()

    def _end_frame(self) -> None:
        frame = self._frame
        self._inside = self._ending = False
        self._need, self._step = _START_NBYTES, self._on_start
        declared = 0 if frame.skippable else frame.content_nbytes
        if declared is None:
            least, most = frame.least, frame.most
        else:
            least = most = declared
            if frame.most < declared:
                raise self._refused(
                    "a frame's blocks cannot fill its content size",
                    expected=declared,
                    got=frame.most,
                )
        self._least += least
        self._most += most
        self._data_frames += not frame.skippable
        if most:
            self._filled_frames += 1
        else:
            self._idle_frames += 1
            # One skippable frame before each data frame is what parallel writers do.
            if self._idle_frames > _FREE_IDLE_FRAMES + self._filled_frames:
                raise self._refused("too many frames without content", got=self._idle_frames)
        if self._on_frame is not None:
            self._on_frame(
                Frame(
                    offset=frame.offset,
                    nbytes=self._position - frame.offset,
                    content_nbytes=declared,
                    window_nbytes=frame.window_nbytes,
                    has_checksum=frame.has_checksum,
                    skippable=frame.skippable,
                    blocks=frame.blocks,
                )
            )
