"""Mutations of plain bytes, JSON text, zstd blobs and safetensors shards, each drawn from one ``random.Random``.

Nothing here uses gpusync. What is handed in may be broken already: a mutation that needs structure where there is
none falls back to plain bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import zstandard

MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = 0x184D2A50

WORDS = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    32767,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53 + 1,
)
HUGE = (2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**18, 10**30)
NUMBERS = (
    *map(str, (*WORDS, *HUGE)),
    "-1",
    "-0",
    "0.0",
    "1e308",
    "1e400",
    "-1e400",
    "9" * 400,
    "NaN",
    "Infinity",
)
TEXTS = (
    "", "a", "../x", "/abs", "a/b", "..", ".", "\0", "C:\\x", "\u2044", "\uff0f", "a\u0300\u0323" * 9, "\ud800", "\udcff",
    "000007", "7", "-1", "\u0663", "1_0", " 7", "xor", "overwrite", "xor_sparse", "xor_rows", "zstd", "xxh3-128", "blake3", "adler32",
    "__metadata__", "delta_encoding", "version", "base_version", "weight_map", "metadata", "gpusync_manifest", "U8", "BF16",
    "F4", "F6_E2M3", "model.safetensors", "model-00001-of-00002.safetensors", "x.safetensors", "0" * 32, "f" * 8, "e" * 64,
    "n" * 300, "n" * 5000, "\U0001f600",
)  # fmt: skip


# ---- plain bytes ------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, random: Random, other: bytes = b"") -> bytes:
    """Flip, set, insert, delete, repeat, zero or cut bytes, or take a run of ``other``."""
    out = bytearray(data)
    at = random.randrange(len(out) + 1)
    end = min(len(out), at + random.choice((1, 1, 2, 4, 8, 64, 1000)))
    kind = random.randrange(9)
    if kind == 0 and at < len(out):
        out[at] ^= 1 << random.randrange(8)
    elif kind == 1 and at < len(out):
        out[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    elif kind == 2:
        out[at:at] = random.randbytes(random.choice((1, 2, 4, 8)))
    elif kind == 3:
        del out[at:end]
    elif kind == 4:
        out[at:at] = out[at:end]
    elif kind == 5:
        out[at:end] = bytes(end - at)
    elif kind == 6:
        del out[at:]
    elif kind == 7:
        width = random.choice((2, 3, 4, 8))
        word = random.choice(WORDS + HUGE[:3]) % (1 << 8 * width)
        out[at : at + width] = word.to_bytes(width, "little")
    elif other:
        begin = random.randrange(len(other))
        out[at:end] = other[begin : begin + random.choice((1, 8, 64, 1000))]
    else:
        out += random.randbytes(random.choice((1, 3, 16)))
    return bytes(out)


# ---- JSON -------------------------------------------------------------------------------------------


@dataclass
class Raw:
    """A number or constant, kept as it was written."""

    text: str


class Pairs(list[Any]):
    """An object as ``[key, value]`` pairs: keys may be there twice."""


def parse_tree(data: bytes) -> Any:
    """Return JSON as a tree of Pairs, list, str, Raw, True, False and None; raises ValueError."""
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=lambda pairs: Pairs([key, value] for key, value in pairs),
            parse_int=Raw,
            parse_float=Raw,
            parse_constant=Raw,
        )
    except RecursionError as err:
        raise ValueError("nests too deep for this mutator") from err


def render_tree(tree: Any) -> bytes:
    """Return the JSON text of a tree."""

    def render(value: Any) -> str:
        if isinstance(value, Raw):
            return value.text
        if isinstance(value, Pairs):
            return "{" + ",".join(f"{json.dumps(key)}:{render(item)}" for key, item in value) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(render, value)) + "]"
        return json.dumps(value)

    return render(tree).encode()


def _slots(tree: Any) -> list[tuple[Any, int]]:
    """Return every place of a tree that holds a value: (container, position)."""
    found: list[tuple[Any, int]] = []
    todo = [tree]
    while todo:
        item = todo.pop()
        if isinstance(item, Pairs):
            found += [(pair, 1) for pair in item]
            todo += [pair[1] for pair in item]
        elif isinstance(item, list):
            found += [(item, position) for position in range(len(item))]
            todo += item
    return found


def _objects(tree: Any) -> list[Pairs]:
    found, todo = [], [tree]
    while todo:
        item = todo.pop()
        if isinstance(item, Pairs):
            found.append(item)
            todo += [pair[1] for pair in item]
        elif isinstance(item, list):
            todo += item
    return found


def random_value(random: Random, like: Any = None) -> Any:
    """Return a value to put in another's place: near it, or of any other kind."""
    if isinstance(like, Raw) and random.random() < 0.6:
        try:
            return Raw(str(int(like.text) + random.choice((-8, -1, 1, 8, 2**32))))
        except ValueError:
            return Raw("0")
    if isinstance(like, str) and random.random() < 0.5 and like:
        at = random.randrange(len(like))
        return random.choice(
            (
                like[:at],
                like.upper(),
                like + "x",
                like[:at] + chr(random.randrange(1, 400)) + like[at + 1 :],
            )
        )
    kind = random.randrange(8)
    if kind < 3:
        return Raw(random.choice(NUMBERS))
    if kind < 6:
        return random.choice(TEXTS)
    if kind == 6:
        return random.choice((True, False, None, [], Pairs(), [Raw("1"), Raw("2")]))
    deep: Any = []
    for _ in range(random.choice((3, 100, 600))):
        deep = [deep]
    return deep


