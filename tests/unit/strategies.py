"""zstd frames and safetensors files built by hand, and hypothesis strategies over them.

Nothing here uses gpusync: the builders follow RFC 8878 and the safetensors format on their own.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zstandard
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SIZES = (0, 1, 3, 15, 16, 17, 240, 241, 1023, 1024, 1025)
MAGIC = b"\x28\xb5\x2f\xfd"
RAW, RLE, COMPRESSED, RESERVED = range(4)

fixed = settings(
    derandomize=True,
    max_examples=200,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
"""The same examples in every run."""


def compress(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


def block(
    data: bytes = b"", *, last: bool = True, kind: int = RAW, nbytes: int | None = None
) -> bytes:
    """A zstd block: its header says ``nbytes`` where that is not the data's own length."""
    nbytes = len(data) if nbytes is None else nbytes
    return struct.pack("<I", last | kind << 1 | nbytes << 3)[:3] + data


def frame(
    blocks: Iterable[bytes],
    *,
    descriptor: int = 0,
    window: int | None = 0x50,
    fields: bytes = b"",
) -> bytes:
    """A zstd frame; ``window`` 0x50 is 1 MiB, None leaves the byte out (single segment)."""
    head = bytes([descriptor]) + (b"" if window is None else bytes([window])) + fields
    return MAGIC + head + b"".join(blocks)


def skippable(data: bytes = b"", number: int = 0) -> bytes:
    return struct.pack("<II", 0x184D2A50 + number, len(data)) + data


def seekable(content: bytes, frame_nbytes: int, **options: Any) -> bytes:
    """Independent frames and a seek table, as in facebook/zstd's contrib/seekable_format."""
    begins = range(0, len(content), frame_nbytes)
    return framed([content[begin : begin + frame_nbytes] for begin in begins], **options)


def framed(parts: Sequence[bytes], **options: Any) -> bytes:
    """A frame for each part, and a seek table."""
    frames, table = [], b""
    for part in parts:
        frames.append(compress(part, **options))
        table += struct.pack("<II", len(frames[-1]), len(part))
    table += struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    return b"".join(frames) + skippable(table, 14)


def flushed(content: bytes, step: int, **options: Any) -> bytes:
    """One frame without content size, a block or more for every ``step`` bytes."""
    writer = zstandard.ZstdCompressor(level=1, **options).compressobj()
    parts = []
    for begin in range(0, len(content), step):
        parts.append(writer.compress(content[begin : begin + step]))
        parts.append(writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return b"".join([*parts, writer.flush()])


def oracle_decode(blob: bytes) -> bytes:
    """What libzstd makes of a blob read as one stream; raises ZstdError where it refuses."""
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        io.BytesIO(blob), read_across_frames=True
    )
    return reader.read()


def reads(data: bytes, step: int = 1 << 30) -> Callable[[int], bytes]:
    """A source of ``data`` that gives at most ``step`` bytes at a time."""
    source = io.BytesIO(data)
    return lambda nbytes: source.read(min(nbytes, step))


@st.composite
def blobs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(content, blob): 1 to 4 frames of any legal kind, skippable frames anywhere."""
    content, blob = b"", b""
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            blob += skippable(draw(st.binary(max_size=9)), draw(st.integers(0, 15)))
        part = draw(st.binary(max_size=40)) * draw(st.sampled_from((1, 1, 7, 100)))
        checksum = draw(st.booleans())
        kind = draw(st.sampled_from(("sized", "unsized", "flushed")))
        if kind == "flushed":
            blob += flushed(part, draw(st.integers(9, 400)), write_checksum=checksum)
        else:
            blob += compress(part, write_content_size=kind == "sized", write_checksum=checksum)
        content += part
    if draw(st.booleans()):
        blob += skippable(draw(st.binary(max_size=9)))
    return content, blob


# ---- safetensors ------------------------------------------------------------------------------------


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header(value: Any) -> bytes:
    """Length word and JSON text; ``value`` may be the text itself."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


NBYTES = {"U8": 1, "BF16": 2, "F8_E4M3": 1, "F32": 4, "I64": 8, "C64": 8}


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a valid file: up to 5 tensors in any order, any metadata."""
    rows: dict[str, Any] = {}
    if draw(st.booleans()):
        text = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
        rows["__metadata__"] = draw(st.dictionaries(text, text, max_size=3))
    position = 0
    name = st.text(
        st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1
    ).filter(lambda name: name != "__metadata__")
    for key in draw(st.lists(name, max_size=5, unique=True)):
        dtype = draw(st.sampled_from(sorted(NBYTES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        nbytes = NBYTES[dtype]
        for size in shape:
            nbytes *= size
        rows[key] = entry(dtype, shape, position, position + nbytes)
        position += nbytes
    order = draw(st.permutations(sorted(rows)))
    return {key: rows[key] for key in order}, bytes(index % 251 for index in range(position))
