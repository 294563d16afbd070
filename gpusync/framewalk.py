"""A walk over zstd frames that judges every header before a decoder sees the bytes.

It follows RFC 8878 (3.1: frames, block headers, skippable frames) and decodes nothing. It knows each frame's
exact extent, so junk, truncation, dictionaries, huge windows and floods of empty blocks are refused by counters,
not by what a decoder makes of them. Entropy-coded content is libzstd's to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpusync.errors import FrameFormatError, SourceNotReadyError
from gpusync.types import Frame

MAX_WINDOW = 128 << 20
"""Largest window, in bytes, that a published frame may ask for."""

MAX_BLOCK_NBYTES = 128 << 10
"""Largest zstd block, in bytes."""

_FRAME_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50
_RLE, _COMPRESSED, _RESERVED = 1, 2, 3
_CONTENT_SIZE_NBYTES = (0, 2, 4, 8)
_DICTIONARY_ID_NBYTES = (0, 1, 2, 4)
# An all-zero start this long is a mount that shows sizes before bytes, not a publisher's mistake.
_ZEROS_NBYTES = 16
# Real writers put 64 KiB and more in a frame and some KiB in a block. The walk costs about a microsecond for each,
# so a blob may not hold many more of them than its content explains.
_FREE_ITEMS = 1024
_CONTENT_NBYTES_PER_ITEM = 256
_FREE_IDLE_FRAMES = 64


@dataclass(frozen=True, slots=True)
class Where:
    """Where a blob stands, for errors; ``offset`` is that of its first byte in the file."""

    version: int | None = None
    file: str | None = None
    tensor: str | None = None
    offset: int = 0

    def refused(
        self, message: str, *, at: int = 0, expected: object = None, got: object = None
    ) -> FrameFormatError:
        """Return (not raise) a FrameFormatError about byte ``at`` of the blob."""
        return FrameFormatError(
            message,
            version=self.version,
            file=self.file,
            tensor=self.tensor,
            offset=self.offset + at,
            expected=expected,
            got=got,
        )


class WindowTooLargeError(FrameFormatError):
    """A valid frame needs a larger window than the caller allows; ``window_nbytes`` says which."""

    window_nbytes: int


@dataclass(slots=True)
class _OpenFrame:
    """The frame being walked; ``least`` and ``most`` bound what its blocks so far decode to."""

    offset: int
    skippable: bool = False
    descriptor: int = 0
    content_nbytes: int | None = None
    window_nbytes: int = 0
    blocks: int = 0
    empty_blocks: int = 0
    least: int = 0
    most: int = 0

    @property
    def has_checksum(self) -> bool:
        return bool(self.descriptor & 0x04)

    def field_nbytes(self) -> tuple[int, int, int]:
        """Bytes of the header's fields after the descriptor: window, dictionary id, content size."""
        single_segment = bool(self.descriptor & 0x20)
        content = _CONTENT_SIZE_NBYTES[self.descriptor >> 6] or int(single_segment)
        return int(not single_segment), _DICTIONARY_ID_NBYTES[self.descriptor & 3], content


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
        self._cap = content_nbytes if content_nbytes is not None else content_cap
        self._on_frame = on_frame
        self._position = 0  # in the blob, after the last byte taken
        self._skip = 0  # bytes of a block, checksum or skippable frame still to pass
        self._ending = False  # the frame ends where the skip does
        self._held = bytearray()  # the part of a header that has arrived
        self._need = 4
        self._step: Callable[[bytes], None] = self._on_magic
        self._frame = _OpenFrame(0)
        self._least = 0  # what all ended frames decode to: at least, at most
        self._most = 0
        self._items = 0  # frames and blocks
        self._idle_frames = 0  # skippable or without content
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
            count = min(self._need - len(self._held), end - at)
            head = bytes(data[at : at + count])
            at += count
            self._position += count
            if self._held or count < self._need:
                self._held += head
                if len(self._held) < self._need:
                    return
                head = bytes(self._held)
                self._held.clear()
            self._step(head)

    def expect(self, content_nbytes: int) -> None:
        """Say what the content's size must be, where the first bytes of the content told.

        Raises
        ------
        FrameFormatError
            The frames walked so far hold more.
        """
        self._content_nbytes = self._cap = content_nbytes
        held = self._least + max(self._frame.content_nbytes or 0, self._frame.least)
        if held > content_nbytes:
            raise self._refused(
                "the frames hold more than the content's own count says",
                expected=content_nbytes,
                got=held,
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
            raise self._zeros()
        if self._skip or self._held or self._step != self._on_magic:
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

    def _zeros(self) -> SourceNotReadyError:
        where = self._where
        return SourceNotReadyError(
            "zeros where a blob should be; refresh the mount and retry",
            version=where.version,
            file=where.file,
            tensor=where.tensor,
            offset=where.offset,
        )

    def _await(self, need: int, step: Callable[[bytes], None]) -> None:
        self._need, self._step = need, step

    def _pass(self, nbytes: int, *, ending: bool) -> None:
        self._skip, self._ending = nbytes, ending
        if ending and not nbytes:
            self._end_frame()

    def _count_item(self) -> None:
        self._items += 1
        if (
            self._cap is not None
            and self._items > _FREE_ITEMS + self._cap // _CONTENT_NBYTES_PER_ITEM
        ):
            raise self._refused(
                "more frames and blocks than the content explains",
                expected=self._cap,
                got=self._items,
            )

    def _on_magic(self, head: bytes) -> None:
        magic = int.from_bytes(head, "little")
        offset = self._position - len(head)
        if magic == _FRAME_MAGIC:
            self._frame = _OpenFrame(offset)
            self._await(1, self._on_descriptor)
        elif magic & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
            self._frame = _OpenFrame(offset, skippable=True)
            self._await(4, self._on_skippable)
        elif magic == 0 and offset == 0:
            self._held += head
            self._await(_ZEROS_NBYTES, self._on_zeros)
            return
        else:
            raise self._where.refused(
                "bytes that are no zstd frame",
                at=offset,
                expected=f"{_FRAME_MAGIC:#010x}",
                got=f"{magic:#010x}",
            )
        self._count_item()

    def _on_zeros(self, head: bytes) -> None:
        if any(head):
            raise self._where.refused("bytes that are no zstd frame", got="0x00000000")
        raise self._zeros()

    def _on_skippable(self, head: bytes) -> None:
        self._pass(int.from_bytes(head, "little"), ending=True)

    def _on_descriptor(self, head: bytes) -> None:
        descriptor = head[0]
        if descriptor & 0x08:
            raise self._refused("a frame header's reserved bit is set", got=f"{descriptor:#04x}")
        self._frame.descriptor = descriptor
        self._await(sum(self._frame.field_nbytes()), self._on_fields)

    def _on_fields(self, head: bytes) -> None:
        frame = self._frame
        window_nbytes, dictionary_nbytes, content_nbytes = frame.field_nbytes()
        if any(head[window_nbytes : window_nbytes + dictionary_nbytes]):
            raise self._refused("a frame needs a dictionary")
        content = None
        if content_nbytes:
            content = int.from_bytes(head[window_nbytes + dictionary_nbytes :], "little")
            content += 256 if content_nbytes == 2 else 0
        if window_nbytes:
            base = 1 << (10 + (head[0] >> 3))
            window = base + base // 8 * (head[0] & 7)
        else:
            window = content or 0
        self._check_frame(content, window)
        frame.content_nbytes, frame.window_nbytes = content, window
        self._await(3, self._on_block)

    def _check_frame(self, content_nbytes: int | None, window_nbytes: int) -> None:
        if self._cap is not None and self._least + (content_nbytes or 0) > self._cap:
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
            raise WindowTooLargeError(
                "a frame's window is over the decoder's limit",
                version=self._where.version,
                file=self._where.file,
                tensor=self._where.tensor,
                offset=self._where.offset + self._frame.offset,
                expected=self._max_window,
                got=window_nbytes,
                window_nbytes=window_nbytes,
            )

    def _on_block(self, head: bytes) -> None:
        frame = self._frame
        word = int.from_bytes(head, "little")
        last, kind, nbytes = word & 1, word >> 1 & 3, word >> 3
        largest = min(frame.window_nbytes, MAX_BLOCK_NBYTES)
        if kind == _RESERVED:
            raise self._refused("a block's type is reserved")
        if nbytes > largest:
            raise self._refused("a block is too large", expected=largest, got=nbytes)
        frame.blocks += 1
        self._count_item()
        if kind == _COMPRESSED:
            if nbytes < 2:
                raise self._refused("a compressed block is too small", expected=2, got=nbytes)
            frame.most += largest
        else:
            frame.least += nbytes
            frame.most += nbytes
            if not nbytes:
                frame.empty_blocks += 1
                if frame.empty_blocks > 1:
                    raise self._refused("a frame holds more than one empty block")
        allowed = frame.content_nbytes
        if allowed is None and self._cap is not None:
            allowed = self._cap - self._least
        if allowed is not None and frame.least > allowed:
            raise self._refused(
                "blocks decode to more than is left", expected=allowed, got=frame.least
            )
        stored = 1 if kind == _RLE else nbytes
        self._pass(stored + (4 if last and frame.has_checksum else 0), ending=bool(last))

    def _end_frame(self) -> None:
        frame = self._frame
        declared = frame.content_nbytes
        self._ending = False
        self._frame = _OpenFrame(self._position)
        self._await(4, self._on_magic)
        if not frame.skippable:
            self._data_frames += 1
            if declared is not None and frame.most < declared:
                raise self._refused(
                    "a frame's blocks cannot fill its content size",
                    expected=declared,
                    got=frame.most,
                )
            self._least += frame.least if declared is None else declared
            self._most += frame.most if declared is None else declared
        if frame.skippable or not (declared if declared is not None else frame.most):
            self._idle_frames += 1
            # One skippable frame before each data frame is what parallel writers do.
            if self._idle_frames > _FREE_IDLE_FRAMES + self._data_frames:
                raise self._refused("too many frames without content", got=self._idle_frames)
        if self._on_frame is not None:
            self._on_frame(
                Frame(
                    offset=frame.offset,
                    nbytes=self._position - frame.offset,
                    content_nbytes=0 if frame.skippable else declared,
                    window_nbytes=frame.window_nbytes,
                    has_checksum=frame.has_checksum,
                    skippable=frame.skippable,
                    blocks=frame.blocks,
                )
            )
