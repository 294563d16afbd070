"""Loops that numpy has no call for, compiled by numba to machine code when they are first called.

A compiled loop runs on the thread that calls it, without the interpreter's lock, and allocates nothing. It checks no
index: whoever calls it has made sure of the sizes, and ``NUMBA_BOUNDSCHECK=1`` checks them in a test. It calls nothing but
parts (:func:`part`), which become part of its machine code.

numba is imported with the first call, and not before: vLLM's workers fail to start where it is there already.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeGuard, TypeVar, cast

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loops: list[_Loop] = []
_parts: set[object] = set()
# Without numba's runtime nothing can be allocated, and no array's references are counted: that is an atomic each time.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
# Parts are called by no one but loops: without what Python and C would call, they compile faster.
_PART_OPTIONS = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(
    signatures: str | Sequence[str],
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that has a function compiled for its signatures.

    Machine code is kept beside the source, in the user's cache folder where that is not writable, or in
    ``NUMBA_CACHE_DIR``; compiling takes a second or so a function. Where there is no such folder, or what is in it is
    damaged, every process compiles for itself.

    Parameters
    ----------
    signatures
        Types of result and arguments in numba's words, one set or several. Integers within the function should be unsigned
        like its sizes: numba makes floats of mixed ones.
    """

    def compile_later(loop: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        made = _Loop(cast(FunctionType, loop), signatures)
        _loops.append(made)
        return cast("Callable[_Arguments, _Result]", functools.wraps(loop)(made))

    return compile_later


def part(function: _Function) -> _Function:
    """Mark a function that compiled loops and other parts call."""
    _parts.add(function)
    return function


def compile_loops(module: str | None = None) -> None:
    """Compile the loops of a module, or of all that are imported: what first calls would do."""
    for loop in _loops:
        if module in (None, loop.module):
            loop.compile()


def are_kept(module: str) -> bool:
    """Return whether machine code of all loops of a module is in numba's cache: then they are there in no time."""
    return all(loop.is_kept() for loop in _loops if loop.module == module)


class _Loop:
    """A loop, and its machine code once it was called."""

    def __init__(self, loop: FunctionType, signatures: str | Sequence[str]) -> None:
        self.module = loop.__module__
        self._loop = loop
        self._signatures = signatures
        self._made: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._made or self.compile())(*arguments)

    def compile(self) -> Callable[..., Any]:
        """Return the machine code, made now if it was not."""
        if self._made is None:
            with _lock:
                if self._made is None:
                    self._made = self._compile()
        return self._made

    def is_kept(self) -> bool:
        """Return whether numba's cache holds machine code by this loop's name."""
        import numba

        loop = _with_parts(self._loop)
        try:
            folder = numba.njit(cache=True, **_OPTIONS)(loop).stats.cache_path
        except RuntimeError:  # there is no such folder
            return False
        return any(Path(folder).glob(f"*.{loop.__qualname__}-*.nbi"))

    def _compile(self) -> Callable[..., Any]:
        import numba

        made: Callable[..., Any]
        loop = _with_parts(self._loop)
        try:
            made = numba.njit(self._signatures, cache=True, **_OPTIONS)(loop)
        except Exception as err:
            # numba has no type for a bad cache; a mistake in the loop itself is raised again here.
            made = numba.njit(self._signatures, **_OPTIONS)(loop)
            _log.warning(
                "numba's cache of compiled code cannot be used (%r): set NUMBA_CACHE_DIR to a folder of this user",
                err,
            )
        return made


def _with_parts(loop: FunctionType) -> FunctionType:
    """Return a loop as numba should see it: the parts that it calls are numba's, and its name says what it was compiled from.

    numba's cache asks whether the loop's own file has changed. The name holds what else machine code depends on: parts and
    constants of other files, as they were imported, the versions of numba and Python, and the processor.
    """
    made: dict[FunctionType, Any] = {}
    linked = _linked(loop, made)
    facts = [_machine(), *(fact for function in (loop, *made) for fact in _facts(function))]
    linked.__name__ = linked.__qualname__ = (
        f"{loop.__name__}_{zlib.crc32(repr(facts).encode()):08x}"
    )
    return linked


def _linked(function: FunctionType, made: dict[FunctionType, Any]) -> FunctionType:
    """Return a function that calls the parts in ``made``, where they are added, instead of the marked ones."""
    import numba

    known = function.__globals__
    called = {name: known.get(name) for name in function.__code__.co_names}
    parts = {name: part for name, part in called.items() if _is_part(part)}
    for part in parts.values():
        if part not in made:
            made[part] = numba.njit(**_PART_OPTIONS)(_linked(part, made))
    linked = {name: made[part] for name, part in parts.items()}
    return FunctionType(function.__code__, {**known, **linked}, function.__name__)


def _is_part(value: object) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and value in _parts


def _facts(function: FunctionType) -> Iterator[object]:
    """Yield what a function's machine code depends on: its code, and the values that it finds by name."""
    import numpy as np

    code, known = function.__code__, function.__globals__
    yield code.co_code
    yield [const for const in code.co_consts if not isinstance(const, CodeType)]
    modules = [value for value in known.values() if isinstance(value, ModuleType)]
    for name in code.co_names:
        for value in (known.get(name), *(getattr(module, name, None) for module in modules)):
            if isinstance(value, (np.ndarray, np.generic)):
                yield name, str(value.dtype), value.shape, value.tobytes()
            elif isinstance(value, (bool, int, float, str)):
                yield name, value
            elif isinstance(value, type):
                yield name, getattr(value, "_fields", None)


@functools.cache
def _machine() -> tuple[object, ...]:
    """Return what machine code depends on beside its source."""
    import numba
    from llvmlite import binding  # type: ignore[import-untyped]

    processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    asked = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    return numba.__version__, sys.version_info[:2], processor, asked
