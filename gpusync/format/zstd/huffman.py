"""Huffman codes for counted literals, and their description (RFC 8878, 4.2); in the rows of tables.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import part
from gpusync.format.zstd.rfc8878 import FSE_COMPRESSED_MODE, MAX_HUFFMAN_BITS
from gpusync.format.zstd.tables import (
    COUNTS,
    FACTS,
    FIRST,
    LITERALS,
    LOG,
    MODE,
    MOST_CODES,
    MOVES,
    PLACE,
    STATES,
    TOLD,
    TOLD_NBYTES,
    WEIGHTS,
    Numbers,
    clear,
    put_bits,
)

CODES, LENGTHS, _NODES, _WORK = range(3, 7)
"""Rows of the literals: codes by symbol, and their bits."""

_U64 = np.uint64
_SYMBOLS = _U64(256)


@part
def make_codes(tables: NDArray[np.uint64]) -> np.uint64:
    """Make the codes of the literals, and count their weights; return how many ``describe_codes`` tells."""
    literals, weight_counts = tables[LITERALS], tables[WEIGHTS, COUNTS]
    clear(weight_counts, MOST_CODES)
    counts, lengths, nodes = literals[COUNTS], literals[LENGTHS], literals[_NODES]
    distinct = _U64(0)
    for symbol in range(_SYMBOLS):
        nodes[distinct] = (counts[symbol] + counts[_SYMBOLS + symbol]) << _U64(8) | symbol
        distinct += _U64(nodes[distinct] >= _SYMBOLS)
    if distinct < _U64(2):
        return _U64(0)
    last = nodes[distinct - _U64(1)] & _U64(255)
    clear(lengths, last + _U64(1))
    _sort(nodes, distinct)
    _find_depths(literals, distinct)
    _limit_depths(literals, distinct)
    # Codes count up from the longest to the shortest, and by symbol within a length.
    starts = literals[_WORK]
    clear(starts, _U64(MAX_HUFFMAN_BITS + 1))
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
        weight = longest + _U64(1) - length if length else _U64(0)
        starts[_SYMBOLS + symbol] = weight
        weight_counts[weight] += _U64(symbol < last)
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
def describe_codes(tables: NDArray[np.uint64], count: np.uint64) -> None:
    """Describe the codes by the weights of all symbols before the last, in the shorter of two forms (4.2.1), if one holds
    them. The weights have their own table by now."""
    literals, fse = tables[LITERALS], tables[WEIGHTS]
    weights = literals[_WORK, _SYMBOLS:]
    told = literals[TOLD]
    coded = _code_weights(weights, count, fse)
    place = _U64(0)
    if coded and coded < _U64(128) and coded <= count // _U64(2):
        place = put_bits(told, place, coded, _U64(8))
        for number in range(coded):
            byte = fse[TOLD, number // _U64(8)] >> (number % _U64(8) * _U64(8)) & _U64(255)
            place = put_bits(told, place, byte, _U64(8))
    elif count and count <= _U64(128):
        place = put_bits(told, place, count + _U64(127), _U64(8))
        weights[count] = 0
        for pair in range(_U64(0), count, _U64(2)):
            both = weights[pair] << _U64(4) | weights[pair + _U64(1)]
            place = put_bits(told, place, both, _U64(8))
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
            place = put_bits(told, place, now & ((_U64(1) << bits) - _U64(1)), bits)
            now = states[(now >> bits) + moves[_U64(PLACE) + weight]]
        now, other = other, now
    mask = (_U64(1) << log) - _U64(1)
    place = put_bits(told, place, now & mask, log)
    place = put_bits(told, place, other & mask, log)
    place = put_bits(told, place, _U64(1), _U64(1))
    return (place + _U64(7)) // _U64(8)
