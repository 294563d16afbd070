"""The marker: ``.weight_sync/state.json``, which version a local checkpoint stands at, and whose bytes it holds.

Other receivers write ``{"version": "000007"}`` and reseed where it is absent. Ours carries more, under a seal: a
marker whose seal does not fit was written, or edited, by someone else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from gpusync import fsio
from gpusync.errors import CheckpointIOError
from gpusync.format.digest import digest_of
from gpusync.format.index import MAX_VERSION

STATE_DIR = ".weight_sync"
MARKER_NAME = "state.json"
_MAX_MARKER_BYTES = 64 << 20
_MAX_HISTORY = 4096


@dataclass(frozen=True)
class Marker:
    """Identity of the bytes in a local checkpoint.

    Parameters
    ----------
    version
        The version applied.
    id
        Random, new with every swap; digest table and journal are bound to it. Empty where the marker is not ours.
    fingerprint
        Of the version's index and shard headers; None for version 0 and where unknown.
    run_id
        The publisher's, where its manifests name one.
    durable
        False where data was not fsynced; then ``boot_id`` is the boot whose page cache holds it.
    base
        The pristine base, latched when the folder was seeded.
    history
        Fingerprints of the versions applied since the seed, by version.
    """

    version: int
    id: str = ""
    fingerprint: str | None = None
    run_id: str | None = None
    durable: bool = True
    boot_id: str = ""
    base: str | None = None
    history: Mapping[int, str] = field(default_factory=dict)

    def advanced(self, **changes: Any) -> Marker:
        """Return a marker with a new id; only the newest part of a long history is kept."""
        made = replace(self, id=uuid4().hex, **changes)
        kept = dict(sorted(made.history.items())[-_MAX_HISTORY:])
        return replace(made, history=kept)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document, sealed."""
        document: dict[str, Any] = {
            "version": f"{self.version:06d}",
            "valid": True,
            "id": self.id,
            "fingerprint": self.fingerprint,
            "run_id": self.run_id,
            "durability": "durable" if self.durable else "process",
            "boot_id": self.boot_id,
            "base": self.base,
            "history": {str(version): text for version, text in self.history.items()},
        }
        return sealed(document)


@dataclass(frozen=True)
class MarkerState:
    """What was found in place of a marker.

    ``state`` is "ours"; "foreign" (another receiver's, its version can be trusted); "untrusted" (it says itself
    that the bytes are not valid, or only lived in a process); "damaged"; or "absent".
    """

    state: Literal["ours", "foreign", "untrusted", "damaged", "absent"]
    marker: Marker | None = None


def read_marker(folder: Path) -> MarkerState:
    """Read the marker of a local checkpoint.

    Raises
    ------
    CheckpointIOError
        It is there and cannot be read: neither trusted nor taken for damaged.
    """
    path = folder / STATE_DIR / MARKER_NAME
    try:
        raw = fsio.read_file(path, _MAX_MARKER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return MarkerState("absent")
    except OSError as err:
        raise CheckpointIOError(
            f"marker cannot be read: {err.strerror}", file=str(path), errno=err.errno
        ) from err
    return parse_marker(raw)


def parse_marker(raw: bytes) -> MarkerState:
    """Classify a marker's bytes; nothing in them raises."""
    try:
        document = json.loads(raw)
        version = int(document["version"])
        if isinstance(document["version"], bool | float) or not 0 <= version <= MAX_VERSION:
            return MarkerState("damaged")
        if is_sealed(document):
            return MarkerState("ours", _from_json(document, version))
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return MarkerState("damaged")
    if document.get("valid") is False or document.get("durability") == "process":
        return MarkerState("untrusted", Marker(version))
    return MarkerState("foreign", Marker(version))


def write_marker(folder: Path, marker: Marker) -> None:
    """Write the marker durably: it never runs ahead of data, and data that it stands for was fsynced before."""
    fsio.write_json(folder / STATE_DIR / MARKER_NAME, marker.to_json(), durable=True)


def current_boot_id() -> str:
    """Return the kernel's id of this boot, or "" where there is none."""
    buffer = bytearray(64)  # files of /proc have no size to go by
    try:
        fd = fsio.open_regular(Path("/proc/sys/kernel/random/boot_id"))
    except OSError:
        return ""
    try:
        got = fsio.pread_into(fd, memoryview(buffer), 0)
    finally:
        fsio.close_read(fd)
    return buffer[:got].decode("ascii", "replace").strip()


def _from_json(document: Mapping[str, Any], version: int) -> Marker:
    """Read a sealed marker; another release may have sealed one with other fields."""
    for key in ("fingerprint", "run_id", "base"):
        if not isinstance(document[key], str | None):
            raise TypeError(f"{key} of the marker is not text")
    if not isinstance(document["id"], str) or not isinstance(document["boot_id"], str):
        raise TypeError("an id of the marker is not text")
    return Marker(
        version=version,
        id=document["id"],
        fingerprint=document["fingerprint"],
        run_id=document["run_id"],
        durable=document["durability"] == "durable",
        boot_id=document["boot_id"],
        base=document["base"],
        history={int(key): text for key, text in document["history"].items()},
    )


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON document with its seal: damage to any part of it shows."""
    return {**document, "seal": _seal(document)}


def is_sealed(document: Mapping[str, Any]) -> bool:
    """True where a document's seal fits."""
    plain = {key: value for key, value in document.items() if key != "seal"}
    return document.get("seal") == _seal(plain)


def _seal(document: Mapping[str, Any]) -> str:
    """Digest of everything else in the document, in canonical JSON."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return digest_of("xxh3-128", canonical.encode("utf-8", "surrogatepass")).hex
