"""The decoder of nearly empty blobs: libzstd is its oracle, and it takes nothing that libzstd refuses."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpusync.errors import FrameFormatError, SourceNotReadyError
from gpusync.format.frames import Where, WindowTooLargeError
from gpusync.format.zstd.encode_runs import compress_runs
from gpusync.format.zstd.nonzero import LeftToLibzstdError, NonzeroReader
from tests import support
from tests.fuzz import mutations
from tests.unit.strategies import (
    RLE,
    blobs,
    block,
    compress,
    fixed,
    flushed,
    frame,
    oracle_decode,
    reads,
    seekable,
    skippable,
)

Bytes = NDArray[np.uint8]
WHERE = Where(version=7, file="m.safetensors", tensor="a", offset=1000)
KIB, MIB = 1 << 10, 1 << 20
CHECKED = "NUMBA_BOUNDSCHECK" in os.environ
"""Every index is checked: ten times slower."""


# ---- contents ----------------------------------------------------------------------------------------


def step_of_training(nbytes: int, density: float, seed: int) -> bytes:
    """The XOR of bf16 weights and what a step makes of them."""
    rng = np.random.default_rng(seed)
    count = nbytes // 2
    old = (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2")
    new = old.copy()
    changed = rng.random(count) < density
    new[changed] += rng.choice(np.array([1, 0xFFFF], np.uint16), int(changed.sum()))
    return (old ^ new).tobytes() + bytes(nbytes % 2)


def random_bytes(nbytes: int, density: float, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 256, nbytes)
    return (values * (rng.random(nbytes) < density)).astype(np.uint8).tobytes()


def equal_changes(nbytes: int, density: float, seed: int) -> bytes:
    """One change, again and again, at distances that repeat."""
    rng = np.random.default_rng(seed)
    row = bytearray(int(rng.integers(20, 3000)))
    for at in rng.integers(0, len(row), 1 + int(density * len(row))):
        row[at] = 7
    return bytes(row * (nbytes // len(row) + 1))[:nbytes]


def stripes(nbytes: int, density: float, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    content = np.zeros(nbytes, np.uint8)
    content[int(rng.integers(0, 9)) :: int(1 / max(density, 0.001))] = rng.integers(1, 256)
    return content.tobytes()


def dense_places(nbytes: int, density: float, seed: int) -> bytes:
    """Zeros, and places of random bytes."""
    rng = np.random.default_rng(seed)
    content = bytearray(nbytes)
    for _ in range(3):
        at, size = int(rng.integers(0, nbytes)), int(density * nbytes / 3)
        content[at : at + size] = rng.bytes(size)
    return bytes(content[:nbytes])


def one_byte(nbytes: int, density: float, seed: int) -> bytes:
    content = bytearray(nbytes)
    content[seed % nbytes] = 1 + seed % 255
    return bytes(content)


KINDS: tuple[Callable[[int, float, int], bytes], ...] = (
    step_of_training,
    random_bytes,
    equal_changes,
    stripes,
    dense_places,
    one_byte,
)


# ---- framings ----------------------------------------------------------------------------------------


def single(content: bytes, level: int = 1, window_log: int | None = None, **options: Any) -> bytes:
    values = {} if window_log is None else {"window_log": window_log}
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=len(content), **values, **options
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(content)


def split(content: bytes, nbytes: int) -> Iterator[bytes]:
    for begin in range(0, len(content), nbytes):
        yield content[begin : begin + nbytes]


def runs(content: bytes) -> bytes:
    """The publisher's own frame, where it makes one."""
    (frame,) = compress_runs(np.frombuffer(content, np.uint8), len(content))
    return frame or compress(content)


FRAMINGS: dict[str, Callable[[bytes], bytes]] = {
    "level 1": single,
    "level -5": lambda content: single(content, -5),
    "level 3": lambda content: single(content, 3),
    "level 9": lambda content: single(content, 9),
    "level 19": lambda content: single(content, 19),
    "window of 1 KiB": lambda content: single(content, 1, 10),
    "window of 64 KiB": lambda content: single(content, 3, 16),
    "window of 8 MiB": lambda content: single(content, 3, 23),
    "without content size": lambda content: compress(content, write_content_size=False),
    "flushed": lambda content: flushed(content, 30_000),
    "several frames": lambda content: b"".join(compress(part) for part in split(content, 100_000)),
    "seekable": lambda content: seekable(content, 64 * KIB),
    "seekable, frames of 999 bytes": lambda content: (
        seekable(content[:50_000], 999) + compress(content[50_000:])
    ),
    "skippable frames": lambda content: b"".join(
        skippable(b"x" * 9, 3) + compress(part) for part in split(content, 50_000)
    ),
    "a large skippable frame": lambda content: skippable(bytes(600_000)) + compress(content),
    "frames of runs": lambda content: b"".join(runs(part) for part in split(content, 90_000)),
}


