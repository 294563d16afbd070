"""The index of a version, the manifest beside it, and the names both use.

The index is the publication boundary: written last, it says what a version is (delta or full), what it stands on,
and which shard holds which tensor.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any, TypeGuard

from gpusync.errors import IndexFormatError, SourceNotReadyError
from gpusync.format.header import tensor_nbytes
from gpusync.format.jsontext import parse_json_object, parse_tensor_name, show, uncollected
from gpusync.types import (
    ALGORITHMS,
    ENCODINGS,
    DeltaIndex,
    FullIndex,
    Manifest,
    ManifestEntry,
)

__all__ = [
    "INDEX_NAME",
    "MANIFEST_NAME",
    "build_manifest",
    "parse_index",
    "parse_json_object",
    "parse_manifest",
    "parse_shard_name",
    "parse_version_dir_name",
    "parse_version_number",
    "version_dir_name",
]

INDEX_NAME = "model.safetensors.index.json"
MANIFEST_NAME = "gpusync.manifest.json"

_VERSION_DIR = re.compile(r"weight_v([0-9]{1,18})")
_VERSION_TEXT = re.compile(r"[0-9]{1,18}")
_XXH3_HEX = re.compile(r"[0-9a-fA-F]{32}")
MAX_VERSION = 10**18 - 1
MAX_RUN_ID_CHARS = 256
_MAX_SHARD_NAME_BYTES = 255
_SHARD_SUFFIX = ".safetensors"
# Characters that some shell, file system or reader takes for a separator, or shows as one. NFKC finds the
# full-width forms; these have no compatibility mapping to the ASCII ones.
_SEPARATOR_LOOK_ALIKES = frozenset("\u2044\u2215\u2216\u29f5\u29f8\u29f9\u2571\u2572\u27cb\u27cd")

_DELTA_ONLY = {"base_version", "compression_format", "checksum_format"}


def version_dir_name(version: int) -> str:
    """Return the folder name of a version, ``weight_v000007``."""
    return f"weight_v{version:06d}"


def parse_version_dir_name(name: str) -> int | None:
    """Return the version that a folder name says, or None: any padding, N >= 1, nothing before or after."""
    match = _VERSION_DIR.fullmatch(name)
    version = int(match[1]) if match else 0
    return version or None


def parse_version_number(value: object) -> int | None:
    """Return a version written as "000007" or 7, or None."""
    if isinstance(value, str) and _VERSION_TEXT.fullmatch(value):
        return int(value)
    return value if type(value) is int and 0 <= value <= MAX_VERSION else None


def parse_shard_name(name: object, *, file: str) -> str:
    """Return a shard's file name as it is: one path component that ends in ``.safetensors``.

    Raises
    ------
    IndexFormatError
        It is no string, holds a separator, something that looks like one, a colon, ``..`` or an unprintable
        character, is over 255 bytes, or has another suffix.
    """
    if not isinstance(name, str) or not name:
        raise IndexFormatError("a shard name is not a file name", file=file, got=show(name))
    # First of all: normalizing takes time that grows with the square of a name's marks.
    too_long = len(name) > _MAX_SHARD_NAME_BYTES or len(name.encode()) > _MAX_SHARD_NAME_BYTES
    if too_long or not name.endswith(_SHARD_SUFFIX):
        raise IndexFormatError(
            f"a shard name is over {_MAX_SHARD_NAME_BYTES} bytes or does not end in {_SHARD_SUFFIX}",
            file=file,
            got=show(name),
        )
    folded = unicodedata.normalize("NFKC", name)
    if (
        any(char in "/\\:" for char in folded)
        or not _SEPARATOR_LOOK_ALIKES.isdisjoint(name)
        or not name.isprintable()
        or ".." in folded
    ):
        raise IndexFormatError(
            "a shard name is not one plain path component", file=file, got=show(name)
        )
    return name


@uncollected
def parse_index(data: bytes, *, file: str) -> DeltaIndex | FullIndex:
    """Return the validated index of a version: a delta where its metadata has ``delta_encoding``, else full.

    Raises
    ------
    SourceNotReadyError
        ``data`` is empty or all zeros, as mounts show a file before its bytes.
    IndexFormatError
        Anything else that is not a valid index.
    """
    if not data.strip(b"\0"):
        raise SourceNotReadyError(
            "the index is empty or zeros; refresh the mount and retry", file=file, got=len(data)
        )
    index = parse_json_object(data, file=file, error=IndexFormatError, what="the index")
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise IndexFormatError("metadata is not an object", file=file, got=type(metadata).__name__)
    weight_map = _parse_weight_map(index.get("weight_map"), file)
    manifest_digest = None
    if "gpusync_manifest" in metadata:
        manifest_digest = _parse_hex(metadata["gpusync_manifest"], "gpusync_manifest", file)
    if "delta_encoding" not in metadata:
        leftover = sorted(_DELTA_ONLY & metadata.keys())
        if leftover:  # a delta that lost its encoding must not replace a checkpoint with its blobs
            raise IndexFormatError(
                "the index has a delta's keys and no delta_encoding",
                file=file,
                got=", ".join(leftover),
            )
        if not weight_map:
            raise IndexFormatError("a full checkpoint's weight_map is empty", file=file)
        return FullIndex(weight_map, parse_version_number(metadata.get("version")), manifest_digest)
    _parse_choice(metadata, "compression_format", ("zstd",), file)
    return DeltaIndex(
        version=_parse_version(metadata, "version", 1, file),
        base_version=_parse_version(metadata, "base_version", 0, file),
        encoding=_parse_choice(metadata, "delta_encoding", ENCODINGS, file),
        algorithm=_parse_choice(metadata, "checksum_format", ALGORITHMS, file),
        weight_map=weight_map,
        manifest_digest=manifest_digest,
    )


@uncollected
def parse_manifest(data: bytes, *, file: str) -> Manifest:
    """Return the validated ``gpusync.manifest.json`` of a version.

    Raises
    ------
    SourceNotReadyError
        ``data`` is empty or all zeros.
    IndexFormatError
        Anything else that is not a valid manifest.
    """
    if not data.strip(b"\0"):
        raise SourceNotReadyError(
            "the manifest is empty or zeros; refresh the mount and retry", file=file, got=len(data)
        )
    value = parse_json_object(data, file=file, error=IndexFormatError, what="the manifest")
    run_id, base, tensors = value.get("run_id"), value.get("base_fingerprint"), value.get("tensors")
    if not is_run_id(run_id):
        raise IndexFormatError(
            f"run_id is no printable string of 1 to {MAX_RUN_ID_CHARS} characters",
            file=file,
            got=show(run_id),
        )
    if not isinstance(tensors, dict):
        raise IndexFormatError("tensors is not an object", file=file, got=type(tensors).__name__)
    return Manifest(
        version=_parse_version(value, "version", 1, file),
        run_id=run_id,
        base_fingerprint=None if base is None else _parse_hex(base, "base_fingerprint", file),
        tensors={
            parse_tensor_name(name, file=file, error=IndexFormatError): _parse_manifest_entry(
                name, row, file
            )
            for name, row in tensors.items()
        },
    )


def is_run_id(value: object) -> TypeGuard[str]:
    """True for text that may name a run: printable, and short enough to stand in every marker and message."""
    return isinstance(value, str) and 0 < len(value) <= MAX_RUN_ID_CHARS and value.isprintable()


def build_manifest(manifest: Manifest) -> bytes:
    """Return a manifest's JSON; ``parse_manifest`` gives it back."""
    value = {
        "version": f"{manifest.version:06d}",
        "run_id": manifest.run_id,
        "base_fingerprint": manifest.base_fingerprint,
        "tensors": {
            name: {
                "blob_digest": entry.blob_digest,
                "nbytes": entry.nbytes,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "framing": entry.framing,
            }
            for name, entry in manifest.tensors.items()
        },
    }
    return json.dumps(value, separators=(",", ":")).encode()


