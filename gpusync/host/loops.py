"""Compiled loops over change lists: finding changed words, and storing them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusync.compiled import compiled

Words = NDArray[np.unsignedinteger[Any]]
"""Live bytes as words: of 2 bytes, or of 1 where the address is odd."""

_U64 = np.uint64
_LINE = _U64(8)  # words
_READ = "Array(uint64, 1, 'C', readonly=True, aligned=False)"


@compiled(
    [
        f"uint64({_READ}, {_READ}, uint64[::1], boolean, uint64, uint32[::1], {word}[::1], {word}[::1], uint64,"
        " uint32[::1], uint32[::1])"
        for word in ("uint16", "uint8")
    ]
)
def list_words(
    piece: NDArray[np.uint64],
    live: NDArray[np.uint64],
    other: NDArray[np.uint64],
    holds_delta: bool,
    first: int,
    index: NDArray[np.uint32],
    value: Words,
    seen: Words,
    count: int,
    places: NDArray[np.uint32],
    lines: NDArray[np.uint32],
) -> np.uint64:
    """Set ``other`` to piece XOR live, and add the changed words to a list; return how many the list holds then.

    Parameters
    ----------
    piece, other
        New XOR live, and the new bytes, if ``holds_delta``; else the other way round.
    live
        It is read once. It and ``piece`` may be at any address.
    first
        Number of the piece's first word.
    index, value, seen
        Numbers of changed words, the XOR of each, and the live word. There is room for every word of the piece behind the
        ``count`` that are there, and for one more.
    places, lines
        Room for what this works with: for some words of 8 bytes, and for an eighth as many lines of 8 words. Small, so that
        it stays in cache.
    """
    bits = _U64(8 * value.itemsize)
    lanes = _U64(8 // value.itemsize)
    mask = (_U64(1) << bits) - _U64(1)
    found = _U64(count)
    delta = piece if holds_delta else other
    new = other if holds_delta else piece
    for begin in range(_U64(0), _U64(piece.size), _U64(places.size)):
        end = min(begin + _U64(places.size), _U64(piece.size))
        for at in range(begin, end):
            other[at] = piece[at] ^ live[at]
        # Whether a word changes is a coin toss to the processor. So there is no branch: all are stored, and kept if changed;
        # those of a line only where the line has a change.
        changed = _U64(0)
        whole = begin + (end - begin) // _LINE * _LINE
        for at in range(begin, whole, _LINE):
            lines[changed] = at
            any_change = _U64(0)
            for word in range(_LINE):
                any_change |= delta[at + word]
            changed += _U64(any_change != _U64(0))
        wide = _U64(0)
        for number in range(changed):
            line = _U64(lines[number])
            for at in range(line, line + _LINE):
                places[wide] = at
                wide += _U64(delta[at] != _U64(0))
        for at in range(whole, end):
            places[wide] = at
            wide += _U64(delta[at] != _U64(0))
        for number in range(wide):
            place = _U64(places[number])
            change = delta[place]
            was = new[place] ^ change
            for lane in range(lanes):
                word = change >> (bits * lane) & mask
                index[found] = first + place * lanes + lane
                value[found] = word
                seen[found] = was >> (bits * lane) & mask
                found += _U64(word != _U64(0))
    return found


@compiled(
    [
        f"uint64({word}[::1], uint32[::1], {word}[::1], {word}[::1], uint64, uint64, uint64, uint64[::1])"
        for word in ("uint16", "uint8")
    ]
)
def store_words(
    live: Words,
    index: NDArray[np.uint32],
    value: Words,
    seen: Words,
    begin: int,
    end: int,
    step: int,
    begun: NDArray[np.uint64],
) -> np.uint64:
    """XOR the entries from ``begin`` to ``end`` into live words, ``step`` at a time, each step checked before its own.

    Returns the entry that it stopped before: ``end``, or the begin of a step of which a live word is not the one seen.

    Parameters
    ----------
    begun
        ``begun[0]`` is set to the end of a step before anything of it is stored.
    """
    done = _U64(begin)
    while done < _U64(end):
        stop = min(done + _U64(step), _U64(end))
        differs = _U64(0)
        for at in range(done, stop):
            differs |= _U64(live[index[at]] ^ seen[at])
        if differs != _U64(0):
            return done
        begun[0] = stop
        for at in range(done, stop):
            live[index[at]] = seen[at] ^ value[at]
        done = stop
    return done
