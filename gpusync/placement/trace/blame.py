"""Errors inside a loader, and which checkpoint tensors they are about."""

from __future__ import annotations

_BLAMED = "_gpusync_names"
_TEXT = 160


class UntraceableError(RuntimeError):
    """The loader does what cannot be followed. Raised inside the loader."""


def blame(err: BaseException, names: frozenset[str]) -> None:
    """Write on an error which checkpoint tensors it is about."""
    vars(err).setdefault(_BLAMED, names)


def blamed(err: BaseException | None) -> frozenset[str]:
    """Return what ``blame`` wrote on an error or on one that it came from."""
    while err is not None:
        names: frozenset[str] | None = vars(err).get(_BLAMED)
        if names:
            return names
        err = err.__cause__ or err.__context__
    return frozenset()


def reason_of(err: BaseException) -> str:
    """Return an error in one line."""
    text = (str(err).splitlines() or [""])[0]
    if isinstance(err, UntraceableError):
        return text
    return f"the loader raised {type(err).__name__}: {text[:_TEXT]}"
