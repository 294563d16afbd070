"""A second implementation of xor_rows, from docs/FORMAT.md alone: plain loops, a byte at a time, and no line of gpusync's."""

from __future__ import annotations

from dataclasses import dataclass

BAND, ROW = 1_048_576, 128


class Broken(Exception):
    """The payload breaks a rule."""


@dataclass
class Cursor:
    """A payload, and how far it has been read."""

    payload: bytes
    at: int = 0

    def byte(self) -> int:
        if self.at == len(self.payload):
            raise Broken("the payload ends too early")
        self.at += 1
        return self.payload[self.at - 1]

    def bytes(self, count: int) -> list[int]:
        return [self.byte() for _ in range(count)]


def decode(payload: bytes, nbytes: int) -> bytes:
    """Return old XOR new of a tensor of ``nbytes``."""
    cursor = Cursor(payload)
    delta = bytearray()
    while len(delta) < nbytes:
        delta += decode_record(cursor, min(BAND, nbytes - len(delta)))
    if cursor.at != len(payload):
        raise Broken("bytes after the last record")
    return bytes(delta)


def decode_record(cursor: Cursor, nbytes: int) -> bytearray:
    """Return old XOR new of one band."""
    begin, words = cursor.at, (nbytes + 1) // 2
    delta = bytearray(2 * words)
    form = cursor.byte()
    if form == 1:
        delta[0::2] = bytes(cursor.bytes(words))
        for word in range(nbytes // 2):
            delta[2 * word + 1] = cursor.byte()
    elif form == 0:
        counts = cursor.bytes((words + ROW - 1) // ROW)
        changed = sum(counts)
        positions, low, high = (cursor.bytes(changed) for _ in range(3))
        if cursor.at - begin > 1 + nbytes:
            raise Broken("rows where words are smaller")
        entry = 0
        for row, count in enumerate(counts):
            last = -1
            for _ in range(count):
                word = row * ROW + positions[entry]
                if positions[entry] >= ROW or word >= words:
                    raise Broken("a position outside of the row or the tensor")
                if positions[entry] <= last:
                    raise Broken("positions that do not increase")
                if low[entry] == high[entry] == 0:
                    raise Broken("a change that changes nothing")
                last = positions[entry]
                delta[2 * word], delta[2 * word + 1] = low[entry], high[entry]
                entry += 1
        if nbytes % 2 and delta[-1]:
            raise Broken("a change behind the last byte")
    else:
        raise Broken("an unknown form")
    return delta[:nbytes]


def encode(delta: bytes, *, rows: bool | None = None) -> list[bytes]:
    """Return the records of old XOR new: of the smaller form, or of the one that is asked for where it is allowed."""
    return [
        encode_record(delta[begin : begin + BAND], rows=rows)
        for begin in range(0, len(delta), BAND)
    ]


def encode_record(delta: bytes, *, rows: bool | None = None) -> bytes:
    words = b"\1" + delta[0::2] + delta[1::2]
    padded = delta + bytes(len(delta) % 2)
    counts, positions, low, high = [0] * ((len(padded) // 2 + ROW - 1) // ROW), [], [], []
    for word in range(len(padded) // 2):
        pair = padded[2 * word], padded[2 * word + 1]
        if pair != (0, 0):
            counts[word // ROW] += 1
            positions.append(word % ROW)
            low.append(pair[0])
            high.append(pair[1])
    sparse = b"\0" + bytes(counts) + bytes(positions) + bytes(low) + bytes(high)
    if len(sparse) > len(words) or rows is False:
        return words
    return sparse
