"""Literals, sequences and tables to a zstd frame (RFC 8878): every offset is the frame's first repeated one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import part
from gpusync.format.zstd.huffman import CODES, LENGTHS
from gpusync.format.zstd.rfc8878 import (
    COMPRESSED_LITERALS,
    FSE_COMPRESSED_MODE,
    RAW_LITERALS,
    REPEAT_MODE,
    RLE_MODE,
    TREELESS_LITERALS,
)
from gpusync.format.zstd.tables import (
    FACTS,
    FIRST,
    LITERAL_LENGTHS,
    LITERALS,
    LOG,
    MATCH_LENGTHS,
    MODE,
    MOVES,
    PLACE,
    STATES,
    TOLD,
    TOLD_NBYTES,
    Numbers,
)

Bytes = NDArray[np.uint8]

BLOCK_NBYTES = 128 << 10

_U64 = np.uint64
_BLOCK = _U64(BLOCK_NBYTES)


@part
def write_frame(
    nbytes: np.uint64,
    literals: Bytes,
    sequences: Numbers,
    ends: Numbers,
    tables: NDArray[np.uint64],
    frame: Numbers,
) -> np.uint64:
    """Write one frame, and return its bytes, or 0 where a block with sequences would be larger than its content.

    Parameters
    ----------
    nbytes
        Of the content.
    literals, sequences
        Of all blocks. A sequence is literal length code | match length code << 8 | extra bits << 16 | their value << 32.
    ends
        For each block how many literals and sequences there are up to its end.
    tables
        With the codes of literals and the tables of both lengths.
    frame
        Takes the frame; has room for the content, and what a block makes at most behind it.
    """
    out = frame.view(np.uint8)
    blocks = (nbytes + _BLOCK - _U64(1)) // _BLOCK
    at = _put_header(out, nbytes)
    has_codes = has_tables = False
    first_literal = first_sequence = _U64(0)
    for block in range(blocks):
        content = min(_BLOCK, nbytes - block * _BLOCK)
        last = _U64(block + _U64(1) == blocks)
        these = literals[first_literal : ends[block, 0]]
        copies = sequences[first_sequence : ends[block, 1]]
        first_literal, first_sequence = ends[block, 0], ends[block, 1]
        # A zero and a match are nothing but zeros. Decoders before zstd 1.4.4 stumble over a first block of this kind.
        if block > _U64(0) and these.size == 1 and copies.size == 1:
            at = _put(out, at, last | _U64(1 << 1) | content << _U64(3), _U64(3))
            at = _put(out, at, _U64(0), _U64(1))
            continue
        begin = at + _U64(3)
        end = _put_literals(frame, out, begin, these, has_codes, tables[LITERALS])
        end = _put_count(out, end, _U64(copies.size))
        if copies.size:
            end = _put_tables(out, end, has_tables, tables)
            end = _put_sequences(frame, end, copies, tables)
        if end - begin < content:
            _put(out, at, last | _U64(2 << 1) | (end - begin) << _U64(3), _U64(3))
            has_codes = has_codes or out[begin] & 3 == COMPRESSED_LITERALS
            has_tables = has_tables or copies.size > 0
            at = end
        elif copies.size == 0:
            _put(out, at, last | content << _U64(3), _U64(3))
            at = _copy(out, begin, these)
        else:
            return _U64(0)
    return at


@part
def _put(out: Bytes, at: np.uint64, value: np.uint64, count: np.uint64) -> np.uint64:
    """Write a number of so many bytes; return where it ends."""
    for number in range(count):
        out[at + number] = value >> (_U64(8) * number) & _U64(255)
    return at + count


@part
def _put_header(out: Bytes, nbytes: np.uint64) -> np.uint64:
    """Write magic, descriptor (single segment) and content size (3.1.1.1)."""
    at = _put(out, _U64(0), _U64(0xFD2FB528), _U64(4))
    if nbytes < _U64(256):
        return _put(out, at, _U64(0x20) | nbytes << _U64(8), _U64(2))
    if nbytes < _U64(256 + 65536):
        return _put(out, at, _U64(0x60) | (nbytes - _U64(256)) << _U64(8), _U64(3))
    return _put(out, at, _U64(0xA0) | nbytes << _U64(8), _U64(5))


# ---- literals (3.1.1.3.1) ----


@part
def _put_literals(
    frame: Numbers,
    out: Bytes,
    at: np.uint64,
    literals: Bytes,
    has_codes: bool,
    table: Numbers,
) -> np.uint64:
    """Write a block's literals in the form that takes least; return where they end."""
    if table[FACTS, TOLD_NBYTES]:
        end = _put_coded_literals(frame, out, at, literals, has_codes, table)
        if end > at:
            return end
    count = _U64(literals.size)
    kind = _U64(RAW_LITERALS)
    if count < _U64(32):
        at = _put(out, at, kind | count << _U64(3), _U64(1))
    elif count < _U64(4096):
        at = _put(out, at, kind | _U64(1 << 2) | count << _U64(4), _U64(2))
    else:
        at = _put(out, at, kind | _U64(3 << 2) | count << _U64(4), _U64(3))
    return _copy(out, at, literals)


