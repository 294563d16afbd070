"""The numbers of RFC 8878 that whoever writes or reads zstd's sequences needs; sections are the RFC's.

A sequence says: copy so many literals, then a match of such a length from such an offset back. Each of the three is a
code, spread by a finite state entropy (FSE) table, and as many extra bits as the code says: value = baseline + extra bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Section 3.1.1.3.2.1.1.
LITERAL_LENGTH_EXTRA_BITS: NDArray[np.uint64] = np.array(
    [0] * 16 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], np.uint64
)
"""By literal length code, 0 to 35: extra bits."""

LITERAL_LENGTH_BASELINES: NDArray[np.uint64] = np.array(
    [
        *range(16),
        *(16, 18, 20, 22, 24, 28, 32, 40, 48, 64),
        *(1 << bits for bits in range(7, 17)),
    ],
    np.uint64,
)
"""By literal length code, 0 to 35: the shortest length, in bytes."""

MATCH_LENGTH_EXTRA_BITS: NDArray[np.uint64] = np.array(
    [0] * 32 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], np.uint64
)
"""By match length code, 0 to 52: extra bits."""

MATCH_LENGTH_BASELINES: NDArray[np.uint64] = np.array(
    [
        *range(3, 35),
        *(35, 37, 39, 41, 43, 47, 51, 59, 67, 83, 99),
        *((1 << bits) + 3 for bits in range(7, 17)),
    ],
    np.uint64,
)
"""By match length code, 0 to 52: the shortest length, in bytes."""

MAX_OFFSET_CODE = 31
"""Offset code n has n extra bits and the baseline 1 << n; more than 31 is not allowed (section 3.1.1.3.2.1.1)."""

REPEATED_OFFSETS = 3
"""Offset values up to this one name a recent offset; larger ones are an offset and this (section 3.1.1.5)."""

FIRST_REPEATED_OFFSETS = (1, 4, 8)
"""The recent offsets at a frame's start, the latest first (section 3.1.1.5)."""

# Section 3.1.1.3.2.2: distributions for Predefined_Mode. -1 is a probability of less than 1.
DEFAULT_LITERAL_LENGTHS: NDArray[np.int64] = np.array(
    [4, 3, *[2] * 11, 1, 1, 1, *[2] * 9, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1], np.int64
)
DEFAULT_LITERAL_LENGTHS_LOG = 6

DEFAULT_MATCH_LENGTHS: NDArray[np.int64] = np.array(
    [1, 4, 3, *[2] * 6, *[1] * 37, *[-1] * 7], np.int64
)
DEFAULT_MATCH_LENGTHS_LOG = 6

DEFAULT_OFFSETS: NDArray[np.int64] = np.array([*[1] * 6, 2, 2, 2, *[1] * 15, *[-1] * 5], np.int64)
DEFAULT_OFFSETS_LOG = 5

# Sections 3.1.1.3.2.1 (literal lengths, offsets, match lengths), 4.1.1 (every table) and 4.2.1 (Huffman weights).
MAX_LITERAL_LENGTHS_LOG = 9
MAX_MATCH_LENGTHS_LOG = 9
MAX_OFFSETS_LOG = 8
MIN_TABLE_LOG = 5
MAX_WEIGHTS_LOG = 6

MAX_HUFFMAN_BITS = 11
"""The longest Huffman code of a literal (section 4.2.1)."""

# Section 3.1.1.3.2.1: how a table is told, two bits for each.
PREDEFINED_MODE, RLE_MODE, FSE_COMPRESSED_MODE, REPEAT_MODE = range(4)

# Section 3.1.1.3.1.1: how a block's literals are told.
RAW_LITERALS, RLE_LITERALS, COMPRESSED_LITERALS, TREELESS_LITERALS = range(4)

# Section 3.1.1.3.2.1: the number of sequences, in one byte below the first, in two below the second plus 1 << 8, else in three.
TWO_BYTE_SEQUENCES = 128
THREE_BYTE_SEQUENCES = 0x7F00
