"""Rounds: what the ranks of a process group tell each other over the group's key-value store, stage by stage.

Collectives would not do: one that a rank misses leaves the group out of step for good, one that times out may have ended
for others, and those of nccl need the device that may have failed. A store's compare-and-set gives each stage one
verdict for all, whoever is late; nothing else of the group is used, so gloo and nccl are alike, and so are capture and
forward passes meanwhile.

Keys of the group's store, below "gpusync/"::

    process/RANK      the rank's process, for those on its host that wait for it
    joins/RANK        how many rounds the rank has begun: the number of its newest
    N/STAGE/RANK      what the rank says in a stage of round N
    N/STAGE/count     how many have spoken; the last one judges
    N/STAGE/verdict   set once; everyone goes by it
    N/channel/STAGE/  how the ranks find each other for an exchange in that stage (channel.py)
    N/left            ranks that are done with the round; the last one clears its keys
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

from gpusync import errors
from gpusync.errors import DeviceError, GpuSyncError, ModelPoisonedError
from gpusync.folder.marker import current_boot_id

T = TypeVar("T")
Message = Mapping[str, Any]
Stage = Literal["hello", "slices", "sums", "vote", "outcome", "undone"]

STAGES: tuple[Stage, ...] = ("hello", "slices", "sums", "vote", "outcome", "undone")
_SILENCE: dict[Stage, str] = {
    "hello": "did not begin the update",
    "slices": "did not say which slices it holds",
    "sums": "did not get ready to prove them",
    "vote": "did not vote",
    "outcome": "did not say whether it stored",
    "undone": "did not say whether it took its stores back",
}
_FIRST_PAUSE_SECONDS = 0.0005
_LAST_PAUSE_SECONDS = 0.02
_LIFE_SIGN_SECONDS = 0.25
_ERRORS = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, GpuSyncError)
}


class Store(Protocol):
    """What is asked of a group's store; torch.distributed's stores have it."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class StoreLostError(Exception):
    """The group's store does not answer: its host is gone, or cannot be reached."""


@dataclass(frozen=True)
class Verdict:
    """How a stage ended, the same for every rank.

    Parameters
    ----------
    error, message, values
        Where it is no: name of the error's class, its text and its values.
    result
        Where it is yes: what the judge made of the messages.
    """

    go: bool
    error: str = ""
    message: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def poisons(self) -> bool:
        return self.error == ModelPoisonedError.__name__

    def exception(self) -> GpuSyncError:
        """Return the error of a stage that ended with no."""
        return _ERRORS.get(self.error, DeviceError)(self.message, **self.values)


YES = Verdict(True)


def no(rank: int, error: BaseException, kind: type[GpuSyncError] | None = None) -> Verdict:
    """Return the verdict that a rank's error makes: of the same class, so that every caller does the same next.

    Parameters
    ----------
    kind
        Another class for it.
    """
    values: dict[str, Any] = {"rank": rank}
    text = repr(error)
    if isinstance(error, GpuSyncError):
        text = error.message
        kind = kind or type(error)
        for key in error.FIELDS:
            value = getattr(error, key)
            if value is not None:
                values[key] = value if isinstance(value, int | str) else str(value)
    return Verdict(False, (kind or DeviceError).__name__, f"rank {rank} failed: {text}", values)