# ---- checks ------------------------------------------------------------------------------------------


def decode(blob: bytes, nbytes: int, *, piece: int = MIB, step: int = 1 << 30) -> bytes:
    """Decode a blob in pieces by XORing it into bytes that are not zero."""
    old = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
    new = old.copy()
    reader = NonzeroReader(reads(blob, step), nbytes=len(blob), content_nbytes=nbytes, where=WHERE)
    for begin in range(0, nbytes, piece):
        part = new[begin : begin + piece]
        before = part.copy() if part.size < 10_000 else None
        try:
            reader.xor_into(part)
        except (LeftToLibzstdError, FrameFormatError, SourceNotReadyError):
            assert before is None or np.array_equal(part, before)
            raise
    reader.finish()
    return (new ^ old).tobytes()


def check(blob: bytes, nbytes: int, **options: int) -> str:
    """Whatever a blob is: it is refused, or it decodes to what libzstd makes of it. Returns which."""
    try:
        content = decode(blob, nbytes, **options)
    except LeftToLibzstdError:
        return "left"
    except (FrameFormatError, SourceNotReadyError):
        return "refused"
    assert content == oracle_decode(blob)
    return "taken"


# ---- what is taken -----------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_nearly_empty_content_is_decoded(
    kind: Callable[[int, float, int], bytes], framing: str
) -> None:
    for density in (0.0, 0.0005, 0.01):
        content = kind(300_001, density, 11)
        assert decode(FRAMINGS[framing](content), len(content), piece=64 * KIB) == content


@pytest.mark.parametrize("density", [0.0005, 0.002, 0.01, 0.05])
@pytest.mark.parametrize("level", [1, 3, 19])
def test_a_large_tensor_in_one_frame_is_decoded(level: int, density: float) -> None:
    content = step_of_training((300 * KIB if CHECKED else 3 * MIB) + 5, density, 5)
    assert decode(single(content, level), len(content)) == content


@pytest.mark.parametrize("nbytes", [1, 2, 3, 7, 8, 9, 255, 256, 257, 511, 512, 513, 100_000])
def test_content_of_any_size_is_decoded(nbytes: int) -> None:
    for content in (bytes(nbytes), b"\7" * nbytes, random_bytes(nbytes, 0.3, nbytes)):
        for blob in (compress(content), single(content, 19), flushed(content, 100)):
            assert decode(blob, nbytes) == content


@pytest.mark.parametrize("piece", [1, 7, 4096, 127 * KIB, 128 * KIB + 1, MIB])
def test_pieces_of_any_size(piece: int) -> None:
    content = step_of_training(5_000 if piece < 100 else MIB, 0.01, 3)
    for blob in (compress(content), seekable(content, 64 * KIB)):
        assert decode(blob, len(content), piece=piece) == content


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_source_that_gives_little_at_a_time(step: int) -> None:
    content = step_of_training(200_000, 0.01, 3)
    for blob in (compress(content), seekable(content, 20_000)):
        assert decode(blob, len(content), step=step) == content


def test_blocks_that_a_read_cuts_wait_for_the_rest() -> None:
    content = b"".join(random_bytes(300, 0.5, seed) + bytes(9_700) for seed in range(2_600))
    blob = compress(content)
    assert len(blob) > 2 * (256 << 10)
    assert decode(blob, len(content)) == content


