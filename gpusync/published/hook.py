"""The pre-read hook: a user's function that makes published bytes visible before they are read.

Stores that are not POSIX (object-store mounts, cached network volumes) need a refresh first. The hook is called
``hook(source_dir, target_version)`` in this process, in a thread of its own.
"""

from __future__ import annotations

import importlib
import threading
import time
import traceback
from collections.abc import Callable

from gpusync.errors import SourceNotReadyError
from gpusync.types import Progress, ProgressCallback

_POLL_SECONDS = 0.1

PreReadHook = str | Callable[[str, int], object]


def resolve_hook(hook: PreReadHook) -> Callable[[str, int], object]:
    """Return the function that ``"module:function"`` or ``"module.function"`` names (a function is itself).

    Raises
    ------
    SourceNotReadyError
        It cannot be imported, or is not callable; the import's traceback is in the message.
    """
    if not isinstance(hook, str):
        return hook
    module_name, _, name = (
        hook.partition(":")
        if ":" in hook
        else (hook.rpartition(".")[0], "", hook.rpartition(".")[2])
    )
    try:
        function = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except BaseException as err:
        if isinstance(err, KeyboardInterrupt):
            raise
        raise SourceNotReadyError(
            f"pre-read hook {hook!r} cannot be imported:\n{traceback.format_exc()}"
        ) from err
    if not callable(function):
        raise SourceNotReadyError(f"pre-read hook {hook!r} is not callable")
    return function


class HookCall:
    """One call of a pre-read hook in a daemon thread.

    Parameters
    ----------
    hook
        The function, or its import path.
    source_dir, target_version
        What it is called with.
    """

    def __init__(self, hook: PreReadHook, source_dir: str, target_version: int) -> None:
        self._name = hook if isinstance(hook, str) else getattr(hook, "__qualname__", repr(hook))
        self._function = resolve_hook(hook)
        self._arguments = (source_dir, target_version)
        self._failure: str | None = None
        self._returned = threading.Event()
        self._afterwards: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def run(self, timeout_seconds: float, progress: ProgressCallback | None = None) -> None:
        """Call the hook and wait for it; an exception from ``progress`` ends the wait.

        Raises
        ------
        SourceNotReadyError
            It raised (anything, SystemExit included; its traceback is in the message) or outlasted the timeout.
        """
        try:
            threading.Thread(target=self._call, name="gpusync-pre-read-hook", daemon=True).start()
        except RuntimeError as err:
            self._returned.set()
            raise SourceNotReadyError(
                f"no thread for pre-read hook {self._name!r}: {err}", version=self._arguments[1]
            ) from err
        deadline = time.monotonic() + timeout_seconds
        while not self._returned.wait(max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))):
            if progress is not None:
                progress(Progress("hook", message=f"waiting for {self._name}"))
            if time.monotonic() < deadline:
                continue
            raise SourceNotReadyError(
                f"pre-read hook {self._name!r} did not return within {timeout_seconds:g} s",
                version=self._arguments[1],
            )
        if self._failure is not None:
            raise SourceNotReadyError(
                f"pre-read hook {self._name!r} failed:\n{self._failure}", version=self._arguments[1]
            )

    def when_returned(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the hook has returned: now, or later from its thread."""
        with self._lock:
            if not self._returned.is_set():
                self._afterwards.append(action)
                return
        action()

    def _call(self) -> None:
        try:
            self._function(*self._arguments)
        except BaseException:
            self._failure = traceback.format_exc()
        with self._lock:
            self._returned.set()
        for action in self._afterwards:
            action()
