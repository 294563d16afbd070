"""Loops that numpy has no call for, compiled by numba to machine code when they are first called.

A compiled loop runs on the thread that calls it, without the interpreter's lock, and allocates nothing. It checks no
index: whoever calls it has made sure of the sizes, and ``NUMBA_BOUNDSCHECK=1`` checks them in a test. It calls nothing but
parts of its own file (:func:`part`), which become part of its machine code.

numba is imported with the first call, and not before: vLLM's workers fail to start where it is there already.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loops: list[_Loop] = []
_parts: set[object] = set()
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

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
        made = _Loop(loop, signatures)
        _loops.append(made)
        return cast("Callable[_Arguments, _Result]", functools.wraps(loop)(made))

    return compile_later


def part(function: _Function) -> _Function:
    """Mark a function that compiled loops and other parts call, all of its own file: a change there has them compiled anew."""
    _parts.add(function)
    return function


def compile_loops() -> None:
    """Compile every loop of the modules that are imported: what first calls would do."""
    for loop in _loops:
        loop.compile()


class _Loop:
    """A loop, and its machine code once it was called."""

    def __init__(self, loop: Callable[..., Any], signatures: str | Sequence[str]) -> None:
        self._loop = loop
        self._signatures = signatures
        self._made: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._made or self.compile())(*arguments)

    def compile(self) -> Callable[..., Any]:
        """Return the machine code, made now if it was not."""
        with _lock:
            if self._made is None:
                self._made = self._compile()
            return self._made

    def _compile(self) -> Callable[..., Any]:
        import numba

        made: Callable[..., Any]
        loop = _with_parts(self._loop, {})
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


def _with_parts(function: Callable[..., Any], made: dict[str, Any]) -> Callable[..., Any]:
    """Return the function as numba should see it: the parts that it calls are numba's."""
    import numba

    known = function.__globals__
    for name in function.__code__.co_names:
        called = known.get(name)
        if name not in made and isinstance(called, FunctionType) and called in _parts:
            made[name] = numba.njit(**_OPTIONS)(_with_parts(called, made))
    if not made:
        return function
    return FunctionType(function.__code__, {**known, **made}, function.__name__)
