"""Maps of a blob's frames: equal to what a walk of the whole blob finds, or a reason, or the walk's own error."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from gpusync.errors import FrameFormatError, SourceNotReadyError, VersionConflictError
from gpusync.folder.files import OpenFiles
from gpusync.format.frames import Where, walk_frames
from gpusync.published.blobmaps import MAX_FRAME_NBYTES, BlobMap, read_blob_map
from gpusync.published.blobs import locate_blob
from tests.device.published import digests_of, open_blobs, write_delta
from tests.reference import xor_rows
from tests.unit.strategies import (
    MAGIC,
    RAW,
    blobs,
    block,
    compress,
    fixed,
    flushed,
    frame,
    framed,
    seekable,
    skippable,
)

KIB = 1 << 10


def content_of(nbytes: int) -> bytes:
    rng = np.random.default_rng(nbytes)
    return (rng.integers(1, 256, nbytes) * (rng.random(nbytes) < 0.02)).astype(np.uint8).tobytes()


def map_of(
    folder: Path,
    blob: bytes,
    nbytes: int,
    *,
    encoding: str = "xor",
    stated: dict[str, str] | None = None,
    untrusted: bool = False,
) -> BlobMap | str:
    # another tensor before and behind: the blob begins at an odd offset, and its end is not the file's
    write_delta(folder, {"0": b"xyz", "a": blob, "b": b"xyz"}, encoding=encoding, stated=stated)
    return read_blob_map(open_blobs(folder)["a"], nbytes, untrusted=untrusted)


def rows_of(found: BlobMap | str) -> list[tuple[int, int, int, int]]:
    assert isinstance(found, BlobMap), found
    columns = (found.offset, found.nbytes, found.content_offset, found.content_nbytes)
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)]  # type: ignore[misc]


def walked_rows(blob: bytes, nbytes: int) -> list[tuple[int, int, int, int]]:
    """What the map must be: the frames with content, as the walk of the whole blob finds them."""
    rows, at = [], 0
    for found in walk_frames(blob, content_nbytes=nbytes, where=Where()):
        size = nbytes if found.content_nbytes is None else found.content_nbytes
        if size and not found.skippable:
            rows.append((found.offset, found.nbytes, at, size))
            at += size
    return rows


WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "single": compress,
    "single, no content size": lambda data: compress(data, write_content_size=False),
    "single, many blocks, no content size": lambda data: flushed(data, 1024),
    "seekable": lambda data: seekable(data, 4 * KIB),
    "seekable, 600 frames": lambda data: seekable(data, -(-len(data) // 600)),
    "several frames without a table": lambda data: b"".join(
        compress(data[at : at + 7000]) for at in range(0, len(data), 7000)
    ),
    "skippable frames between": lambda data: (
        skippable(b"x" * 9) + compress(data[:777]) + skippable(b"", 3) + compress(data[777:])
    ),
    "empty frames between": lambda data: compress(b"") + compress(data) + compress(b""),
}


@pytest.mark.parametrize("nbytes", [1, 100, 70 * KIB, 700 * KIB])
@pytest.mark.parametrize("writer", WRITERS)
def test_maps_are_what_a_walk_finds(tmp_path: Path, writer: str, nbytes: int) -> None:
    content = content_of(nbytes)
    blob = WRITERS[writer](content)
    found = map_of(tmp_path, blob, nbytes)
    assert rows_of(found) == walked_rows(blob, nbytes)
    assert isinstance(found, BlobMap)
    assert (found.payload_nbytes, found.blob_nbytes) == (nbytes, len(blob))


@given(blobs())
@fixed
def test_any_legal_blob_has_its_true_map_or_a_reason(case: tuple[bytes, bytes]) -> None:
    content, blob = case
    with tempfile.TemporaryDirectory() as folder:
        found = map_of(Path(folder), blob, len(content))
    if isinstance(found, BlobMap):
        # one header that promises all content is believed to be the blob's only frame
        alone = [(0, len(blob), 0, len(content))]
        assert rows_of(found) in (walked_rows(blob, len(content)), alone)
        return
    frames = walk_frames(blob, content_nbytes=len(content), where=Where())
    several = sum(not found.skippable for found in frames) > 1
    assert any(found.has_checksum or (several and found.content_nbytes is None) for found in frames)


def test_a_tensor_of_no_bytes_has_no_frames(tmp_path: Path) -> None:
    found = map_of(tmp_path, compress(b""), 0)
    assert isinstance(found, BlobMap) and found.count == 0
    assert found.covering(0, 0) == found.extent(0, 0) == found.content(0, 0) == (0, 0)


def test_covering_names_the_frames_that_hold_a_span(tmp_path: Path) -> None:
    content = content_of(10_000)
    found = map_of(tmp_path, seekable(content, 999), len(content))
    assert isinstance(found, BlobMap)
    for begin in range(0, 10_000, 331):
        for end in (begin, begin + 1, begin + 998, begin + 2500, 10_000):
            if end > 10_000:
                continue
            first, last = found.covering(begin, end)
            named = [n for n in range(found.count) if n * 999 < end and (n + 1) * 999 > begin]
            assert list(range(first, last)) == (named if begin < end else [])


@pytest.mark.parametrize(
    ("blob", "nbytes", "reason"),
    [
        (compress(b"abc" * 99, write_checksum=True), 297, "checksum"),
        (flushed(b"abc" * 99, 50, write_checksum=True), 297, "checksum"),
        (seekable(b"abc" * 99, 100, write_checksum=True), 297, "checksum"),
        (flushed(b"abc" * 50, 50) + flushed(b"abc" * 49, 50), 297, "without content size"),
        (compress(bytes(600)) * 7000, 4_200_000, "7000 frames"),
    ],
)
def test_what_nvcomp_cannot_take_is_told(
    tmp_path: Path, blob: bytes, nbytes: int, reason: str
) -> None:
    found = map_of(tmp_path, blob, nbytes)
    assert isinstance(found, str) and reason in found


def test_a_frame_of_2_gib_is_left_to_the_host(tmp_path: Path) -> None:
    nbytes = MAX_FRAME_NBYTES + 1
    blob = frame([block(b"a")], descriptor=0xC0, fields=struct.pack("<Q", nbytes))
    found = map_of(tmp_path, blob, nbytes)
    assert isinstance(found, str) and str(MAX_FRAME_NBYTES) in found
    below = frame([block(b"a")], descriptor=0xC0, fields=struct.pack("<Q", nbytes - 1))
    assert isinstance(map_of(tmp_path / "below", below, nbytes - 1), BlobMap)


@pytest.mark.parametrize(
    ("blob", "error", "match"),
    [
        (compress(b"abc" * 99)[:-1], None, ""),  # its header still promises one frame
        (flushed(b"abc" * 99, 50)[:-1], FrameFormatError, "within a frame"),
        (compress(b"abc" * 98), FrameFormatError, "not the expected size"),
        (compress(b"abc" * 100), FrameFormatError, "more than is left"),
        (compress(b"abc" * 99, write_content_size=False) + b"junk!", FrameFormatError, "no zstd"),
        (b"junk" * 20, FrameFormatError, "no zstd"),
        (bytes(50), SourceNotReadyError, "zeros"),
        (bytes(5), SourceNotReadyError, "zeros"),
        (b"", FrameFormatError, "no zstd frame"),
        (MAGIC, FrameFormatError, "within a frame"),
        (skippable(b"only"), FrameFormatError, "no zstd frame"),
    ],
)
def test_what_breaks_the_format_raises_as_on_the_host(
    tmp_path: Path, blob: bytes, error: type[Exception] | None, match: str
) -> None:
    if error is None:
        assert isinstance(map_of(tmp_path, blob, 297), BlobMap)
        return
    with pytest.raises(error, match=match) as caught:
        map_of(tmp_path, blob, 297)
    assert (caught.value.version, caught.value.file) == (1, "m.safetensors")  # type: ignore[attr-defined]
    assert caught.value.tensor == "a"  # type: ignore[attr-defined]


# ---- seek tables -------------------------------------------------------------------------------------


def with_table(frames: bytes, rows: list[tuple[int, ...]], *, descriptor: int = 0) -> bytes:
    table = b"".join(struct.pack(f"<{len(row)}I", *row) for row in rows)
    return frames + skippable(table + struct.pack("<IBI", len(rows), descriptor, 0x8F92EAB1), 14)


CONTENT = content_of(3000)
FRAMES = [compress(CONTENT[:1000]), compress(CONTENT[1000:])]
SIZES = [(len(FRAMES[0]), 1000), (len(FRAMES[1]), 2000)]
BODY = b"".join(FRAMES)


@pytest.mark.parametrize(
    "blob",
    [
        with_table(BODY, SIZES),
        with_table(BODY, [(*row, 0xABCD) for row in SIZES], descriptor=0x80),
        with_table(skippable(b"a") + BODY, [(9, 0), *SIZES]),
        # tables that do not add up, or break the format, are passed over: the walk finds the frames
        with_table(BODY, [SIZES[0], (SIZES[1][0] + 1, 2000)]),
        with_table(BODY, [SIZES[0], (SIZES[1][0], 1999)]),
        with_table(BODY, SIZES, descriptor=0x04),
        with_table(BODY, SIZES, descriptor=0x80),
        with_table(BODY, SIZES[:1]),
        BODY + skippable(struct.pack("<IBI", 1 << 31, 0, 0x8F92EAB1), 14),
        BODY + skippable(struct.pack("<IBI", 0, 0, 0x8F92EAB1), 14),
    ],
)
def test_a_seek_table_is_believed_only_where_its_sums_are_the_blobs(
    tmp_path: Path, blob: bytes
) -> None:
    try:
        true = walked_rows(blob, 3000)
    except FrameFormatError:
        with pytest.raises(FrameFormatError):
            map_of(tmp_path, blob, 3000)
        return
    assert rows_of(map_of(tmp_path, blob, 3000)) == true


def test_a_table_that_lies_within_its_sums_is_believed_for_now(tmp_path: Path) -> None:
    blob = with_table(BODY, [(SIZES[0][0] + 1, 1000), (SIZES[1][0] - 1, 2000)])
    assert rows_of(map_of(tmp_path, blob, 3000)) != walked_rows(blob, 3000)


@pytest.mark.parametrize("writer", ["single", "seekable, 600 frames"])
def test_only_headers_and_table_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    content = np.random.default_rng(0).bytes(3 << 20)
    read = 0
    plain = OpenFiles.read_into

    def counted(self: OpenFiles, path: Path, buffer: memoryview, *rest: object) -> None:
        nonlocal read
        read += len(buffer)
        plain(self, path, buffer, *rest)  # type: ignore[arg-type]

    write_delta(tmp_path, {"a": WRITERS[writer](content)})
    source = open_blobs(tmp_path)["a"]
    monkeypatch.setattr(OpenFiles, "read_into", counted)
    assert isinstance(read_blob_map(source, len(content)), BlobMap)
    assert read < 10 * KIB


# ---- sparse payloads, manifests, files ---------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse"])
def test_sparse_payloads_are_of_any_size_that_the_tensor_allows(
    tmp_path: Path, encoding: str
) -> None:
    width = 4 if encoding == "overwrite" else 8
    for number, (nbytes, fits) in enumerate(
        [(width, True), (width + 50 * (width + 1), True), (width - 1, False)]
    ):
        found = map_of(tmp_path / str(number), compress(bytes(nbytes)), 100, encoding=encoding)
        assert isinstance(found, BlobMap) == fits
    with pytest.raises(FrameFormatError):
        map_of(
            tmp_path / "most", compress(bytes(width + 101 * (width + 1))), 100, encoding=encoding
        )
    unknown = compress(bytes(width), write_content_size=False)
    found = map_of(tmp_path / "unknown", unknown, 100, encoding=encoding)
    assert isinstance(found, str) and "without content size" in found
    seek = seekable(bytes(width + 50 * (width + 1)), 100)
    assert rows_of(map_of(tmp_path / "seek", seek, 100, encoding=encoding))[0][3] == 100


def test_records_of_xor_rows_need_a_frame_each(tmp_path: Path) -> None:
    nbytes = (1 << 20) + 700
    records = xor_rows.encode(bytes([1, 0, 0, 0]) * (nbytes // 4))
    found = map_of(tmp_path / "1", framed(records), nbytes, encoding="xor_rows")
    assert [row[3] for row in rows_of(found)] == [len(record) for record in records]
    for number, blob in enumerate(
        (compress(b"".join(records)), seekable(b"".join(records), 100_000))
    ):
        found = map_of(tmp_path / f"other{number}", blob, nbytes, encoding="xor_rows")
        assert isinstance(found, str) and "a frame for each" in found
    found = map_of(tmp_path / "none", compress(b""), 0, encoding="xor_rows")
    assert isinstance(found, BlobMap) and found.count == 0


def test_an_untrusted_blob_needs_a_stated_digest(tmp_path: Path) -> None:
    blob = compress(b"abc")
    found = map_of(tmp_path / "1", blob, 3, untrusted=True)
    assert isinstance(found, str) and "untrusted" in found
    found = map_of(tmp_path / "2", blob, 3, untrusted=True, stated={})
    assert isinstance(found, str)
    stated = digests_of({"a": blob})
    assert isinstance(map_of(tmp_path / "3", blob, 3, untrusted=True, stated=stated), BlobMap)
    assert locate_blob(open_blobs(tmp_path / "3")["a"]).stated == stated["a"]


def test_a_shard_that_was_replaced_is_a_conflict(tmp_path: Path) -> None:
    write_delta(tmp_path, {"a": compress(b"abc")})
    source = open_blobs(tmp_path)["a"]
    path = locate_blob(source).path
    raw = path.read_bytes()
    source.files.forget(path)
    path.unlink()
    path.write_bytes(raw + b"more")
    with pytest.raises(VersionConflictError, match="replaced"):
        read_blob_map(source, 3)


def test_raw_blocks_are_frames_too(tmp_path: Path) -> None:
    blob = frame([block(b"abc", kind=RAW)], descriptor=0x20, window=None, fields=b"\x03")
    assert rows_of(map_of(tmp_path, blob, 3)) == [(0, len(blob), 0, 3)]