@dataclass(frozen=True)
class Process:
    """One rank's process, such that another on its host can tell whether it still runs."""

    boot_id: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return a process as this one sees it; None where it has ended, or cannot be seen."""
        try:
            namespace = Path("/proc/self/ns/pid").readlink()
            fields = (
                Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            return None
        ended = fields[0] in (
            "Z",
            "X",
        )  # proc(5): state is the third field, the start time the 22nd
        return None if ended else cls(current_boot_id(), str(namespace), pid, fields[19])

    def has_ended(self, here: Process | None) -> bool:
        """Say whether it is certain that the process is gone; ``here`` is the one that asks."""
        if here is None or (here.boot_id, here.namespace) != (self.boot_id, self.namespace):
            return False
        return Process.of(self.pid) != self


class Round:
    """One round of one rank.

    Every call but ``leave`` asks the store and raises StoreLostError where it does not answer within the timeout.
    """

    def __init__(self, board: _Board, number: int, rank: int, size: int) -> None:
        self._board = board
        self._at = f"gpusync/{number}"
        self._size = size
        self.rank = rank
        self._process = Process.of(os.getpid())

    def exchange(
        self,
        stage: Stage,
        message: Message,
        judge: Callable[[Sequence[Message]], Verdict],
        late: type[GpuSyncError],
    ) -> Verdict:
        """Speak in a stage and return its verdict.

        Parameters
        ----------
        judge
            Makes the verdict from all messages, by rank.
        late
            The error of a stage that some rank does not reach in time, or not alive.
        """
        self.say(stage, message, judge)
        return self._wait(stage, late)

    def show_process(self) -> None:
        """Let the others know by which process they can tell that this rank is gone."""
        if self._process is not None:
            text = json.dumps(asdict(self._process))
            self._board.ask(lambda store: store.set(f"gpusync/process/{self.rank}", text))

    def say(
        self, stage: Stage, message: Message, judge: Callable[[Sequence[Message]], Verdict]
    ) -> None:
        """Speak in a stage, and judge it if nobody is left to speak."""
        self._board.ask(lambda store: store.set(self._key(stage, self.rank), json.dumps(message)))
        if self._board.ask(lambda store: store.add(self._key(stage, "count"), 1)) == self._size:
            self.propose(stage, judge(self._messages(stage)))

    def propose(self, stage: Stage, verdict: Verdict) -> Verdict:
        """Let this be a stage's verdict unless it has one; return the one that it has."""
        text = json.dumps(asdict(verdict))
        key = self._key(stage, "verdict")
        return _verdict(self._board.ask(lambda store: store.compare_set(key, "", text)))

    def look_around(self) -> None:
        """Between stages: raise where another rank has failed, or its process has ended.

        Raises
        ------
        GpuSyncError
            The other rank's; DeviceError for one that has ended.
        """
        found = self.verdict("vote")
        if found is not None and not found.go:
            raise found.exception()
        ended = self._ended([rank for rank in range(self._size) if rank != self.rank])
        if ended:
            who = ", ".join(map(str, ended))
            raise DeviceError(
                f"rank {who} has ended; nothing was stored", rank=ended[0], ranks=ended
            )

    @property
    def channel_prefix(self) -> str:
        """What the keys of a group for this round alone begin with."""
        return f"{self._at}/channel"

    def verdict(self, stage: Stage) -> Verdict | None:
        """Return a stage's verdict, None where there is none yet."""
        key = self._key(stage, "verdict")
        found = self._board.ask(lambda store: store.get(key) if store.check([key]) else None)
        return _verdict(found) if found is not None else None

    def leave(self) -> None:
        """Be done with the round; the last rank to leave clears its keys."""
        if self._board.ask(lambda store: store.add(f"{self._at}/left", 1)) == self._size:
            self._board.ask(self._clear)

    def _clear(self, store: Store) -> None:
        for stage in STAGES:
            for name in (*range(self._size), "count", "verdict"):
                store.delete_key(self._key(stage, name))
        store.delete_key(f"{self._at}/left")

    def _wait(self, stage: Stage, late: type[GpuSyncError]) -> Verdict:
        seconds = self._board.timeout_seconds
        deadline = time.monotonic() + seconds
        look = time.monotonic() + _LIFE_SIGN_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        while (found := self.verdict(stage)) is None:
            now = time.monotonic()
            if now >= deadline:
                return self._give_up(stage, late, self._silent(stage), f"within {seconds:g} s")
            if now >= look:
                look = now + _LIFE_SIGN_SECONDS
                if ended := self._ended(self._silent(stage)):
                    return self._give_up(stage, late, ended, "and its process has ended")
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        return found

    def _give_up(
        self, stage: Stage, late: type[GpuSyncError], ranks: Sequence[int], what: str
    ) -> Verdict:
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "the rank that judges"
        ends = "nothing was stored" if late is DeviceError else "replace the processes"
        message = f"{who} {_SILENCE[stage]} {what}; {ends}"
        values = {"rank": ranks[0] if ranks else None, "ranks": list(ranks)}
        return self.propose(stage, Verdict(False, late.__name__, message, values))

    def _messages(self, stage: Stage) -> list[Message]:
        keys = [self._key(stage, rank) for rank in range(self._size)]
        return self._board.ask(lambda store: [json.loads(store.get(key)) for key in keys])

    def _silent(self, stage: Stage) -> list[int]:
        """Return the ranks that have not spoken yet."""
        keys = [self._key(stage, rank) for rank in range(self._size)]
        spoke = self._board.ask(lambda store: [store.check([key]) for key in keys])
        return [rank for rank, said in enumerate(spoke) if not said]

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the ranks whose processes are known to be gone."""

        def known(store: Store) -> dict[int, bytes]:
            keys = {rank: f"gpusync/process/{rank}" for rank in ranks}
            return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

        found = {rank: Process(**json.loads(raw)) for rank, raw in self._board.ask(known).items()}
        return [rank for rank, process in found.items() if process.has_ended(self._process)]

    def _key(self, stage: Stage, name: int | str) -> str:
        return f"{self._at}/{stage}/{name}"


def next_round(store: Store, rank: int, size: int, timeout_seconds: float) -> Round:
    """Return a rank's next round, past those that the others gave up waiting for it.

    Nobody gets past a round's hello without all others, so a round whose hello has a verdict is over.
    """
    board = _Board(store, timeout_seconds)
    while True:
        number = board.ask(lambda store: store.add(f"gpusync/joins/{rank}", 1))
        found = Round(board, number, rank, size)
        if found.verdict("hello") is None:
            return found
        found.leave()


class _Board:
    """A store, asked from threads of our own: one whose host vanished keeps its caller for as long as TCP hopes."""

    def __init__(self, store: Store, timeout_seconds: float) -> None:
        self._store = store
        self._lost = ""
        self.timeout_seconds = timeout_seconds

    def ask(self, question: Callable[[Store], T]) -> T:
        if self._lost:  # asking again would wait as long again, while others wait for this rank
            raise StoreLostError(self._lost)
        answers: SimpleQueue[tuple[T] | Exception] = SimpleQueue()

        def run() -> None:
            try:
                answers.put((question(self._store),))
            except Exception as err:
                answers.put(err)

        threading.Thread(target=run, name="gpusync-store", daemon=True).start()
        try:
            answer = answers.get(timeout=self.timeout_seconds)
        except Empty:
            self._lost = f"the group's store did not answer within {self.timeout_seconds:g} s"
            raise StoreLostError(self._lost) from None
        if isinstance(answer, Exception):
            self._lost = f"the group's store is lost: {str(answer).partition(chr(10))[0]}"
            raise StoreLostError(self._lost) from answer
        return answer[0]


def _verdict(raw: bytes) -> Verdict:
    return Verdict(**json.loads(raw))
