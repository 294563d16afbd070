"""FSE tables for counted symbols, and the descriptions by which a decoder makes the same ones (RFC 8878, 4.1).

Tables stand in one array, uint64[4, ROWS, COLUMNS]: for each of the four kinds of symbols there are rows, named below.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import part
from gpusync.format.zstd.rfc8878 import (
    DEFAULT_LITERAL_LENGTHS,
    DEFAULT_LITERAL_LENGTHS_LOG,
    DEFAULT_MATCH_LENGTHS,
    FSE_COMPRESSED_MODE,
    MAX_LITERAL_LENGTHS_LOG,
    MAX_WEIGHTS_LOG,
    MIN_TABLE_LOG,
    PREDEFINED_MODE,
    RLE_MODE,
)

Numbers = NDArray[np.uint64]

LITERALS, LITERAL_LENGTHS, MATCH_LENGTHS, WEIGHTS = range(4)
"""Kinds: literals are coded by Huffman, lengths by FSE; weights describe the literals' codes."""

ROWS, COLUMNS = 7, 512

COUNTS, FACTS, TOLD = range(3)
"""Rows of every kind: counts by symbol, of literals twice, to be added up; facts; the description, 8 bytes a number."""

TOLD_NBYTES, MODE, LOG = range(3)
"""Facts: bytes of the description, 0 where literals have none; an FSE table's mode and accuracy log."""

NORM, STATES, MOVES, _SPREAD = range(3, 7)
"""Rows of an FSE table. A symbol's code is the low bits b of a state s, and another state comes next:
b = (s + moves[symbol]) >> 16, next = states[(s >> b) + moves[PLACE + symbol]]; the first is states[moves[FIRST + symbol]]."""

PLACE, FIRST, _NEXT = 64, 128, 192

MOST_CODES = np.uint64(64)
"""More than there are of lengths, or of weights."""

_U64 = np.uint64
_LESS_THAN_1 = _U64(0xFFFF)
_DEFAULTS = np.zeros((2, 64), np.uint64)
for _row, _default in zip(_DEFAULTS, (DEFAULT_LITERAL_LENGTHS, DEFAULT_MATCH_LENGTHS), strict=True):
    _row[: _default.size] = np.where(_default < 0, int(_LESS_THAN_1), _default)
# Of numbers up to the largest table's size: the highest bit, and 256 times the logarithm to base 2.
_TOP_BIT = np.array([max(number, 1).bit_length() - 1 for number in range(COLUMNS + 2)], np.uint64)
_LOG2 = np.round(256 * np.log2(np.arange(COLUMNS + 1).clip(1))).astype(_U64)


@part
def clear(numbers: Numbers, count: np.uint64) -> None:
    """Set the first numbers to 0."""
    for number in range(count):
        numbers[number] = 0


@part
def put_bits(told: Numbers, at: np.uint64, value: np.uint64, bits: np.uint64) -> np.uint64:
    """Write up to 63 bits at a bit's place; return where they end. What was behind them is lost."""
    word, used = at >> _U64(6), at & _U64(63)
    kept = told[word] & ((_U64(1) << used) - _U64(1))
    told[word] = kept | value << used
    told[word + _U64(1)] = (value >> _U64(1)) >> (_U64(63) - used)
    return at + bits


@part
def choose_table(tables: NDArray[np.uint64], kind: np.uint64) -> None:
    """Build the table with which the counted symbols of a kind, not literals, take least, its description included.

    For weights one is described or it is RLE_MODE; lengths may have the predefined one.
    """
    fse = tables[kind]
    counts, norm, facts = fse[COUNTS], fse[NORM], fse[FACTS]
    symbols = distinct = total = _U64(0)
    for code in range(MOST_CODES):
        if counts[code] != _U64(0):
            symbols = code + _U64(1)
            distinct += _U64(1)
            total += counts[code]
    facts[MODE], facts[LOG], facts[TOLD_NBYTES] = RLE_MODE, 0, 0
    if distinct > _U64(1):
        if not _describe(fse, kind, symbols, total):
            # The log of both predefined tables.
            facts[MODE], facts[LOG] = PREDEFINED_MODE, DEFAULT_LITERAL_LENGTHS_LOG
            facts[TOLD_NBYTES] = 0
            symbols = MOST_CODES
            _set_default(norm, kind, symbols)
    elif distinct == _U64(1):
        clear(norm, symbols)
        norm[symbols - _U64(1)] = 1
        fse[TOLD, 0], facts[TOLD_NBYTES] = symbols - _U64(1), 1
    if symbols:
        _build_table(fse, symbols, facts[LOG])


@part
def _set_default(norm: Numbers, kind: np.uint64, symbols: np.uint64) -> None:
    """Set the norm to the predefined one."""
    for symbol in range(symbols):
        norm[symbol] = _DEFAULTS[kind - _U64(LITERAL_LENGTHS), symbol]


