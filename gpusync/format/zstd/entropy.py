"""Compiled parts that read what is entropy-coded in a zstd block: tables, Huffman trees and literals.

Sections are those of RFC 8878. Nothing is taken that libzstd refuses; some things that nobody writes are refused that it
takes. No part reads or writes outside of its arrays, whatever the bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import part
from gpusync.format.zstd import rfc8878

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Word = Any  # a uint64: mypy would have the numbers of a range, and what is made of them, signed

SPARE_NBYTES = 32
"""Bytes before and behind the compressed ones, and behind the literals, that may be read and mean nothing."""

LENGTHS, OFFSETS, MATCHES, WEIGHTS = range(4)
"""Kinds of table: literal lengths, offsets, match lengths, Huffman weights."""

TREE_BITS, ROW, LOG, NUM_MARKS = 0, 1, 4, 7
"""What ``Coded.marks`` holds: the tree's longest code, or 0; rows of the first three tables, and the logs of their sizes."""

NO_ROW, NUM_ROWS = 7, 7
"""A kind's own row has its number; its predefined table is four rows on; ``NO_ROW`` stands for none yet."""

_U64 = np.uint64
_ONE, _TWO, _THREE, _FIVE, _SEVEN = _U64(1), _U64(2), _U64(3), _U64(5), _U64(7)
_BYTE, _LOW = _U64(0xFF), _U64(0xFFFFFFFF)
_VALUES, _MORE_WEIGHTS = 1024, 1536
WORK_WORDS = 2048
_HIGH_BIT = np.array([max(value.bit_length() - 1, 0) for value in range(2048)], np.uint64)
_NUM_CODES = np.array([36, rfc8878.MAX_OFFSET_CODE + 1, 53, 12], np.uint64)
_MAX_LOGS = np.array(
    [
        rfc8878.MAX_LITERAL_LENGTHS_LOG,
        rfc8878.MAX_OFFSETS_LOG,
        rfc8878.MAX_MATCH_LENGTHS_LOG,
        rfc8878.MAX_WEIGHTS_LOG,
    ],
    np.uint64,
)
# By kind and code: baseline, and from bit 32 on extra bits.
_CODES = np.zeros((4, 64), np.uint64)
_CODES[LENGTHS, :36] = rfc8878.LITERAL_LENGTH_BASELINES
_CODES[LENGTHS, :36] |= rfc8878.LITERAL_LENGTH_EXTRA_BITS << _U64(32)
_CODES[OFFSETS, :32] = _ONE << np.arange(32, dtype=np.uint64)
_CODES[OFFSETS, :32] |= np.arange(32, dtype=np.uint64) << _U64(32)
_CODES[MATCHES, :53] = rfc8878.MATCH_LENGTH_BASELINES
_CODES[MATCHES, :53] |= rfc8878.MATCH_LENGTH_EXTRA_BITS << _U64(32)
_CODES[WEIGHTS, :12] = np.arange(12)
# By kind: the predefined probabilities plus one, and the logs of their sums.
_PREDEFINED = np.zeros((3, 64), np.uint64)
_PREDEFINED[LENGTHS, :36] = rfc8878.DEFAULT_LITERAL_LENGTHS + 1
_PREDEFINED[OFFSETS, :29] = rfc8878.DEFAULT_OFFSETS + 1
_PREDEFINED[MATCHES, :53] = rfc8878.DEFAULT_MATCH_LENGTHS + 1
_NUM_PREDEFINED = np.array([36, 29, 53], np.uint64)
_PREDEFINED_LOGS = np.array(
    [
        rfc8878.DEFAULT_LITERAL_LENGTHS_LOG,
        rfc8878.DEFAULT_OFFSETS_LOG,
        rfc8878.DEFAULT_MATCH_LENGTHS_LOG,
    ],
    np.uint64,
)


class Coded(NamedTuple):
    """What blocks are read from, and into.

    ``tree`` has, by a stream's next bits, a byte and from bit 8 on how many of them are its code. ``tables`` have, by row and
    state, the code's baseline; from bit 32 on its extra bits, from 40 on the bits of the next state, from 48 on its least.
    """

    data: Bytes
    literals: Bytes
    tree: NDArray[np.uint16]
    tables: Words
    marks: Words
    work: Words


