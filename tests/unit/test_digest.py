"""Digests and fingerprints against xxhash, blake3 and zlib."""

from __future__ import annotations

import struct
import zlib

import blake3
import numpy as np
import pytest
import xxhash

import gpusync.format.digest
from gpusync.errors import HeaderFormatError, MissingDependencyError
from gpusync.format.digest import digest_of, fingerprint, new_hasher, parse_digest
from gpusync.types import ALGORITHMS, Digest
from tests.unit.strategies import SIZES

ORACLES = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data, seed=0),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data, 1):08x}",
}
NBYTES = {"xxh3-128": 32, "blake3": 64, "adler32": 8}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nbytes", [*SIZES, (1 << 19) - 1, 1 << 19, (1 << 19) + 1])
def test_digest_equals_the_oracle(algorithm: str, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    expected = Digest(algorithm, ORACLES[algorithm](data))
    assert digest_of(algorithm, data) == expected
    assert digest_of(algorithm, np.frombuffer(data, np.uint8)) == expected
    assert digest_of(algorithm, memoryview(bytearray(data))) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("piece", [1, 15, 16, 17, 1024])
def test_digest_of_pieces_equals_digest_of_the_whole(algorithm: str, piece: int) -> None:
    data = np.random.default_rng(1).bytes(2049)
    hasher = new_hasher(algorithm)
    for begin in range(0, len(data), piece):
        hasher.update(data[begin : begin + piece])
    assert hasher.digest() == digest_of(algorithm, data)


def test_adler32_starts_at_one_and_is_zero_padded() -> None:
    assert digest_of("adler32", b"").hex == "00000001"
    assert digest_of("adler32", b"\0" * 3).hex == "00030001"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_published_digest_in_upper_case_is_taken_and_lowered(algorithm: str) -> None:
    text = ORACLES[algorithm](b"abc").upper()
    assert parse_digest(algorithm, text) == digest_of(algorithm, b"abc")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "bend",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "0",
        lambda text: "0x" + text[2:],
        lambda text: text[:-1] + "g",
        lambda text: " " + text[1:],
        lambda text: text[:-1] + "\n",
        lambda text: "\u0660" * len(text),
        lambda text: 7,
        lambda text: None,
    ],
)
def test_published_digest_that_is_absent_or_of_wrong_form_is_refused(algorithm, bend) -> None:
    bad = bend("0" * NBYTES[algorithm])
    with pytest.raises(HeaderFormatError) as caught:
        parse_digest(algorithm, bad, version=7, file="m.safetensors", tensor="a")
    err = caught.value
    assert (err.version, err.file, err.tensor) == (7, "m.safetensors", "a")


@pytest.mark.parametrize("algorithm", ["sha256", "", "XXH3-128", "xxh3_128"])
def test_unknown_digest_algorithm_is_refused(algorithm: str) -> None:
    with pytest.raises(HeaderFormatError, match="unknown digest algorithm"):
        parse_digest(algorithm, "0" * 32)
    with pytest.raises(HeaderFormatError, match="unknown digest algorithm"):
        new_hasher(algorithm)


def test_blake3_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpusync.format.digest, "blake3", None)
    with pytest.raises(MissingDependencyError, match=r"gpusync\[blake3\]"):
        new_hasher("blake3")
    assert parse_digest("blake3", "0" * 64).hex == "0" * 64


def test_fingerprint_is_the_documented_hash() -> None:
    def part(name: str, data: bytes) -> bytes:
        raw = name.encode()
        return struct.pack("<Q", len(raw)) + raw + struct.pack("<Q", len(data)) + data

    text = part("index", b"{}") + part("a", b"1") + part("b\u00e9", b"")
    assert fingerprint(b"{}", {"b\u00e9": b"", "a": b"1"}) == xxhash.xxh3_128_hexdigest(text)
    assert fingerprint(None, {"a": b"1"}) == xxhash.xxh3_128_hexdigest(part("a", b"1"))


def test_fingerprint_tells_apart_what_differs_only_in_a_border_or_a_header() -> None:
    prints = {
        fingerprint(b"{}", {"a": b"12", "b": b"3"}),
        fingerprint(b"{}", {"a": b"1", "b": b"23"}),
        fingerprint(b"{}", {"a": b"12"}),
        fingerprint(None, {"a": b"12", "b": b"3"}),
        fingerprint(b"", {"a": b"12", "b": b"3"}),
        fingerprint(b"{ }", {"a": b"12", "b": b"3"}),
    }
    assert len(prints) == 6
