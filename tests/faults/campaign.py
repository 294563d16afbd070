"""A fault at every system call of a run, one run per call, until a run meets none; and what must hold after each."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

import gpusync
from gpusync.errors import (
    ChainError,
    CheckpointError,
    GpuSyncError,
    PlacementError,
    SourceNotReadyError,
)
from tests import live, wire
from tests.crash.figures import counted
from tests.crash.harness import Scene, copy_keeping_inodes, count_of_descriptors, files_of
from tests.driver import model_at, open_chain
from tests.faults.kinds import RESUMED, Fault
from tests.faults.layer import Real, System, SystemCall

SHOWN = 12


class Injector:
    """The script of one run: the call of this number fails, or it and every later one.

    Numbers count the calls that the fault fits. ``hits`` are the calls that failed, ``seen`` how many there were.
    """

    def __init__(self, fault: Fault, run: Run, number: int, *, lasting: bool) -> None:
        self._fault = fault
        self._number = number
        self._lasting = lasting
        self._folders = {"source": run.source, "local": run.local, "scratch": run.scratch}
        self._lock = threading.Lock()
        self._last: SystemCall | None = None
        self.seen = 0
        self.hits: list[SystemCall] = []

    def __call__(self, call: SystemCall, real: Real) -> Any:
        if not self._fault.fits(call) or not self._is_here(call):
            return real(*call.arguments)
        with self._lock:
            number, self.seen = self.seen, self.seen + 1
            hit = number == self._number or (self._lasting and number > self._number)
            # A call that a signal cut short goes through when it is tried again.
            hit = hit and not (self._fault.name == "EINTR" and call == self._last)
            self._last = call
            if hit:
                self.hits.append(call)
        return self._fault.act(call, real) if hit else real(*call.arguments)

    def _is_here(self, call: SystemCall) -> bool:
        if self._fault.where == "any":
            return True
        return call.within(*self._folders[self._fault.where])


class Run(Protocol):
    """One thing that gpusync does to a folder, again and again from the same start.

    ``source`` are the folders that it reads, ``local`` those that it writes, ``scratch`` those of unlinked files.
    """

    @property
    def source(self) -> tuple[Path, ...]: ...

    @property
    def local(self) -> tuple[Path, ...]: ...

    @property
    def scratch(self) -> tuple[Path, ...]: ...

    def begin(self) -> None:
        """Put everything where the run starts; no fault is met here."""

    def act(self) -> None:
        """The run itself."""

    def check(self, when: str, error: GpuSyncError | None) -> None:
        """What must hold right after it."""

    def heal(self, when: str) -> None:
        """One more try, without a fault, and what must hold then."""

    def right(self, fault: Fault, first: SystemCall, lasting: bool) -> tuple[type[Exception], ...]:
        """Classes of the error that says who acts, where the run fails of this fault, met first at this call."""


@dataclass
class OnAScene:
    """What the runs of a receiver have in common: a fault of the source, or of the local disk, says so."""

    scene: Scene

    @property
    def source(self) -> tuple[Path, ...]:
        return self.scene.stream.source, self.scene.stream.base

    @property
    def local(self) -> tuple[Path, ...]:
        return (self.scene.local,)

    @property
    def scratch(self) -> tuple[Path, ...]:
        folders = (self.scene.local / ".weight_sync", Path(tempfile.gettempdir()))
        return tuple(folder / "(scratch)" for folder in folders)

    def right(self, fault: Fault, first: SystemCall, lasting: bool) -> tuple[type[Exception], ...]:
        if lasting and fault.where == "any":
            return CheckpointError, SourceNotReadyError
        return (SourceNotReadyError if first.within(*self.source) else CheckpointError,)


@dataclass
class Pulled(OnAScene):
    """A pull (or a seed): the folder's files are old or new, whole, and one more pull ends at the target."""

    def begin(self) -> None:
        self.scene.restore()

    def act(self) -> None:
        self.scene.pull()

    def check(self, when: str, error: GpuSyncError | None) -> None:
        self.scene.check_no_file_is_torn(when)
        if error is None:
            check_new(self.scene, when)

    def heal(self, when: str) -> None:
        self.scene.pull()
        check_new(self.scene, when)
        self.scene.check_nothing_is_left(when)


@dataclass
class Resumed(Pulled):
    """The pull after a kill: it has to finish a swap, and nothing is published any more."""

    kill: Callable[[], object] = field(kw_only=True)

    def __post_init__(self) -> None:
        self.scene.restore()
        self.kill()
        shutil.rmtree(self.scene.local.with_name("left"), ignore_errors=True)
        self._left = self.scene.local.with_name("left")
        self.scene.local.rename(self._left)

    def begin(self) -> None:
        self.scene.show_versions()
        copy_keeping_inodes(self._left, self.scene.local)
        self.scene.hide_versions()

    def right(self, fault: Fault, first: SystemCall, lasting: bool) -> tuple[type[Exception], ...]:
        right = super().right(fault, first, lasting)
        # Damage, and nothing is published to heal it from.
        return (*right, ChainError) if fault.name == "early end" else right


