"""How tests drive gpusync over a ``wire.Stream``: short calls, what must hold afterwards, a trace of file operations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gpusync
from gpusync import fsio
from gpusync.errors import GpuSyncError
from tests import live, wire

REPOSITORY = Path(__file__).resolve().parent.parent


def pull(stream: wire.Stream, target: int, **options: Any) -> gpusync.PullReport:
    """Pull the stream's local folder to a version."""
    return gpusync.pull(stream.local, stream.base, stream.source, target, **options)


def open_chain(stream: wire.Stream, target: int, **options: Any) -> gpusync.Chain:
    """Open a chain for the stream's local folder (``checkpoint=None`` for none)."""
    options.setdefault("checkpoint", stream.local)
    return gpusync.open_chain(stream.source, target, base_dir=stream.base, **options)


def update(
    stream: wire.Stream, model: nn.Module, target: int, **options: Any
) -> gpusync.UpdateReport:
    """Bring a live module (and the local folder) to a version."""
    return gpusync.apply_to_model(model, open_chain(stream, target), device="cpu", **options)


def model_at(stream: wire.Stream, version: int) -> nn.Module:
    """Return a module that holds a version's tensors in memory of its own."""
    return live.model_from(stream.base, stream.states[version])


def check_at(stream: wire.Stream, version: int, folder: Path | None = None) -> None:
    """The folder holds a version's bytes, and a marker that says so."""
    folder = folder or stream.local
    got = wire.read_tensors(folder)
    differing = [name for name, data in stream.states[version].items() if got.get(name) != data]
    assert not differing, f"{differing} are not at version {version}"
    assert set(got) == set(stream.states[version])
    assert wire.marker_version(folder) == version


@contextmanager
def refused(
    stream: wire.Stream,
    error: type[GpuSyncError],
    *,
    text: str = "",
    model: nn.Module | None = None,
) -> Iterator[pytest.ExceptionInfo[GpuSyncError]]:
    """The block raises this error, and neither the local folder nor the module changes by a byte."""
    there = stream.local.exists()
    before = wire.snapshot(stream.local) if there else {}
    held = live.bytes_of(model) if model is not None else {}
    with pytest.raises(error) as caught:
        yield caught
    assert re.search(text, str(caught.value)), f"{caught.value} has no {text!r}"
    if there:
        assert wire.snapshot(stream.local) == before
    elif stream.local.exists():
        assert set(wire.snapshot(stream.local)) == {wire.MARKER}, "a fresh folder was half filled"
        assert wire.marker_version(stream.local) is None
    if model is not None:
        assert live.bytes_of(model) == held


@dataclass(frozen=True)
class Call:
    """One file operation: its name in ``fsio``, the path, the second path of a rename, bytes asked for."""

    operation: str
    path: Path
    to: Path | None = None
    offset: int = 0
    nbytes: int = 0

    def within(self, folder: Path) -> bool:
        return folder in (self.path, *self.path.parents)


class Trace:
    """Records every operation of ``gpusync.fsio`` while a test runs; ``before`` may raise in its place.

    Nothing is replaced by a pretence: each call still does its work.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, before: Callable[[Call], None] | None = None
    ) -> None:
        self.calls: list[Call] = []
        self.before = before
        for name in fsio.OPERATIONS:
            monkeypatch.setattr(fsio, name, self._recorded(name, getattr(fsio, name)))

    def of(self, operation: str, folder: Path | None = None) -> list[Call]:
        """Return the calls of one operation, in order, below a folder."""
        return [
            call
            for call in self.calls
            if call.operation == operation and (folder is None or call.within(folder))
        ]

    def renamed_onto(self, folder: Path, suffix: str = "") -> list[str]:
        """Return the names that were renamed into place in a folder, in order."""
        names = [call.to.name for call in self.of("rename") if call.to and call.to.parent == folder]
        return [name for name in names if name.endswith(suffix)]

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            first = arguments[0]
            fd = f"/proc/self/fd/{first}"
            path = Path(os.readlink(fd) if isinstance(first, int) else first or "/nowhere")
            call = Call(name, path)
            if name == "rename":
                call = Call(name, path, to=Path(arguments[1]))
            elif name in ("pread_into", "pwrite"):
                call = Call(name, path, offset=arguments[2], nbytes=len(arguments[1]))
            self.calls.append(call)
            if self.before is not None:
                self.before(call)
            return function(*arguments, **options)

        return wrapper


def start_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process in the checkout with pipes to it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
