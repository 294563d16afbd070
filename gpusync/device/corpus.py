"""Valid zstd frames of every kind that publishers write, with what they decode to.

Made with the installed libzstd rather than stored: what it makes is what publishers have. The same frames every time
for one libzstd. One is of gpusync's own encoder (format/zstd/encode_runs.py), and stored: receivers need not compile that one.
Which kinds are among them is shown by a test that parses them (RFC 8878, 3.1.1).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

_SIZES = (
    *(1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025),
    *(4095, 4096, 4097, 65535, 65536, 65537),
    *(65791, 65792),  # the content size field has 2 bytes up to the first, 4 from the second on
    *(131071, 131072, 131073),  # one block, and two
)
_LONG_NBYTES = 2_000_000
# Blocks with 60, no and 40 changed bytes: one table for all offsets beside repeated ones for the lengths.
_RUNS_FRAME = base64.b85decode(
    "D77#BpkV3*00ad9l7|TgkhcwU?IkIjnc2*2Hk+{-voSUcGqa6tY!ep7wwbXoV{FW}0X>)zF#G@!C<Ols!T%!!41w"
    "Z!UamEL>VzlfLRL9$I@x{)JOD)L3GK#ZhVeTL3Jf8XjR@s>qci;U(xpv@gR@`cMq29lV-EwBhkyAK^e}7-+SH+Cs"
    "<XSvy=Q0Z2Q=pCXIq%V6qB1YMlLzZ>xLTN!^!{x0ss&I)dBz$1qESYV{B|=+swvhV`dv+W5#So*w`uD0Bx&o!O;8"
    "C$gsc{Kc7UgtS+neUhy#;dVgGhvcIZVYZy)q7jrsp)a!;~Cd+eNC}^G4aVzIr=da{{nTW>#0R"
)
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """A frame without checksum and dictionary, and its content."""

    name: str
    frame: bytes
    content: bytes


def make_corpus() -> tuple[Sample, ...]:
    """Return the samples: about 50, of about 6 MiB of content together, made in less than a second."""
    return (*_by_mode(), *_by_window(), *_by_size())


def _by_mode() -> Iterator[Sample]:
    """Every type of block, of literals and of sequence codes."""
    rng = np.random.default_rng(1)
    delta = _delta(rng, 200_000, 0.01)
    for level in (-5, 1, 3, 19):
        yield _compressed(f"delta at level {level}", delta, level)
    yield _compressed("thin delta", _delta(rng, 200_000, 0.002), 1)
    yield _compressed("thick delta", _delta(rng, 131_072, 0.3), 3)
    yield _compressed("noise", rng.integers(0, 256, 150_001, dtype=np.uint8), 3)
    yield _compressed("zeros", np.zeros(300_000, np.uint8), 3)
    yield _compressed("period", np.tile(np.arange(7, dtype=np.uint8), 20_000), 3)
    skewed = rng.geometric(0.15, 140_000).clip(0, 200).astype(np.uint8)
    yield _compressed("short literals only", skewed[:400], 1)
    yield _compressed("few symbols", rng.integers(0, 2, 3000, dtype=np.uint8), 19)
    # Blocks alike: from level 6 or so on, libzstd weighs the tables of the block before against new ones.
    alike = np.split(_delta(rng, 65_536, 0.05), 8)
    yield _pieces("tables repeated", alike, zstandard.ZstdCompressor(level=9))
    rows = _rows_again(rng)
    for level in (9, 19):
        compressor = zstandard.ZstdCompressor(level=level)
        yield _pieces(f"equal literals at level {level}", rows, compressor)
    every_match = zstandard.ZstdCompressionParameters.from_level(
        13, min_match=4, window_log=18, strategy=zstandard.STRATEGY_BTLAZY2
    )
    yield _pieces(
        "many sequences",
        _many_matches(rng),
        zstandard.ZstdCompressor(compression_params=every_match),
    )
    # Half of the block's literals once more, in another order: they are as frequent, and the codes as good.
    block = skewed[:131_072]
    blocks = [block, rng.permutation(np.sort(block)[::2])]
    yield _compressed("literals only", np.concatenate(blocks), 1)
    content = zstandard.ZstdDecompressor().decompress(_RUNS_FRAME)
    yield Sample("runs of zeros", _RUNS_FRAME, content)


def _by_window() -> Iterator[Sample]:
    """Windows from 1 KiB to 128 MiB, with and without content size, and blocks cut short."""
    rng = np.random.default_rng(2)
    delta = _delta(rng, 150_000, 0.01)
    for log, level, nbytes in ((10, 3, 30_000), (17, 1, 150_000)):
        parameters = zstandard.ZstdCompressionParameters.from_level(level, window_log=log)
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
        content = delta[:nbytes].tobytes()
        yield Sample(f"window of 2^{log}", compressor.compress(content), content)
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=wide)
    yield _pieces("window of 2^27", [delta], compressor)
    yield _pieces("no content size", [delta], zstandard.ZstdCompressor(level=3))
    cuts = [delta[:1000], delta[1000:1003], delta[1003:70_000]]
    yield _pieces("short blocks, an empty one last", [*cuts, delta[:0]], zstandard.ZstdCompressor())

    # A match whose distance is nearly the size of the frame.
    noise = rng.integers(0, 256, 65536, dtype=np.uint8)
    middle = _delta(rng, _LONG_NBYTES - 2 * noise.size, 0.01)
    long = np.concatenate([noise, middle, noise])
    parameters = zstandard.ZstdCompressionParameters.from_level(
        3, source_size=long.size, enable_ldm=True
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    yield Sample("long distance", compressor.compress(long.tobytes()), long.tobytes())
    yield _compressed("many blocks", middle[:530_000], 1)


def _by_size() -> Iterator[Sample]:
    rng = np.random.default_rng(3)
    for nbytes in _SIZES:
        yield _compressed(f"{nbytes} bytes", _delta(rng, nbytes, 0.05), 3)


def _compressed(name: str, content: _Bytes, level: int) -> Sample:
    data = content.tobytes()
    return Sample(name, zstandard.ZstdCompressor(level=level).compress(data), data)


def _pieces(name: str, pieces: list[_Bytes], compressor: zstandard.ZstdCompressor) -> Sample:
    """Compress as a stream of unknown size, with a new block for each piece."""
    stream = compressor.compressobj()
    frame = b""
    for number, piece in enumerate(pieces):
        if number:
            frame += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        frame += stream.compress(piece.tobytes())
    return Sample(name, frame + stream.flush(), b"".join(piece.tobytes() for piece in pieces))


def _delta(rng: np.random.Generator, nbytes: int, density: float) -> _Bytes:
    """Return an XOR delta of 16-bit floats of which few changed, each in its low bits."""
    words = np.zeros(nbytes // 2 + 1, np.uint16)
    changed = np.flatnonzero(rng.random(words.size) < density)
    words[changed] = 1 << rng.integers(0, 9, changed.size)
    return words.view(np.uint8)[:nbytes]


def _rows_again(rng: np.random.Generator) -> list[_Bytes]:
    """Return rows of noise, then blocks of those rows, whole and cut, with the same byte between them.

    Literals are all equal there, and match lengths one of three: tables of one symbol, and tables worth repeating.
    """
    rows = rng.integers(0, 256, (250, 64), dtype=np.uint8)
    between = np.array([200], np.uint8)
    blocks = [rows.ravel()]
    for lengths in ((64,), *((24, 40, 64),) * 5):
        pieces: list[_Bytes] = []
        for row, nbytes in zip(rng.permutation(250), rng.choice(lengths, 250), strict=True):
            pieces += (rows[row, :nbytes], between)
        blocks.append(np.concatenate(pieces))
    return blocks


def _many_matches(rng: np.random.Generator) -> list[_Bytes]:
    """Return noise, then one block of its 4-byte words: more than 32,512 matches, whose count takes 3 bytes."""
    words = rng.integers(0, 256, (25_000, 4), dtype=np.uint8)
    return [words.ravel(), words[rng.integers(0, len(words), 32_768)].ravel()]
