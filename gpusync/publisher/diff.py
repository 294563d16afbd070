"""Old and new bytes of tensors to their blobs and digests, on several threads and in bounded memory.

A tensor is cut into blocks of whole frames. Each block is read, digested, XORed and compressed while it is in a
core's cache, so that neither the old tensor nor the delta is ever in memory as a whole; blocks of one tensor run on
all threads. Only digests need the blocks in order: they pass one after another through a turnstile. A dense payload
in a single frame is one stream, so such a tensor keeps to one thread and the threads share out the tensors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import zstandard

from gpusync.errors import BaseMismatchError
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import Layout
from gpusync.format.digest import digest_of, new_hasher
from gpusync.format.encode import (
    Bytes,
    Changes,
    EncodedFrame,
    build_sparse_payload,
    check_overwrite_nbytes,
    compress_single,
    find_changes,
    join_frames,
    new_compressor,
)
from gpusync.publisher.delta_options import DeltaOptions
from gpusync.types import Digest

IN_FLIGHT_NBYTES = 64 << 20
"""Bytes of tensors that are being worked on at once, where one tensor alone is not more than that."""
IN_FLIGHT_TENSORS = 512

# Handing a task to another thread and waiting for it costs more than the work on a tensor of this size.
_SMALL_NBYTES = 64 << 10
_local = threading.local()


Result = TypeVar("Result")


class BlockSource(Protocol):
    """Where a tensor's bytes are."""

    def block(self, offset: int, scratch: Bytes) -> Bytes:
        """Return ``scratch.size`` bytes from ``offset`` of the tensor: in ``scratch``, or where they are anyway."""


class ArrayBytes:
    """A tensor in memory."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def block(self, offset: int, scratch: Bytes) -> Bytes:
        return self._data[offset : offset + scratch.size]


_NO_BYTES = ArrayBytes(np.empty(0, np.uint8))


class FileBytes:
    """A tensor in a shard of a checkpoint folder."""

    def __init__(self, files: OpenFiles, layout: Layout, tensor: str) -> None:
        self._files = files
        self._shard = layout.shards[layout.file_of[tensor]]
        self._offset = self._shard.header.data_offset + layout.entry(tensor).begin

    def block(self, offset: int, scratch: Bytes) -> Bytes:
        shard = self._shard
        self._files.read_into(shard.path, scratch.data, self._offset + offset, shard.stamp)
        return scratch


@dataclass(frozen=True, slots=True)
class TensorDelta:
    """One tensor's result; ``blob`` is None where no byte changed, and ``blob_digest`` is its xxh3-128 in hex."""

    name: str
    nbytes: int
    digest: Digest
    blob: bytes | None
    blob_digest: str


