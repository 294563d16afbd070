"""Payloads applied piece by piece, against plain numpy on the whole tensor."""

from __future__ import annotations

import errno
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpusync.format.encodings
from gpusync import fsio
from gpusync.errors import FrameFormatError, OutOfScratchError, SourceNotReadyError
from gpusync.format import decode_xor
from gpusync.format.encodings import SPARSE_MEMORY_BYTES, Layer, open_layer
from gpusync.format.frames import MAX_WINDOW, Where, WindowTooLargeError
from gpusync.types import ENCODINGS, Encoding
from tests.reference import xor_rows
from tests.unit.strategies import (
    RLE,
    SIZES,
    block,
    compress,
    fixed,
    flushed,
    frame,
    reads,
    seekable,
)

WHERE = Where(version=7, file="m.safetensors", tensor="a", offset=1000)
KIB, MIB = 1 << 10, 1 << 20
PIECE = 4 * KIB


@pytest.fixture(scope="module", autouse=True, params=[False, True], ids=["libzstd", "loops"])
def xor_decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of this module's tests run with either decoder of xor."""
    with pytest.MonkeyPatch.context() as patch:
        loops = decode_xor._Loops()
        if request.param:
            loops.load()
        patch.setattr(decode_xor, "loops", loops)
        yield


def payload_of(
    encoding: Encoding, old: bytes, new: bytes, order: Callable[[Any], Any] | None = None
) -> bytes:
    """The payload that leads from old to new, written as the format says; ``order`` permutes positions."""
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    delta = before ^ after
    if encoding == "xor":
        return delta.tobytes()
    if encoding == "xor_rows":
        return b"".join(xor_rows.encode(delta.tobytes()))
    positions = np.flatnonzero(delta)
    positions = positions if order is None else order(positions)
    count, kind = ("<I", "<u4") if encoding == "overwrite" else ("<Q", "<u8")
    values = after if encoding == "overwrite" else delta
    return (
        struct.pack(count, positions.size)
        + positions.astype(kind).tobytes()
        + values[positions].tobytes()
    )


def open_(
    encoding: Encoding, blob: bytes, nbytes: int, spill: Any = tempfile.TemporaryFile, **more: Any
) -> Layer:
    step = more.pop("step", 1 << 30)
    return open_layer(
        encoding,
        lambda: reads(blob, step),
        blob_nbytes=len(blob),
        nbytes=nbytes,
        max_window=more.pop("max_window", MAX_WINDOW),
        where=WHERE,
        spill=spill,
    )


def run(encoding: Encoding, blob: bytes, old: bytes, piece: int = PIECE, **more: Any) -> bytes:
    """Apply a blob to ``old`` piece by piece."""
    tensor = np.frombuffer(old, np.uint8).copy()
    layer = open_(encoding, blob, tensor.size, **more)
    for begin in range(0, tensor.size, piece):
        layer.apply(tensor[begin : begin + piece], begin)
    layer.finish()
    return tensor.tobytes()


def step_of(nbytes: int, share: float = 0.1, seed: int = 0) -> tuple[bytes, bytes]:
    """(old, new) tensors that differ in about ``share`` of their bytes."""
    rng = np.random.default_rng([nbytes, seed])
    old = rng.integers(0, 256, nbytes).astype(np.uint8)
    flips = (rng.integers(1, 256, nbytes) * (rng.random(nbytes) < share)).astype(np.uint8)
    return old.tobytes(), (old ^ flips).tobytes()


def refused(encoding: Encoding, payload: bytes, nbytes: int, match: str) -> FrameFormatError:
    """A sparse payload is refused when it is opened: no byte of any piece can have changed."""
    with pytest.raises(FrameFormatError, match=match) as caught:
        open_(encoding, compress(payload), nbytes)
    err = caught.value
    assert (err.version, err.file, err.tensor) == (7, "m.safetensors", "a")
    return err