@part
def _describe(fse: Numbers, kind: np.uint64, symbols: np.uint64, total: np.uint64) -> bool:
    """Set norm, facts and description to those of the accuracy log that takes least; False if the predefined table does."""
    facts, norm = fse[FACTS], fse[NORM]
    best, most = _U64(1 << 60), _U64(MAX_WEIGHTS_LOG)
    if kind != _U64(WEIGHTS):
        _set_default(norm, kind, symbols)
        best = _cost(fse, symbols, _U64(DEFAULT_LITERAL_LENGTHS_LOG))
        most = _U64(MAX_LITERAL_LENGTHS_LOG)
    least = max(_U64(MIN_TABLE_LOG), _TOP_BIT[symbols] + _U64(1))
    log = max(least, min(most, _TOP_BIT[min(total, _U64(COLUMNS))] + _U64(1)))
    best_log = _U64(0)
    while True:
        _normalize(fse, symbols, total, log)
        facts[TOLD_NBYTES] = _put_norm(fse[TOLD], norm, log)
        if log == best_log:
            break
        cost = (facts[TOLD_NBYTES] << _U64(11)) + _cost(fse, symbols, log)
        if cost < best:
            best, best_log = cost, log
        elif best_log:
            log = best_log
            continue
        if log == least:
            break
        log -= _U64(1)
    facts[MODE], facts[LOG] = FSE_COMPRESSED_MODE, best_log
    return bool(best_log > _U64(0))


@part
def _cost(fse: Numbers, symbols: np.uint64, log: np.uint64) -> np.uint64:
    """Return what the counted symbols take with the norm, in bits * 256."""
    cost = _U64(0)
    for symbol in range(symbols):
        share = fse[NORM, symbol]
        if share == _LESS_THAN_1:
            share = _U64(1)
        cost += fse[COUNTS, symbol] * ((log << _U64(8)) - _LOG2[share])
    return cost


@part
def _normalize(fse: Numbers, symbols: np.uint64, total: np.uint64, log: np.uint64) -> None:
    """Make the norm of the counts: 1 at least for each that is there, 1 << log together."""
    counts, norm = fse[COUNTS], fse[NORM]
    size = _U64(1) << log
    factor = (_U64(1) << (_U64(40) + log)) // total
    given = _U64(0)
    for symbol in range(symbols):
        share = (counts[symbol] * factor + _U64(1 << 39)) >> _U64(40)
        norm[symbol] = max(share, _U64(counts[symbol] != _U64(0)))
        given += norm[symbol]
    while given != size:
        largest = _U64(0)
        for symbol in range(symbols):
            if norm[symbol] > norm[largest]:
                largest = _U64(symbol)
        if given < size:
            norm[largest] += size - given
            given = size
        else:
            less = min(given - size, max(_U64(1), norm[largest] // _U64(4)))
            norm[largest] -= less
            given -= less


@part
def _put_norm(told: Numbers, norm: Numbers, log: np.uint64) -> np.uint64:
    """Write a table's description; return its bytes."""
    place = put_bits(told, _U64(0), log - _U64(MIN_TABLE_LOG), _U64(4))
    left = _U64(1) << log
    symbol = _U64(0)
    while left > _U64(0):
        bits = _TOP_BIT[left + _U64(1)] + _U64(1)
        half = (_U64(1) << (bits - _U64(1))) - _U64(1)
        short = half + half - left  # so many values, the smallest, take one bit less
        value = norm[symbol] + _U64(1)
        if value < short:
            bits -= _U64(1)
        elif value > half:
            value += short
        place = put_bits(told, place, value, bits)
        left -= norm[symbol]
        symbol += _U64(1)
        if norm[symbol - _U64(1)] == _U64(0):
            zeros = _U64(0)
            while norm[symbol] == _U64(0):
                zeros += _U64(1)
                symbol += _U64(1)
            while zeros >= _U64(3):
                place = put_bits(told, place, _U64(3), _U64(2))
                zeros -= _U64(3)
            place = put_bits(told, place, zeros, _U64(2))
    return (place + _U64(7)) // _U64(8)


@part
def _build_table(fse: Numbers, symbols: np.uint64, log: np.uint64) -> None:
    """Make states and moves of a norm (4.1.1)."""
    norm, states, moves, spread = fse[NORM], fse[STATES], fse[MOVES], fse[_SPREAD]
    size = _U64(1) << log
    step = (size >> _U64(1)) + (size >> _U64(3)) + _U64(3)
    end = size
    total = _U64(0)
    for symbol in range(symbols):
        share = norm[symbol]
        if share == _LESS_THAN_1:
            end -= _U64(1)
            spread[end] = symbol
            share = _U64(1)
        bits = log - _TOP_BIT[share - _U64(1)] if share > _U64(1) else log
        moves[symbol] = (bits << _U64(16)) - (share << bits)
        moves[_U64(PLACE) + symbol] = total - share
        moves[_U64(FIRST) + symbol] = total
        moves[_U64(_NEXT) + symbol] = total
        total += share
    place = _U64(0)
    for symbol in range(symbols):
        if norm[symbol] == _LESS_THAN_1:
            continue
        for _ in range(norm[symbol]):
            spread[place] = symbol
            place = (place + step) & (size - _U64(1))
            while place >= end:
                place = (place + step) & (size - _U64(1))
    for state in range(size):
        next_ = _U64(_NEXT) + spread[state]
        states[moves[next_]] = size + state
        moves[next_] += _U64(1)
