"""Loops that numpy has no call for, compiled by numba to machine code when their module is imported.

A compiled loop runs on the thread that calls it, without the interpreter's lock, and allocates nothing. It checks no
index: whoever calls it has made sure of the sizes, and ``NUMBA_BOUNDSCHECK=1`` checks them in a test. What it calls must
stand in its own file, because numba's cache looks for changes in no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numba

_log = logging.getLogger(__name__)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def compiled(
    signatures: str | Sequence[str],
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that compiles a function for its signatures.

    Machine code is kept beside the source, in the user's cache folder where that is not writable, or in
    ``NUMBA_CACHE_DIR``; compiling takes a second or so a function. Where there is no such folder, or what is in it is
    damaged, every process compiles for itself.

    Parameters
    ----------
    signatures
        Types of result and arguments in numba's words, one set or several. Integers within the function should be unsigned
        like its sizes: numba makes floats of mixed ones.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

    def compile_loop(loop: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        made: Callable[_Arguments, _Result]
        try:
            made = numba.njit(signatures, cache=True, **options)(loop)
        except Exception as err:
            # numba has no type for a bad cache; a mistake in the loop itself is raised again here.
            made = numba.njit(signatures, **options)(loop)
            _log.warning(
                "numba's cache of compiled code cannot be used (%r): set NUMBA_CACHE_DIR to a folder of this user",
                err,
            )
        return made

    return compile_loop