# ---- right bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("nbytes", [*SIZES, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_layer_leads_from_old_to_new(encoding: Encoding, share: float, nbytes: int) -> None:
    old, new = step_of(nbytes, share)
    blob = compress(payload_of(encoding, old, new))
    assert run(encoding, blob, old) == new
    assert run(encoding, blob, old, piece=17, step=5) == new


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("nbytes", [512 * KIB - 1, 512 * KIB, 512 * KIB + 1, 3 * MIB + 1])
def test_layer_in_pieces_of_the_default_size(encoding: Encoding, nbytes: int) -> None:
    old, new = step_of(nbytes, 0.01)
    assert run(encoding, compress(payload_of(encoding, old, new)), old, piece=512 * KIB) == new


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_layer_with_pieces_of_changing_size(encoding: Encoding) -> None:
    old, new = step_of(10_000)
    tensor = np.frombuffer(old, np.uint8).copy()
    layer = open_(encoding, compress(payload_of(encoding, old, new)), tensor.size)
    begin = 0
    for size in (1, 4096, 0, 3, 5000, 900):
        layer.apply(tensor[begin : begin + size], begin)
        begin += size
    layer.finish()
    assert tensor.tobytes() == new


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "write",
    [
        lambda data: compress(data, write_content_size=False),
        lambda data: compress(data, write_checksum=True),
        lambda data: seekable(data, 300),
        lambda data: flushed(data, 300),
    ],
)
def test_layer_takes_every_framing(encoding: Encoding, write: Callable[[bytes], bytes]) -> None:
    old, new = step_of(5000)
    assert run(encoding, write(payload_of(encoding, old, new)), old) == new


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_empty_tensor_takes_an_empty_frame(encoding: Encoding) -> None:
    assert run(encoding, compress(payload_of(encoding, b"", b"")), b"") == b""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_scalar_and_one_byte_tensor_change(encoding: Encoding) -> None:
    for old, new in ((b"\0", b"\1"), (b"\0\0\x80\x3f", b"\0\0\x80\xbf")):
        assert run(encoding, compress(payload_of(encoding, old, new)), old) == new


@pytest.mark.parametrize("order", [lambda p: p[::-1], np.random.default_rng(0).permutation])
def test_overwrite_positions_may_be_unsorted(order: Callable[[Any], Any]) -> None:
    old, new = step_of(300_001, 0.9)
    payload = payload_of("overwrite", old, new, order)
    assert run("overwrite", compress(payload), old, piece=64 * KIB) == new


def test_overwrite_writes_its_bytes_whatever_was_there() -> None:
    old, new = step_of(5000)
    payload = payload_of("overwrite", old, new)
    assert run("overwrite", compress(payload), new) == new


def test_xor_sparse_value_zero_changes_nothing() -> None:
    payload = struct.pack("<QQ", 1, 2) + b"\0"
    assert run("xor_sparse", compress(payload), b"abcd") == b"abcd"


# ---- sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [-64, -1, 1, 64])
def test_xor_payload_longer_or_shorter_than_the_tensor_is_refused(delta: int) -> None:
    for write in (compress, lambda data: compress(data, write_content_size=False)):
        with pytest.raises(FrameFormatError):
            run("xor", write(bytes(5000 + delta)), bytes(5000))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_blob_of_no_bytes_is_refused(encoding: Encoding) -> None:
    for old in (b"", b"abc"):
        with pytest.raises(FrameFormatError, match="no zstd frame"):
            run(encoding, b"", old)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_blob_of_zeros_is_not_there_yet(encoding: Encoding) -> None:
    with pytest.raises(SourceNotReadyError):
        run(encoding, bytes(64), bytes(100))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_window_over_the_callers_limit_passes_through(encoding: Encoding) -> None:
    old, new = step_of(3 * MIB)
    blob = flushed(payload_of(encoding, old, new), MIB)
    with pytest.raises(WindowTooLargeError):
        run(encoding, blob, old, max_window=64 * KIB)


@pytest.mark.parametrize("nbytes", [1 << 32, (1 << 32) + 1, 1 << 40])
def test_overwrite_of_a_tensor_over_4_gib_is_refused_even_if_its_positions_fit(nbytes: int) -> None:
    err = refused("overwrite", struct.pack("<II", 1, 5) + b"x", nbytes, "cannot address")
    assert err.got == nbytes