def new_coded(data_nbytes: int, literals_nbytes: int) -> Coded:
    """Return room for so many compressed bytes, from ``SPARE_NBYTES`` on, and literals."""
    return Coded(
        data=np.zeros(data_nbytes + 2 * SPARE_NBYTES, np.uint8),
        literals=np.zeros(literals_nbytes + SPARE_NBYTES, np.uint8),
        tree=np.zeros(1 << rfc8878.MAX_HUFFMAN_BITS, np.uint16),
        tables=np.zeros((NUM_ROWS, 1 << rfc8878.MAX_LITERAL_LENGTHS_LOG), np.uint64),
        marks=np.zeros(NUM_MARKS, np.uint64),
        work=np.zeros(WORK_WORDS, np.uint64),
    )


@part
def load(data: Bytes, at: Word) -> Word:
    """Return eight bytes, the first lowest: one load, in machine code."""
    low = _U64(data[at]) | _U64(data[at + _ONE]) << 8
    low |= _U64(data[at + _TWO]) << 16 | _U64(data[at + _THREE]) << 24
    high = _U64(data[at + _U64(4)]) | _U64(data[at + _FIVE]) << 8
    return low | (high | _U64(data[at + _U64(6)]) << 16 | _U64(data[at + _SEVEN]) << 24) << 32


@part
def load_bits(data: Bytes, bit: Word, count: Word) -> Word:
    """Return up to 57 bits from ``bit`` on."""
    return load(data, bit >> 3) >> (bit & _SEVEN) & ((_ONE << count) - _ONE)


@part
def last_bit(data: Bytes, end: Word) -> Word:
    """Return the highest bit set before ``end``, from which a stream is read downwards; 0 if its byte is 0."""
    last = data[end - _ONE]
    return ((end - _ONE) << 3) + _HIGH_BIT[last] if last else _U64(0)


# ---- tables ------------------------------------------------------------------------------------------


@part
def _read_distribution(
    data: Bytes, at: Word, end: Word, kind: Word, values: Words
) -> tuple[Word, Word, Word]:
    """Read probabilities, plus one (4.1.1); return the log of their sum, 0 if they are wrong, how many, and their end."""
    log: Word = (data[at] & _U64(15)) + _U64(rfc8878.MIN_TABLE_LOG)
    if log > _MAX_LOGS[kind]:
        return _U64(0), _U64(0), at
    bit, left, count, most = (at << 3) + _U64(4), _ONE << log, _U64(0), _NUM_CODES[kind]
    while left > 0 and count < most and bit <= end << 3:
        width = _HIGH_BIT[left + _ONE]
        value = load_bits(data, bit, width + _ONE)
        short = (_TWO << width) - _TWO - left  # so many values have a bit less
        if value & ((_ONE << width) - _ONE) < short:
            value &= (_ONE << width) - _ONE
        else:
            value -= short if value >> width else _U64(0)
            bit += _ONE
        bit += width
        values[count] = value
        count += _ONE
        left -= value - _ONE if value else _ONE
        zeros = _THREE if value == 1 else _U64(0)
        while zeros == 3 and count < most:
            zeros = load_bits(data, bit, _TWO)
            bit += _TWO
            for number in range(zeros):
                values[count + number] = _ONE
            count += zeros
    if left > 0 or bit > end << 3:
        log = _U64(0)
    return log, count, (bit + _SEVEN) >> 3


@part
def _build_table(
    values: Words, count: Word, log: Word, kind: Word, table: Words, work: Words
) -> None:
    """Spread codes over the states of a table (4.1.1)."""
    codes, numbers = work[:512], work[512:]
    size = _ONE << log
    end = size
    for code in range(count):
        numbers[code] = values[code] - _ONE if values[code] else _ONE
        if values[code] == 0:
            end -= _ONE
            codes[end] = code
    step, at = (size >> 1) + (size >> 3) + _THREE, _U64(0)
    for code in range(count):
        for _ in range(_ONE, values[code]):
            codes[at] = code
            at = at + step & (size - _ONE)
            while at >= end:
                at = at + step & (size - _ONE)
    for state in range(size):
        number = numbers[codes[state]]
        numbers[codes[state]] = number + _ONE
        width = log - _HIGH_BIT[number]
        least = (number << width) - size
        table[state] = _CODES[kind, codes[state]] | width << 40 | least << 48


