"""Compiled decoding of zstd frames (RFC 8878, whose sections are named) to their non-zero bytes; nonzero.py has the reader.

An entry is ``position << 8 | value``, a byte of content that is not zero. Literals add entries, a match adds those in its
source once more, and everything else only moves the position. Entries are numbered and lie in a ring by number. A recent
offset has a cursor: the number of an entry that is not behind the source of its next match, and follows it.

What is wrong, or not done here, is refused: libzstd decodes what is taken to the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusync.compiled import compiled, part
from gpusync.format.frameruns import COMPRESSED, FRAME_MAGIC, MAX_BLOCK_NBYTES, RLE
from gpusync.format.zstd import rfc8878
from gpusync.format.zstd.entropy import (
    LOG,
    NO_ROW,
    ROW,
    TREE_BITS,
    Bytes,
    Coded,
    Word,
    Words,
    last_bit,
    load,
    load_bits,
    read_literals,
    read_tables,
)

DONE, STARVED, REFUSED = range(3)
"""What a call comes to: the piece is changed; more compressed bytes are needed; the blob is not for this decoder."""

MAX_REACH = 8 << 20
"""Largest window, in bytes: what a match may reach back."""
NUM_KEYS = 1 << 17

# What a blob's state holds: where the content ends so far, and where the next piece begins; where in the compressed bytes
# the next is, and their end; how many to skip; then of the frame: whether there is one, its begin and end in the content,
# its window, and its largest block.
POSITION, PIECE, AT, END, SKIP, IN_FRAME, _FRAME_BEGIN, _FRAME_END, _WINDOW, _LARGEST = range(10)
# Numbers of entries: of all, of those that were XORed in, of those that are not needed any more. Then recent offsets.
ENTRIES, _XORED, _DROPPED, _RECENT = range(10, 14)
STATE_WORDS = 16

_U64 = np.uint64
_ONE, _TWO, _THREE, _SEVEN = _U64(1), _U64(2), _U64(3), _U64(7)
_BYTE, _LOW, _ALL = _U64(0xFF), _U64(0xFFFFFFFF), ~_U64(0)
_KEY = _U64(NUM_KEYS - 1)
_MOST_ENTRIES = _U64(NUM_KEYS - 16)
_OFFSET = _U64((1 << 24) - 1)  # a recent offset is this and, from bit 24 on, its cursor
_NEW = _U64(1 << 63)  # the cursor of an offset that was not there before
_LAST = ~_U64(0xFF << 40)  # of an entry of a table: without bits of a next state
_MAX_BITS = 57


class Room(NamedTuple):
    """What a blob is decoded in: what blocks are read into, its state, and its entries."""

    coded: Coded
    state: Words
    keys: Words


# ---- entries -----------------------------------------------------------------------------------------


@part
def _add_bytes(room: Room, content: Bytes, at: Word, end: Word) -> bool:
    """Add content at the position, which moves; return whether there was room for its entries."""
    state = room.state
    count, most, position = state[ENTRIES], state[_DROPPED] + _MOST_ENTRIES, state[POSITION]
    for number in range(end - at):
        value = _U64(content[at + number])
        if value and count <= most:
            room.keys[count & _KEY] = (position + number) << 8 | value
            count += _ONE
    state[ENTRIES], state[POSITION] = count, position + (end - at)
    return bool(count <= most)


@part
def _copy_entries(
    room: Room, cursor: Word, count: Word, end: Word, offset: Word
) -> tuple[Word, Word]:
    """Add the entries from ``cursor`` to those at ``end`` again, ``offset`` further on; return cursor and number then."""
    most = room.state[_DROPPED] + _MOST_ENTRIES
    while cursor < count <= most and room.keys[cursor & _KEY] < end << 8:
        key = room.keys[cursor & _KEY] + (offset << 8)
        room.keys[count & _KEY] = key
        cursor += _ONE
        count += _ONE
    return cursor, count


@part
def _find(room: Room, source: Word, count: Word) -> Word:
    """Return the number of the first entry at ``source`` or behind it. Which way to go nobody can foretell: no branch."""
    first, left = room.state[_DROPPED], count - room.state[_DROPPED]
    while left > 0:
        half = (left + _ONE) >> 1
        first += half * _U64(room.keys[(first + half - _ONE) & _KEY] < source << 8)
        left -= half
    return first


@part
def _drop_entries(room: Room) -> None:
    """Drop the entries that neither a match nor the piece needs any more."""
    state, position = room.state, room.state[POSITION]
    oldest = min(position - min(position - state[_FRAME_BEGIN], state[_WINDOW]), state[PIECE])
    at = state[_DROPPED]
    while at < state[ENTRIES] and room.keys[at & _KEY] < oldest << 8:
        at += _ONE
    state[_DROPPED] = at
    for number in range(3):
        recent = state[_RECENT + number]
        state[_RECENT + number] = max(recent >> 24, at) << 24 | recent & _OFFSET


# ---- sequences ---------------------------------------------------------------------------------------


@part
def _value(entry: Word, word: Word) -> Word:
    """Return a table's baseline and its extra bits, the lowest of ``word``."""
    return (entry & _LOW) + (word & ((_ONE << (entry >> 32 & _BYTE)) - _ONE))


