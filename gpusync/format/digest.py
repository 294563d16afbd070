"""Digests of tensors, and the fingerprint of a version.

Published digests are xxh3-128 (seed 0), blake3 or adler32 (start 1) of a tensor's complete new bytes, in hex.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import xxhash

from gpusync.errors import HeaderFormatError, MissingDependencyError
from gpusync.format.jsontext import show
from gpusync.types import ALGORITHMS, Algorithm, Digest

try:
    import blake3
except ModuleNotFoundError:
    blake3 = None  # type: ignore[assignment]

_HEX_DIGITS: dict[str, int] = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
_HEX = re.compile(r"[0-9a-f]+")


class Hasher(Protocol):
    """A running digest."""

    def update(self, buffer: Any, /) -> None:
        """Take the next bytes: any C-contiguous buffer, not kept. The GIL is released while they are hashed."""

    def digest(self) -> Digest:
        """Return the digest of all bytes so far."""


def parse_digest(
    algorithm: str,
    text: object,
    *,
    version: int | None = None,
    file: str | None = None,
    tensor: str | None = None,
) -> Digest:
    """Return a published digest; upper-case hex is taken and lowered.

    Raises
    ------
    HeaderFormatError
        The algorithm is unknown, or ``text`` is not as many hex digits as it has. ``text`` None means: absent.
    """
    where: dict[str, Any] = {"version": version, "file": file, "tensor": tensor}
    if algorithm not in ALGORITHMS:
        raise HeaderFormatError(
            "unknown digest algorithm", expected=" or ".join(ALGORITHMS), got=algorithm, **where
        )
    if text is None:
        raise HeaderFormatError(
            "no digest is published for the tensor", expected=algorithm, **where
        )
    lowered = text.lower() if isinstance(text, str) else ""
    if len(lowered) != _HEX_DIGITS[algorithm] or not _HEX.fullmatch(lowered):
        raise HeaderFormatError(
            f"a digest is not {_HEX_DIGITS[algorithm]} hex digits",
            expected=algorithm,
            got=show(text),
            **where,
        )
    return Digest(_known(algorithm), lowered)


def new_hasher(algorithm: str) -> Hasher:
    """Return a fresh hasher.

    Raises
    ------
    MissingDependencyError
        blake3 is asked for and its package is not installed.
    HeaderFormatError
        The algorithm is unknown.
    """
    known = _known(algorithm)
    if known == "adler32":
        return _Adler32()
    if known == "xxh3-128":
        return _Wrapped(known, xxhash.xxh3_128())
    if blake3 is None:
        raise MissingDependencyError("blake3 digests need a package: pip install 'gpusync[blake3]'")
    return _Wrapped(known, blake3.blake3())


def digest_of(algorithm: str, buffer: Any) -> Digest:
    """Return the digest of one C-contiguous buffer."""
    hasher = new_hasher(algorithm)
    hasher.update(buffer)
    return hasher.digest()


def fingerprint(index: bytes | None, headers: Mapping[str, bytes]) -> str:
    """Return the fingerprint of a version: xxh3-128 hex over its index and all its shard headers.

    Parameters
    ----------
    index
        The index file's bytes; None where the version has none.
    headers
        Shard name to the file's first 8 + N bytes.

    Notes
    -----
    Hashed in order: the index under the name "index", then the headers sorted by name; each as length of the name
    (u64, little endian), name (UTF-8), length of the bytes, bytes.
    """
    state = xxhash.xxh3_128()
    named = [] if index is None else [("index", index)]
    named += sorted(headers.items())
    for name, data in named:
        encoded = name.encode()
        state.update(len(encoded).to_bytes(8, "little") + encoded + len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def _known(algorithm: str) -> Algorithm:
    for known in ALGORITHMS:
        if known == algorithm:
            return known
    raise HeaderFormatError(
        "unknown digest algorithm", expected=" or ".join(ALGORITHMS), got=algorithm
    )


class _Wrapped:
    """A library's hash object under our protocol."""

    def __init__(self, algorithm: Algorithm, state: Any) -> None:
        self._algorithm = algorithm
        self._state = state
        self.update = state.update

    def digest(self) -> Digest:
        return Digest(self._algorithm, self._state.hexdigest())


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, buffer: Any, /) -> None:
        self._value = zlib.adler32(buffer, self._value)

    def digest(self) -> Digest:
        return Digest("adler32", f"{self._value:08x}")