@part
def _copy(out: Bytes, at: np.uint64, data: Bytes) -> np.uint64:
    """Write bytes as they are; return where they end."""
    for number in range(_U64(data.size)):
        out[at + number] = data[number]
    return at + _U64(data.size)


@part
def _put_coded_literals(
    frame: Numbers,
    out: Bytes,
    at: np.uint64,
    literals: Bytes,
    has_codes: bool,
    table: Numbers,
) -> np.uint64:
    """Write literals by their codes; return the end, or ``at`` where that is no gain."""
    count = _U64(literals.size)
    form, bits, streams = _U64(3), _U64(18), _U64(4)
    if count < _U64(1 << 10):
        form, bits, streams = _U64(0), _U64(10), _U64(1)
    elif count < _U64(1 << 14):
        form, bits = _U64(2), _U64(14)
    begin = at + (_U64(4) + bits + bits) // _U64(8)
    end = begin
    kind = _U64(TREELESS_LITERALS)
    if not has_codes:
        kind = _U64(COMPRESSED_LITERALS)
        end = _put_told(out, begin, table)
    sizes = end
    end += _U64(2) * (streams - _U64(1))
    each = (count + streams - _U64(1)) // streams
    for number in range(streams):
        stream = end
        these = literals[number * each : min(count, (number + _U64(1)) * each)]
        end = _put_stream(frame, end, these, table)
        if number < streams - _U64(1):
            sizes = _put(out, sizes, end - stream, _U64(2))
    if end - begin >= count:
        return at
    head = kind | form << _U64(2) | count << _U64(4) | (end - begin) << (_U64(4) + bits)
    _put(out, at, head, begin - at)
    return end


@part
def _put_told(out: Bytes, at: np.uint64, table: Numbers) -> np.uint64:
    """Write a table's description."""
    for number in range(table[FACTS, TOLD_NBYTES]):
        byte = number & _U64(7)
        out[at + number] = table[TOLD, number >> _U64(3)] >> (byte << _U64(3)) & _U64(255)
    return at + _U64(table[FACTS, TOLD_NBYTES])


# ---- streams of bits: written forwards, read backwards ----


@part
def _push(
    frame: Numbers,
    place: np.uint64,
    held: np.uint64,
    value: np.uint64,
    bits: np.uint64,
) -> tuple[np.uint64, np.uint64]:
    """Write bits at a bit's place behind what is held of its word; return the place behind them, and what is held there."""
    used = place & _U64(63)
    held |= value << used
    frame[place >> _U64(6)] = held
    rest = (value >> _U64(1)) >> (_U64(63) - used)
    return place + bits, rest if used + bits > _U64(63) else held


@part
def _begin_stream(frame: Numbers, at: np.uint64) -> np.uint64:
    """Return what is held of the word of a byte's place."""
    word = _U64(frame[at >> _U64(3)])
    return word & ((_U64(1) << ((at & _U64(7)) << _U64(3))) - _U64(1))


@part
def _end_stream(frame: Numbers, place: np.uint64, held: np.uint64) -> np.uint64:
    """Write the bit that ends a stream; return the byte behind it."""
    place, held = _push(frame, place, held, _U64(1), _U64(1))
    frame[place >> _U64(6)] = held
    return (place + _U64(7)) >> _U64(3)


