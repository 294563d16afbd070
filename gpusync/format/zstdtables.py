"""Huffman codes and FSE tables for counted symbols, and the descriptions by which a decoder makes the same ones.

What is made stands in one array, uint64[4, ROWS, COLUMNS]: for each of the four kinds of symbols there are rows, named below.
The sections that are named are those of RFC 8878.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import part
from gpusync.format.zstdcodes import (
    DEFAULT_LITERAL_LENGTHS,
    DEFAULT_LITERAL_LENGTHS_LOG,
    DEFAULT_MATCH_LENGTHS,
    FSE_COMPRESSED_MODE,
    MAX_HUFFMAN_BITS,
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

CODES, LENGTHS, _NODES, _WORK = range(3, 7)
"""Rows of the literals: codes by symbol, and their bits."""

_U64 = np.uint64
_SYMBOLS = _U64(256)
_LESS_THAN_1 = _U64(0xFFFF)
_MOST_CODES = _U64(64)
_DEFAULTS = np.zeros((2, 64), np.uint64)
for _row, _default in zip(_DEFAULTS, (DEFAULT_LITERAL_LENGTHS, DEFAULT_MATCH_LENGTHS), strict=True):
    _row[: _default.size] = np.where(_default < 0, int(_LESS_THAN_1), _default)
# Of numbers up to the largest table's size: the highest bit, and 256 times the logarithm to base 2.
_TOP_BIT = np.array([max(number, 1).bit_length() - 1 for number in range(COLUMNS + 2)], np.uint64)
_LOG2 = np.round(256 * np.log2(np.arange(COLUMNS + 1).clip(1))).astype(_U64)


@part
def build_tables(tables: NDArray[np.uint64]) -> None:
    """Make the codes of literals and the tables of both lengths from their counts."""
    literals = tables[LITERALS]
    count = _make_codes(literals)
    weights = literals[_WORK, _SYMBOLS:]
    _clear(tables[WEIGHTS, COUNTS], _MOST_CODES)
    for symbol in range(count):
        tables[WEIGHTS, COUNTS, weights[symbol]] += _U64(1)
    for kind in (_U64(LITERAL_LENGTHS), _U64(MATCH_LENGTHS), _U64(WEIGHTS)):
        _choose_table(tables[kind], kind)
    _put_weights(literals, weights, count, tables[WEIGHTS])


@part
def _clear(numbers: Numbers, count: np.uint64) -> None:
    """Set the first numbers to 0."""
    for number in range(count):
        numbers[number] = 0


@part
def _put_bits(told: Numbers, at: np.uint64, value: np.uint64, bits: np.uint64) -> np.uint64:
    """Write up to 63 bits at a bit's place; return where they end. What was behind them is lost."""
    word, used = at >> _U64(6), at & _U64(63)
    kept = told[word] & ((_U64(1) << used) - _U64(1))
    told[word] = kept | value << used
    told[word + _U64(1)] = (value >> _U64(1)) >> (_U64(63) - used)
    return at + bits


# ---- FSE tables (4.1) ----


@part
def _choose_table(fse: Numbers, kind: np.uint64) -> None:
    """Build the table with which counted codes take least, its description included, and set its facts."""
    counts, norm, facts = fse[COUNTS], fse[NORM], fse[FACTS]
    symbols = distinct = total = _U64(0)
    for code in range(_MOST_CODES):
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
            symbols = _MOST_CODES
            _set_default(norm, kind, symbols)
    elif distinct == _U64(1):
        _clear(norm, symbols)
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
    place = _put_bits(told, _U64(0), log - _U64(MIN_TABLE_LOG), _U64(4))
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
        place = _put_bits(told, place, value, bits)
        left -= norm[symbol]
        symbol += _U64(1)
        if norm[symbol - _U64(1)] == _U64(0):
            zeros = _U64(0)
            while norm[symbol] == _U64(0):
                zeros += _U64(1)
                symbol += _U64(1)
            while zeros >= _U64(3):
                place = _put_bits(told, place, _U64(3), _U64(2))
                zeros -= _U64(3)
            place = _put_bits(told, place, zeros, _U64(2))
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


# ---- Huffman codes (4.2) ----


@part
def _make_codes(literals: Numbers) -> np.uint64:
    """Make the codes of the literals and behind the work row's start their weights; return how many of them are told."""
    counts, lengths, nodes = literals[COUNTS], literals[LENGTHS], literals[_NODES]
    distinct = _U64(0)
    for symbol in range(_SYMBOLS):
        nodes[distinct] = (counts[symbol] + counts[_SYMBOLS + symbol]) << _U64(8) | symbol
        distinct += _U64(nodes[distinct] >= _SYMBOLS)
    if distinct < _U64(2):
        return _U64(0)
    last = nodes[distinct - _U64(1)] & _U64(255)
    _clear(lengths, last + _U64(1))
    _sort(nodes, distinct)
    _find_depths(literals, distinct)
    _limit_depths(literals, distinct)
    # Codes count up from the longest to the shortest, and by symbol within a length.
    starts = literals[_WORK]
    _clear(starts, _U64(MAX_HUFFMAN_BITS + 1))
    longest = _U64(0)
    for symbol in range(last + _U64(1)):
        starts[lengths[symbol]] += _U64(1)
        longest = max(longest, lengths[symbol])
    place = _U64(0)
    for back in range(longest):
        length = longest - back
        count = starts[length]
        starts[length] = place >> back
        place += count << back
    for symbol in range(last + _U64(1)):
        length = lengths[symbol]
        literals[CODES, symbol] = starts[length]
        starts[length] += _U64(1)
        starts[_SYMBOLS + symbol] = longest + _U64(1) - length if length else _U64(0)
    return _U64(last)


