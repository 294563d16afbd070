"""Coverage-guided fuzzing of what parses published bytes: header, index, manifest, frames, payloads, marker.

Run by hand, in an environment with ``atheris`` (Python 3.11 has wheels), from the root of the checkout::

    python -m tests.fuzz.atheris_target --seeds corpus      # writes the first inputs
    python -m tests.fuzz.atheris_target corpus -max_total_time=3600 -timeout=30 -rss_limit_mb=1024 -max_len=4096

The first byte of an input says which parser it is for. An exception that is no GpuSyncError is a crash, and so are:
a second's work, memory beyond the cap, text taken that the oracle (safetensors, libzstd, the format read byte by
byte) refuses or reads in another way, and an error text over some KiB.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["gpusync"]):
    from gpusync.errors import FrameFormatError, GpuSyncError
    from gpusync.folder import marker
    from gpusync.format import digest, encodings, frames, header, index, jsontext, nonzero

import numpy as np
import safetensors
import zstandard

from tests.fuzz import mutations
from tests.reference import xor_rows

MEMORY_CAP = 768 << 20
_MAX_TEXT = 8192
_WHERE = frames.Where(version=7, file="m.safetensors", tensor="t", offset=1000)
_ENCODINGS = ("xor", "overwrite", "xor_sparse", "xor_rows")


class WrongError(AssertionError):
    """The parser took what it must not, or took it for something else."""


def check(fine: bool, message: str) -> None:
    if not fine:
        raise WrongError(message)


# ---- one target per parser --------------------------------------------------------------------------


def fuzz_header(data: bytes) -> None:
    """u32 of data bytes that the file has after its header (or, odd mode, of the whole file), then the file's start."""
    if len(data) < 5:
        return
    mode, nbytes = data[0], int.from_bytes(data[1:5], "little")
    raw = data[5:] if mode & 1 else mutations.join_shard(data[5:], b"")
    size = nbytes if mode & 2 else len(raw) + nbytes
    length = header.parse_header_nbytes(raw[:8], file_nbytes=size, file="f", max_bytes=1 << 20)
    parsed = header.parse_header(raw[: 8 + length], file_nbytes=size, file="f")
    position = 0
    for entry in parsed.entries.values():
        check(entry.begin == position, "entries do not touch")
        check(header.tensor_nbytes(entry.dtype, entry.shape) == entry.nbytes, "an entry's size")
        position = entry.end
    check(parsed.data_offset + position == size, "entries do not end with the file")
    if size <= 1 << 16 and length + 8 <= len(raw):
        safetensors.deserialize(raw[: 8 + length] + bytes(position))
    rebuilt = header.build_header(
        [(e.name, e.dtype, e.shape, e.nbytes) for e in parsed.entries.values()], parsed.metadata
    )
    again = header.parse_header(rebuilt, file_nbytes=len(rebuilt) + position, file="f")
    check(list(again.entries) == list(parsed.entries), "a rebuilt header reads otherwise")


def fuzz_index(data: bytes) -> None:
    parsed = index.parse_index(data, file="i")
    loose = json.loads(data)
    check(dict(parsed.weight_map) == loose["weight_map"], "weight_map")
    for name, shard in parsed.weight_map.items():
        check(0 < len(name.encode()) <= 4096 and "\0" not in name, "a tensor name")
        check(len(shard.encode()) <= 255 and Path(shard).name == shard != "..", "a shard name")
    check(("delta_encoding" in loose.get("metadata", {})) == hasattr(parsed, "encoding"), "kind")


def fuzz_manifest(data: bytes) -> None:
    parsed = index.parse_manifest(data, file="m")
    check(index.parse_manifest(index.build_manifest(parsed), file="m") == parsed, "round trip")
    check(len(parsed.run_id) <= index.MAX_RUN_ID_CHARS, "run_id")


def _reads(blob: bytes, step: int) -> Callable[[int], bytes]:
    position = 0

    def read(nbytes: int) -> bytes:
        nonlocal position
        piece = blob[position : position + min(nbytes, step)]
        position += len(piece)
        return piece

    return read


def fuzz_blob(data: bytes) -> None:
    """u16 content size, u8 unused, u8 flags (known size, step, window), then the blob: readers, walk and libzstd must agree."""
    if len(data) < 4:
        return
    nbytes, flags, blob = int.from_bytes(data[:2], "little"), data[3], data[4:]
    known = bool(flags & 1)
    step = (1, 3, 17, 1 << 20)[flags >> 1 & 3] if len(blob) < 600 else 1 << 20
    window = frames.MAX_WINDOW if flags & 8 else 1 << 20
    walked: Exception | None = None
    found: tuple[object, ...] = ()
    try:
        found = frames.walk_frames(blob, content_nbytes=nbytes, where=_WHERE)
        frames.check_seek_table(blob, found, where=_WHERE)
    except GpuSyncError as err:
        walked = err
    stepped = _walk_in_steps(blob, nbytes, step)
    check((stepped is None) == (walked is None or bool(found)), "the walk depends on its steps")
    sparse = _decode_nonzero(blob, nbytes, step, window)
    reader = frames.BlobReader(
        _reads(blob, step),
        nbytes=len(blob),
        content_nbytes=nbytes if known else None,
        content_cap=None if known else nbytes,
        where=_WHERE,
        max_window=window,
    )
    out = bytearray(nbytes)
    try:
        reader.readinto(memoryview(out))
        reader.finish()
    except GpuSyncError:
        check(sparse is None, "the decoder of non-zero bytes takes what libzstd refuses")
        raise
    check(sparse is None or sparse == out, "the decoder of non-zero bytes reads other content")
    told = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        blob, read_across_frames=True
    )
    check(told.read() == out, "libzstd reads other content")
    check(bool(found) or not known, "the reader takes what the walk refuses")


