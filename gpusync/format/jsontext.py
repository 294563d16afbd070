"""Strict JSON for published text: index, manifest and safetensors header share one reader.

Plain ``json.loads`` keeps the last of two equal keys, reads NaN, and lets ``\\ud800`` through as a lone surrogate
that no file name or UTF-8 stream can carry. All of that is refused here, once.
"""

from __future__ import annotations

import functools
import gc
import json
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from gpusync.errors import FormatError

MAX_NAME_BYTES = 4096
"""Longest tensor name, in UTF-8 bytes."""

_SHOWN_CHARS = 80
_SHOWN_ITEMS = 8
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
# u64 has 20 digits. Longer integers become floats: ignored where the key is, refused where an integer is due,
# and never the quadratic time of a huge int().
_MAX_INT_DIGITS = 20


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def uncollected(parse: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a parser that runs with Python's cyclic garbage collection off.

    A parser makes tens of thousands of objects that all stay, and no cycles. Python takes their number as a reason to search
    for garbage again and again, among everything that the process holds: a serving engine's objects as well.
    """

    @functools.wraps(parse)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not gc.isenabled():  # the process's own choice, or another thread parses
            return parse(*args, **kwargs)
        gc.disable()
        try:
            return parse(*args, **kwargs)
        finally:
            gc.enable()

    return run


class _RefusedJson(Exception):
    """JSON that parses, but that we do not take; ``str`` says why."""


def parse_json_object(
    data: bytes, *, file: str, error: type[FormatError], what: str
) -> dict[str, Any]:
    """Return the JSON object that ``data`` is, surrounding JSON whitespace allowed.

    Parameters
    ----------
    data
        UTF-8 text.
    file, error, what
        Error class to raise, the file it names, and what to call the text in its message.

    Raises
    ------
    FormatError
        ``error``, where ``data`` is not UTF-8, not one JSON object, holds a key twice, NaN, Infinity or a lone
        surrogate, or nests too deep.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object_of_pairs,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
        )
    except UnicodeDecodeError as err:
        raise error(f"{what} is not UTF-8", file=file, offset=err.start) from err
    except _RefusedJson as err:
        raise error(f"{what} {err}", file=file) from err
    except RecursionError as err:
        raise error(f"{what} nests too deep", file=file) from err
    except ValueError as err:
        raise error(f"{what} is not JSON: {err}", file=file) from err
    if not isinstance(value, dict):
        raise error(f"{what} is not a JSON object", file=file, got=type(value).__name__)
    # UTF-8 itself cannot carry a surrogate, so only an escape can have made one.
    if _SURROGATE_ESCAPE.search(data) and _has_lone_surrogate(value):
        raise error(f"{what} holds a lone surrogate", file=file)
    return value


def parse_tensor_name(name: object, *, file: str, error: type[FormatError]) -> str:
    """Return a tensor's name as it is.

    Raises
    ------
    FormatError
        ``error``, where it is not a string, empty, ``__metadata__``, holds NUL, or is over ``MAX_NAME_BYTES``.
    """
    if not isinstance(name, str) or not name or name == "__metadata__" or "\0" in name:
        raise error(
            "a tensor name is empty, reserved, holds NUL or is no string",
            file=file,
            got=show(name),
        )
    if len(name) * 4 > MAX_NAME_BYTES and len(name.encode()) > MAX_NAME_BYTES:
        raise error(
            f"a tensor name is over {MAX_NAME_BYTES} bytes",
            file=file,
            expected=MAX_NAME_BYTES,
            got=len(name.encode()),
        )
    return name


def show(value: object) -> str:
    """Return what an error says of a foreign value: short and printable, whatever its size, depth or characters."""
    if isinstance(value, dict) or (isinstance(value, list) and not _is_short(value)):
        return (
            f"{type(value).__name__} of {len(value)}"  # its repr could be huge, or too deep to make
        )
    return ascii(value[:_SHOWN_CHARS] if isinstance(value, str) else value)[:_SHOWN_CHARS]


def _is_short(items: list[Any]) -> bool:
    """True for a few numbers and constants."""
    return len(items) <= _SHOWN_ITEMS and not any(
        isinstance(item, dict | list | str) for item in items
    )


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedJson(f"holds the key {show(key)} twice")
            seen.add(key)
    return value


def _refuse_constant(text: str) -> Any:
    raise _RefusedJson(f"holds {text}, which is not JSON")


def _parse_int(text: str) -> int | float:
    # "-0" is a float to strict parsers: no sign is lost.
    return int(text) if len(text) <= _MAX_INT_DIGITS and text != "-0" else float(text)


def _has_lone_surrogate(value: Any) -> bool:
    # The value came out of json.loads, so it is no deeper than that recursion could go; a stack keeps it that way.
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo.extend(item)
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, str) and any("\ud800" <= char <= "\udfff" for char in item):
            return True
    return False