def _parse_weight_map(value: object, file: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise IndexFormatError("weight_map is not an object", file=file, got=type(value).__name__)
    # A shard holds many tensors: each name is judged once.
    good: set[str] = set()
    for tensor, shard in value.items():
        parse_tensor_name(tensor, file=file, error=IndexFormatError)
        if not isinstance(shard, str) or shard not in good:
            try:
                good.add(parse_shard_name(shard, file=file))
            except IndexFormatError as err:
                raise err.located(tensor=tensor) from None
    return value


def _parse_choice(values: dict[str, Any], key: str, choices: tuple[Any, ...], file: str) -> Any:
    value = values.get(key)
    if not isinstance(value, str) or value not in choices:
        raise IndexFormatError(
            f"{key} is not one that this receiver knows",
            file=file,
            expected=" or ".join(choices),
            got=show(value),
        )
    return value


def _parse_version(values: dict[str, Any], key: str, least: int, file: str) -> int:
    version = parse_version_number(values.get(key))
    if version is None or version < least:
        raise IndexFormatError(
            f"{key} is not an integer of at least {least}",
            file=file,
            got=show(values.get(key)),
        )
    return version


def _parse_hex(value: object, key: str, file: str) -> str:
    if not isinstance(value, str) or not _XXH3_HEX.fullmatch(value):
        raise IndexFormatError(f"{key} is not 32 hex digits", file=file, got=show(value))
    return value.lower()


def _parse_manifest_entry(name: str, row: object, file: str) -> ManifestEntry:
    if not isinstance(row, dict):
        raise IndexFormatError("a manifest entry is not an object", file=file, tensor=name)
    try:
        blob_digest = _parse_hex(row.get("blob_digest"), "blob_digest", file)
        framing = _parse_choice(row, "framing", ("seekable", "single"), file)
    except IndexFormatError as err:
        raise err.located(tensor=name) from None
    nbytes = tensor_nbytes(row.get("dtype"), row.get("shape"))
    if nbytes is None or type(row.get("nbytes")) is not int or nbytes != row["nbytes"]:
        raise IndexFormatError(
            "dtype, shape and nbytes of a manifest entry disagree",
            file=file,
            tensor=name,
            expected=nbytes,
            got=show(row.get("nbytes")),
        )
    return ManifestEntry(blob_digest, nbytes, row["dtype"], tuple(row["shape"]), framing)