@part
def _put_stream(frame: Numbers, at: np.uint64, literals: Bytes, table: Numbers) -> np.uint64:
    """Write a stream of codes, the last literal first; return where it ends."""
    codes, lengths = table[CODES], table[LENGTHS]
    place, held = at << _U64(3), _begin_stream(frame, at)
    left = _U64(literals.size)
    while left >= _U64(4):
        value = bits = _U64(0)
        for back in range(_U64(1), _U64(5)):
            literal = literals[left - back]
            value |= codes[literal] << bits
            bits += lengths[literal]
        left -= _U64(4)
        place, held = _push(frame, place, held, value, bits)
    while left > _U64(0):
        left -= _U64(1)
        literal = literals[left]
        place, held = _push(frame, place, held, codes[literal], lengths[literal])
    return _end_stream(frame, place, held)


# ---- sequences (3.1.1.3.2) ----


@part
def _put_count(out: Bytes, at: np.uint64, count: np.uint64) -> np.uint64:
    """Write the number of a block's sequences."""
    if count < _U64(128):
        return _put(out, at, count, _U64(1))
    # Never 0x7F00, from which on it takes 3 bytes: a sequence is for 5 bytes of the block at least.
    return _put(out, at, count >> _U64(8) | _U64(128) | (count & _U64(255)) << _U64(8), _U64(2))


@part
def _put_tables(
    out: Bytes, at: np.uint64, has_tables: bool, tables: NDArray[np.uint64]
) -> np.uint64:
    """Write the modes of literal lengths, offsets and match lengths, and the descriptions that come behind them.

    Only described tables are repeated; the others are told again, as libzstd does.
    """
    modes = at
    at += _U64(1)
    told = _U64(RLE_MODE)
    for kind in (_U64(LITERAL_LENGTHS), _U64(MATCH_LENGTHS)):
        table = tables[kind]
        mode = table[FACTS, MODE]
        if mode == _U64(FSE_COMPRESSED_MODE) and has_tables:
            mode = _U64(REPEAT_MODE)
        else:
            at = _put_told(out, at, table)
        if kind == _U64(LITERAL_LENGTHS):
            told |= mode << _U64(2)
            at = _put(
                out, at, _U64(0), _U64(1)
            )  # every offset has the code 0, the first repeated one
        else:
            told = told << _U64(4) | mode << _U64(2)
    out[modes] = told
    return at


@part
def _put_sequences(
    frame: Numbers, at: np.uint64, sequences: Numbers, tables: NDArray[np.uint64]
) -> np.uint64:
    """Write a block's sequences, the last one first; return where they end."""
    lls, mls = tables[LITERAL_LENGTHS], tables[MATCH_LENGTHS]
    ll_states, ll_moves, ml_states, ml_moves = lls[STATES], lls[MOVES], mls[STATES], mls[MOVES]
    place, held = at << _U64(3), _begin_stream(frame, at)
    left = _U64(sequences.size) - _U64(1)
    sequence = sequences[left]
    ll = ll_states[ll_moves[_U64(FIRST) + (sequence & _U64(255))]]
    ml = ml_states[ml_moves[_U64(FIRST) + (sequence >> _U64(8) & _U64(255))]]
    bits = sequence >> _U64(16) & _U64(255)
    place, held = _push(frame, place, held, sequence >> _U64(32), bits)
    while left > _U64(0):
        left -= _U64(1)
        sequence = sequences[left]
        ll_code, ml_code = sequence & _U64(255), sequence >> _U64(8) & _U64(255)
        bits = (ml + ml_moves[ml_code]) >> _U64(16)
        value = ml & ((_U64(1) << bits) - _U64(1))
        ml = ml_states[(ml >> bits) + ml_moves[_U64(PLACE) + ml_code]]
        more = (ll + ll_moves[ll_code]) >> _U64(16)
        value |= (ll & ((_U64(1) << more) - _U64(1))) << bits
        ll = ll_states[(ll >> more) + ll_moves[_U64(PLACE) + ll_code]]
        bits += more
        value |= sequence >> _U64(32) << bits
        bits += sequence >> _U64(16) & _U64(255)
        place, held = _push(frame, place, held, value, bits)
    ml_log, ll_log = mls[FACTS, LOG], lls[FACTS, LOG]
    value = ml & ((_U64(1) << ml_log) - _U64(1))
    value |= (ll & ((_U64(1) << ll_log) - _U64(1))) << ml_log
    place, held = _push(frame, place, held, value, ll_log + ml_log)
    return _end_stream(frame, place, held)