@part
def _next_state(entry: Word, word: Word) -> Word:
    """Return the state that follows on a table's entry; its bits are the lowest of ``word``."""
    return (entry >> 48) + (word & ((_ONE << (entry >> 40 & _BYTE)) - _ONE))


@part
def _take_recent(
    value: Word, length: Word, first: Word, second: Word, third: Word
) -> tuple[Word, Word, Word]:
    """Return recent offsets after an offset value (3.1.1.5). Which one it is nobody can foretell: there is no branch."""
    choice = value - _U64(length > 0)
    if value > rfc8878.REPEATED_OFFSETS or choice == 3:
        offset = value - _THREE if value > 3 else (first & _OFFSET) - _ONE
        return _NEW | min(offset, _OFFSET), first, second
    not_first, not_second = _U64(0) - _U64(choice > 0), _U64(0) - _U64(choice > 1)
    own = first ^ (first ^ second) & not_first ^ (second ^ third) & not_second
    return own, second ^ (second ^ first) & not_first, third ^ (third ^ second) & not_second


@part
def _add_literals(room: Room, used: Word, length: Word, position: Word, count: Word) -> Word:
    """Add a sequence's literals: two or fewer, mostly, and nobody can foretell how many. Return how many entries there are."""
    literals, state = room.coded.literals, room.state
    for ahead in range(_TWO):
        value = _U64(literals[used + ahead])
        room.keys[count & _KEY] = (position + ahead) << 8 | value
        count += _U64(value != 0) & _U64(length > ahead)
    if length > 2:
        state[ENTRIES], state[POSITION] = count, position + _TWO
        _add_bytes(room, literals, used + _TWO, used + length)
        count = state[ENTRIES]
    return count


@part
def _run_match(
    room: Room, recent: Word, position: Word, length: Word, count: Word
) -> tuple[Word, Word]:
    """Add the entries in a match's source again; return its offset with the cursor then, and how many entries there are."""
    keys, cursor, offset = room.keys, recent >> 24, recent & _OFFSET
    source = position - offset
    if keys[(count - _ONE) & _KEY] >= source << 8:
        if recent >= _NEW:
            cursor = _find(room, source, count)
        for _ in range(2):
            before = keys[cursor & _KEY] < source << 8
            cursor += _U64(before) & _U64(cursor < count)
        while cursor < count and keys[cursor & _KEY] < source << 8:
            cursor += _ONE
        if cursor < count and keys[cursor & _KEY] < (source + length) << 8:
            cursor, count = _copy_entries(room, cursor, count, source + length, offset)
    elif recent >= _NEW:
        cursor = count
    return cursor << 24 | offset, count


