"""Real processes that are the ranks of a gloo group, each with a model of its own, and what each of them saw.

Every process runs the same list of updates. A fault is a name of :data:`FAULTS`, put at one rank of one update.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn

import gpusync
from gpusync import fsio
from gpusync.errors import DigestMismatchError, GpuSyncError, PlacementError
from gpusync.host.changes import RegionChanges
from gpusync.live import state as states
from gpusync.live.devices import PathRunner
from gpusync.ranks.channel import Channel
from gpusync.ranks.group import Voters
from gpusync.ranks.rounds import Round
from tests import live, wire

DIED = 17
_LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Folders:
    """Where a rank reads from, and the local checkpoint that it follows with.

    ``chain_only``: its model is loaded from the base, and the chain then knows neither base nor checkpoint.
    """

    source: Path
    base: Path
    local: Path | None
    chain_only: bool = False

    @classmethod
    def of(cls, stream: wire.Stream) -> Folders:
        return cls(stream.source, stream.base, stream.local)


@dataclass(frozen=True)
class Step:
    """One update of all ranks.

    Parameters
    ----------
    faults
        By rank; ranks without one do as they should.
    targets, timeouts
        Of single ranks, by rank.
    """

    target: int
    faults: Mapping[int, str] = field(default_factory=dict)
    targets: Mapping[int, int] = field(default_factory=dict)
    timeout_seconds: float = 20.0
    device: str = "cpu"
    write_back: str = "sync"
    exchange_bytes: int = 1 << 20


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one update: its error, what its model held after it, and when."""

    error: str | None
    text: str
    values: Mapping[str, Any]
    version: int | None
    known_version: int | None
    poisoned: bool
    state: str
    seconds: float
    write_back: str = ""
    notes: tuple[str, ...] = ()
    keys: int = 0


