"""Fold: new bytes of one tensor = its origin with the deltas applied, in pieces, digested on the way.

Everything that produces tensor bytes runs through here: seeding, patching, healing, resetting, dry passes, and the
change lists of a live model. Memory per thread is a few pieces, whatever the tensor's size or the chain's length:
long chains run in several passes over an unlinked scratch file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from gpusync import fsio
from gpusync.folder.files import FileStamp, OpenFiles
from gpusync.folding.openblob import OpenBlob
from gpusync.folding.scratch import ScratchFile
from gpusync.format.digest import Hasher, new_hasher
from gpusync.format.encodings import Layer
from gpusync.format.frames import MAX_WINDOW, WindowTooLargeError
from gpusync.published.blobs import BlobSource
from gpusync.published.seeking import open_seeking
from gpusync.types import Algorithm, Digest

if TYPE_CHECKING:  # it loads torch, which a disk-only pull has no use for
    from gpusync.placement.regions import Region

Bytes = NDArray[np.uint8]

# Decoders that run side by side, over all threads, and the window each may have. A rare larger window is decoded
# by one thread alone. Together: the decoders' memory stays under 16 x 8 MiB + 128 MiB.
_STREAMS = 16
_SHARED_WINDOW = 8 << 20
# Bytes of a piece that all layers are applied to before the next: with decoded bytes beside it, within a common L2 cache.
_PART_NBYTES = 1 << 20
_large_window = threading.Lock()
_local = threading.local()


Pieces = Generator[tuple[int, Bytes], None, None]
"""Offset and bytes of a tensor's pieces, in order; a piece is void once the next one is asked for."""

Wanted = Callable[[int, int], bool]
"""Whether the piece of a tensor from an offset on, of so many bytes, is of use to anyone."""


class Origin(Protocol):
    """Bytes of one tensor before the deltas."""

    def read_into(self, piece: Bytes, offset: int) -> None:
        """Fill ``piece`` with the tensor's bytes from ``offset``."""


class Sink(Protocol):
    """Receives a tensor's new bytes, in order; ``piece`` is reused after the call returns.

    A fold that meets a frame whose window needs a decoder of its own starts over: then the pieces come again from
    offset 0, and those before are void.
    """

    def write(self, piece: Bytes, offset: int) -> None: ...


@dataclass(frozen=True)
class FileOrigin:
    """A tensor in a checkpoint's shard. ``explain`` turns a system error into the reader's typed one."""

    files: OpenFiles
    path: Path
    stamp: FileStamp | None
    begin: int
    explain: Callable[[OSError], Exception]

    def read_into(self, piece: Bytes, offset: int) -> None:
        try:
            self.files.read_into(self.path, piece.data, self.begin + offset, self.stamp)
        except OSError as err:
            raise self.explain(err) from err


@dataclass(frozen=True)
class RegionOrigin:
    """A tensor as it is live; device memory is copied down."""

    region: Region

    def read_into(self, piece: Bytes, offset: int) -> None:
        np.copyto(piece, self.region.read(offset, piece.size))


@dataclass(frozen=True)
class FileSink:
    """Writes a tensor into a file under construction, ``begin`` bytes into it."""

    fd: int
    begin: int

    def write(self, piece: Bytes, offset: int) -> None:
        fsio.pwrite(self.fd, piece.data, self.begin + offset)


class NullSink:
    """Drops the bytes: a dry pass that only digests."""

    def write(self, piece: Bytes, offset: int) -> None:
        pass