@dataclass
class Prepared(OnAScene):
    """``prepare`` and ``discard``: the live model and the folder are as before, whatever happened."""

    def begin(self) -> None:
        self.scene.restore()
        assert self.scene.case.before is not None
        self._old = self.scene.stream.states[self.scene.case.before]
        self._model = model_at(self.scene.stream, self.scene.case.before)

    def act(self) -> None:
        with open_chain(self.scene.stream, self.scene.case.target) as chain:
            gpusync.prepare(self._model, chain, device="cpu").discard()

    def check(self, when: str, error: GpuSyncError | None) -> None:
        assert live.bytes_of(self._model) == self._old, f"{when}: the live model was touched"
        assert files_of(self.scene.local) == self.scene.old, f"{when}: the folder was touched"
        assert (self.scene.local / wire.MARKER).read_bytes() == self.scene.marker_before, when

    def heal(self, when: str) -> None:
        stream, target = self.scene.stream, self.scene.case.target
        with open_chain(stream, target) as chain:
            gpusync.apply_to_model(self._model, chain, device="cpu")
        assert live.bytes_of(self._model) == stream.states[target], when
        check_new(self.scene, when)
        self.scene.check_nothing_is_left(when)

    def right(self, fault: Fault, first: SystemCall, lasting: bool) -> tuple[type[Exception], ...]:
        right = super().right(fault, first, lasting)
        # A damaged folder cannot say what the model is.
        return (*right, PlacementError) if fault.name == "early end" else right


@dataclass
class Finished(Pulled):
    """``finish`` after a commit: the model is at the target, the folder old or new, and the error says where both are."""

    def begin(self) -> None:
        self.scene.restore()
        assert self.scene.case.before is not None
        stream, target = self.scene.stream, self.scene.case.target
        self._model = model_at(stream, self.scene.case.before)
        self._chain = open_chain(stream, target)
        self._update = gpusync.prepare(self._model, self._chain, device="cpu")
        self._update.commit()

    def act(self) -> None:
        self._update.finish()

    def check(self, when: str, error: GpuSyncError | None) -> None:
        self._chain.close()
        super().check(when, error)
        target = self.scene.case.target
        assert live.bytes_of(self._model) == self.scene.stream.states[target], when
        if error is not None:
            assert isinstance(error, CheckpointError), f"{when}: {error!r}"
            assert error.live_version == target, f"{when}: {error!r}"
            stands = wire.marker_version(self.scene.local)
            assert error.disk_version in (stands, None), f"{when}: {error!r}, and it is {stands}"

    def right(self, fault: Fault, first: SystemCall, lasting: bool) -> tuple[type[Exception], ...]:
        return (CheckpointError,)


def check_new(scene: Scene, when: str) -> None:
    """The folder holds the target's files, and a marker that says so."""
    assert files_of(scene.local) == scene.new, f"{when}: not the target's files"
    assert wire.marker_version(scene.local) == scene.case.target, when


# ---- injecting --------------------------------------------------------------------------------------


def inject_at_every_call(
    run: Run, fault: Fault, *, lasting: bool, stride: int = 1, any_class: bool = False
) -> None:
    """Run with the fault at every ``stride``-th call that it fits, until a run meets none.

    ``any_class``: any error of ours will do; what is wrong with a file decides which.
    """
    problems = list(_problems(run, fault, lasting, stride, any_class))
    assert not problems, f"{len(problems)} of:\n" + "\n".join(problems[:SHOWN])


def _problems(
    run: Run, fault: Fault, lasting: bool, stride: int, any_class: bool = False
) -> Iterator[str]:
    number = 0
    while True:
        run.begin()
        injector = Injector(fault, run, number, lasting=lasting)
        before = count_of_descriptors()
        error, untyped = _act(run, injector)
        if not injector.hits:
            return
        counted["faults injected"] += len(injector.hits)
        counted["runs with a fault"] += 1
        when = f"{fault.name}{' from' if lasting else ''} at call {number} ({injector.hits[0]})"
        if untyped is not None:
            yield f"{when}: {untyped!r} has no type of ours"
        if not any_class:
            yield from _wrong_class(when, run, fault, injector.hits[0], error, lasting)
        if count_of_descriptors() > before:
            gc.collect()
            if count_of_descriptors() > before:
                yield f"{when}: a descriptor is left open"
        try:
            run.check(when, error)
            run.heal(f"{when}, healed")
        except (AssertionError, GpuSyncError) as err:
            yield str(err) if isinstance(err, AssertionError) else f"{when}, not healed: {err!r}"
        number += stride


def _act(run: Run, injector: Injector) -> tuple[GpuSyncError | None, Exception | None]:
    """Run under the fault; return the error of ours, and the one that is not."""
    with pytest.MonkeyPatch.context() as patch:
        System(patch, injector)
        try:
            run.act()
        except GpuSyncError as err:
            return err.with_traceback(None), None
        except Exception as err:
            return None, err.with_traceback(None)
    return None, None


def _wrong_class(
    when: str,
    run: Run,
    fault: Fault,
    first: SystemCall,
    error: GpuSyncError | None,
    lasting: bool,
) -> Iterator[str]:
    """The error is of a class that says who acts, and what can go on goes on."""
    if error is None:
        return
    if fault.name in RESUMED:
        yield f"{when}: {error!r}, and it should have gone on"
    if not isinstance(error, run.right(fault, first, lasting)):
        yield f"{when}: {error!r} is of the wrong class"