@part
def _run_sequences(room: Room, at: Word, end: Word, number: Word, num_literals: Word) -> Word:
    """Run a block's sequences (3.1.1.4); return how many literals they use, more than there are where anything is wrong."""
    coded, state = room.coded, room.state
    data, marks = coded.data, coded.marks
    lengths, offsets = coded.tables[marks[ROW]], coded.tables[marks[ROW + 1]]
    matches = coded.tables[marks[ROW + 2]]
    bit, first = last_bit(data, end), at << 3
    if bit < first + marks[LOG] + marks[LOG + 1] + marks[LOG + 2]:
        return _ALL
    bit -= marks[LOG]
    length_state = load_bits(data, bit, marks[LOG])
    bit -= marks[LOG + 1]
    offset_state = load_bits(data, bit, marks[LOG + 1])
    bit -= marks[LOG + 2]
    match_state = load_bits(data, bit, marks[LOG + 2])
    recent, second, third = state[_RECENT], state[_RECENT + 1], state[_RECENT + 2]
    position, begin, window = state[POSITION], state[_FRAME_BEGIN], state[_WINDOW]
    block_end, used = position + state[_LARGEST], _U64(0)
    count = state[ENTRIES]  # whether there is room for so many is asked at the block's end
    for step in range(_ONE, number + _ONE):
        of_length, of_offset, of_match = (
            lengths[length_state],
            offsets[offset_state],
            matches[match_state],
        )
        if step == number:
            of_length, of_offset, of_match = of_length & _LAST, of_offset & _LAST, of_match & _LAST
        widths = (of_length >> 32) + (of_offset >> 32) + (of_match >> 32)
        extra, following = widths & _BYTE, widths >> 8 & _BYTE
        if extra > _MAX_BITS or bit < first + extra + following:
            return _ALL
        bit -= extra
        word = load(data, bit >> 3) >> (bit & _SEVEN)
        length = _value(of_length, word)
        word >>= of_length >> 32 & _BYTE
        match = _value(of_match, word)
        value = _value(of_offset, word >> (of_match >> 32 & _BYTE))
        bit -= following
        word = load(data, bit >> 3) >> (bit & _SEVEN)
        offset_state = _next_state(of_offset, word)
        word >>= of_offset >> 40 & _BYTE
        match_state = _next_state(of_match, word)
        length_state = _next_state(of_length, word >> (of_match >> 40 & _BYTE))
        recent, second, third = _take_recent(value, length, recent, second, third)
        offset = recent & _OFFSET
        if (
            used + length > num_literals
            or position + length + match > block_end
            or offset - _ONE >= min(position + length - begin, window)
        ):
            return _ALL
        count = _add_literals(room, used, length, position, count)
        used += length
        position += length
        recent, count = _run_match(room, recent, position, match, count)
        position += match
    state[_RECENT], state[_RECENT + 1], state[_RECENT + 2] = recent, second, third
    state[POSITION], state[ENTRIES] = position, count
    return used if bit == first else _ALL


# ---- blocks and frames -------------------------------------------------------------------------------


@part
def _decode_block(room: Room, at: Word, end: Word) -> bool:
    """Decode a compressed block (3.1.1.3); return whether it is right."""
    coded, state = room.coded, room.state
    data = coded.data
    block_end = state[POSITION] + state[_LARGEST]
    fine, at, num_literals = read_literals(coded, at, end, state[_LARGEST])
    if not fine or at >= end:
        return False
    number: Word = _U64(data[at])
    at += _ONE
    if number == 255:
        number = (load(data, at) & _U64(0xFFFF)) + _U64(rfc8878.THREE_BYTE_SEQUENCES)
        at += _TWO
    elif number >= rfc8878.TWO_BYTE_SEQUENCES:
        number = (number & _U64(0x7F)) << 8 | data[at]
        at += _ONE
    used = _U64(0)
    if number > 0:
        at = read_tables(coded, at, end) if at < end else _U64(0)
        used = _run_sequences(room, at, end, number, num_literals) if at else _ALL
    elif at != end or data[at - _ONE]:
        return False
    if used > num_literals or not _add_bytes(room, coded.literals, used, num_literals):
        return False
    return bool(state[POSITION] <= block_end)