@part
def read_tables(coded: Coded, at: Word, end: Word) -> Word:
    """Read a block's three tables (3.1.1.3.2.1); return where they end, 0 if they are wrong."""
    data, tables, marks, work = coded.data, coded.tables, coded.marks, coded.work
    values = work[_VALUES:]
    modes = _U64(data[at])
    at += _ONE
    for kind in range(_THREE):
        mode = modes >> (_U64(6) - kind - kind) & _THREE
        row: Word = kind
        log: Word = _U64(0)
        if mode == rfc8878.PREDEFINED_MODE:
            row, log = kind + _U64(4), _PREDEFINED_LOGS[kind]
            if tables[row, 0] == 0:
                for code in range(_NUM_PREDEFINED[kind]):
                    values[code] = _PREDEFINED[kind, code]
                _build_table(values, _NUM_PREDEFINED[kind], log, kind, tables[row], work)
        elif mode == rfc8878.RLE_MODE:
            if at >= end or data[at] >= _NUM_CODES[kind]:
                return _U64(0)
            tables[row, 0] = _CODES[kind, data[at]]
            at += _ONE
        elif mode == rfc8878.FSE_COMPRESSED_MODE:
            log, count, at = _read_distribution(data, at, end, kind, values)
            if log == 0:
                return _U64(0)
            _build_table(values, count, log, kind, tables[row], work)
        else:
            row, log = marks[ROW + kind], marks[LOG + kind]
            if row == NO_ROW:
                return _U64(0)
        marks[ROW + kind], marks[LOG + kind] = row, log
    return at if modes & _THREE == 0 and at < end else _U64(0)


# ---- literals ----------------------------------------------------------------------------------------


@part
def _read_weights(coded: Coded, at: Word, end: Word, weights: Words) -> Word:
    """Read Huffman weights that are compressed (4.2.1.2); return how many, 0 if they are wrong."""
    data, table, work, kind = coded.data, coded.tables[WEIGHTS], coded.work, _U64(WEIGHTS)
    values = work[_VALUES:]
    log, count, at = _read_distribution(data, at, end, kind, values)
    if log == 0 or at >= end:
        return _U64(0)
    _build_table(values, count, log, kind, table, work)
    bit, first = last_bit(data, end), at << 3
    if bit < first + log + log:
        return _U64(0)
    bit -= log + log
    state, other = load_bits(data, bit + log, log), load_bits(data, bit, log)
    for number in range(_U64(254)):
        weights[number] = table[state] & _LOW
        width = table[state] >> 40 & _BYTE
        if bit < first + width:
            weights[number + _ONE] = table[other] & _LOW
            return number + _TWO
        bit -= width
        state, other = other, (table[state] >> 48) + load_bits(data, bit, width)
    return _U64(0)


@part
def _build_tree(weights: Words, count: Word, tree: NDArray[np.uint16], begins: Words) -> Word:
    """Fill a tree's table from all weights but the last (4.2.1.3); return its longest code's bits, 0 if they are wrong."""
    most = _U64(rfc8878.MAX_HUFFMAN_BITS)
    for weight in range(most + _THREE):
        begins[weight] = _U64(0)
    total = _U64(0)
    for symbol in range(count):
        if weights[symbol] > most:
            return _U64(0)
        begins[weights[symbol] + _ONE] += _ONE << weights[symbol] >> 1
        total += _ONE << weights[symbol] >> 1
    if total == 0 or total >> most:
        return _U64(0)
    bits = _HIGH_BIT[total] + _ONE
    left = (_ONE << bits) - total
    weights[count] = _HIGH_BIT[left] + _ONE
    begins[weights[count] + _ONE] += left
    if left & (left - _ONE) or begins[2] < 2:
        return _U64(0)
    for weight in range(_ONE, most + _ONE):
        begins[weight + _ONE] += begins[weight]
    for symbol in range(count + _ONE):
        weight = weights[symbol]
        begin = begins[weight]
        begins[weight] += _ONE << weight >> 1
        for at in range(begin, begins[weight]):
            tree[at] = symbol | (bits + _ONE - weight) << 8
    return bits


@part
def _read_tree(coded: Coded, at: Word, end: Word) -> tuple[Word, Word]:
    """Read a Huffman tree (4.2.1); return its longest code's bits, 0 if it is wrong, and where it ends."""
    weights = coded.work[_MORE_WEIGHTS:]
    head = _U64(coded.data[at])
    at += _ONE
    count = _U64(0)
    stop = at + (head if head < 128 else (head - _U64(126)) >> 1)
    if stop <= end:
        if head < 128:
            count = _read_weights(coded, at, stop, weights)
        else:
            count = head - _U64(127)
            for number in range(count):
                pair = _U64(coded.data[at + (number >> 1)])
                weights[number] = pair & _U64(15) if number & _ONE else pair >> 4
    if count == 0:
        return _U64(0), stop
    return _build_tree(weights, count, coded.tree, coded.work), stop


@part
def _read_five(coded: Coded, bit: Word, shift: Word, at: Word) -> Word:
    """Read five literals from the bits below ``bit``; return where they end."""
    word = load(coded.data, (bit >> 3) - _SEVEN) << (_U64(8) - (bit & _SEVEN))
    for number in range(_FIVE):
        code = _U64(coded.tree[word >> shift])
        coded.literals[at + number] = code & _BYTE
        word <<= code >> 8
        bit -= code >> 8
    return bit


