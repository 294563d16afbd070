"""Payloads of xor: two decoders, one result, and one judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gpusync
from gpusync.errors import FrameFormatError
from gpusync.format import decode_xor
from gpusync.format.encodings import Layer, open_layer
from gpusync.format.frames import MAX_WINDOW, Where
from tests.unit.strategies import compress, reads, seekable

MIB = 1 << 20
WHERE = Where(version=7, file="m.safetensors", tensor="a", offset=1000)


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[decode_xor._Loops]:
    """This test's own, loaded."""
    loops = decode_xor._Loops()
    loops.load()
    monkeypatch.setattr(decode_xor, "loops", loops)
    yield loops


def nearly_empty(nbytes: int, share: float = 0.002) -> np.ndarray:
    rng = np.random.default_rng(nbytes)
    return (rng.integers(1, 256, nbytes) * (rng.random(nbytes) < share)).astype(np.uint8)


def dense_at(begin: int, nbytes: int = MIB) -> np.ndarray:
    """Nearly empty, but for a stretch that is small on the wire and has no zeros."""
    delta = nearly_empty(4 * MIB)
    delta[begin : begin + nbytes] = 0xA5
    return delta


def open_(blob: bytes, nbytes: int) -> Layer:
    return open_layer(
        "xor",
        lambda: reads(blob),
        blob_nbytes=len(blob),
        nbytes=nbytes,
        max_window=MAX_WINDOW,
        where=WHERE,
        spill=None,
    )


def applied(blob: bytes, old: np.ndarray, piece: int) -> np.ndarray:
    tensor = old.copy()
    layer = open_(blob, tensor.size)
    for begin in range(0, tensor.size, piece):
        layer.apply(tensor[begin : begin + piece], begin)
    layer.finish()
    return tensor


def decoder_of(layer: Layer) -> str:
    if isinstance(layer, decode_xor.DenseLayer):
        return "libzstd"
    assert isinstance(layer, decode_xor.NonzeroLayer)
    return "loops" if layer._dense is None else "loops, then libzstd"


@pytest.mark.parametrize("piece", [4096, MIB, 3 * MIB])
@pytest.mark.parametrize("framing", ["single", "seekable"])
def test_both_decoders_give_the_same_bytes(
    framing: str, piece: int, loops: decode_xor._Loops
) -> None:
    delta = nearly_empty(4 * MIB + 5)
    content = delta.tobytes()
    blob = compress(content) if framing == "single" else seekable(content, 256 << 10)
    old = np.random.default_rng(0).integers(0, 256, delta.size).astype(np.uint8)
    assert decoder_of(open_(blob, delta.size)) == "loops"
    assert np.array_equal(applied(blob, old, piece), old ^ delta)
    loops.loaded = False
    assert decoder_of(open_(blob, delta.size)) == "libzstd"
    assert np.array_equal(applied(blob, old, piece), old ^ delta)


def test_a_layer_that_starts_gives_the_delta() -> None:
    delta = nearly_empty(2 * MIB)
    layer = open_(compress(delta.tobytes()), delta.size)
    piece = np.full(MIB, 7, np.uint8)
    for begin in (0, MIB):
        layer.start(piece, begin)
        assert np.array_equal(piece, delta[begin : begin + MIB])
    layer.finish()


@pytest.mark.parametrize("begin", [0, MIB + 4096, 3 * MIB])
@pytest.mark.parametrize("piece", [4096, MIB])
def test_libzstd_takes_over_where_a_payload_is_not_nearly_empty(begin: int, piece: int) -> None:
    delta = dense_at(begin)
    blob = compress(delta.tobytes())
    layer = open_(blob, delta.size)
    assert decoder_of(layer) == "loops"
    tensor = np.zeros(delta.size, np.uint8)
    for at in range(0, tensor.size, piece):
        layer.apply(tensor[at : at + piece], at)
    layer.finish()
    assert decoder_of(layer) == "loops, then libzstd"
    assert np.array_equal(tensor, delta)


def test_a_payload_that_is_large_on_the_wire_is_libzstds() -> None:
    delta = nearly_empty(MIB, 0.2)
    blob = compress(delta.tobytes())
    assert decoder_of(open_(blob, delta.size)) == "libzstd"
    assert np.array_equal(applied(blob, np.zeros_like(delta), MIB), delta)


def test_a_checksum_at_the_end_is_libzstds_to_judge() -> None:
    delta = nearly_empty(MIB)
    blob = compress(delta.tobytes(), write_checksum=True)
    assert np.array_equal(applied(blob, np.zeros_like(delta), 4096), delta)
    with pytest.raises(FrameFormatError):
        applied(blob[:-1] + bytes([blob[-1] ^ 1]), np.zeros_like(delta), 4096)


def test_a_damaged_blob_is_refused_as_libzstd_refuses_it(loops: decode_xor._Loops) -> None:
    delta = nearly_empty(MIB)
    good = compress(delta.tobytes())
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(300):
        blob = bytearray(good)
        blob[rng.integers(len(blob))] ^= 1 << rng.integers(8)
        results: list[object] = []
        for loops.loaded in (False, True):
            try:
                results.append(applied(bytes(blob), np.zeros_like(delta), 64 << 10).tobytes())
            except FrameFormatError as err:
                results.append((str(err), err.offset))
        assert results[0] == results[1]
        refused += isinstance(results[0], tuple)
    assert refused


@pytest.mark.parametrize("kept", [False, True])
def test_the_loops_are_loaded_or_compiled_when_much_was_asked_for(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_xor, "_LOADED_AFTER_NBYTES", 10 * MIB)
    monkeypatch.setattr(decode_xor, "_COMPILED_AFTER_NBYTES", 20 * MIB)
    monkeypatch.setattr(decode_xor, "are_kept", lambda module: kept)
    loops = decode_xor._Loops()
    loaded = []
    for _ in range(22):
        loops.ask(MIB)
        loaded.append(loops.loaded)
    assert loaded.index(True) == (10 if kept else 20)


def test_where_loops_cannot_be_loaded_libzstd_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(module: str) -> bool:
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(decode_xor, "are_kept", broken)
    monkeypatch.setattr(decode_xor, "loops", decode_xor._Loops())
    monkeypatch.setattr(decode_xor, "_COMPILED_AFTER_NBYTES", 1 << 60)
    decode_xor.loops.ask(300 * MIB)
    delta = nearly_empty(MIB)
    blob = compress(delta.tobytes())
    assert decoder_of(open_(blob, delta.size)) == "libzstd"
    assert np.array_equal(applied(blob, np.zeros_like(delta), MIB), delta)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_blob_that_is_read_again_is_held_against_its_digest_once(tmp_path: Path) -> None:
    base, source, local = tmp_path / "base", tmp_path / "source", tmp_path / "local"
    base.mkdir()
    old = {"a": np.arange(4 * MIB).astype(np.uint8), "b": np.zeros(MIB, np.uint8)}
    new = {"a": old["a"] ^ dense_at(2 * MIB), "b": old["b"] ^ nearly_empty(MIB)}
    save_file(old, base / "model.safetensors")
    gpusync.Publisher(source, base, framing="single").publish(new.items())
    gpusync.pull(local, base, source, 1)
    pulled = load_file(local / "model.safetensors")
    assert all(np.array_equal(pulled[name], new[name]) for name in new)