@part
def _sort(numbers: Numbers, count: np.uint64) -> None:
    """Sort the first numbers upwards (Shell's method)."""
    gap = _U64(121)  # then 40, 13, 4, 1
    while gap > _U64(0):
        for begin in range(gap, count):
            number = numbers[begin]
            at = _U64(begin)
            while at >= gap and numbers[at - gap] > number:
                numbers[at] = numbers[at - gap]
                at -= gap
            numbers[at] = number
        gap //= _U64(3)


@part
def _find_depths(literals: Numbers, distinct: np.uint64) -> None:
    """Join the two rarest of the sorted leaves and the joined ones, until one is left; set the leaves' depths."""
    nodes, parents = literals[_NODES], literals[_WORK]
    leaf, joined = _U64(0), distinct
    root = distinct + distinct - _U64(2)
    for node in range(distinct, root + _U64(1)):
        count = _U64(0)
        for _ in range(_U64(2)):
            if joined >= node or (leaf < distinct and nodes[leaf] >> _U64(8) <= nodes[joined]):
                count += nodes[leaf] >> _U64(8)
                parents[leaf] = node
                leaf += _U64(1)
            else:
                count += nodes[joined]
                parents[joined] = node
                joined += _U64(1)
        nodes[node] = count
    nodes[root] = 0
    for back in range(_U64(1), distinct - _U64(1)):
        nodes[root - back] = nodes[parents[root - back]] + _U64(1)
    for number in range(distinct):
        literals[LENGTHS, nodes[number] & _U64(255)] = nodes[parents[number]] + _U64(1)


@part
def _limit_depths(literals: Numbers, distinct: np.uint64) -> None:
    """Shorten what is too long, lengthen the rarest others for it, and shorten what can be: all codes are used up then."""
    nodes, lengths = literals[_NODES], literals[LENGTHS]
    most = _U64(MAX_HUFFMAN_BITS)
    room, taken = _U64(1) << most, _U64(0)
    for leaf in range(distinct):
        symbol = nodes[leaf] & _U64(255)
        lengths[symbol] = min(lengths[symbol], most)
        taken += room >> lengths[symbol]
    while taken > room:
        for leaf in range(distinct):
            symbol = nodes[leaf] & _U64(255)
            if taken > room and lengths[symbol] < most:
                lengths[symbol] += _U64(1)
                taken -= room >> lengths[symbol]
    for back in range(distinct):
        symbol = nodes[distinct - _U64(1) - back] & _U64(255)
        while taken + (room >> lengths[symbol]) <= room:
            taken += room >> lengths[symbol]
            lengths[symbol] -= _U64(1)


@part
def _put_weights(literals: Numbers, weights: Numbers, count: np.uint64, fse: Numbers) -> None:
    """Describe the codes by the weights of all symbols before the last, in the shorter of two forms (4.2.1), if one holds
    them."""
    told = literals[TOLD]
    coded = _code_weights(weights, count, fse)
    place = _U64(0)
    if coded and coded < _U64(128) and coded <= count // _U64(2):
        place = _put_bits(told, place, coded, _U64(8))
        for number in range(coded):
            byte = fse[TOLD, number // _U64(8)] >> (number % _U64(8) * _U64(8)) & _U64(255)
            place = _put_bits(told, place, byte, _U64(8))
    elif count and count <= _U64(128):
        place = _put_bits(told, place, count + _U64(127), _U64(8))
        weights[count] = 0
        for pair in range(_U64(0), count, _U64(2)):
            both = weights[pair] << _U64(4) | weights[pair + _U64(1)]
            place = _put_bits(told, place, both, _U64(8))
    literals[FACTS, TOLD_NBYTES] = place // _U64(8)


@part
def _code_weights(weights: Numbers, count: np.uint64, fse: Numbers) -> np.uint64:
    """Write weights by their table behind its description (4.2.1.2); return the bytes, or 0 where all are the same."""
    states, moves, told, facts = fse[STATES], fse[MOVES], fse[TOLD], fse[FACTS]
    if facts[MODE] != _U64(FSE_COMPRESSED_MODE):
        return _U64(0)
    place, log = facts[TOLD_NBYTES] * _U64(8), facts[LOG]
    # Two states by turns; that of even numbers is written last.
    now = other = _U64(0)
    for back in range(count):
        weight = weights[count - _U64(1) - back]
        if back < _U64(2):
            now = states[moves[_U64(FIRST) + weight]]
        else:
            bits = (now + moves[weight]) >> _U64(16)
            place = _put_bits(told, place, now & ((_U64(1) << bits) - _U64(1)), bits)
            now = states[(now >> bits) + moves[_U64(PLACE) + weight]]
        now, other = other, now
    mask = (_U64(1) << log) - _U64(1)
    place = _put_bits(told, place, now & mask, log)
    place = _put_bits(told, place, other & mask, log)
    place = _put_bits(told, place, _U64(1), _U64(1))
    return (place + _U64(7)) // _U64(8)
