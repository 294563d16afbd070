"""From nearly empty content, such as old XOR new, to a zstd frame whose matches are all runs of zeros.

zstd's own search looks for any match; here all are known beforehand. A run of zeros is one zero as a literal and a match
with offset 1, which is the first repeated offset of every frame, so that offsets take no bits. Literals are the changed
bytes, the zero before each run, and runs that are too short. Their codes and the tables of both lengths are made once for a
frame (huffman.py, tables.py), and told in its first block that needs them (frames.py).
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import compiled, part
from gpusync.format.zstd.frames import BLOCK_NBYTES, Bytes, write_frame
from gpusync.format.zstd.huffman import describe_codes, make_codes
from gpusync.format.zstd.rfc8878 import (
    LITERAL_LENGTH_BASELINES,
    LITERAL_LENGTH_EXTRA_BITS,
    MATCH_LENGTH_BASELINES,
    MATCH_LENGTH_EXTRA_BITS,
)
from gpusync.format.zstd.tables import (
    COLUMNS,
    COUNTS,
    LITERAL_LENGTHS,
    LITERALS,
    MATCH_LENGTHS,
    ROWS,
    WEIGHTS,
    Numbers,
    choose_table,
)

MAX_CONTENT_NBYTES = 1 << 20

_SHORTEST_RUN_NBYTES = 4
_LINE_NBYTES = 64

_U64 = np.uint64
_BLOCK = _U64(BLOCK_NBYTES)
_LINE = _U64(_LINE_NBYTES // 8)  # of so many words, looked at together
_LINES_END = _U64(BLOCK_NBYTES // _LINE_NBYTES)
# Where more than one byte in so many is not 0, libzstd is faster, or makes less of it. One word in 16 is looked at for it.
_MOST_FILLED = _U64(3)
_SAMPLE = _U64(16)
_LOW_BITS = _U64(0x7F7F7F7F7F7F7F7F)
_LANES = _U64(0x0001020304050607)  # 1 << (8 * n) times this has n as its highest byte
# A shorter run takes less as literals.
_SHORTEST_RUN = _U64(_SHORTEST_RUN_NBYTES)
_SHORTEST_MATCH = MATCH_LENGTH_BASELINES[0]


def _codes_by_length(baselines: Numbers, step: int) -> Numbers:
    """Return the codes of lengths from the shortest on: of ``step`` lengths one by one, and then of every ``step``-th."""
    lengths = [*range(step), *range(0, BLOCK_NBYTES, step)]
    above = np.searchsorted(baselines, np.array(lengths, np.uint64) + baselines[0], "right")
    codes: Numbers = above.astype(np.uint64) - _U64(1)
    return codes


# From here on only every so many lengths have a code of their own.
_LL_STEP, _ML_STEP = _U64(64), _U64(128)
_LL_CODES = _codes_by_length(LITERAL_LENGTH_BASELINES, 64)
_ML_CODES = _codes_by_length(MATCH_LENGTH_BASELINES, 128)


class _Room:
    """Room for what becomes of so many frames of so many bytes of content; arguments of ``_encode``."""

    def __init__(self, frames: int, frame_nbytes: int) -> None:
        self.frames, self.frame_nbytes = frames, frame_nbytes
        blocks = -(-frame_nbytes // BLOCK_NBYTES)
        self.lists = np.empty(int(_LINES_END) + BLOCK_NBYTES // 8, np.uint32)
        self.literals: Bytes = np.empty(frame_nbytes + 8, np.uint8)
        shortest = 1 + _SHORTEST_RUN_NBYTES
        self.sequences: Numbers = np.empty(frame_nbytes // shortest + 8, np.uint64)
        self.ends: Numbers = np.empty((blocks, 2), np.uint64)
        self.tables = np.empty((4, ROWS, COLUMNS), np.uint64)
        self.places: Numbers = np.empty((frames, 2), np.uint64)
        # A frame takes no more than its content and a line: its header, 3 bytes a block, and what is left of a word. But codes of
        # literals have up to 11 bits, and only behind a block is it seen that it takes more than its content.
        nbytes = frames * (frame_nbytes + _LINE_NBYTES) + 2 * BLOCK_NBYTES
        self.output: Numbers = np.empty(nbytes // 8, np.uint64)
        self.output_bytes: Bytes = self.output.view(np.uint8)


class _PerThread(threading.local):
    room = _Room(0, 0)


_local = _PerThread()


def compress_runs(payload: Bytes, frame_nbytes: int) -> list[bytes | None]:
    """Return a payload as zstd frames with their sizes in the headers, without checksum and dictionary.

    Parameters
    ----------
    payload
        Contiguous, of any size and at any address.
    frame_nbytes
        Content of every frame but the last, which may be shorter.

    Returns
    -------
    list
        None for a frame that libzstd is the better choice for: too few bytes that are 0, or too few bytes at all. None for
        all, where ``frame_nbytes`` is more than 1 MiB.
    """
    frames = -(-payload.size // frame_nbytes)
    if frame_nbytes > MAX_CONTENT_NBYTES:
        return [None] * frames
    if frames > 1 and frame_nbytes % _LINE_NBYTES:
        begins = range(0, payload.size, frame_nbytes)
        pieces = [payload[begin : begin + frame_nbytes] for begin in begins]
        return [compress_runs(piece, piece.size)[0] for piece in pieces]
    nbytes = payload.size
    if nbytes % _LINE_NBYTES:
        padded = np.zeros(-(-nbytes // _LINE_NBYTES) * _LINE_NBYTES, np.uint8)
        padded[:nbytes] = payload
        payload = padded
    room = _local.room
    if frames > room.frames or frame_nbytes > room.frame_nbytes:
        # Not the most of each so far: many small frames, each with room for a large one, would be gigabytes.
        room = _local.room = _Room(frames, frame_nbytes)
    places = room.places[:frames]
    _encode(
        payload.view(np.uint64),
        nbytes,
        frame_nbytes,
        room.lists,
        room.literals,
        room.sequences,
        room.ends,
        room.tables,
        room.output,
        places,
    )
    out = room.output_bytes
    return [out[begin:end].tobytes() or None for begin, end in places.tolist()]


@compiled(
    "void(Array(uint64, 1, 'C', readonly=True, aligned=False), uint64, uint64, uint32[::1], uint8[::1], uint64[::1],"
    " uint64[:, ::1], uint64[:, :, ::1], uint64[::1], uint64[:, ::1])"
)
def _encode(
    words: Numbers,
    nbytes: int,
    frame_nbytes: int,
    lists: NDArray[np.uint32],
    literals: Bytes,
    sequences: Numbers,
    ends: Numbers,
    tables: NDArray[np.uint64],
    output: Numbers,
    places: Numbers,
) -> None:
    """Write the frames of ``nbytes`` of content.

    Parameters
    ----------
    words
        The content, and zeros behind it up to the end of a line.
    frame_nbytes
        Whole lines, where there is more than one frame.
    lists
        Room for places of a block's lines and words.
    literals, sequences, ends, tables
        Room for one frame, as ``write_frame`` takes them.
    output
        Takes the frames, each from a whole word on.
    places
        Takes where in the output, in bytes, each frame begins and ends: at the same place where libzstd should do it.
    """
    at = _U64(0)
    for number in range(_U64(places.shape[0])):
        begin = number * _U64(frame_nbytes)
        size = min(_U64(frame_nbytes), _U64(nbytes) - begin)
        content = words[begin // _U64(8) :]
        frame = output[at // _U64(8) :]
        end = at + _encode_frame(content, size, lists, literals, sequences, ends, tables, frame)
        places[number, 0] = at
        places[number, 1] = end
        at = (end + _U64(7)) & ~_U64(7)


@part
def _encode_frame(
    words: Numbers,
    size: np.uint64,
    lists: NDArray[np.uint32],
    literals: Bytes,
    sequences: Numbers,
    ends: Numbers,
    tables: NDArray[np.uint64],
    frame: Numbers,
) -> np.uint64:
    """Write the frame of so many bytes of content, and return its size, or 0 where libzstd should do it."""
    literals_end = sequences_end = filled = _U64(0)
    for block in range((size + _BLOCK - _U64(1)) // _BLOCK):
        begin = block * _BLOCK
        content = min(_BLOCK, size - begin)
        lines = (content + _U64(_LINE_NBYTES - 1)) // _U64(_LINE_NBYTES)
        first = begin // _U64(8)
        these = words[first : first + lines * _LINE]
        changed = lists[_LINES_END : _LINES_END + _list_changes(these, lists)]
        filled += _estimate_filled(these, changed)
        if filled * _MOST_FILLED > begin + content:
            return _U64(0)
        literals_end, sequences_end = _split(
            these, changed, content, literals, literals_end, sequences, sequences_end
        )
        ends[block, 0] = literals_end
        ends[block, 1] = sequences_end
    _count_literals(literals[:literals_end], tables[LITERALS, COUNTS])
    _code_sequences(
        sequences[:sequences_end], tables[LITERAL_LENGTHS, COUNTS], tables[MATCH_LENGTHS, COUNTS]
    )
    count = make_codes(tables)
    for kind in (_U64(LITERAL_LENGTHS), _U64(MATCH_LENGTHS), _U64(WEIGHTS)):
        choose_table(tables, kind)
    describe_codes(tables, count)
    return write_frame(size, literals, sequences, ends, tables, frame)


@part
def _list_changes(words: Numbers, lists: NDArray[np.uint32]) -> np.uint64:
    """List words that are not 0 behind ``_LINES_END``; return how many."""
    lines = _U64(0)
    # What changes is a coin toss to the processor. So there is no branch: all are stored, and kept if changed.
    for at in range(_U64(0), _U64(words.size), _LINE):
        lists[lines] = at
        low = words[at] | words[at + _U64(1)] | words[at + _U64(2)] | words[at + _U64(3)]
        high = words[at + _U64(4)] | words[at + _U64(5)] | words[at + _U64(6)] | words[at + _U64(7)]
        lines += _U64(low | high != _U64(0))
    words_end = _LINES_END
    for number in range(lines):
        line = _U64(lists[number])
        for at in range(line, line + _LINE):
            lists[words_end] = at
            words_end += _U64(words[at] != _U64(0))
    return words_end - _LINES_END


@part
def _estimate_filled(words: Numbers, places: NDArray[np.uint32]) -> np.uint64:
    """Return about how many bytes are not 0, from every so many of the words that have some."""
    changed = _U64(places.size)
    filled = _U64(0)
    for number in range(_U64(0), changed, _SAMPLE):
        filled += (_marks(words[places[number]]) >> _U64(7)) * _U64(0x0101010101010101) >> _U64(56)
    return filled * changed // ((changed + _SAMPLE - _U64(1)) // _SAMPLE) if changed else filled


@part
def _marks(word: np.uint64) -> np.uint64:
    """Return the highest bit of each byte that is not 0."""
    return ((word & _LOW_BITS) + _LOW_BITS | word) & ~_LOW_BITS


@part
def _split(
    words: Numbers,
    places: NDArray[np.uint32],
    content: np.uint64,
    literals: Bytes,
    literals_end: np.uint64,
    sequences: Numbers,
    sequences_end: np.uint64,
) -> tuple[np.uint64, np.uint64]:
    """Add a block's literals, and its sequences as literal length | match length << 32; return where both end then."""
    start = literals_end
    after = _U64(0)
    for number in range(_U64(places.size)):
        at = _U64(places[number])
        word = words[at]
        marks = _marks(word)
        while marks != _U64(0):
            lane = ((marks & (~marks + _U64(1))) >> _U64(7)) * _LANES >> _U64(56)
            marks &= marks - _U64(1)
            place = at * _U64(8) + lane
            zeros = place - after
            after = place + _U64(1)
            is_run = zeros >= _SHORTEST_RUN
            for ahead in range(_SHORTEST_RUN - _U64(1)):
                literals[literals_end + ahead] = 0
            literals_end += _U64(1) if is_run else zeros
            sequences[sequences_end] = literals_end - start | (zeros - _U64(1)) << _U64(32)
            sequences_end += _U64(is_run)
            start = literals_end if is_run else start
            literals[literals_end] = word >> (lane * _U64(8)) & _U64(255)
            literals_end += _U64(1)
    zeros = content - after
    for ahead in range(_SHORTEST_RUN - _U64(1)):
        literals[literals_end + ahead] = 0
    if zeros < _SHORTEST_RUN:
        return literals_end + zeros, sequences_end
    literals_end += _U64(1)
    sequences[sequences_end] = literals_end - start | (zeros - _U64(1)) << _U64(32)
    return literals_end, sequences_end + _U64(1)