def _decode_nonzero(blob: bytes, nbytes: int, step: int, window: int) -> bytes | None:
    """Return the content as the decoder of non-zero bytes has it, None where it does not take the blob."""
    content = np.zeros(nbytes, np.uint8)
    try:
        reader = nonzero.NonzeroReader(
            _reads(blob, step),
            nbytes=len(blob),
            content_nbytes=nbytes,
            where=_WHERE,
            max_window=window,
        )
        for begin in range(0, nbytes, 999):
            reader.xor_into(content[begin : begin + 999])
        reader.finish()
    except (GpuSyncError, nonzero.LeftToLibzstdError):
        return None
    return content.tobytes()


def _walk_in_steps(blob: bytes, nbytes: int, step: int) -> Exception | None:
    walker = frames.FrameWalker(content_nbytes=nbytes, where=_WHERE)
    try:
        for at in range(0, len(blob), step):
            walker.feed(blob[at : at + step])
        walker.finish()
    except GpuSyncError as err:
        return err
    return None


def fuzz_payload(data: bytes) -> None:
    """u8 encoding, u8 tensor size, u8 piece, then a payload: the format read byte by byte must agree."""
    if len(data) < 3:
        return
    encoding, nbytes, piece, payload = (
        _ENCODINGS[data[0] % len(_ENCODINGS)],
        data[1],
        data[2] or 1,
        data[3:],
    )
    old = bytes(range(nbytes))
    blob = zstandard.ZstdCompressor(level=1).compress(payload)
    expected = _interpret(encoding, payload, old)
    try:
        layer = encodings.open_layer(
            encoding,  # type: ignore[arg-type]
            lambda: _reads(blob, 1 << 20),
            blob_nbytes=len(blob),
            nbytes=nbytes,
            max_window=1 << 20,
            where=_WHERE,
            spill=None,
        )
        new = np.frombuffer(bytearray(old), np.uint8)
        for offset in range(0, nbytes, piece):
            layer.apply(new[offset : offset + piece], offset)
        layer.finish()
    except FrameFormatError:
        check(expected is None, "a valid payload is refused")
        raise
    check(new.tobytes() == expected, "a payload is read otherwise")


def _interpret(encoding: str, payload: bytes, old: bytes) -> bytes | None:
    if encoding == "xor":
        return bytes(a ^ b for a, b in zip(old, payload)) if len(payload) == len(old) else None  # noqa: B905
    if encoding == "xor_rows":
        try:
            delta = xor_rows.decode(payload, len(old))
        except xor_rows.Broken:
            return None
        return bytes(a ^ b for a, b in zip(old, delta, strict=True))
    width = 4 if encoding == "overwrite" else 8
    count = int.from_bytes(payload[:width], "little")
    if len(payload) < width or len(payload) != width + count * (width + 1):
        return None
    words = [
        int.from_bytes(payload[width * n : width * (n + 1)], "little") for n in range(1, count + 1)
    ]
    values = payload[len(payload) - count :] if count else b""
    if any(word >= len(old) for word in words) or len(set(words)) != count:
        return None
    if encoding == "xor_sparse" and words != sorted(words):
        return None
    new = bytearray(old)
    for word, value in zip(words, values, strict=True):
        new[word] = value if encoding == "overwrite" else new[word] ^ value
    return bytes(new)


def fuzz_marker(data: bytes) -> None:
    """Nothing in a marker raises."""
    found = marker.parse_marker(data)
    if found.marker is not None:
        check(0 <= found.marker.version <= index.MAX_VERSION, "a marker's version")


def fuzz_names(data: bytes) -> None:
    """A shard name, a folder name, a digest, a tensor name: plain text."""
    text = data.decode("utf-8", "surrogateescape")
    version = index.parse_version_dir_name(text)
    check(version is None or 0 < version <= index.MAX_VERSION, "a folder's version")
    outcomes: list[Callable[[], object]] = [
        lambda: digest.parse_digest("xxh3-128", text),
        lambda: digest.parse_digest("adler32", text),
        lambda: jsontext.parse_tensor_name(text, file="f", error=FrameFormatError),
        lambda: index.parse_shard_name(text, file="f"),
    ]
    for outcome in outcomes:
        try:
            outcome()
        except UnicodeEncodeError:
            check(
                any("\ud800" <= char <= "\udfff" for char in text), "only a surrogate has no UTF-8"
            )
        except GpuSyncError as err:
            check(len(str(err)) <= _MAX_TEXT, "an error's text is long")


