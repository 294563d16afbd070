"""xor_rows: the geometry of its payload, and records decoded one at a time.

A tensor is cut into bands of ``BAND_NBYTES``, a band into rows of ``ROW_WORDS`` 2-byte words. The payload is one record
per band, in order. A record begins with its form:

======= =========================================================================================================
0 rows  u8 per row: its changed words; then three planes of a byte per changed word: position in its row, low byte,
        high byte of old XOR new
1 words the low bytes of old XOR new of all words, then the high bytes
======= =========================================================================================================

The last byte of a tensor of odd size is a word of its own, without a high byte in form 1 and with 0 for it in form 0.
A record of form 0 is never larger than its band's record of form 1 would be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpusync.errors import FrameFormatError
from gpusync.format.frames import BlobReader
from gpusync.format.where import Where

Bytes = NDArray[np.uint8]

BAND_NBYTES = 1 << 20
"""Bytes of a tensor that one record is about; the last band is shorter."""

ROW_WORDS = 128
"""Words of a row; the last one of a tensor may be shorter."""

FORM_ROWS, FORM_WORDS = 0, 1

_ROW_NBYTES = 2 * ROW_WORDS


@dataclass(frozen=True, slots=True)
class Band:
    """A band of a tensor: its first byte in the tensor, and its size."""

    begin: int
    nbytes: int

    @property
    def words(self) -> int:
        """Number of words, a last byte alone included."""
        return -(-self.nbytes // 2)

    @property
    def rows(self) -> int:
        """Number of rows, a short last one included."""
        return -(-self.nbytes // _ROW_NBYTES)

    @property
    def most_changes(self) -> int:
        """Changed words that a record of form 0 may hold: with more it would be larger than one of form 1."""
        return (self.nbytes - self.rows) // 3


def count_bands(nbytes: int) -> int:
    """Return how many bands, and so records, a tensor of ``nbytes`` has."""
    return -(-nbytes // BAND_NBYTES)


def band_at(nbytes: int, begin: int) -> Band:
    """Return the band that begins at tensor byte ``begin`` of a tensor of ``nbytes``."""
    return Band(begin, min(BAND_NBYTES, nbytes - begin))


def least_payload_nbytes(nbytes: int) -> int:
    """Return the size of the smallest payload of a tensor: nothing changed."""
    return count_bands(nbytes) + -(-nbytes // _ROW_NBYTES)


def most_payload_nbytes(nbytes: int) -> int:
    """Return the size of the largest payload of a tensor."""
    return count_bands(nbytes) + nbytes


@dataclass(frozen=True, slots=True)
class SparseDelta:
    """Changed words of a band: uint32 numbers within the band, increasing, and old XOR new, uint16, never 0."""

    words: NDArray[np.uint32]
    values: NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class BandDelta:
    """What a record says of its band; ``content`` is the sparse delta, or all bytes of old XOR new."""

    band: Band
    content: SparseDelta | Bytes

    def dense(self) -> Bytes:
        """Return all bytes of old XOR new."""
        if isinstance(self.content, SparseDelta):
            words = np.zeros(self.band.words, "<u2")
            words[self.content.words] = self.content.values
            return words.view(np.uint8)[: self.band.nbytes]
        return self.content

    def xor_into(self, part: Bytes) -> None:
        """Change the bytes of a whole band in place."""
        if isinstance(self.content, SparseDelta) and part.size % 2 == 0:
            # Words are unique, so the gather and the scatter do not meet.
            part.view("<u2")[self.content.words] ^= self.content.values
        else:
            np.bitwise_xor(part, self.dense(), out=part)


def read_record(reader: BlobReader, band: Band, where: Where) -> BandDelta:
    """Read the next record of a payload, the one of ``band``.

    Parameters
    ----------
    reader
        Stands at the record's first byte.
    where
        For errors.

    Raises
    ------
    FrameFormatError
        The record breaks a rule, or the content ends before it does.
    """
    form = _take(reader, 1)[0]
    if form == FORM_WORDS:
        planes = _take(reader, band.nbytes)
        content = np.empty(band.nbytes, np.uint8)
        content[0::2], content[1::2] = planes[: band.words], planes[band.words :]
        return BandDelta(band, content)
    if form != FORM_ROWS:
        raise _refused(where, band, "the form of a record is unknown", "0 or 1", form)
    counts = _take(reader, band.rows)
    changes = int(counts.sum(dtype=np.int64))
    if changes > band.most_changes:
        raise _refused(
            where, band, "a record holds too many changed words", band.most_changes, changes
        )
    positions, low, high = _take(reader, 3 * changes).reshape(3, changes)
    words = _words_of(counts, positions, band, where)
    values = _values_of(low, high, where, band)
    if band.nbytes % 2 and changes and words[-1] == band.words - 1 and high[-1]:
        raise _refused(
            where, band, "a change reaches behind the tensor's last byte", 0, int(high[-1])
        )
    return BandDelta(band, SparseDelta(words, values))


def _words_of(counts: Bytes, positions: Bytes, band: Band, where: Where) -> NDArray[np.uint32]:
    """Return the numbers of the changed words: positions below ``ROW_WORDS`` that increase strictly within each row.

    So that no row can hold more of them than it has words.
    """
    firsts = np.arange(band.rows, dtype=np.uint32) * ROW_WORDS
    words: NDArray[np.uint32] = np.repeat(firsts, counts)
    words += positions
    if not positions.size:
        return words
    largest = int(positions.max())
    if largest >= ROW_WORDS:
        raise _refused(where, band, "a position is outside of its row", ROW_WORDS, largest)
    if not (words[1:] > words[:-1]).all():
        at = int(np.argmin(words[1:] > words[:-1]))
        raise _refused(
            where,
            band,
            "positions do not increase strictly within a row",
            f"over {positions[at]}",
            int(positions[at + 1]),
        )
    if int(words[-1]) >= band.words:
        raise _refused(where, band, "a position is behind the tensor", band.words, int(words[-1]))
    return words


def _values_of(low: Bytes, high: Bytes, where: Where, band: Band) -> NDArray[np.uint16]:
    values = np.empty((low.size, 2), np.uint8)
    values[:, 0], values[:, 1] = low, high
    joined: NDArray[np.uint16] = values.view("<u2")[:, 0]
    if not joined.all():
        raise _refused(where, band, "a changed word has the value 0", "not 0", 0)
    return joined


def _take(reader: BlobReader, nbytes: int) -> Bytes:
    content = np.empty(nbytes, np.uint8)
    reader.readinto(content.data)
    return content


def _refused(
    where: Where, band: Band, message: str, expected: object, got: object
) -> FrameFormatError:
    return where.refused(
        f"{message}, in the band at tensor byte {band.begin}", expected=expected, got=got
    )


class RowsLayer:
    """An xor_rows payload as a layer (:class:`gpusync.format.encodings.Layer`); keeps one band."""

    def __init__(self, reader: BlobReader, nbytes: int, where: Where) -> None:
        self._reader = reader
        self._nbytes = nbytes
        self._where = where
        self._band = Band(0, 0)
        self._dense: Bytes = np.empty(0, np.uint8)

    def start(self, piece: Bytes, offset: int) -> None:
        piece.fill(0)
        self.apply(piece, offset)

    def apply(self, piece: Bytes, offset: int) -> None:
        done = 0
        while done < piece.size:
            at = offset + done
            end = self._band.begin + self._band.nbytes
            if at >= end:
                done += self._next(piece[done:], end)
                continue
            part = self._dense[at - self._band.begin :][: piece.size - done]
            target = piece[done : done + part.size]
            np.bitwise_xor(target, part, out=target)
            done += part.size

    def finish(self) -> None:
        self._reader.finish()
        self._dense = np.empty(0, np.uint8)

    def _next(self, rest: Bytes, begin: int) -> int:
        """Read the band from ``begin`` on, where ``rest`` begins; return its bytes if that took it whole, else 0."""
        band = band_at(self._nbytes, begin)
        delta = read_record(self._reader, band, self._where)
        self._band = band
        if rest.size < band.nbytes:
            self._dense = delta.dense()
            return 0
        delta.xor_into(rest[: band.nbytes])
        return band.nbytes