@part
def _clear(counts: Numbers) -> None:
    for symbol in range(_U64(counts.size)):
        counts[symbol] = 0


@part
def _count_literals(literals: Bytes, counts: Numbers) -> None:
    """Count the literals, in two rows by turns: adding to a number that was just added to has to wait."""
    _clear(counts)
    half = _U64(literals.size) // _U64(2)
    for number in range(half):
        counts[literals[number * _U64(2)]] += _U64(1)
        counts[_U64(256) + _U64(literals[number * _U64(2) + _U64(1)])] += _U64(1)
    if _U64(literals.size) & _U64(1):
        counts[literals[half * _U64(2)]] += _U64(1)


@part
def _code_sequences(sequences: Numbers, ll_counts: Numbers, ml_counts: Numbers) -> None:
    """Make codes and extra bits of the sequences' lengths, and count the codes."""
    _clear(ll_counts)
    _clear(ml_counts)
    for number in range(_U64(sequences.size)):
        sequence = sequences[number]
        ll, ml = sequence & _U64(0xFFFFFFFF), (sequence >> _U64(32)) - _SHORTEST_MATCH
        ll_code = _LL_CODES[ll if ll < _LL_STEP else _LL_STEP + ll // _LL_STEP]
        ml_code = _ML_CODES[ml if ml < _ML_STEP else _ML_STEP + ml // _ML_STEP]
        ll_counts[ll_code] += _U64(1)
        ml_counts[ml_code] += _U64(1)
        bits = LITERAL_LENGTH_EXTRA_BITS[ll_code]
        extra = ll - LITERAL_LENGTH_BASELINES[ll_code]
        extra |= (ml + _SHORTEST_MATCH - MATCH_LENGTH_BASELINES[ml_code]) << bits
        bits += MATCH_LENGTH_EXTRA_BITS[ml_code]
        sequences[number] = ll_code | ml_code << _U64(8) | bits << _U64(16) | extra << _U64(32)
