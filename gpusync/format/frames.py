"""Blobs: walking one whole, and decoding one as a stream in bounded memory.

A BlobReader shows every compressed byte to the walk (framewalk.py) before libzstd gets it, and accepts a blob only
where walk and decoder agree on its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, cast

import zstandard

from gpusync.format.framewalk import (
    MAX_BLOCK_NBYTES,
    MAX_WINDOW,
    READ_NBYTES,
    FrameWalker,
    ReadBytes,
    WalkedSource,
)
from gpusync.format.where import Where, WindowTooLargeError
from gpusync.types import Frame

__all__ = [
    "MAX_BLOCK_NBYTES",
    "MAX_WINDOW",
    "SEEK_TABLE_FOOTER_MAGIC",
    "SEEK_TABLE_FRAME_MAGIC",
    "BlobReader",
    "FrameWalker",
    "ReadBytes",
    "Where",
    "WindowTooLargeError",
    "check_seek_table",
    "walk_frames",
]

SEEK_TABLE_FRAME_MAGIC = 0x184D2A5E
SEEK_TABLE_FOOTER_MAGIC = 0x8F92EAB1

# The shortest block with content, header included: RLE, up to 128 KiB of one byte.
_MIN_BLOCK_NBYTES = 4
# The smallest window limit that libzstd takes.
_MIN_WINDOW = 1 << 10


class BlobReader:
    """Decodes a blob front to back.

    Parameters
    ----------
    read
        Gives the blob's bytes in order. What it raises passes through.
    nbytes
        Size of the blob; no more is ever asked for.
    content_nbytes
        Bytes that it decodes to, where the caller knows.
    where
        For errors.
    max_window
        Largest zstd window that may be allocated: the decoder's memory is this and about half a MiB.
    content_cap
        The most that the content may be, where ``content_nbytes`` is None.
    """

    def __init__(
        self,
        read: ReadBytes,
        *,
        nbytes: int,
        content_nbytes: int | None,
        where: Where,
        max_window: int = MAX_WINDOW,
        content_cap: int | None = None,
    ) -> None:
        self._where = where
        self._walker = FrameWalker(
            content_nbytes=content_nbytes,
            where=where,
            max_window=max_window,
            content_cap=content_cap,
        )
        self._source = WalkedSource(read, nbytes, self._walker)
        self._content_position = 0
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(max_window, _MIN_WINDOW))
        self._stream = decompressor.stream_reader(
            cast(IO[bytes], self._source), read_size=READ_NBYTES, read_across_frames=True
        )

    def expect(self, content_nbytes: int) -> None:
        """Say how much content there must be, where its first bytes told.

        Raises
        ------
        FrameFormatError
            The blob holds more, or is too short to hold as much: checked before anyone allocates for it.
        """
        most = self._source.nbytes // _MIN_BLOCK_NBYTES * MAX_BLOCK_NBYTES
        if content_nbytes > most:
            raise self._where.refused(
                "the blob is too short for the content that its count promises",
                expected=content_nbytes,
                got=most,
            )
        self._walker.expect(content_nbytes)

    def readinto(self, out: memoryview) -> None:
        """Fill ``out``, writable bytes of the caller's, with the next content. The GIL is released meanwhile.

        Raises
        ------
        FrameFormatError
            The content ends before, or the walk or libzstd refuses the blob.
        SourceNotReadyError
            The blob is zeros.
        """
        done = 0
        while done < len(out):
            count = self._decode(out[done:])
            if not count:
                self._walker.finish()
                raise self._where.refused(
                    "the content ends too early",
                    at=self._source.position,
                    expected=self._content_position + len(out) - done,
                    got=self._content_position,
                )
            done += count
            self._content_position += count

    def finish(self) -> None:
        """Check that there is no more content and that the whole blob was walked.

        Raises
        ------
        FrameFormatError
            There is more of either, or a frame's checksum is wrong.
        """
        # libzstd looks at an end-of-frame checksum only when it is asked for more.
        if self._decode(memoryview(bytearray(1))):
            raise self._where.refused(
                "the content is longer than expected",
                at=self._source.position,
                expected=self._content_position,
            )
        self._walker.finish()
        if self._source.position != self._source.nbytes:
            raise self._where.refused(
                "the blob ends too early", expected=self._source.nbytes, got=self._source.position
            )

    def _decode(self, out: memoryview) -> int:
        try:
            return self._stream.readinto(out)
        except zstandard.ZstdError as err:
            raise self._where.refused(
                f"libzstd refuses the blob: {err}", at=self._source.position
            ) from err


def walk_frames(
    blob: bytes | memoryview,
    *,
    content_nbytes: int | None,
    where: Where,
    max_window: int = MAX_WINDOW,
) -> tuple[Frame, ...]:
    """Return the frames of a complete blob, in order; raises as FrameWalker does."""
    frames: list[Frame] = []
    walker = FrameWalker(
        content_nbytes=content_nbytes, where=where, max_window=max_window, on_frame=frames.append
    )
    walker.feed(blob)
    walker.finish()
    return tuple(frames)


def check_seek_table(blob: bytes | memoryview, frames: Sequence[Frame], *, where: Where) -> bool:
    """Check a blob's seek table (Zstandard Seekable Format) against its walked frames.

    Returns
    -------
    bool
        True where the last frame is a seek table and lists exactly the frames before it; False where there is none.

    Raises
    ------
    FrameFormatError
        There is a table, but it does not describe the frames.
    """
    if not frames or not frames[-1].skippable:
        return False
    table = bytes(blob[frames[-1].offset : frames[-1].offset + frames[-1].nbytes])
    if int.from_bytes(table[:4], "little") != SEEK_TABLE_FRAME_MAGIC:
        return False
    # Magic and size (8 bytes), the entries, then: number of frames (4), descriptor (1), magic (4).
    footer = table[-9:]
    listed = int.from_bytes(footer[:4], "little")
    entry_nbytes = 12 if footer[4] & 0x80 else 8
    if (
        len(table) < 17
        or int.from_bytes(footer[5:], "little") != SEEK_TABLE_FOOTER_MAGIC
        or footer[4] & 0x7C
        or len(table) != 17 + listed * entry_nbytes
        or listed != len(frames) - 1
    ):
        raise where.refused(
            "the seek table breaks the format, or lists other frames",
            at=frames[-1].offset,
            expected=len(frames) - 1,
            got=listed,
        )
    for number, frame in enumerate(frames[:-1]):
        at = 8 + number * entry_nbytes
        nbytes = int.from_bytes(table[at : at + 4], "little")
        content_nbytes = int.from_bytes(table[at + 4 : at + 8], "little")
        if nbytes != frame.nbytes or content_nbytes != (frame.content_nbytes or 0):
            raise where.refused(
                "the seek table disagrees with a frame",
                at=frame.offset,
                expected=(frame.nbytes, frame.content_nbytes),
                got=(nbytes, content_nbytes),
            )
    return True