def mutate_tree(tree: Any, random: Random) -> None:
    """Change one thing of a tree in place: a value, a key, the order, the number of pairs, or swap two values."""
    objects = [item for item in _objects(tree) if item]
    slots = _slots(tree)
    if not slots or not objects:
        return
    target, pair = random.choice(objects), None
    pair = random.choice(target)
    kind = random.randrange(8)
    if kind < 3:
        holder, position = random.choice(slots)
        holder[position] = random_value(random, holder[position])
    elif kind == 3:
        (left, a), (right, b) = random.choice(slots), random.choice(slots)
        if left is not right or a != b:
            left[a], right[b] = _copy(right[b]), _copy(left[a])
    elif kind == 4:
        target.remove(pair)
    elif kind == 5:
        target.insert(random.randrange(len(target) + 1), [pair[0], _copy(pair[1])])
    elif kind == 6:
        pair[0] = random.choice((random_value(random, pair[0]), random.choice(target)[0]))
        pair[0] = pair[0] if isinstance(pair[0], str) else "k"
    else:
        target.append([random.choice(TEXTS), random_value(random)])


def _copy(value: Any) -> Any:
    if isinstance(value, Pairs):
        return Pairs([key, _copy(item)] for key, item in value)
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return Raw(value.text) if isinstance(value, Raw) else value


def mutate_json(data: bytes, random: Random) -> bytes:
    """Change one thing of JSON text: mostly of its values, at times of its bytes."""
    try:
        tree = parse_tree(data)
    except ValueError:
        return mutate_bytes(data, random)
    if random.random() < 0.15:
        return mutate_bytes(data, random)
    try:
        mutate_tree(tree, random)
        text = render_tree(tree)
    except RecursionError:
        return mutate_bytes(data, random)
    return random.choice((b"", b"", b"", b" \n")) + text


# ---- zstd blobs -------------------------------------------------------------------------------------


def split_frames(blob: bytes) -> list[bytes]:
    """Return a blob's frames as far as they can be told apart; what is left is the last part."""
    frames, at = [], 0
    while at < len(blob):
        end = _frame_end(blob, at)
        frames.append(blob[at:end])
        at = end
    return frames


