"""Records of xor_rows (rows.py), judged and then XORed in one at a time.

A record is decoded into one buffer of the thread's, and judged there as a whole before it changes a byte.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import compiled
from gpusync.errors import FrameFormatError
from gpusync.format.frames import BlobReader
from gpusync.format.rows import BAND_NBYTES, FORM_ROWS, FORM_WORDS, ROW_WORDS, Band, band_at
from gpusync.format.where import Where

Bytes = NDArray[np.uint8]

_U64 = np.uint64
_ROW_WORDS = _U64(ROW_WORDS)


class _PerThread(threading.local):
    """Room for a record behind its form, which is as long as its band at most, and for a number with each change.

    Fresh memory would cost more than decoding into it.
    """

    def __init__(self) -> None:
        self.record: Bytes = np.empty(BAND_NBYTES, np.uint8)
        self.begun = np.empty(Band(0, BAND_NBYTES).most_changes + 1, np.uint16)


_local = _PerThread()


def xor_record(reader: BlobReader, band: Band, target: Bytes, where: Where) -> None:
    """Read the next record of a payload, the one of ``band``, and change the bytes of that band in place.

    Parameters
    ----------
    reader
        Stands at the record's first byte.
    target
        The bytes of the whole band, contiguous, at any address.
    where
        For errors.

    Raises
    ------
    FrameFormatError
        The record breaks a rule, or the content ends before it does; ``target`` is as it was.
    """
    if target.size != band.nbytes:
        raise ValueError(f"a band of {band.nbytes} bytes, and a target of {target.size}")
    record = _local.record
    reader.readinto(record.data[:1])
    form = int(record[0])
    if form == FORM_ROWS:
        _read_rows(reader, band, record, target, where)
    elif form == FORM_WORDS:
        reader.readinto(record.data[: band.nbytes])
        _xor_words(record[: band.words], record[band.words : band.nbytes], target)
    else:
        raise _refused(where, band, "the form of a record is unknown", "0 or 1", form)


def _read_rows(reader: BlobReader, band: Band, record: Bytes, target: Bytes, where: Where) -> None:
    """Read a record of form 0 from behind its form on, judge it and change ``target``."""
    counts = record[: band.rows]
    reader.readinto(counts.data)
    changes = int(counts.sum(dtype=np.int64))
    if changes > band.most_changes:
        raise _refused(
            where, band, "a record holds too many changed words", band.most_changes, changes
        )
    if not changes:
        return
    content = record[band.rows : band.rows + 3 * changes]
    reader.readinto(content.data)
    planes = content.reshape(3, changes)
    if not _xor_rows(counts, planes, _local.begun, target):
        raise _broken_rule(counts, planes, band, where)


@compiled("boolean(uint8[::1], uint8[:, ::1], uint16[::1], uint8[::1])")
def _xor_rows(counts: Bytes, planes: Bytes, begun: NDArray[np.uint16], target: Bytes) -> bool:
    """XOR the changes of a band into it; where they break a rule, change nothing and return False.

    Parameters
    ----------
    counts
        Changed words of each row of ``target``.
    planes
        Positions, first and second bytes of the changed words: as many as the counts add up to, at least one.
    begun
        Takes for each change how many rows begin with it or end empty before it; has room for one more.
    """
    positions, low, high = planes[0], planes[1], planes[2]
    rows, changes, nbytes = _U64(counts.size), _U64(positions.size), _U64(target.size)
    last_row, last_change = rows - _U64(1), changes - _U64(1)

    # How many changes a row has cannot be foreseen, so no loop over rows has one over its changes in it.
    for change in range(changes + _U64(1)):
        begun[change] = 0
    at = _U64(0)
    for row in range(rows):
        begun[at] += np.uint16(1)
        at += _U64(counts[row])

    outside, idle, falls = np.uint8(0), np.uint8(0), np.uint8(0)
    for change in range(changes):
        outside |= positions[change]
        idle |= np.uint8((low[change] | high[change]) == 0)
    for change in range(_U64(1), changes):
        falls |= np.uint8(begun[change] == 0) & np.uint8(
            positions[change] <= positions[change - _U64(1)]
        )
    if outside >= _ROW_WORDS or idle or falls:
        return False
    if counts[last_row]:
        begin = (last_row * _ROW_WORDS + _U64(positions[last_change])) << _U64(1)
        if begin >= nbytes or (begin + _U64(1) == nbytes and high[last_change]):
            return False

    so_far = _U64(0)
    for change in range(changes):
        so_far += _U64(begun[change])
        begin = ((so_far - _U64(1)) * _ROW_WORDS + _U64(positions[change])) << _U64(1)
        target[begin] ^= low[change]
        if begin + _U64(1) < nbytes:
            target[begin + _U64(1)] ^= high[change]
    return True


@compiled("void(uint8[::1], uint8[::1], uint8[::1])")
def _xor_words(low: Bytes, high: Bytes, target: Bytes) -> None:
    """XOR the first and second bytes of all words of a band into it; a last word of one byte has no second."""
    for word in range(_U64(high.size)):
        begin = word << _U64(1)
        target[begin] ^= low[word]
        target[begin + _U64(1)] ^= high[word]
    if low.size > high.size:
        target[_U64(target.size) - _U64(1)] ^= low[_U64(high.size)]


def _broken_rule(counts: Bytes, planes: Bytes, band: Band, where: Where) -> FrameFormatError:
    """Return what is wrong with the rows that were found to break a rule."""
    positions, low, high = planes
    words = np.repeat(np.arange(band.rows, dtype=np.uint32) * ROW_WORDS, counts) + positions
    largest = int(positions.max())
    if largest >= ROW_WORDS:
        return _refused(where, band, "a position is outside of its row", ROW_WORDS, largest)
    falls = np.flatnonzero(words[1:] <= words[:-1])
    if falls.size:
        before, got = (int(position) for position in positions[falls[0] : falls[0] + 2])
        return _refused(
            where, band, "positions do not increase strictly within a row", f"over {before}", got
        )
    if int(words[-1]) >= band.words:
        return _refused(where, band, "a position is behind the tensor", band.words, int(words[-1]))
    if not (low | high).all():
        return _refused(where, band, "a changed word has the value 0", "not 0", 0)
    return _refused(where, band, "a change reaches behind the tensor's last byte", 0, int(high[-1]))


def _refused(
    where: Where, band: Band, message: str, expected: object, got: object
) -> FrameFormatError:
    return where.refused(
        f"{message}, in the band at tensor byte {band.begin}", expected=expected, got=got
    )


class RowsLayer:
    """An xor_rows payload as a layer (:class:`gpusync.format.encodings.Layer`).

    A band that lies within a piece is changed there. Of one that a piece's end cuts, old XOR new is kept.
    """

    def __init__(self, reader: BlobReader, nbytes: int, where: Where) -> None:
        self._reader = reader
        self._nbytes = nbytes
        self._where = where
        self._band = Band(0, 0)
        self._delta: Bytes = np.empty(0, np.uint8)

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
            part = self._delta[at - self._band.begin : self._band.nbytes][: piece.size - done]
            target = piece[done : done + part.size]
            np.bitwise_xor(target, part, out=target)
            done += part.size

    def finish(self) -> None:
        self._reader.finish()
        self._delta = np.empty(0, np.uint8)

    def _next(self, rest: Bytes, begin: int) -> int:
        """Read the band from ``begin`` on, where ``rest`` begins; return its bytes if that took it whole, else 0."""
        band = band_at(self._nbytes, begin)
        taken = band.nbytes if rest.size >= band.nbytes else 0
        if taken:
            xor_record(self._reader, band, rest[:taken], self._where)
        else:
            if not self._delta.size:
                self._delta = np.empty(min(BAND_NBYTES, self._nbytes), np.uint8)
            delta = self._delta[: band.nbytes]
            delta.fill(0)
            xor_record(self._reader, band, delta, self._where)
        self._band = band
        return taken