@part
def _open_frame(room: Room) -> int:
    """Take a frame's header (3.1.1.1), or a skippable frame's (3.1.2)."""
    data, marks, state = room.coded.data, room.coded.marks, room.state
    at, left = state[AT], state[END] - state[AT]
    if left < 8:
        return STARVED
    magic, descriptor = load(data, at) & _LOW, _U64(data[at + _U64(4)])
    if magic >> 4 == 0x184D2A5:
        state[SKIP] = load(data, at + _U64(4)) & _LOW
        state[AT] += _U64(8)
        return DONE
    if magic != FRAME_MAGIC or descriptor & _U64(0x0F):
        return REFUSED
    single, form = descriptor >> 5 & _ONE, descriptor >> 6
    width = _ONE << form if form else single
    if left < _U64(6) - single + width:
        return STARVED
    at += _U64(5)
    window = _U64(data[at])
    window = (_U64(8) | window & _SEVEN) << 7 << (window >> 3)
    at += _ONE - single
    content = load(data, at)
    if width < 8:
        content &= (_ONE << (width << 3)) - _ONE
    if form == 1:
        content += _U64(256)
    if single:
        window = content
    if window > MAX_REACH or content >> 48:
        return REFUSED
    state[AT], state[IN_FRAME] = at + width, _ONE
    state[_FRAME_BEGIN], state[_FRAME_END] = state[POSITION], state[POSITION] + content
    if width == 0:
        state[_FRAME_END] = _ALL
    state[_WINDOW], state[_LARGEST] = window, min(window, _U64(MAX_BLOCK_NBYTES))
    marks[TREE_BITS], cursor = _U64(0), state[ENTRIES] << 24
    state[_RECENT], state[_RECENT + 1], state[_RECENT + 2] = (
        cursor | _ONE,
        cursor | _U64(4),
        cursor | _U64(8),
    )
    for kind in range(3):
        marks[ROW + kind] = _U64(NO_ROW)
    return DONE


@part
def _take_block(room: Room) -> int:
    """Take a block (3.1.1.2)."""
    data, literals, state = room.coded.data, room.coded.literals, room.state
    at, left = state[AT], state[END] - state[AT]
    head = load(data, at) & _U64(0xFFFFFF)
    kind, size = head >> 1 & _THREE, head >> 3
    stored = _ONE if kind == RLE else size
    if left >= 3 and (size > state[_LARGEST] or kind > COMPRESSED):
        return REFUSED
    if left < 3 or left - _THREE < stored:
        return STARVED
    at += _THREE
    state[AT] = at + stored
    _drop_entries(room)
    if kind == COMPRESSED:
        fine = _decode_block(room, at, state[AT])
    elif kind == RLE and data[at]:
        for number in range(size):
            literals[number] = data[at]
        fine = _add_bytes(room, literals, _U64(0), size)
    elif kind == RLE:
        state[POSITION] += size
        fine = True
    else:
        fine = _add_bytes(room, data, at, state[AT])
    frame_end = state[_FRAME_END]
    if head & _ONE:
        state[IN_FRAME] = _U64(0)
        fine &= frame_end == _ALL or frame_end == state[POSITION]
    return DONE if fine and state[POSITION] <= frame_end else REFUSED


@compiled(
    "uint64(uint8[::1], uint8[::1], uint8[::1], uint16[::1], uint64[:, ::1], uint64[::1], uint64[::1],"
    " uint64[::1], uint64[::1])"
)
def xor_nonzero(
    piece: Bytes,
    data: Bytes,
    literals: Bytes,
    tree: np.ndarray,
    tables: Words,
    marks: Words,
    work: Words,
    state: Words,
    keys: Words,
) -> int:
    """Decode up to the end of the next piece, of an empty one all that there is, and XOR it into ``piece``."""
    room = Room(Coded(data, literals, tree, tables, marks, work), state, keys)
    end = state[PIECE] + _U64(piece.size)
    while state[POSITION] < end or piece.size == 0:
        if state[SKIP]:
            taken = min(state[SKIP], state[END] - state[AT])
            state[SKIP] -= taken
            state[AT] += taken
            step = DONE if taken else STARVED
        elif state[IN_FRAME]:
            step = _take_block(room)
        else:
            step = _open_frame(room)
        if step != DONE:
            return step
    at, count, begin = state[_XORED], state[ENTRIES], state[PIECE]
    while at < count and keys[at & _KEY] < end << 8:
        key = keys[at & _KEY]
        piece[(key >> 8) - begin] ^= key & _BYTE
        at += _ONE
    state[_XORED], state[PIECE] = at, end
    return DONE