def test_overwrite_reaches_the_last_byte_below_4_gib() -> None:
    nbytes = (1 << 32) - 1
    layer = open_("overwrite", compress(struct.pack("<II", 1, nbytes - 1) + b"x"), nbytes)
    piece = np.zeros(10, np.uint8)
    layer.apply(piece, nbytes - 10)
    assert piece.tobytes() == bytes(9) + b"x"


def test_xor_sparse_reaches_over_4_gib() -> None:
    nbytes = (1 << 32) + 100
    positions = [(1 << 32) - 1, 1 << 32, (1 << 32) + 99]
    blob = compress(struct.pack("<Q3Q", 3, *positions) + b"\1\2\3")
    layer = open_("xor_sparse", blob, nbytes)
    piece = np.full(101, 8, np.uint8)
    layer.apply(piece, (1 << 32) - 1)
    assert piece[[0, 1, 100]].tolist() == [9, 10, 11]
    assert (piece[2:100] == 8).all()


def test_xor_of_a_tensor_over_4_gib_streams_in_bounded_memory() -> None:
    blocks = (1 << 32) // (128 * KIB)
    blob = frame(
        [
            block(b"\0", kind=RLE, nbytes=128 * KIB, last=False) * blocks,
            block(b"\1\2\3"),
        ],
        descriptor=0xC0,
        fields=((1 << 32) + 3).to_bytes(8, "little"),
    )
    layer = open_("xor", blob, (1 << 32) + 3)
    piece = np.zeros(4 * MIB, np.uint8)
    for begin in range(0, 1 << 32, piece.size):
        layer.apply(piece, begin)
    assert not piece.any()
    tail = np.full(3, 8, np.uint8)
    layer.apply(tail, 1 << 32)
    layer.finish()
    assert tail.tolist() == [9, 10, 11]


# ---- sparse rules -----------------------------------------------------------------------------------

OLD = bytes(range(256)) * 16


def sparse(
    encoding: Encoding, positions: list[int], values: bytes, count: int | None = None
) -> bytes:
    form = "I" if encoding == "overwrite" else "Q"
    count = len(positions) if count is None else count
    return struct.pack(f"<{len(positions) + 1}{form}", count, *positions) + values


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse"])
@pytest.mark.parametrize(
    ("positions", "values", "count", "match"),
    [
        ([3], b"x" + b"\0\0", None, "longer|hold more|expected size"),
        ([3], b"x", 0, "longer|hold more|expected size"),
        ([3, 5], b"x", None, "too early|expected size|is left"),
        ([3], b"", None, "too early|expected size|is left"),
        ([3], b"x", 2, "too early|expected size|is left"),
        ([], b"", 1, "too early|expected size|is left"),
        ([3], b"x", 4097, "more positions than"),
        ([3], b"x", (1 << 32) - 1, "more positions than"),
        ([5, 4096], b"xy", None, "outside of the tensor"),
        ([5, (1 << 32) - 1], b"xy", None, "outside of the tensor"),
        ([4096, 5], b"xy", None, "outside of the tensor|increase"),
        ([5, 5], b"xy", None, "twice|increase"),
        ([5, 5], b"xx", None, "twice|increase"),
        ([7, 5, 9, 5], b"wxyz", None, "twice|increase"),
    ],
)
def test_sparse_payload_that_breaks_a_rule_is_refused_before_anything_changes(
    encoding: Encoding, positions: list[int], values: bytes, count: int | None, match: str
) -> None:
    refused(encoding, sparse(encoding, positions, values, count), len(OLD), match)


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse"])
@pytest.mark.parametrize("write", [compress, lambda data: compress(data, write_content_size=False)])
def test_sparse_payload_cut_anywhere_is_refused(
    encoding: Encoding, write: Callable[[bytes], bytes]
) -> None:
    old, new = step_of(241, 0.2)
    payload = payload_of(encoding, old, new)
    for nbytes in range(len(payload)):
        with pytest.raises(FrameFormatError):
            open_(encoding, write(payload[:nbytes]), 241)


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse"])
def test_sparse_payload_with_bytes_after_it_that_only_the_decoder_sees_is_refused(
    encoding: Encoding,
) -> None:
    payload = sparse(encoding, list(range(1000)), bytes(1000))
    blob = compress(payload + bytes(500), write_content_size=False)
    with pytest.raises(FrameFormatError, match="longer than expected"):
        open_(encoding, blob, len(OLD))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_wrong_frame_checksum_is_refused(encoding: Encoding) -> None:
    old, new = step_of(4096)
    blob = compress(payload_of(encoding, old, new), write_checksum=True)
    with pytest.raises(FrameFormatError, match="libzstd refuses"):
        run(encoding, blob[:-1] + bytes([blob[-1] ^ 1]), old)