@part
def _read_stream(coded: Coded, bit: Word, first: Word, at: Word, end: Word) -> bool:
    """Read literals ``at`` to ``end`` from a stream's bits between ``first`` and ``bit``; return whether both end together."""
    shift = _U64(64) - coded.marks[TREE_BITS]
    while at + _FIVE <= end and bit >= first:
        bit = _read_five(coded, bit, shift, at)
        at += _FIVE
    while at < end and bit >= first:
        word = load(coded.data, (bit >> 3) - _SEVEN) << (_U64(8) - (bit & _SEVEN))
        code = _U64(coded.tree[word >> shift])
        coded.literals[at] = code & _BYTE
        bit -= code >> 8
        at += _ONE
    return bool(bit == first)


@part
def _read_four_streams(coded: Coded, at: Word, end: Word, count: Word) -> bool:
    """Read literals of four streams (3.1.1.3.1.6), side by side: none waits for another."""
    data, sizes, shift = coded.data, load(coded.data, at), _U64(64) - coded.marks[TREE_BITS]
    at += _U64(6)
    end_1 = at + (sizes & _U64(0xFFFF))
    end_2 = end_1 + (sizes >> 16 & _U64(0xFFFF))
    end_3 = end_2 + (sizes >> 32 & _U64(0xFFFF))
    if at >= end_1 or end_1 >= end_2 or end_2 >= end_3 or end_3 >= end or count < 6:
        return False
    first_1, first_2, first_3, first_4 = at << 3, end_1 << 3, end_2 << 3, end_3 << 3
    bit_1, bit_2 = last_bit(data, end_1), last_bit(data, end_2)
    bit_3, bit_4 = last_bit(data, end_3), last_bit(data, end)
    at_2 = (count + _THREE) >> 2
    at_3, at_4, done = at_2 + at_2, at_2 + at_2 + at_2, _U64(0)
    while (
        at_4 + done + _FIVE <= count
        and bit_1 >= first_1
        and bit_2 >= first_2
        and bit_3 >= first_3
        and bit_4 >= first_4
    ):
        bit_1 = _read_five(coded, bit_1, shift, done)
        bit_2 = _read_five(coded, bit_2, shift, at_2 + done)
        bit_3 = _read_five(coded, bit_3, shift, at_3 + done)
        bit_4 = _read_five(coded, bit_4, shift, at_4 + done)
        done += _FIVE
    fine = _read_stream(coded, bit_1, first_1, done, at_2)
    fine &= _read_stream(coded, bit_2, first_2, at_2 + done, at_3)
    fine &= _read_stream(coded, bit_3, first_3, at_3 + done, at_4)
    return fine and _read_stream(coded, bit_4, first_4, at_4 + done, count)


@part
def read_literals(coded: Coded, at: Word, end: Word, most: Word) -> tuple[bool, Word, Word]:
    """Read a block's literals, ``most`` or fewer (3.1.1.3.1); return whether they are right, their end, and how many."""
    data, marks = coded.data, coded.marks
    head = load(data, at)
    kind, form = head & _THREE, head >> 2 & _THREE
    if kind <= rfc8878.RLE_LITERALS:
        size = (form + _THREE) >> 1 if form & _ONE else _ONE
        count = (head & ((_ONE << (size << 3)) - _ONE)) >> (3 if size == 1 else 4)
        at += size
        step = _U64(kind == rfc8878.RAW_LITERALS)
        stop = at + (count if step else _ONE)
        if stop > end or count > most:
            return False, stop, count
        for number in range(count):
            coded.literals[number] = data[at + step * number]
        return True, stop, count
    width = _U64(10) if form <= 1 else _U64(6) + (form << 2)
    count = head >> 4 & ((_ONE << width) - _ONE)
    at += (_U64(4) + width + width) >> 3
    stop = at + (head >> (_U64(4) + width) & ((_ONE << width) - _ONE))
    if stop > end or count > most or count == 0 or at >= stop:
        return False, stop, count
    if kind == rfc8878.COMPRESSED_LITERALS:
        marks[TREE_BITS], at = _read_tree(coded, at, stop)
    if marks[TREE_BITS] == 0 or at >= stop:
        return False, stop, count
    if form:
        return _read_four_streams(coded, at, stop, count), stop, count
    return _read_stream(coded, last_bit(data, stop), at << 3, _U64(0), count), stop, count
