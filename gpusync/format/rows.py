"""xor_rows: the geometry of its payload.

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

BAND_NBYTES = 1 << 20
"""Bytes of a tensor that one record is about; the last band is shorter."""

ROW_WORDS = 128
"""Words of a row; the last one of a tensor may be shorter."""

FORM_ROWS, FORM_WORDS = 0, 1

ROW_NBYTES = 2 * ROW_WORDS


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
        return -(-self.nbytes // ROW_NBYTES)

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
    return count_bands(nbytes) + -(-nbytes // ROW_NBYTES)


def most_payload_nbytes(nbytes: int) -> int:
    """Return the size of the largest payload of a tensor."""
    return count_bands(nbytes) + nbytes