def test_xor_sparse_positions_must_increase() -> None:
    refused("xor_sparse", sparse("xor_sparse", [9, 5], b"xy"), len(OLD), "increase strictly")
    refused("xor_sparse", sparse("xor_sparse", [1 << 63], b"x"), len(OLD), "outside of the tensor")
    refused("xor_sparse", sparse("xor_sparse", [], b"", 1 << 63), len(OLD), "more positions than")


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse"])
@pytest.mark.parametrize("at", [1, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 299_999])
def test_duplicate_position_is_found_across_steps(encoding: Encoding, at: int) -> None:
    positions = np.arange(300_000)
    positions[at] = positions[at - 1]
    payload = sparse(encoding, positions.tolist(), bytes(300_000))
    refused(encoding, payload, 400_000, "twice|increase")


def test_duplicate_position_far_apart_is_found() -> None:
    positions = np.random.default_rng(0).permutation(300_000)
    positions[0] = positions[-1]
    payload = sparse("overwrite", positions.tolist(), bytes(300_000))
    err = refused("overwrite", payload, 300_000, "twice")
    assert err.got == positions[-1]


# ---- memory -----------------------------------------------------------------------------------------

MANY = SPARSE_MEMORY_BYTES // 8 + 1


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse"])
@pytest.mark.parametrize("count", [MANY - 1, MANY])
def test_payload_over_the_cap_goes_to_a_file_and_gives_the_same_bytes(
    encoding: Encoding, count: int
) -> None:
    files = []

    def spill() -> Any:
        files.append(tempfile.TemporaryFile())  # noqa: SIM115 (open_layer closes it)
        return files[-1]

    old = np.random.default_rng(0).bytes(count + 1000)
    new = (np.frombuffer(old[:count], np.uint8) ^ 1).tobytes() + old[count:]
    order = np.random.default_rng(1).permutation if encoding == "overwrite" else None
    blob = compress(payload_of(encoding, old, new, order))
    assert run(encoding, blob, old, piece=64 * KIB, spill=spill) == new
    assert len(files) == (count == MANY)
    assert all(file.closed for file in files)


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse"])
def test_memory_stays_bounded_for_a_payload_of_16_mib(encoding: Encoding) -> None:
    count = 2 * MIB
    order = (lambda p: p[::-1]) if encoding == "overwrite" else None
    blob = compress(payload_of(encoding, bytes(count), b"\1" * count, order))
    piece = np.zeros(64 * KIB, np.uint8)
    tracemalloc.start()
    layer = open_(encoding, blob, count)
    for begin in range(0, count, piece.size):
        piece[:] = 0
        layer.apply(piece, begin)
        assert (piece == 1).all()
    layer.finish()
    assert tracemalloc.get_traced_memory()[1] < SPARSE_MEMORY_BYTES + 2 * MIB
    tracemalloc.stop()


def test_payload_over_the_cap_without_a_file_is_out_of_scratch() -> None:
    payload = payload_of("xor_sparse", bytes(MANY), b"\1" * MANY)
    with pytest.raises(OutOfScratchError) as caught:
        open_("xor_sparse", compress(payload), MANY, spill=None)
    assert caught.value.needed_bytes == MANY * 8
    assert caught.value.budget_bytes == SPARSE_MEMORY_BYTES


def test_count_that_the_blob_is_too_short_for_allocates_nothing() -> None:
    def spill() -> Any:
        raise AssertionError("allocated for a count that cannot be true")

    for encoding in ("overwrite", "xor_sparse"):
        payload = sparse(encoding, [1], b"x", 1 << 31)
        with pytest.raises(FrameFormatError, match="too short for the content"):
            open_(encoding, compress(payload), (1 << 32) - 1, spill=spill)