TARGETS: tuple[Callable[[bytes], None], ...] = (
    fuzz_header,
    fuzz_index,
    fuzz_manifest,
    fuzz_blob,
    fuzz_payload,
    fuzz_marker,
    fuzz_names,
)


def fuzz_one(data: bytes) -> None:
    """Run one input."""
    if not data:
        return
    begun = time.process_time()
    try:
        TARGETS[data[0] % len(TARGETS)](data[1:])
    except GpuSyncError as err:
        check(len(str(err)) <= _MAX_TEXT, "an error's text is long")
    check(time.process_time() - begun < 1, "over a second of work")


# ---- mutation and seeds -----------------------------------------------------------------------------


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's own mutations and, half of the time, ours that know the structure."""
    random = Random(seed)
    kind = data[0] % len(TARGETS) if data else 0
    if random.random() < 0.5 or len(data) < 8:
        return bytes(atheris.Mutate(data, max_size))
    head = {0: 6, 3: 5, 4: 4}.get(kind, 1)
    start, body = data[:head], data[head:]
    if kind in (0, 1, 2, 5):
        body = mutations.mutate_json(body, random)
        if kind == 0 and random.random() < 0.7:
            start = bytes([0, 0]) + struct.pack("<I", _demanded(body) % (1 << 32))
    elif kind == 3:
        body = mutations.mutate_blob(body, random, (body,))
    else:
        body = mutations.mutate_bytes(body, random)
    return (start + body)[:max_size]


def _demanded(text: bytes) -> int:
    """Return how many bytes the entries of a header ask for, so that the file can have them."""
    try:
        rows = json.loads(text)
        return max(
            (int(row["data_offsets"][1]) for name, row in rows.items() if name != "__metadata__"),
            default=0,
        )
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return 0


def seeds() -> Iterator[bytes]:
    """Yield a few good inputs of each kind."""
    rows = {
        "__metadata__": {"a": "0" * 32},
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [3, 11]},
        "c": {"dtype": "F4", "shape": [2, 0], "data_offsets": [11, 11]},
    }
    yield bytes([0, 0]) + struct.pack("<I", 11) + json.dumps(rows).encode()
    yield bytes([0, 1]) + struct.pack("<I", 0) + mutations.join_shard(b"{}", b"")
    metadata = {
        "version": "000007",
        "base_version": 6,
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
        "gpusync_manifest": "0" * 32,
    }
    names = {"a": "m.safetensors", "b": "m.safetensors", "c": "n.safetensors"}
    yield b"\1" + json.dumps({"metadata": metadata, "weight_map": names}).encode()
    yield b"\1" + json.dumps({"metadata": {"total_size": 3}, "weight_map": names}).encode()
    row = {"blob_digest": "0" * 32, "nbytes": 4, "dtype": "BF16", "shape": [2], "framing": "single"}
    manifest = {"version": "7", "run_id": "r", "base_fingerprint": None, "tensors": {"a": row}}
    yield b"\2" + json.dumps(manifest).encode()
    yield from _blob_seeds()
    for kind, payload in enumerate(
        (bytes(9), b"\1\0\0\0\2\0\0\0\7", struct.pack("<QQ", 1, 3) + b"\7")
    ):
        yield bytes([4, kind, 9, 4]) + payload
    ours = marker.Marker(7, id="x", fingerprint="0" * 32, history={6: "1" * 32}).to_json()
    yield b"\5" + json.dumps(ours).encode()
    yield b"\5" + b'{"version": "000007", "valid": false}'
    for name in (b"weight_v000007", b"model-00001-of-00002.safetensors", b"a" * 32, b"f" * 8):
        yield b"\6" + name


def _blob_seeds() -> Iterator[bytes]:
    content = bytes(range(200)) + bytes(3000)
    parts = [
        zstandard.ZstdCompressor(level=1).compress(content[at : at + 800])
        for at in range(0, 3200, 800)
    ]
    table = b"".join(struct.pack("<II", len(part), 800) for part in parts) + struct.pack(
        "<IBI", 4, 0, 0x8F92EAB1
    )
    blobs = (
        zstandard.ZstdCompressor(level=1).compress(content),
        zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=False).compress(
            content
        ),
        b"".join(parts) + struct.pack("<II", 0x184D2A5E, len(table)) + table,
        mutations.MAGIC + b"\x00\x50" + struct.pack("<I", 1 << 1 | 3200 << 3 | 1)[:3] + b"\0",
    )
    for blob in blobs:
        for flags in (1, 7):
            yield b"\3" + struct.pack("<I", 3200)[:3] + bytes([flags]) + blob


def main() -> None:
    if "--seeds" in sys.argv:
        folder = Path(sys.argv[sys.argv.index("--seeds") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds()):
            (folder / f"seed-{number:02d}").write_bytes(seed)
            fuzz_one(seed)
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_CAP, used + MEMORY_CAP))
    atheris.Setup(sys.argv, fuzz_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
