"""A gloo group of our own, over the store of the caller's: it lives for one exchange between an update's ranks.

Collectives on the caller's group would come between those of the engine that serves meanwhile. Here each step is made in
a thread of ours, while the caller looks whether the others still take part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gpusync.errors import DeviceError, GpuSyncError

T = TypeVar("T")
Bytes = NDArray[np.uint8]

_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 1.0
_GRACE_LOOKS = 20


@dataclass(frozen=True)
class Members:
    """The ranks of a group: its store, with what keys in it begin with, this process's rank, and how many there are."""

    store: Any
    rank: int
    size: int
    prefix: str = ""


class _Noted(distributed.Store):  # type: ignore[name-defined,misc]
    """A store that notes which keys were set through it: a group leaves its own behind."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self.keys: set[str] = set()

    def set(self, key: str, value: Any) -> None:
        self.keys.add(key)
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.keys.add(key)
        return int(self._store.add(key, amount))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def forget(self) -> None:
        """Delete the keys."""
        for key in self.keys:
            self._store.delete_key(key)


class Channel:
    """Ranks that exchange bytes; every call is one that all ranks make, and blocks until they do.

    Parameters
    ----------
    members
        The ranks; no two channels of theirs have the same prefix.
    watch
        Raises the error of a rank that failed or died; asked now and then, from the calling thread.

    Raises
    ------
    GpuSyncError
        What ``watch`` raises, or DeviceError where the ranks lost each other; so for every call.
    """

    def __init__(self, members: Members, timeout_seconds: float, watch: Callable[[], None]) -> None:
        self._watch = watch
        self._seconds = timeout_seconds
        self.rank, self.size = members.rank, members.size
        noted = _Noted(PrefixStore(members.prefix, members.store))
        timeout = timedelta(seconds=timeout_seconds)
        self._group: Any = self._run(
            lambda: distributed.ProcessGroupGloo(noted, self.rank, self.size, timeout)
        )
        self.gather(b"")  # everyone has found everyone: nobody reads these keys any more
        self._run(noted.forget)

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank."""
        mine = torch.tensor([len(data)])
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([sizes], [mine]).wait())
        most = max(int(size) for size in sizes)
        if not most:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
        found = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([found], [padded]).wait())
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(found, sizes, strict=True)
        ]

    def swap(
        self, outgoing: Bytes, to_each: Sequence[int], incoming: Bytes, from_each: Sequence[int]
    ) -> None:
        """Send bytes to each rank, and fill ``incoming`` with those of each; they lie one after the other, by rank."""
        out, into = torch.from_numpy(outgoing), torch.from_numpy(incoming)
        self._run(
            lambda: self._group.alltoall_base(into, out, list(from_each), list(to_each)).wait()
        )

    def close(self) -> None:
        """Part from the others. What is under way with one that failed ends in a thread of ours."""
        self._group = None

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, step: Callable[[], T]) -> T:
        answers: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        # Tensors that an engine makes in its loop are filled in the mode of the loop.
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            try:
                with torch.inference_mode(inference):
                    answers.put((step(),))
            except Exception as err:
                answers.put(err)

        threading.Thread(target=run, name="gpusync-channel", daemon=True).start()
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                answer = answers.get(timeout=_LOOK_SECONDS)
            except Empty:
                self._watch()
                if time.monotonic() < deadline:
                    continue
                answer = TimeoutError(f"not within {self._seconds:g} s")
            if isinstance(answer, Exception):
                raise self._why(answer) from answer
            return answer[0]

    def _why(self, error: Exception) -> GpuSyncError:
        """Return why a step failed: most often another rank did, and says so, or will be found dead, in a moment."""
        for _ in range(_GRACE_LOOKS):
            try:
                self._watch()
            except GpuSyncError as found:
                return found
            time.sleep(_GRACE_SECONDS / _GRACE_LOOKS)
        reason = str(error).partition("\n")[0]
        return DeviceError(f"the ranks lost each other; nothing was stored: {reason}")
