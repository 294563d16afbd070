"""A mount whose names and bytes appear late, on an injected clock: waited for, or refused with nothing touched."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpusync
from gpusync.errors import SourceNotReadyError
from tests import live, wire
from tests.crash.harness import DELTA, SEED, Scene, Scenes
from tests.driver import model_at, refused
from tests.faults.campaign import check_new
from tests.faults.layer import Real, System, SystemCall

LATE_SECONDS = 20.0
NEGATIVE_SECONDS = 30.0
LOOKUPS = ("stat", "lstat", "open")


class Clock:
    """Time as the code that waits sees it: a pause moves it on, and nothing really waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(
            "gpusync.published.chain.time",
            SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep),
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


class Mount:
    """Shows version 2 late in one way. ``hides`` gets a call and the seconds since the mount was first asked."""

    def __init__(
        self, clock: Clock, folder: Path, way: Callable[[Mount, SystemCall, Real], Any]
    ) -> None:
        self.clock = clock
        self.folder = folder
        self.negative: dict[Path, float] = {}
        self._way = way

    @property
    def late(self) -> bool:
        return self.clock.now < LATE_SECONDS

    def __call__(self, call: SystemCall, real: Real) -> Any:
        if not call.within(self.folder.parent):
            return real(*call.arguments)
        return self._way(self, call, real)


def _absent(call: SystemCall) -> OSError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(call.path))


def zeros_first(suffix: str, header: bool = True) -> Callable[[Mount, SystemCall, Real], Any]:
    """Sizes are right at once; the bytes (``header`` false: those behind a shard's header) are zeros for a while."""

    def way(mount: Mount, call: SystemCall, real: Real) -> Any:
        result = real(*call.arguments)
        if call.name == "preadv" and mount.late and call.path.name.endswith(suffix):
            _, (buffer,), offset = call.arguments
            start = 0 if header else wire.raw_header(call.path)[1]
            if offset >= start:
                buffer[:result] = bytes(result)
        return result

    return way


def empty_first(mount: Mount, call: SystemCall, real: Real) -> Any:
    """The names are there at once; the files are empty for a while."""
    result = real(*call.arguments)
    if mount.late and call.within(mount.folder) and call.path != mount.folder:
        if call.name == "preadv":
            return 0
        if call.name in ("fstat", "stat", "lstat"):
            return os.stat_result([*result[:6], 0, *result[7:10]])
    return result


def names_late(missing: Callable[[str], bool]) -> Callable[[Mount, SystemCall, Real], Any]:
    """Some names of the version are missing for a while."""

    def way(mount: Mount, call: SystemCall, real: Real) -> Any:
        if not mount.late:
            return real(*call.arguments)
        if call.name in LOOKUPS and call.path.parent == mount.folder and missing(call.path.name):
            raise _absent(call)
        result = real(*call.arguments)
        if call.name == "listdir" and call.path == mount.folder:
            return [name for name in result if not missing(name)]
        return result

    return way


def folder_late(mount: Mount, call: SystemCall, real: Real) -> Any:
    """The version's folder is not listed for a while."""
    result = real(*call.arguments)
    if call.name == "listdir" and call.path == mount.folder.parent and mount.late:
        return [name for name in result if name != mount.folder.name]
    return result


def negative_dentry(mount: Mount, call: SystemCall, real: Real) -> Any:
    """Listings are right; a name that was once looked up in vain stays absent for 30 s."""
    if call.name in LOOKUPS and call.within(mount.folder):
        first = mount.negative.setdefault(call.path, mount.clock.now)
        if mount.clock.now - first < NEGATIVE_SECONDS and call.path.name == wire.INDEX:
            raise _absent(call)
    return real(*call.arguments)


WAYS = {
    "zeros in shards first": zeros_first(".safetensors"),
    "zeros behind headers first": zeros_first(".safetensors", header=False),
    "zeros in the index first": zeros_first(".json"),
    "sizes late": empty_first,
    "index before shards": names_late(lambda name: name.endswith(".safetensors")),
    "index before one shard": names_late(lambda name: "00001-of" in name),
    "shards before index": names_late(lambda name: name == wire.INDEX),
    "folder late": folder_late,
    "negative dentry": negative_dentry,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def mounted(patch: pytest.MonkeyPatch, scene: Scene, way: Any) -> Clock:
    clock = Clock(patch)
    System(patch, Mount(clock, scene.stream.folder(2), way))
    return clock


@pytest.mark.parametrize("case", [DELTA, SEED], ids=lambda case: case.name)
@ways
def test_a_late_version_is_waited_for(scenes: Scenes, case: Any, way: Any) -> None:
    scene = scenes(case)
    with pytest.MonkeyPatch.context() as patch:
        clock = mounted(patch, scene, way)
        scene.pull(visibility_timeout_seconds=60.0)
        assert LATE_SECONDS <= clock.now < 40.0
    check_new(scene, "waited for")
    scene.check_new("waited for")


@ways
def test_a_late_version_is_refused_without_a_wait_and_pulled_later(
    scenes: Scenes, way: Any
) -> None:
    scene = scenes(DELTA)
    with pytest.MonkeyPatch.context() as patch:
        clock = mounted(patch, scene, way)
        with refused(scene.stream, SourceNotReadyError):
            scene.pull()
        assert clock.now == 0.0
        scene.check_old("refused")
        with refused(scene.stream, SourceNotReadyError):
            scene.pull(visibility_timeout_seconds=5.0)
        assert 5.0 <= clock.now < 7.0
        clock.now = NEGATIVE_SECONDS
        scene.pull()
    scene.check_new("settled")


@ways
def test_a_late_version_never_reaches_a_live_model(scenes: Scenes, way: Any) -> None:
    scene = scenes(DELTA)
    stream = scene.stream
    model = model_at(stream, 1)

    def update(timeout: float) -> None:
        with gpusync.open_chain(
            stream.source,
            2,
            checkpoint=stream.local,
            base_dir=stream.base,
            visibility_timeout_seconds=timeout,
        ) as chain:
            gpusync.apply_to_model(model, chain, device="cpu")

    with pytest.MonkeyPatch.context() as patch:
        clock = mounted(patch, scene, way)
        with refused(stream, SourceNotReadyError, model=model):
            update(0.0)
        clock.now = NEGATIVE_SECONDS
        update(0.0)
    assert live.bytes_of(model) == stream.states[2]
    scene.check_new("settled")