@given(
    kind=st.sampled_from(KINDS),
    nbytes=st.integers(1, 200_000),
    density=st.sampled_from((0.0, 0.0005, 0.005, 0.02, 0.05)),
    seed=st.integers(0, 1 << 20),
    level=st.sampled_from((1, 1, 3, 9, 19, -5)),
    window_log=st.integers(10, 23),
    parts=st.integers(1, 4),
    piece=st.sampled_from((1_000, 4_096, 65_537, MIB)),
    sized=st.booleans(),
)
@fixed
def test_any_content_and_framing_decodes_as_libzstd_has_it(
    kind: Callable[[int, float, int], bytes],
    nbytes: int,
    density: float,
    seed: int,
    level: int,
    window_log: int,
    parts: int,
    piece: int,
    sized: bool,
) -> None:
    content = kind(nbytes, density, seed)
    blob = b"".join(
        single(part, level, window_log, write_content_size=sized)
        for part in split(content, nbytes // parts + 1)
    )
    assert decode(blob, nbytes, piece=piece) == content


@given(blobs())
@fixed
def test_frames_of_any_kind_are_taken_or_left(made: tuple[bytes, bytes]) -> None:
    content, blob = made
    assert check(blob, len(content)) in ("taken", "left")


def test_many_readers_of_a_thread_take_turns() -> None:
    random = Random(5)
    contents = [KINDS[n % len(KINDS)](200_000, 0.01, n) for n in range(16)]
    codes = [list(FRAMINGS.values())[n](content) for n, content in enumerate(contents)]
    readers = [
        NonzeroReader(reads(blob), nbytes=len(blob), content_nbytes=200_000, where=WHERE)
        for blob in codes
    ]
    got = [np.zeros(200_000, np.uint8) for _ in contents]
    done = [0] * 16
    while min(done) < 200_000:
        at = random.randrange(16)
        piece = got[at][done[at] : done[at] + random.choice((1, 1000, 30_000))]
        readers[at].xor_into(piece)
        done[at] += piece.size
    for reader, content, bytes_got in zip(readers, contents, got, strict=True):
        reader.finish()
        assert bytes_got.tobytes() == content


def test_a_reader_that_takes_over_anothers_room_starts_anew() -> None:
    for seed in range(20):
        content = random_bytes(150_000, 0.05, seed)
        assert decode(compress(content), len(content)) == content
        check(compress(content)[:-5] + b"\1\2\3\4\5", len(content))


def zeros(nbytes: int) -> list[bytes]:
    blocks = [block(b"\0", kind=RLE, nbytes=128 * KIB, last=False)] * (nbytes // (128 * KIB))
    return [*blocks, block(b"\0", kind=RLE, nbytes=nbytes % (128 * KIB), last=True)]


def test_positions_beyond_4_gib() -> None:
    far = (4 << 30) + 12_345
    content = step_of_training(MIB, 0.01, 9)
    blob = frame(zeros(far)) + compress(content)
    reader = NonzeroReader(
        reads(blob), nbytes=len(blob), content_nbytes=far + len(content), where=WHERE
    )
    piece = np.zeros(64 * MIB, np.uint8)
    for begin in range(0, far, piece.size):
        reader.xor_into(piece[: far - begin])
    assert not piece[:MIB].any() and not piece[-MIB:].any()
    new = np.zeros(len(content), np.uint8)
    reader.xor_into(new)
    reader.finish()
    assert new.tobytes() == content


def test_matches_reach_over_many_rounds_of_the_ring() -> None:
    """Content whose entries fill the ring several times, with matches into what is kept."""
    rows = [random_bytes(997, 0.2, seed) for seed in range(40)]
    content = b"".join(rows[n * n % 40] + bytes(n % 500) for n in range(3_000))
    assert sum(1 for value in content if value) > 3 << 17
    assert decode(compress(content), len(content), piece=100_000) == content


# ---- what is left to libzstd -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blob",
    [
        compress(bytes(1000), write_checksum=True),
        frame([block(bytes(1000))], window=(14 << 3)),  # 16 MiB
        compress(os.urandom(1000) * 300, write_checksum=True),
    ],
)
def test_what_it_does_not_do_is_left(blob: bytes) -> None:
    assert check(blob, len(oracle_decode(blob))) == "left"


def test_too_many_bytes_for_its_room_are_left() -> None:
    content = os.urandom(MIB)
    blob = seekable(content, 32 * KIB)
    assert check(blob, MIB) == "left"
    assert check(blob, MIB, piece=4096) == "taken"


def test_a_window_over_the_limit_is_told_apart() -> None:
    blob = frame([block(b"abc")], window=(14 << 3))
    with pytest.raises(WindowTooLargeError):
        NonzeroReader(
            reads(blob), nbytes=len(blob), content_nbytes=3, where=WHERE, max_window=MIB
        ).xor_into(np.zeros(3, np.uint8))


@pytest.mark.parametrize("delta", [-64, -1, 1, 64])
def test_content_longer_or_shorter_than_the_tensor_is_not_taken(delta: int) -> None:
    content = step_of_training(10_000, 0.01, 1)
    for blob in (
        compress(content),
        compress(content, write_content_size=False),
        seekable(content, 999),
    ):
        assert check(blob, len(content) + delta) != "taken"


def test_a_frame_that_holds_less_than_it_says_is_not_taken() -> None:
    content = random_bytes(1000, 0.02, 1)
    first, second = compress(content), compress(content, write_content_size=False)
    assert check(first + second, 2000) == "taken"
    assert int.from_bytes(first[5:7], "little") == 1000 - 256
    longer = first[:5] + (1001 - 256).to_bytes(2, "little") + first[7:]
    assert check(longer + second, 2000) == "left"


def test_a_blob_of_zeros_is_not_there_yet() -> None:
    with pytest.raises(SourceNotReadyError):
        decode(bytes(100), 1000)


def test_an_error_of_the_source_passes_through_and_leaves_the_piece() -> None:
    blob = seekable(step_of_training(8 * MIB, 0.05, 1), 64 * KIB)
    source = reads(blob)
    position = 0

    def fail_late(nbytes: int) -> bytes:
        nonlocal position
        if position:
            raise OSError(5, "I/O error")
        position += nbytes
        return source(nbytes)

    piece = np.zeros(8 * MIB, np.uint8)
    reader = NonzeroReader(fail_late, nbytes=len(blob), content_nbytes=8 * MIB, where=WHERE)
    with pytest.raises(OSError, match="I/O error"):
        reader.xor_into(piece)
    assert not piece.any()


# ---- hostile bytes -----------------------------------------------------------------------------------

SMALL = {
    "single": compress(step_of_training(3000, 0.02, 1)),
    "unsized": compress(random_bytes(2000, 0.05, 2), write_content_size=False),
    "level 19": single(step_of_training(6000, 0.02, 3), 19),
    "frames": seekable(step_of_training(3000, 0.02, 4), 1000),
    "trees": single(random_bytes(4000, 0.1, 5), 3),
    "repeats": compress(equal_changes(5000, 0.01, 6)),
    "runs": runs(step_of_training(20_000, 0.01, 7)),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_flipped_bit_is_refused_or_decoded_as_libzstd_has_it(name: str) -> None:
    blob, nbytes = SMALL[name], len(oracle_decode(SMALL[name]))
    assert check(blob, nbytes) == "taken"
    for bit in range(0, 8 * len(blob), 3 if CHECKED else 1):
        bent = bytearray(blob)
        bent[bit >> 3] ^= 1 << (bit & 7)
        check(bytes(bent), nbytes)


@pytest.mark.parametrize("name", SMALL)
def test_a_blob_that_is_cut_short_is_not_taken(name: str) -> None:
    blob, content = SMALL[name], oracle_decode(SMALL[name])
    for nbytes in range(len(blob)):
        verdict = check(blob[:nbytes], len(content))
        # A cut before the seek table leaves all the content.
        assert verdict != "taken" or oracle_decode(blob[:nbytes]) == content


def large_blobs() -> list[bytes]:
    return [
        compress(step_of_training(200_000, 0.01, 1)),
        compress(step_of_training(200_000, 0.05, 2)),
        single(step_of_training(200_000, 0.01, 3), 19),
        single(random_bytes(60_000, 0.05, 4), 9),
        seekable(step_of_training(60_000, 0.02, 5), 4096),
        single(equal_changes(200_000, 0.02, 6), 3),
        compress(dense_places(100_000, 0.05, 7)),
        runs(step_of_training(200_000, 0.01, 9)),
        single(random_bytes(60_000, 0.3, 8), 1),
    ]


def test_random_edits_are_refused_or_decoded_as_libzstd_has_it() -> None:
    random = Random(1)
    verdicts = []
    for blob in large_blobs():
        nbytes = len(oracle_decode(blob))
        for _ in range(60 if CHECKED else 500):
            bent = bytearray(blob)
            for _ in range(random.choice((1, 1, 1, 2, 5))):
                bent[random.randrange(9, len(bent))] = random.choice(
                    (0, 255, random.randrange(256))
                )
            verdicts.append(check(bytes(bent), nbytes))
    assert {"left", "taken"} <= set(verdicts)


def test_edits_of_headers_are_refused_or_decoded_as_libzstd_has_it() -> None:
    """The first bytes of a frame and its first block: sizes, modes, trees and tables."""
    random = Random(2)
    for blob in large_blobs():
        nbytes = len(oracle_decode(blob))
        for _ in range(60 if CHECKED else 500):
            bent = bytearray(blob)
            for _ in range(random.choice((1, 1, 2))):
                bent[random.randrange(4, min(100, len(bent)))] = random.randrange(256)
            check(bytes(bent), nbytes)


def test_mutations_of_blobs_are_refused_or_decoded_as_libzstd_has_it() -> None:
    random = Random(3)
    every = [*SMALL.values(), *large_blobs()]
    for _ in range(300 if CHECKED else 3000):
        blob = random.choice(every)
        bent = mutations.mutate_blob(blob, random, (random.choice(every),))
        check(bent, len(oracle_decode(blob)))


def test_random_blocks_are_refused_or_decoded_as_libzstd_has_it() -> None:
    """Compressed blocks of random bytes behind a true beginning."""
    random = Random(4)
    beginning = struct.pack("<I", 0xFD2FB528) + b"\x00\x38"
    for _ in range(1000 if CHECKED else 10_000):
        body = bytearray(random.randbytes(random.choice((2, 5, 9, 20, 60))))
        body[0] = random.choice((0, 1, 4, 5, 8, 16, 24, 2, 3, 6, body[0]))
        blob = beginning + block(bytes(body), kind=2)
        check(blob, random.choice((1, 3, 8, 100, 1000)))


def test_trees_of_any_weights_are_refused_or_read_as_libzstd_has_it() -> None:
    """One literal, coded by each of the trees with four weights that are told and one that follows."""
    random = Random(5)
    verdicts = []
    for weights in itertools.product(range(5), repeat=4):
        tree = bytes([127 + 4, weights[0] << 4 | weights[1], weights[2] << 4 | weights[3]])
        for _ in range(2 if CHECKED else 8):
            coded = tree + bytes([random.randrange(1, 64)])
            literals = struct.pack("<I", 2 | 1 << 4 | len(coded) << 14)[:3] + coded
            blob = frame([block(literals + b"\0", kind=2)], window=0x38)
            verdicts.append(check(blob, 1))
    assert {"left", "taken"} == set(verdicts)


@pytest.mark.parametrize("count", range(1, 14))
def test_few_literals_in_four_streams_are_taken_or_left(count: int) -> None:
    """libzstd wants six or more (RFC 8878, 3.1.1.3.1.1)."""
    each = (count + 3) // 4
    sizes = [each, each, each, max(count - 3 * each, 0)]
    coded = b"\x80\x10" + struct.pack("<HHH", 1, 1, 1)  # bytes 0 and 1 have a bit each
    coded += bytes(1 << size | 1 << size >> 1 for size in sizes)
    literals = struct.pack("<I", 2 | 1 << 2 | count << 4 | len(coded) << 14)[:3] + coded
    blob = frame([block(literals + b"\0", kind=2)], window=0x38)
    assert check(blob, count) == ("taken" if count >= 6 else "left")


def test_a_block_of_more_than_the_window_is_left() -> None:
    """The literals behind its last match are what is too much."""
    content = bytes(1000) + random_bytes(500, 1.0, 1)
    blob = bytearray(single(content, 1, 11, write_content_size=False))
    blob += compress(step_of_training(5000, 0.05, 1), write_content_size=False)
    assert check(bytes(blob), 6500) == "taken" and blob[5] == 1 << 3
    blob[5] = 0
    assert check(bytes(blob), 6500) == "left"


def test_bytes_behind_the_literals_of_a_block_without_sequences_are_left() -> None:
    for end, verdict in ((b"\0", "taken"), (b"\0\0", "left"), (b"\0x", "left")):
        literals = bytes([3 << 3]) + b"abc"
        assert check(frame([block(literals + end, kind=2)], window=0x38), 3) == verdict


# ---- published streams -------------------------------------------------------------------------------


def test_blobs_of_real_trainers_are_decoded() -> None:
    taken = 0
    for folder in sorted(support.cases_dir("golden").iterdir()):
        if "_xor_" not in folder.name or "sparse" in folder.name:
            continue
        for file in sorted(folder.glob("published/*/*.safetensors")):
            tensors, _ = support.read_safetensors(file)
            for _, _, data in tensors.values():
                if data[:4] == struct.pack("<I", 0xFD2FB528):
                    taken += check(data, len(oracle_decode(data))) == "taken"
    assert taken > 20


@pytest.mark.timeout(400)
@pytest.mark.skipif(CHECKED, reason="this is that run")
def test_no_index_is_out_of_bounds(repository: Path, tmp_path: Path) -> None:
    """All of the above once more, with every index checked."""
    env = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