def test_full_disk_is_an_error_and_not_a_fault_at_the_first_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allocate(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fsio, "allocate", allocate)
    payload = payload_of("xor_sparse", bytes(MANY), b"\1" * MANY)
    with pytest.raises(OSError, match="No space left"):
        open_("xor_sparse", compress(payload), MANY)


def test_xor_layer_keeps_one_buffer_of_a_piece() -> None:
    blob = compress(bytes(64 * MIB))
    piece = np.zeros(512 * KIB, np.uint8)
    tracemalloc.start()
    layer = open_("xor", blob, 64 * MIB)
    for begin in range(0, 64 * MIB, piece.size):
        layer.apply(piece, begin)
    layer.finish()
    assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    tracemalloc.stop()


# ---- hypothesis -------------------------------------------------------------------------------------


@fixed
@given(
    st.sampled_from(ENCODINGS),
    st.binary(max_size=600),
    st.randoms(use_true_random=False),
    st.floats(0, 1),
    st.integers(1, 700),
    st.booleans(),
)
def test_any_step_of_any_encoding_in_any_pieces(
    encoding: Encoding, old: bytes, random: Any, share: float, piece: int, small_spill: bool
) -> None:
    new = bytes(random.randrange(256) if random.random() < share else byte for byte in old)

    def order(positions: Any) -> Any:
        shuffled = positions.tolist()
        random.shuffle(shuffled)
        return np.array(shuffled, np.int64)

    payload = payload_of(encoding, old, new, order if encoding == "overwrite" else None)
    cap = gpusync.format.encodings.SPARSE_MEMORY_BYTES
    gpusync.format.encodings.SPARSE_MEMORY_BYTES = 64 if small_spill else cap
    try:
        assert run(encoding, compress(payload), old, piece=piece) == new
    finally:
        gpusync.format.encodings.SPARSE_MEMORY_BYTES = cap


def interpret(encoding: Encoding, payload: bytes, old: bytes) -> bytes | None:
    """The format read byte by byte: the new tensor, or None where a rule is broken."""
    if encoding == "xor":
        same = len(payload) == len(old)
        return bytes(a ^ b for a, b in zip(old, payload, strict=True)) if same else None
    if encoding == "xor_rows":
        try:
            delta = xor_rows.decode(payload, len(old))
        except xor_rows.Broken:
            return None
        return bytes(a ^ b for a, b in zip(old, delta, strict=True))
    width = 4 if encoding == "overwrite" else 8
    if len(payload) < width:
        return None
    count = int.from_bytes(payload[:width], "little")
    if len(payload) != width + count * (width + 1):
        return None
    words = [
        int.from_bytes(payload[width * (n + 1) : width * (n + 2)], "little") for n in range(count)
    ]
    if any(word >= len(old) for word in words) or len(set(words)) != count:
        return None
    if encoding == "xor_sparse" and words != sorted(words):
        return None
    new = bytearray(old)
    for word, value in zip(words, payload[len(payload) - count :], strict=True):
        new[word] = value if encoding == "overwrite" else new[word] ^ value
    return bytes(new)


@fixed
@given(
    st.sampled_from(ENCODINGS),
    st.binary(min_size=1, max_size=40),
    st.binary(max_size=40),
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=2),
    st.integers(-3, 3),
)
def test_any_payload_gives_what_the_format_says_or_a_typed_error(
    encoding: Encoding, old: bytes, other: bytes, flips: list[tuple[int, int]], grow: int
) -> None:
    new = (other + old[len(other) :])[: len(old)]
    payload = bytearray(payload_of(encoding, old, new))
    for position, value in flips:
        payload[position % len(payload)] = value
    payload = payload[: len(payload) + min(grow, 0)] + bytes(max(grow, 0))
    expected = interpret(encoding, bytes(payload), old)
    try:
        got = run(encoding, compress(bytes(payload)), old, piece=7)
    except FrameFormatError:
        got = None
    assert got == expected