class TensorDiff:
    """The work on one tensor.

    Parameters
    ----------
    old, new
        Its bytes, ``nbytes`` each.
    borrowed
        ``new`` is memory that its owner may change once the next tensor is asked for.
    old_digest
        What the old bytes must hash to; None where nobody says.
    keep
        Called with every block of new bytes and its offset, from several threads.
    """

    def __init__(
        self,
        name: str,
        nbytes: int,
        old: BlockSource,
        new: BlockSource,
        options: DeltaOptions,
        *,
        borrowed: bool = False,
        old_digest: Digest | None = None,
        keep: Callable[[Bytes, int], None] | None = None,
    ) -> None:
        if options.encoding == "overwrite":
            check_overwrite_nbytes(nbytes, name)
        self.name = name
        self.nbytes = nbytes
        self.borrowed = borrowed
        self._old = old
        self._new = new
        self._options = options
        self._keep = keep
        self._hasher = new_hasher(options.algorithm)
        self._old_digest = old_digest
        self._old_hasher = new_hasher(old_digest.algorithm) if old_digest is not None else None
        self._blocks = -(-nbytes // options.block_nbytes)
        self._parts: list[list[EncodedFrame] | bytes | Changes | None] = [None] * self._blocks
        self._changed = False
        self._numbers: Iterator[int] = iter(())
        self._turnstile = _Turnstile()
        self._left = 0
        self._unread = 0
        self._is_read = threading.Event()
        self._lock = threading.Lock()
        self._futures: list[Future[TensorDelta | None]] = []

    def start(self, pool: Executor, threads: int) -> None:
        """Hand the work to the pool: a task for each of its threads, which share out the blocks among them.

        A small tensor's work is done when this returns.
        """
        is_small = self.nbytes <= _SMALL_NBYTES
        tasks = 1 if self._options.is_stream or is_small else min(threads, self._blocks)
        self._numbers = iter(range(self._blocks))
        self._left = tasks
        self._unread = self._blocks
        if not self._blocks:
            self._is_read.set()
        submit = _run_now if is_small else pool.submit
        self._futures = [submit(self._run) for _ in range(tasks)]

    def wait_until_read(self) -> None:
        """Wait until no thread looks at the new bytes any more; they are let go."""
        self._is_read.wait()
        self._new = _NO_BYTES

    def result(self) -> TensorDelta:
        """Wait for the end of the work and return what came out.

        Raises
        ------
        BaseMismatchError
            The old bytes are not those of ``old_digest``.
        """
        for error in [future.exception() for future in self._futures]:
            if error is not None and not isinstance(error, _Abandoned):
                raise error
        results = [future.result() for future in self._futures]
        return next(result for result in results if result is not None)

    def _run(self) -> TensorDelta | None:
        """Work on one block after the other, as long as there are some; whoever ends last returns the tensor's result."""
        try:
            stream = None
            if self._options.is_stream:
                stream = new_compressor().compressobj(size=self.nbytes)
            for number in self._numbers:  # each goes to one thread
                self._encode(number, self._read(number), stream)
            if stream is not None and self._changed:
                self._parts.append(stream.flush())
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            return self._finish() if is_last else None
        except BaseException:
            self._turnstile.abandon()
            self._is_read.set()
            raise

    def _read(self, number: int) -> Bytes:
        """Read, digest and keep one block; return its delta, valid until the thread's next block.

        What needs the new bytes is done here: they are the caller's, who may wait for them.
        """
        size = self._options.block_nbytes
        offset = number * size
        old_scratch, new_scratch = (
            scratch[: min(size, self.nbytes - offset)] for scratch in _scratch(size)
        )
        old = self._old.block(offset, old_scratch)
        new = self._new.block(offset, new_scratch)
        with self._turnstile.turn(number):
            self._hasher.update(new)
            if self._old_hasher is not None:
                self._old_hasher.update(old)
        if self._keep is not None:
            self._keep(new, offset)
        delta = np.bitwise_xor(old, new, out=old_scratch)
        if self._options.encoding in ("overwrite", "xor_sparse"):
            self._parts[number] = find_changes(delta, new, offset, self._options.encoding)
        with self._lock:
            self._unread -= 1
            if self._unread == 0:
                self._is_read.set()
        return delta

    def _encode(
        self, number: int, delta: Bytes, stream: zstandard.ZstdCompressionObj | None
    ) -> None:
        """Add what becomes of a block's delta, and see whether anything changed in it."""
        options = self._options
        if options.by_runs:  # the encoder looks at every byte anyway
            frames = self._parts[number] = options.encode(delta)
            is_changed = frames != options.encode_zeros(delta.size)
        else:
            is_changed = bool(delta.max())  # numpy's any() takes six times as long
            if stream is not None:
                self._parts[number] = stream.compress(delta.data)
            elif options.blob_framing == "seekable":
                self._parts[number] = (
                    options.encode(delta) if is_changed else options.encode_zeros(delta.size)
                )
        if is_changed:
            self._changed = True

    def _finish(self) -> TensorDelta:
        if self._old_hasher is not None:
            got = self._old_hasher.digest()
            if got != self._old_digest:
                raise BaseMismatchError(
                    "the base's bytes are not the last published ones",
                    tensor=self.name,
                    expected=self._old_digest,
                    got=got,
                )
        blob = self._build_blob() if self._changed else None
        blob_digest = digest_of("xxh3-128", blob).hex if blob is not None else ""
        return TensorDelta(self.name, self.nbytes, self._hasher.digest(), blob, blob_digest)

    def _build_blob(self) -> bytes:
        options = self._options
        if options.blob_framing == "seekable":
            return join_frames(
                [frame for part in self._parts if isinstance(part, list) for frame in part]
            )
        if options.is_stream:
            return b"".join(part for part in self._parts if isinstance(part, bytes))
        changes = [part for part in self._parts if isinstance(part, Changes)]
        return compress_single(build_sparse_payload(options.encoding, changes))


def diff_tensors(
    diffs: Iterable[TensorDiff], pool: Executor, threads: int
) -> Iterator[TensorDelta]:
    """Run the diffs on the pool of so many threads and yield their results in order.

    The next diff is asked for only when the tensors in flight are within ``IN_FLIGHT_NBYTES``, and never while the
    bytes of a borrowed one are still looked at.
    """
    pending: deque[TensorDiff] = deque()
    in_flight = 0
    for diff in diffs:
        diff.start(pool, threads)
        pending.append(diff)
        in_flight += diff.nbytes
        if diff.borrowed:
            diff.wait_until_read()
        del diff  # a held reference would keep this tensor's bytes while the next one is made
        while pending and (in_flight > IN_FLIGHT_NBYTES or len(pending) > IN_FLIGHT_TENSORS):
            in_flight -= pending[0].nbytes
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _run_now(work: Callable[[], Result]) -> Future[Result]:
    """Do on this thread what a pool would do on one of its own."""
    future: Future[Result] = Future()
    try:
        future.set_result(work())
    except Exception as err:
        future.set_exception(err)
    return future


def _scratch(nbytes: int) -> tuple[Bytes, Bytes]:
    """Return this thread's two block buffers."""
    buffers: tuple[Bytes, Bytes] | None = getattr(_local, "buffers", None)
    if buffers is None or buffers[0].size != nbytes:
        buffers = _local.buffers = (np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8))
    return buffers


class _Abandoned(Exception):
    """An earlier block of the same tensor failed."""


class _Turnstile:
    """Lets numbered callers through one at a time, in order of their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._is_abandoned = False

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or self._next == number)
            if self._is_abandoned:
                raise _Abandoned
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def abandon(self) -> None:
        """Send everyone who waits away."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()