def _frame_end(blob: bytes, at: int) -> int:
    magic = int.from_bytes(blob[at : at + 4], "little")
    if magic & 0xFFFFFFF0 == _SKIPPABLE:
        return min(len(blob), at + 8 + int.from_bytes(blob[at + 4 : at + 8], "little"))
    if magic != int.from_bytes(MAGIC, "little"):
        return len(blob)
    try:
        told = zstandard.get_frame_parameters(blob[at:])
        position = at + zstandard.frame_header_size(blob[at : at + 18])
    except zstandard.ZstdError:
        return len(blob)
    while position + 3 <= len(blob):
        word = int.from_bytes(blob[position : position + 3], "little")
        position += 3 + (1 if word >> 1 & 3 == 1 else word >> 3)
        if word & 1:
            return min(len(blob), position + (4 if told.has_checksum else 0))
    return len(blob)


def random_block(random: Random) -> bytes:
    """Return a block: raw, RLE, compressed garbage or reserved, of honest or other size."""
    kind, size = random.randrange(4), random.choice((0, 1, 5, 127, 4096, 131072, 131073, 2**21 - 1))
    body = random.randbytes(1 if kind == 1 else min(size, 200))
    return struct.pack("<I", random.randrange(2) | kind << 1 | size << 3)[:3] + body


def mutate_blob(blob: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Change a blob: its frames' number and order, a frame's header or blocks, or its bytes."""
    frames = split_frames(blob) or [b""]
    at = random.randrange(len(frames))
    kind = random.randrange(9)
    if kind == 0:
        frames.insert(at, frames[at])
    elif kind == 1:
        del frames[at]
    elif kind == 2:
        swapped = random.randrange(len(frames))
        frames[at], frames[swapped] = frames[swapped], frames[at]
    elif kind == 3 and others:
        frames[at : at + 1] = split_frames(random.choice(list(others)))
    elif kind == 4:
        body = random.randbytes(random.choice((0, 4, 17)))
        size = random.choice((len(body), len(body) + 1, 2**31, 2**32 - 1))
        frames.insert(at, struct.pack("<II", _SKIPPABLE + random.randrange(16), size) + body)
    elif kind == 5:
        descriptor = random.randrange(256)
        fields = random.choice((b"", random.randbytes(random.randrange(12)), b"\xff" * 8))
        blocks = b"".join(random_block(random) for _ in range(random.randrange(5)))
        frames[at] = MAGIC + bytes([descriptor]) + fields + blocks
    elif kind == 6 and len(frames[at]) > 6:
        head = bytearray(frames[at])
        head[4 + random.randrange(min(10, len(head) - 4))] ^= 1 << random.randrange(8)
        frames[at] = bytes(head)
    elif kind == 7:
        frames.append(random.choice((b"\0" * 16, b"junk", MAGIC, MAGIC + b"\x00")))
    else:
        other = random.choice(list(others)) if others else b""
        frames[at] = mutate_bytes(frames[at], random, other)
    return b"".join(frames)


def recompressed(blob: bytes, mutate: Callable[[bytes], bytes]) -> bytes:
    """Return a blob of changed content: decoded, mutated, compressed again."""
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        blob, read_across_frames=True
    )
    try:
        content = reader.read(1 << 20)
    except zstandard.ZstdError:
        return blob
    return zstandard.ZstdCompressor(level=1).compress(mutate(content))


# ---- safetensors shards -----------------------------------------------------------------------------


def split_shard(data: bytes) -> tuple[bytes, bytes]:
    """Return a shard's JSON text and its data."""
    nbytes = int.from_bytes(data[:8], "little")
    return data[8 : 8 + nbytes], data[8 + nbytes :]


def join_shard(text: bytes, body: bytes) -> bytes:
    """Return a shard of this JSON text and data."""
    return struct.pack("<Q", len(text)) + text + body


def mutate_shard_header(data: bytes, random: Random) -> bytes:
    """Change a shard's JSON and say its true length, so that the JSON is what is judged."""
    text, body = split_shard(data)
    return join_shard(mutate_json(text, random), body)
