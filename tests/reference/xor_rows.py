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


# ---- records that break a rule --------------------------------------------------------------------------

NBYTES = 700
"""Of the tensor: 350 words in rows of 128, 128 and 94, of which a record in rows may hold (700 - 3) // 3 = 232."""


def record(counts: list[int], positions: list[int], low: list[int], high: list[int]) -> bytes:
    return bytes([0, *counts, *positions, *low, *high])


GOOD = record([2, 0, 1], [3, 127, 93], [1, 0, 7], [0, 2, 0])

BROKEN: dict[str, tuple[bytes, str]] = {
    "a form of 2": (b"\2" + GOOD[1:], "form of a record is unknown"),
    "a form of 255": (b"\xff" + GOOD[1:], "form of a record is unknown"),
    "a position of 128": (
        record([2, 0, 1], [3, 128, 9], [1, 1, 1], [0, 0, 0]),
        "outside of its row",
    ),
    "a position of 255": (record([1, 0, 0], [255], [1], [0]), "outside of its row"),
    "a position behind the tensor": (record([0, 0, 1], [94], [1], [0]), "behind the tensor"),
    "positions that fall": (record([2, 0, 0], [5, 4], [1, 1], [0, 0]), "increase strictly"),
    "a position twice": (record([0, 2, 0], [5, 5], [1, 1], [0, 0]), "increase strictly"),
    "a row of 129": (record([129, 0, 0], [*range(128), 127], [1] * 129, [0] * 129), "increase"),
    "a value of 0": (record([2, 0, 0], [5, 6], [1, 0], [1, 0]), "the value 0"),
    "a count too many": (record([2, 0, 2], [3, 127, 93], [1, 0, 7], [0, 2, 0]), "too early"),
    "a count too few": (record([1, 0, 1], [3, 127, 93], [1, 0, 7], [0, 2, 0]), "behind the tensor"),
    "a change that no row counts": (record([1, 0, 0], [3, 5], [1, 1], [0, 0]), "longer"),
    "changes without a row": (record([0, 0, 0], [3, 5], [1, 1], [0, 0]), "longer"),
    "counts of 255": (record([255] * 3, [], [], []) + bytes(600), "too many changed words"),
    "one change more than rows may hold": (
        record([128, 105, 0], [*range(128), *range(105)], [1] * 233, [0] * 233),
        "too many changed words",
    ),
    "a byte behind the record": (GOOD + b"\0", "longer"),
    "two records": (GOOD + GOOD, "longer"),
    "words, one byte short": (b"\1" + bytes(NBYTES - 1), "too early"),
    "words, one byte over": (b"\1" + bytes(NBYTES + 1), "longer|more than"),
    "nothing": (b"", "too early"),
}
"""Records of it, and what a refusal says of each, in one of these ways."""
