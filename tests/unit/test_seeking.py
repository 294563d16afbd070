"""Folding parts of a tensor: of a blob in many frames, only those that hold the parts are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gpusync
from gpusync.errors import FrameFormatError
from gpusync.folding.fold import Fold
from gpusync.published.blobmaps import BlobMap, read_blob_map
from gpusync.published.blobs import BlobFile, BlobSource
from tests import wire
from tests.reference import xor_rows
from tests.unit.strategies import framed

PIECE, FRAME = 1 << 17, 1 << 16
NBYTES = 20 * PIECE + 1000
ROW = wire.Row(wire.FIRST, "t.weight", "U8", (NBYTES,), NBYTES)
WANTED = (7, 8, 20)
"""Numbers of the pieces that are of use, beside the first."""


@dataclass
class Kept:
    """An origin of a tensor's old bytes, and a sink that keeps the new ones by offset."""

    old: NDArray[np.uint8]
    pieces: dict[int, bytes] = field(default_factory=dict)

    def read_into(self, piece: NDArray[np.uint8], offset: int) -> None:
        piece[:] = self.old[offset : offset + piece.size]

    def write(self, piece: NDArray[np.uint8], offset: int) -> None:
        self.pieces[offset] = piece.tobytes()


@dataclass
class Published:
    stream: wire.Stream
    new: bytes

    def blob(self, chain: gpusync.Chain) -> BlobSource:
        return BlobSource(chain.source.files, chain.route(0).deltas[0], ROW.name)

    def kept(self) -> Kept:
        return Kept(np.frombuffer(self.stream.states[0][ROW.name], np.uint8))

    def part(self, number: int) -> bytes:
        return self.new[number * PIECE : (number + 1) * PIECE]


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    return wire.Stream(tmp_path / "stream", (ROW,))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what was read of blobs."""
    sizes: list[int] = []
    real = BlobFile.read_into

    def read_into(blob: BlobFile, buffer: memoryview, offset: int) -> None:
        sizes.append(len(buffer))
        real(blob, buffer, offset)

    monkeypatch.setattr(BlobFile, "read_into", read_into)
    return sizes


def seekable(stream: wire.Stream) -> Published:
    new = stream.changed([ROW.name], stream.states[0], NBYTES // 4)[ROW.name]
    publisher = gpusync.Publisher(stream.source, stream.base, frame_bytes=FRAME)
    publisher.publish([(ROW.name, torch.frombuffer(bytearray(new), dtype=torch.uint8))])
    return Published(stream, new)


@pytest.fixture
def published(stream: wire.Stream) -> Iterator[tuple[Published, gpusync.Chain]]:
    made = seekable(stream)
    yield made, gpusync.open_chain(stream.source, 1, base_dir=stream.base)


def wanted(offset: int, nbytes: int) -> bool:
    return offset // PIECE in WANTED


def test_only_what_holds_the_wanted_parts_is_read(
    published: tuple[Published, gpusync.Chain], read: list[int]
) -> None:
    made, chain = published
    kept, done = made.kept(), []
    Fold(PIECE, 1).run(NBYTES, kept, [made.blob(chain)], kept, (), done.append, wanted)
    assert kept.pieces == {number * PIECE: made.part(number) for number in (0, *WANTED)}
    assert sum(done) == NBYTES, "progress counts what was passed over"
    some = sum(read)
    read.clear()
    kept = made.kept()
    Fold(PIECE, 1).run(NBYTES, kept, [made.blob(chain)], kept, ())
    assert b"".join(kept.pieces.values()) == made.new
    assert some < sum(read) / 3


def test_frames_that_end_within_pieces(published: tuple[Published, gpusync.Chain]) -> None:
    made, chain = published
    piece = 5 * FRAME // 4
    assert piece % FRAME
    kept = made.kept()

    def third(offset: int, nbytes: int) -> bool:
        return offset // piece % 3 == 1

    Fold(piece, 1).run(NBYTES, kept, [made.blob(chain)], kept, (), None, third)
    assert set(kept.pieces) == {0, *range(piece, NBYTES, 3 * piece)}
    for offset, found in kept.pieces.items():
        assert found == made.new[offset : offset + piece]


def test_a_damaged_frame_is_refused_where_it_is_wanted(stream: wire.Stream) -> None:
    made = seekable(stream)
    chain = gpusync.open_chain(stream.source, 1, base_dir=stream.base)
    shard, entry = chain.route(0).deltas[0].blob(ROW.name)
    found = read_blob_map(made.blob(chain), NBYTES)
    assert isinstance(found, BlobMap)
    with open(shard.path, "r+b") as file:
        frame = int(found.offset[10])
        file.seek(shard.header.data_offset + entry.begin + frame)
        file.write(b"\xff" * 16)
    chain = gpusync.open_chain(stream.source, 1, base_dir=stream.base)
    kept = made.kept()
    Fold(PIECE, 1).run(NBYTES, kept, [made.blob(chain)], kept, (), None, lambda *_: False)
    assert kept.pieces == {0: made.part(0)}
    with pytest.raises(FrameFormatError):
        Fold(PIECE, 1).run(NBYTES, kept, [made.blob(chain)], kept, (), None, lambda *_: True)


@pytest.mark.parametrize("encoding", ["xor", "xor_sparse", "overwrite", "xor_rows"])
def test_blobs_of_one_frame_are_folded_from_front_to_back(
    stream: wire.Stream, encoding: str
) -> None:
    stream.delta([ROW.name], encoding=encoding)
    made = Published(stream, stream.states[1][ROW.name])
    chain = gpusync.open_chain(stream.source, 1, base_dir=stream.base)
    kept = made.kept()
    Fold(PIECE, 1).run(NBYTES, kept, [made.blob(chain)], kept, (), None, wanted)
    assert b"".join(kept.pieces.values()) == made.new


def test_of_xor_rows_only_the_bands_that_hold_wanted_pieces_are_read(tmp_path: Path) -> None:
    band, bands = 1 << 20, 9
    nbytes = (bands - 1) * band + 1001
    row = wire.Row(wire.FIRST, "t.weight", "U8", (nbytes,), nbytes)
    stream = wire.Stream(tmp_path / "stream", (row,))
    old = np.frombuffer(stream.states[0][row.name], np.uint8)
    new = old.copy()
    new[np.random.default_rng(0).choice(nbytes, nbytes // 100)] ^= 3
    records = xor_rows.encode((old ^ new).tobytes())
    # The records of bands 2 and 3, which nobody wants, are of an unknown form.
    bent = [b"\7" + one[1:] if at in (2, 3) else one for at, one in enumerate(records)]
    bend = wire.Bend(blob={row.name: framed(bent)})
    stream.delta(new={row.name: new.tobytes()}, encoding="xor_rows", bend=bend)
    with gpusync.open_chain(stream.source, 1, base_dir=stream.base) as chain:
        blob = BlobSource(chain.source.files, chain.route(0).deltas[0], row.name)
        kept, piece = Kept(old), 2 * band
        asked = {4 * band, 8 * band}
        Fold(piece, 1).run(nbytes, kept, [blob], kept, (), None, lambda offset, _: offset in asked)
        assert kept.pieces == {at: new[at : at + piece].tobytes() for at in (0, *sorted(asked))}
        with pytest.raises(FrameFormatError, match="form of a record"):
            Fold(piece, 1).run(nbytes, kept, [blob], kept, (), None, lambda *_: True)
        # Pieces that cut bands are folded from front to back, and so meet the bent record.
        with pytest.raises(FrameFormatError, match="form of a record"):
            Fold(band // 2, 1).run(nbytes, kept, [blob], kept, (), None, lambda *_: False)