def state_of(tensors: wire.State) -> str:
    """Return a digest of named bytes."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + b"\0" + tensors[name] + b"\0")
    return whole.hexdigest()


Build = Callable[[int, int, Folders], nn.Module]
"""Makes the model of a rank, of so many, from its folders."""


def _whole(rank: int, size: int, folders: Folders) -> nn.Module:
    return live.model_from(folders.base)


def run(
    folders: Sequence[Folders],
    steps: Sequence[Step],
    *,
    own_store: bool = False,
    build: Build = _whole,
) -> list[list[Seen]]:
    """Run updates on one process per folder; return what each rank saw of each, up to where it died.

    Parameters
    ----------
    own_store
        The group's store lives in rank 0, and dies with it; else here, as with an elastic launcher.
    build
        Makes a rank's model.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.ranks"])
    store = None
    if own_store:
        port = _free_port()
    else:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    processes = []
    pipes: list[Connection] = []
    for rank in range(len(folders)):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, len(folders), port, own_store, folders[rank], steps, build, theirs)
        process = context.Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_drain(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(_LIMIT_SECONDS)
            process.kill()


def _drain(pipe: Connection) -> list[Seen]:
    seen: list[Seen] = []
    deadline = time.monotonic() + _LIMIT_SECONDS
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        try:
            seen.append(pipe.recv())
        except EOFError:
            return seen
    raise TimeoutError(f"a rank hangs after {seen}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# ---- in the ranks' processes ------------------------------------------------------------------------------


def _work(
    rank: int,
    size: int,
    port: int,
    own_store: bool,
    folders: Folders,
    steps: Sequence[Step],
    build: Build,
    pipe: Connection,
) -> None:
    store = distributed.TCPStore(
        "127.0.0.1", port, is_master=own_store and rank == 0, timeout=timedelta(seconds=30)
    )
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = build(rank, size, folders)
    for step in steps:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GPUSYNC_VOTE_TIMEOUT_SECONDS", str(step.timeout_seconds))
            patch.setenv("GPUSYNC_EXCHANGE_BYTES", str(step.exchange_bytes))
            pipe.send(_update(rank, folders, model, step, patch, store))
    pipe.close()
    os._exit(0)  # gloo's own teardown waits for ranks that died


def _update(
    rank: int,
    folders: Folders,
    model: nn.Module,
    step: Step,
    patch: pytest.MonkeyPatch,
    store: distributed.TCPStore,
) -> Seen:
    start = time.monotonic()
    error: GpuSyncError | None = None
    report = None
    fault = step.faults.get(rank)
    _rot(model, fault)
    try:
        target = step.targets.get(rank, step.target)
        base = None if folders.chain_only else folders.base
        chain = gpusync.open_chain(folders.source, target, checkpoint=folders.local, base_dir=base)
        if fault in ("absent", "late"):
            time.sleep(1.5 * step.timeout_seconds)
        if fault != "absent":
            report = _apply(model, chain, step, fault, patch)
    except GpuSyncError as err:
        error = err
    _rot(model, fault)
    seconds = time.monotonic() - start
    known = states.known_state(model)
    return Seen(
        error=type(error).__name__ if error is not None else None,
        text=str(error or ""),
        values=error.to_dict() if error is not None else {},
        version=gpusync.live_version(model),
        known_version=known.identity.version if known is not None else None,
        poisoned=known is not None and known.poisoned,
        state=state_of(live.bytes_of(model)),
        seconds=seconds,
        write_back=report.write_back if report is not None else "",
        notes=report.notes if report is not None else (),
        keys=_keys(store),
    )


def _keys(store: distributed.TCPStore) -> int:
    try:
        return store.num_keys()
    except RuntimeError:
        return -1


def _apply(
    model: nn.Module,
    chain: gpusync.Chain,
    step: Step,
    fault: str | None,
    patch: pytest.MonkeyPatch,
) -> gpusync.UpdateReport | None:
    if fault is not None and fault in FAULTS:
        FAULTS[fault](patch)
    update = gpusync.prepare(
        model,
        chain,
        device=step.device,
        group=distributed.group.WORLD,
        write_back=step.write_back,  # type: ignore[arg-type]
    )
    if fault == "late to commit":
        time.sleep(1.5 * step.timeout_seconds)
    if fault == "discards":
        update.discard()
        return None
    update.commit()
    return update.finish()


def _raises(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


def _dies(*arguments: Any, **options: Any) -> Any:
    os._exit(DIED)


def _fails_in_prepare(patch: pytest.MonkeyPatch) -> None:
    error = DigestMismatchError("bad bytes", tensor="a.weight", expected="1", got="2")
    patch.setattr(PathRunner, "prepare", _raises(error))


def _dies_in_prepare(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PathRunner, "prepare", _dies)


def _dies_after_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("gpusync.live.update.commit_parts", _dies)


def _fails_to_store(patch: pytest.MonkeyPatch) -> None:
    """The second store fails, after the first one went well."""
    real = RegionChanges.store
    calls = []

    def store(region: RegionChanges, *run: Any) -> bool:
        calls.append(run)
        if len(calls) == 2:
            raise OSError("no such memory")
        return real(region, *run)

    patch.setattr(RegionChanges, "store", store)


def _refuses_to_store(patch: pytest.MonkeyPatch) -> None:
    error = PlacementError("the weights changed", tensor="a.weight")
    patch.setattr("gpusync.live.update.commit_parts", _raises(error))


def _cannot_take_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RegionChanges, "take_back", _raises(OSError("no way back")))


def _cannot_store_or_take_back(patch: pytest.MonkeyPatch) -> None:
    _fails_to_store(patch)
    _cannot_take_back(patch)


def _interrupted_voting(patch: pytest.MonkeyPatch) -> None:
    """Stopped just after the vote said yes, before it learns so."""
    real = Round._wait

    def wait(round: Round, stage: Any, late: Any) -> Any:
        verdict = real(round, stage, late)
        if stage == "vote":
            raise GpuSyncError("stopped in the vote")
        return verdict

    patch.setattr(Round, "_wait", wait)


def _rot(model: nn.Module, fault: str | None) -> None:
    """Flip a bit of a live byte, as "rots NAME BYTE" says; a second time it is as before."""
    if fault is not None and fault.startswith("rots "):
        _, name, byte = fault.split()
        model.get_parameter(name).data.reshape(-1).view(torch.uint8)[int(byte)] ^= 0x10


def _dies_before_the_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Voters, "prove", _dies)


def _late_for_the_sums(patch: pytest.MonkeyPatch) -> None:
    real = Voters.prove

    def prove(*arguments: Any) -> None:
        time.sleep(1.5)
        real(*arguments)

    patch.setattr(Voters, "prove", prove)


def _dies_finding_the_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("gpusync.ranks.group.Channel", _dies)


def _dies_adding(patch: pytest.MonkeyPatch) -> None:
    """In the second swap, with the others in it."""
    real, calls = Channel.swap, []

    def swap(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            _dies()
        real(*arguments)

    patch.setattr(Channel, "swap", swap)


def _fails_adding(patch: pytest.MonkeyPatch) -> None:
    """Reading its shares, and nothing else."""
    failing = _raises(OSError(5, "Input/output error"))
    patch.setattr(
        "gpusync.ranks.sharefile.fsio", SimpleNamespace(**vars(fsio) | {"pread_all": failing})
    )


FAULTS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "fails in prepare": _fails_in_prepare,
    "dies in prepare": _dies_in_prepare,
    "dies after the vote": _dies_after_vote,
    "fails to store": _fails_to_store,
    "refuses to store": _refuses_to_store,
    "cannot take back": _cannot_take_back,
    "fails and cannot take back": _cannot_store_or_take_back,
    "interrupted voting": _interrupted_voting,
    "dies before the sums": _dies_before_the_sums,
    "late for the sums": _late_for_the_sums,
    "dies finding the others": _dies_finding_the_others,
    "dies adding": _dies_adding,
    "fails adding": _fails_adding,
}
