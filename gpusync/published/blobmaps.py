"""The map of a blob's frames, made without reading all of it.

A map is a promise made by a seek table or by a frame header, and the planner builds on it; whoever reads the frames
walks them and holds them against it. What the device's decoder cannot take is told as a reason, not as an error:
host threads decode it, and refuse it if it breaks the format.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpusync.format.frames import SEEK_TABLE_FOOTER_MAGIC, SEEK_TABLE_FRAME_MAGIC, FrameWalker
from gpusync.format.rows import count_bands, least_payload_nbytes, most_payload_nbytes
from gpusync.published.blobs import BlobFile, BlobSource, locate_blob
from gpusync.types import Encoding, Frame

Positions = NDArray[np.int64]

MAX_FRAME_NBYTES = (1 << 31) - 1
"""Most bytes, compressed or decoded, that nvCOMP takes as one frame (nvcomp/zstd.h)."""

CHECKSUM_REASON = "a frame with a checksum, which only the host verifies"

_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_HEADER_NBYTES = 18  # the longest frame header, magic included (RFC 8878, 3.1.1)
_FOOTER_NBYTES = 9
_TABLE_NBYTES = 17  # of a seek table without entries: magic, size and footer
# Read from a blob's end at once: the table of 500 frames, and the whole of a small blob.
_TAIL_NBYTES = 4096
_WALK_NBYTES = 1 << 20
# A decoder's fixed cost per frame is that of some KiB of content.
_MIN_MEAN_CONTENT_NBYTES = 1024
_FREE_FRAMES = 1024


@dataclass(frozen=True, eq=False, slots=True)
class BlobMap:
    """The frames of a blob that have content, in order.

    Parameters
    ----------
    offset, nbytes
        int64 (frames,): where each begins in the blob, and its compressed size. Skippable frames may lie between.
    content_offset, content_nbytes
        int64 (frames,): where its content begins in the payload, and its size, above 0. Without gaps.
    blob_nbytes
        Size of the blob.
    """

    offset: Positions
    nbytes: Positions
    content_offset: Positions
    content_nbytes: Positions
    blob_nbytes: int

    @property
    def count(self) -> int:
        """Number of frames."""
        return len(self.offset)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all content."""
        return self.content(0, self.count)[1]

    def covering(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first frame, and the one after the last, that hold payload bytes ``begin`` to ``end``."""
        if begin >= end:
            return 0, 0
        if self.count == 1:
            return 0, 1
        starts = self.content_offset
        return (
            int(starts.searchsorted(begin, "right")) - 1,
            int(starts.searchsorted(end, "left")),
        )

    def extent(self, first: int, end: int) -> tuple[int, int]:
        """Return where in the blob the frames from ``first`` to before ``end`` begin and end."""
        if first == end:
            return 0, 0
        return int(self.offset[first]), int(self.offset[end - 1] + self.nbytes[end - 1])

    def content(self, first: int, end: int) -> tuple[int, int]:
        """Return where in the payload their content begins and ends."""
        if first == end:
            return 0, 0
        last = end - 1
        return (
            int(self.content_offset[first]),
            int(self.content_offset[last] + self.content_nbytes[last]),
        )


def read_blob_map(
    source: BlobSource, tensor_nbytes: int, *, untrusted: bool = False
) -> BlobMap | str:
    """Return the map of a tensor's blob, or the reason why the host must decode it.

    The map comes from the seek table at the blob's end, else from the header of a first frame that holds all content
    and so is taken for the whole blob, else from a walk.

    Parameters
    ----------
    tensor_nbytes
        Size of the tensor.
    untrusted
        The store may hold anything: only a blob whose digest the manifest gives goes to the device.

    Raises
    ------
    FrameFormatError, SourceNotReadyError
        A walk of the whole blob was needed and refuses it.
    VersionConflictError, HeaderFormatError
        The shard was replaced, or cannot be read.
    """
    blob = locate_blob(source)
    if untrusted and blob.stated is None:
        return "an untrusted source, and no manifest gives the blob's digest"
    needs = _needs_of(blob.encoding, tensor_nbytes)
    found = _map_by_headers(blob, needs) if tensor_nbytes else None
    if found is None:
        found = _map_by_walk(blob, needs)
    return found if isinstance(found, str) else _unfit(found, needs) or found


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a payload's size must be: exactly ``least`` where it equals ``most``.

    ``frames`` is how many frames the device needs it in, where it cares.
    """

    least: int
    most: int
    frames: int | None = None

    @property
    def exact(self) -> int | None:
        return self.most if self.least == self.most else None

    def allow(self, nbytes: int) -> bool:
        return self.least <= nbytes <= self.most


def _needs_of(encoding: Encoding, tensor_nbytes: int) -> _Needs:
    if encoding == "xor":
        return _Needs(tensor_nbytes, tensor_nbytes)
    if encoding == "xor_rows":
        return _Needs(
            least_payload_nbytes(tensor_nbytes),
            most_payload_nbytes(tensor_nbytes),
            frames=count_bands(tensor_nbytes),
        )
    width = 4 if encoding == "overwrite" else 8  # bytes of the count, and of a position
    return _Needs(width, width + tensor_nbytes * (width + 1))


def _map_by_headers(blob: BlobFile, needs: _Needs) -> BlobMap | str | None:
    """Take the word of the seek table or of the only frame's header; None where there is neither."""
    tail_nbytes = min(blob.nbytes, _TAIL_NBYTES)
    tail = blob.read(blob.nbytes - tail_nbytes, tail_nbytes)
    head = tail[:_HEADER_NBYTES] if tail_nbytes == blob.nbytes else blob.read(0, _HEADER_NBYTES)
    content_nbytes = _declared_content(head)
    found = _parse_seek_table(blob, tail, needs)
    if found is None and content_nbytes is not None and needs.allow(content_nbytes):
        found = _new_map([0], [blob.nbytes], [content_nbytes], blob.nbytes)
    if found is not None and head[:4] == _FRAME_MAGIC and head[4] & 0x04:
        return CHECKSUM_REASON
    return found


def _parse_seek_table(blob: BlobFile, tail: bytes, needs: _Needs) -> BlobMap | None:
    """Return the frames that a seek table lists, if its sums are those of blob and payload.

    The format is the Zstandard Seekable Format's (facebook/zstd, contrib/seekable_format): a skippable frame of
    (compressed size, content size) pairs and a footer of count, descriptor and magic.
    """
    footer = tail[-_FOOTER_NBYTES:]
    if len(tail) < _TABLE_NBYTES or footer[5:] != SEEK_TABLE_FOOTER_MAGIC.to_bytes(4, "little"):
        return None
    count, descriptor = int.from_bytes(footer[:4], "little"), footer[4]
    entry_nbytes = 12 if descriptor & 0x80 else 8
    table_nbytes = _TABLE_NBYTES + count * entry_nbytes
    if descriptor & 0x7C or table_nbytes > blob.nbytes or count > _most_frames(needs.most):
        return None
    begin = blob.nbytes - table_nbytes
    table = tail[-table_nbytes:] if table_nbytes <= len(tail) else blob.read(begin, table_nbytes)
    head = SEEK_TABLE_FRAME_MAGIC.to_bytes(4, "little") + (table_nbytes - 8).to_bytes(4, "little")
    if table[:8] != head:
        return None
    columns = entry_nbytes // 4
    entries = np.frombuffer(table, "<u4", count * columns, 8).reshape(count, columns)
    nbytes, content_nbytes = entries[:, :2].T.astype(np.int64)
    if int(nbytes.sum()) != begin or not needs.allow(int(content_nbytes.sum())):
        return None
    return _new_map(np.cumsum(nbytes) - nbytes, nbytes, content_nbytes, blob.nbytes)


def _declared_content(head: bytes) -> int | None:
    """Return the content size in a frame header (RFC 8878, 3.1.1.1), or None where there is none."""
    if head[:4] != _FRAME_MAGIC or len(head) < 6:
        return None
    descriptor = head[4]
    single_segment = descriptor & 0x20
    size_nbytes = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    at = 5 + (0 if single_segment else 1) + (0, 1, 2, 4)[descriptor & 3]
    if not size_nbytes or len(head) < at + size_nbytes:
        return None
    content_nbytes = int.from_bytes(head[at : at + size_nbytes], "little")
    return content_nbytes + (256 if size_nbytes == 2 else 0)


def _map_by_walk(blob: BlobFile, needs: _Needs) -> BlobMap | str:
    seen = _Seen(needs)
    walker = FrameWalker(
        content_nbytes=needs.exact, content_cap=needs.most, where=blob.where, on_frame=seen.add
    )
    buffer = memoryview(bytearray(min(blob.nbytes, _WALK_NBYTES)))
    for offset in range(0, blob.nbytes, _WALK_NBYTES):
        piece = buffer[: min(_WALK_NBYTES, blob.nbytes - offset)]
        blob.read_into(piece, offset)
        walker.feed(piece)
    walker.finish()
    return seen.map(blob.nbytes)


class _Seen:
    """The frames that a walk has met, 24 bytes each, and no more of them than the device takes."""

    def __init__(self, needs: _Needs) -> None:
        self._needs = needs
        self._columns = array("q"), array("q"), array("q")
        self._most = _most_frames(needs.most)
        self._count = self._unknown = 0
        self._checksum = False

    def add(self, frame: Frame) -> None:
        if frame.skippable:
            return
        self._count += 1
        self._checksum |= frame.has_checksum
        self._unknown += frame.content_nbytes is None
        if self._count <= self._most:
            row = frame.offset, frame.nbytes, frame.content_nbytes or 0
            for column, value in zip(self._columns, row, strict=True):
                column.append(value)

    def map(self, blob_nbytes: int) -> BlobMap | str:
        if self._checksum:
            return CHECKSUM_REASON
        if self._count > self._most:
            return f"{self._count} frames, far more than their content needs"
        offset, nbytes, content_nbytes = self._columns
        if self._unknown:
            if self._count > 1 or self._needs.exact is None:
                return "a frame without content size, in a blob of several or of a sparse payload"
            content_nbytes[0] = self._needs.exact
        return _new_map(offset, nbytes, content_nbytes, blob_nbytes)


def _most_frames(content_nbytes: int) -> int:
    """Return how many frames the device takes for so much content."""
    return _FREE_FRAMES + content_nbytes // _MIN_MEAN_CONTENT_NBYTES


def _new_map(
    offset: Sequence[int] | Positions,
    nbytes: Sequence[int] | Positions,
    content_nbytes: Sequence[int] | Positions,
    blob_nbytes: int,
) -> BlobMap:
    """Return a map of the frames with content."""
    content = np.array(content_nbytes, np.int64)
    columns = (np.array(offset, np.int64), np.array(nbytes, np.int64), content)
    if not content.all():
        columns = tuple(column[content > 0] for column in columns)  # type: ignore[assignment]
    ends = np.cumsum(columns[2])
    return BlobMap(columns[0], columns[1], ends - columns[2], columns[2], blob_nbytes)


def _unfit(found: BlobMap, needs: _Needs) -> str | None:
    """Return why nvCOMP cannot take these frames."""
    if not needs.allow(found.payload_nbytes):
        return "the frames' content sizes are not the payload's"
    if needs.frames not in (None, found.count):
        return f"{found.count} frames for {needs.frames} records: the device takes a frame for each"
    if not found.count:
        return None
    largest = int(max(found.nbytes.max(), found.content_nbytes.max()))
    if largest > MAX_FRAME_NBYTES:
        return f"a frame of {largest} bytes: the device's decoder takes {MAX_FRAME_NBYTES}"
    return None