@dataclass(frozen=True)
class Fold:
    """How to fold: piece size, threads that share the decoders, and where scratch files go.

    ``scratch_dir`` should be on disk: its pages are then the page cache's, not this process's memory.
    """

    piece_bytes: int
    workers: int
    scratch_dir: Path | None = None

    def run(
        self,
        nbytes: int,
        origin: Origin | None,
        blobs: Sequence[BlobSource],
        sink: Sink,
        algorithms: Iterable[Algorithm],
        on_piece: Callable[[int], None] | None = None,
        wanted: Wanted | None = None,
    ) -> dict[Algorithm, Digest]:
        """Write a tensor's new bytes to ``sink`` and return their digests.

        Parameters
        ----------
        nbytes
            Size of the tensor, before and after.
        origin
            The bytes to start from. None for zeros: xor deltas alone, of which there must be one.
        blobs
            The deltas to apply, oldest first.
        on_piece
            Called with the bytes done after each piece; an exception from it stops the fold.
        wanted
            Whether anyone needs a piece, by offset and size. Where the blobs allow it, pieces that nobody needs are neither
            decoded nor written to the sink, save the first.

        Raises
        ------
        FrameFormatError, SourceNotReadyError, VersionConflictError
            A blob cannot be decoded or read. What the sink has received by then is void.
        """
        taken = _Taken(sink, tuple(algorithms), on_piece, nbytes)
        buffer = _piece_buffer(self.piece_bytes)

        def passes(streams: int, max_window: int) -> Pieces:
            return self._passes(nbytes, origin, blobs, buffer, streams, max_window, wanted)

        try:
            with contextlib.closing(passes(self._streams, _SHARED_WINDOW)) as pieces:
                taken.take(pieces)
        except WindowTooLargeError:
            with _large_window, contextlib.closing(passes(1, MAX_WINDOW)) as pieces:
                taken.take(pieces)
        return taken.digests()

    def pieces(
        self, nbytes: int, origin: Origin | None, blobs: Sequence[BlobSource]
    ) -> Iterator[tuple[int, Bytes]]:
        """Yield a tensor's new bytes as (offset, piece), in order; for who takes them at a pace of their own.

        Parameters are those of :meth:`run`, and so are the errors. A piece is void once the next one is asked for.
        Where a frame's window needs a decoder of its own the pieces start over at offset 0, with the same bytes; that
        decoder's memory is the caller's to bound.
        """
        buffer: Bytes = np.empty(min(self.piece_bytes, max(nbytes, 1)), np.uint8)
        try:
            yield from self._passes(nbytes, origin, blobs, buffer, self._streams, _SHARED_WINDOW)
        except WindowTooLargeError:
            yield from self._passes(nbytes, origin, blobs, buffer, 1, MAX_WINDOW)

    @property
    def _streams(self) -> int:
        return max(1, _STREAMS // self.workers)

    def _passes(
        self,
        nbytes: int,
        origin: Origin | None,
        blobs: Sequence[BlobSource],
        buffer: Bytes,
        streams: int,
        max_window: int,
        wanted: Wanted | None = None,
    ) -> Pieces:
        groups = [blobs[i : i + streams] for i in range(0, len(blobs), streams)] or [[]]
        with contextlib.ExitStack() as stack:
            # Passes write the one and read the other in turn.
            scratch = [
                stack.enter_context(contextlib.closing(ScratchFile(self.scratch_dir)))
                for _ in groups[1:3]
            ]
            for number, group in enumerate(groups[:-1]):
                between = scratch[number % 2]
                with contextlib.closing(
                    self._one_pass(nbytes, origin, group, buffer, max_window, wanted)
                ) as pieces:
                    for offset, piece in pieces:
                        between.write(piece, offset)
                origin = between
            yield from self._one_pass(nbytes, origin, groups[-1], buffer, max_window, wanted)

    def _one_pass(
        self,
        nbytes: int,
        origin: Origin | None,
        blobs: Sequence[BlobSource],
        buffer: Bytes,
        max_window: int,
        wanted: Wanted | None,
    ) -> Pieces:
        layers: Sequence[Layer] | None = None
        if wanted is not None:
            layers = open_seeking(blobs, nbytes, buffer.size, max_window)
        if layers is None:
            with contextlib.ExitStack() as stack:
                opened = [
                    stack.enter_context(
                        contextlib.closing(OpenBlob(blob, nbytes, max_window, self.scratch_dir))
                    )
                    for blob in blobs
                ]
                yield from _apply(opened, nbytes, origin, buffer, None, _PART_NBYTES)
        else:  # frames of a part would be decoded for every part that they reach into
            yield from _apply(layers, nbytes, origin, buffer, wanted, buffer.size)


def _apply(
    layers: Sequence[Layer],
    nbytes: int,
    origin: Origin | None,
    buffer: Bytes,
    wanted: Wanted | None,
    part_nbytes: int,
) -> Pieces:
    """Yield the tensor's pieces with the layers applied, all of them to one part after the other."""
    for offset in range(0, nbytes, buffer.size):
        piece = buffer[: min(buffer.size, nbytes - offset)]
        if offset and wanted is not None and not wanted(offset, piece.size):
            continue
        if origin is not None:
            origin.read_into(piece, offset)
        for begin in range(0, piece.size, part_nbytes):
            part = piece[begin : begin + part_nbytes]
            if origin is None:
                layers[0].start(part, offset + begin)
            for layer in layers if origin is not None else layers[1:]:
                layer.apply(part, offset + begin)
        yield offset, piece
    for layer in layers:
        layer.finish()


class _Taken:
    """What a fold gives to its sink, with the digests of it."""

    def __init__(
        self,
        sink: Sink,
        algorithms: Sequence[Algorithm],
        on_piece: Callable[[int], None] | None,
        nbytes: int,
    ) -> None:
        self._nbytes = nbytes
        self._sink = sink
        self._algorithms = algorithms
        self._on_piece = on_piece
        self._hashers: dict[Algorithm, Hasher] = {}

    def take(self, pieces: Iterator[tuple[int, Bytes]]) -> None:
        """Hand all pieces on; those of an earlier call are void."""
        self._hashers = {algorithm: new_hasher(algorithm) for algorithm in self._algorithms}
        done = 0
        for offset, piece in pieces:
            for hasher in self._hashers.values():
                hasher.update(piece.data)
            self._sink.write(piece, offset)
            if self._on_piece is not None:
                self._on_piece(offset + piece.size - done)  # with what was passed over
            done = offset + piece.size
        if self._on_piece is not None and done < self._nbytes:
            self._on_piece(self._nbytes - done)

    def digests(self) -> dict[Algorithm, Digest]:
        return {algorithm: hasher.digest() for algorithm, hasher in self._hashers.items()}


def _piece_buffer(nbytes: int) -> Bytes:
    """This thread's piece buffer, reused: fresh large buffers cost a page fault per 4 KiB."""
    buffer: Bytes | None = getattr(_local, "piece", None)
    if buffer is None or buffer.size != nbytes:
        buffer = _local.piece = np.empty(nbytes, np.uint8)
    return buffer
