"""The safetensors header: the only parser of it, and its builder.

A file is an 8-byte little-endian length N, N bytes of JSON, then the tensors' bytes. Every rule is checked before a
size is allocated or an offset is used: entries sorted by offset start at 0, touch, and end at the end of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpusync.errors import HeaderFormatError, SourceNotReadyError
from gpusync.format.jsontext import parse_json_object, parse_tensor_name, show, uncollected
from gpusync.types import ShardHeader, TensorEntry

DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, by safetensors dtype name."""

LENGTH_NBYTES = 8
"""Bytes of the length word in front of the JSON."""

_MAX_U64 = (1 << 64) - 1
_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))


def parse_header_nbytes(first8: bytes, *, file_nbytes: int, file: str, max_bytes: int) -> int:
    """Return N, the bytes of JSON after the length word, before anyone allocates them.

    Parameters
    ----------
    first8
        The file's first 8 bytes; fewer where it has fewer.
    file_nbytes
        Size of the file.
    file
        Its name, for errors.
    max_bytes
        Largest N that is taken.

    Raises
    ------
    SourceNotReadyError
        The file ends before its header does, or shows zeros where a header should be.
    HeaderFormatError
        N is over ``max_bytes``.
    """
    if file_nbytes < LENGTH_NBYTES or len(first8) < LENGTH_NBYTES:
        raise SourceNotReadyError(
            "the file ends within the header's length word; refresh the mount and retry",
            file=file,
            expected=LENGTH_NBYTES,
            got=min(file_nbytes, len(first8)),
        )
    nbytes = int.from_bytes(first8[:LENGTH_NBYTES], "little")
    if nbytes == 0:
        raise SourceNotReadyError(
            "zeros where a header should be; refresh the mount and retry", file=file, offset=0
        )
    if nbytes > max_bytes:
        raise HeaderFormatError(
            "the header's length is over the cap (GPUSYNC_MAX_HEADER_BYTES)",
            file=file,
            expected=max_bytes,
            got=nbytes,
        )
    if LENGTH_NBYTES + nbytes > file_nbytes:
        raise SourceNotReadyError(
            "the file ends within its header; refresh the mount and retry",
            file=file,
            expected=LENGTH_NBYTES + nbytes,
            got=file_nbytes,
        )
    return nbytes


@uncollected
def parse_header(raw: bytes, *, file_nbytes: int, file: str) -> ShardHeader:
    """Return the validated header of a safetensors file.

    Parameters
    ----------
    raw
        The file's first 8 + N bytes, length word included.
    file_nbytes
        Size of the file.
    file
        Its name, for errors and in the result.

    Raises
    ------
    SourceNotReadyError
        The header is zeros, or the file is shorter than its tensors demand.
    HeaderFormatError
        Any other rule is broken, trailing bytes included.
    """
    nbytes = parse_header_nbytes(
        raw[:LENGTH_NBYTES], file_nbytes=file_nbytes, file=file, max_bytes=_MAX_U64
    )
    if len(raw) != LENGTH_NBYTES + nbytes:
        raise HeaderFormatError(
            "the bytes read are not the header's",
            file=file,
            expected=LENGTH_NBYTES + nbytes,
            got=len(raw),
        )
    body = raw[LENGTH_NBYTES:]
    if not body.strip(b"\0"):
        raise SourceNotReadyError(
            "zeros where a header should be; refresh the mount and retry",
            file=file,
            offset=LENGTH_NBYTES,
        )
    rows = parse_json_object(body, file=file, error=HeaderFormatError, what="the header")
    metadata = _parse_metadata(rows.pop("__metadata__", {}), file)
    entries = [_parse_entry(name, row, file) for name, row in rows.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_extents(entries, file_nbytes - len(raw), file)
    return ShardHeader(
        file=file,
        file_nbytes=file_nbytes,
        raw=raw,
        entries={entry.name: entry for entry in entries},
        metadata=metadata,
    )


def tensor_nbytes(dtype: object, shape: object) -> int | None:
    """Return the bytes of a dense tensor, or None where dtype and shape do not describe one.

    None for an unknown dtype, a dimension that is no integer in [0, 2^64), a size whose bits do not fit u64 (as
    safetensors counts them, left to right), or bits that do not fill whole bytes.
    """
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None or not isinstance(shape, (list, tuple)):
        return None
    count = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_U64:
            return None
        count *= size
        if count > _MAX_U64:
            return None
    total = count * bits
    return None if total > _MAX_U64 or total % 8 else total // 8


def build_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None
) -> bytes:
    """Return length word and JSON for tensors that follow one another, padded with spaces to a multiple of 8.

    Parameters
    ----------
    tensors
        (name, dtype, shape, nbytes) in the order of their bytes.
    metadata
        ``__metadata__``, left out where None.
    """
    rows: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, dtype, shape, nbytes in tensors:
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        begin += nbytes
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text


def _parse_metadata(value: object, file: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise HeaderFormatError(
            "__metadata__ is not an object", file=file, got=type(value).__name__
        )
    for key, text in value.items():
        if not isinstance(text, str):
            raise HeaderFormatError(
                "a value of __metadata__ is not a string",
                file=file,
                tensor=show(key),
                got=type(text).__name__,
            )
    return value


def _parse_entry(name: str, row: object, file: str) -> TensorEntry:
    parse_tensor_name(name, file=file, error=HeaderFormatError)
    # A key we do not know could change what the bytes mean.
    if not isinstance(row, dict) or row.keys() != _ENTRY_KEYS:
        raise HeaderFormatError(
            "a tensor entry is not an object of dtype, shape and data_offsets alone",
            file=file,
            tensor=name,
        )
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderFormatError("unknown dtype", file=file, tensor=name, got=show(dtype))
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or type(offsets[0]) is not int
        or type(offsets[1]) is not int
        or not 0 <= offsets[0] <= offsets[1] <= _MAX_U64
    ):
        raise HeaderFormatError(
            "data_offsets are not two integers in order",
            file=file,
            tensor=name,
            got=show(offsets),
        )
    begin, end = offsets
    nbytes = tensor_nbytes(dtype, shape)
    if nbytes is None:
        raise HeaderFormatError(
            f"a shape of {dtype} is no list of sizes, overflows, or fills no whole bytes",
            file=file,
            tensor=name,
            got=show(shape),
        )
    if nbytes != end - begin:
        raise HeaderFormatError(
            "shape and data_offsets disagree",
            file=file,
            tensor=name,
            expected=nbytes,
            got=end - begin,
        )
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _check_extents(entries: list[TensorEntry], data_nbytes: int, file: str) -> None:
    """Check that sorted entries start at 0, touch, and end where the file does."""
    position = 0
    for entry in entries:
        if entry.begin != position:
            what = (
                "overlaps the one before" if entry.begin < position else "leaves a hole before it"
            )
            raise HeaderFormatError(
                f"a tensor {what}", file=file, tensor=entry.name, expected=position, got=entry.begin
            )
        position = entry.end
    if data_nbytes < position:
        raise SourceNotReadyError(
            "the file is shorter than its header demands; refresh the mount and retry",
            file=file,
            expected=position,
            got=data_nbytes,
        )
    if data_nbytes > position:
        raise HeaderFormatError(
            "bytes after the last tensor", file=file, expected=position, got=data_nbytes
        )
