"""What SGLang's callers ask for: one step of an update, out of a path, a message, or a payload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from gpusync.errors import DeviceError, FormatError, SourceNotReadyError
from gpusync.folder.layout import absolute_path
from gpusync.folder.marker import read_marker
from gpusync.format.index import parse_version_dir_name
from gpusync.format.jsontext import parse_json_object

LOAD_FORMAT = "gpusync"
MESSAGE_NAME = "gpusync"

Phase = Literal["apply", "prepare", "commit", "discard", "attach"]

_MAX_MESSAGE_NBYTES = 65536
_VALUES: Mapping[str, tuple[type, ...]] = {
    "phase": (str,),
    "source_dir": (str,),
    "target_version": (int,),
    "checkpoint": (str,),
    "base_dir": (str,),
}
_OPTIONS: Mapping[str, tuple[type, ...]] = {
    "background": (bool,),
    "device": (str,),
    "durable": (bool,),
    "scratch_bytes": (int,),
    "untrusted_source": (bool,),
    "visibility_timeout_seconds": (int, float),
    "write_back": (str,),
}
"""Options that a request may name. None of them names code: a pre-read hook comes with a pull, by the server's arguments."""


@dataclass(frozen=True)
class Request:
    """One step of an update.

    Parameters
    ----------
    phase
        "apply" does everything; "prepare", then "commit", split it, and "discard" forgets what is prepared; "attach" proves
        the live weights against ``checkpoint``, else the base.
    source_dir, target_version, checkpoint, base_dir
        See :func:`gpusync.open_chain`.
    options
        Those of :func:`gpusync.prepare` and :func:`gpusync.open_chain` that are plain values, and ``background``.
    """

    phase: Phase = "apply"
    source_dir: str | None = None
    target_version: int | None = None
    checkpoint: str | None = None
    base_dir: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_request(document: Mapping[str, Any]) -> Request:
    """Return the step that a JSON object asks for.

    Raises
    ------
    DeviceError
        It has another key, a value of another type, or lacks what its phase needs.
    """
    known = {**_VALUES, **_OPTIONS}
    for name, value in document.items():
        types = known.get(name)
        if types is None:
            raise DeviceError(
                f"a request has no {name!r}", expected=", ".join(sorted(known)), got=name
            )
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise DeviceError(f"{name} of a request is no {wanted}", got=repr(value)[:80])
    values = {name: value for name, value in document.items() if name in _VALUES}
    request = Request(
        **values, options={name: value for name, value in document.items() if name in _OPTIONS}
    )
    if request.phase not in get_args(Phase):
        raise DeviceError("the phase is none of " + ", ".join(get_args(Phase)), got=request.phase)
    if request.phase in ("apply", "prepare"):
        for name in ("source_dir", "target_version"):
            if getattr(request, name) is None:
                raise DeviceError(f"a request to {request.phase} an update needs {name}")
    return request


def parse_text(text: bytes) -> Request:
    """Return the step that JSON text asks for; see :func:`parse_request`."""
    if len(text) > _MAX_MESSAGE_NBYTES:
        raise DeviceError(
            "a request is too long", expected=f"at most {_MAX_MESSAGE_NBYTES} bytes", got=len(text)
        )
    try:
        document = parse_json_object(text, file="request", error=FormatError, what="a request")
    except FormatError as err:
        raise DeviceError(err.message) from err
    return parse_request(document)


def encode_message(**values: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors that :func:`gpusync.engines.sglang.load` takes: uint8, shape (n,), JSON text in UTF-8.

    Parameters
    ----------
    values
        The keys of a request: ``source_dir``, ``target_version``, and so on.
    """
    text = json.dumps(values).encode()
    return [(MESSAGE_NAME, torch.frombuffer(bytearray(text), dtype=torch.uint8))]


def parse_message(named_tensors: Any) -> Request:
    """Return the step that a message asks for; see :func:`encode_message`.

    Raises
    ------
    DeviceError
        It is not exactly one tensor of that kind, or its text is no request.
    """
    named = list(named_tensors)
    if len(named) != 1 or named[0][0] != MESSAGE_NAME:
        raise DeviceError(
            "a message to gpusync is one tensor with a request in it, and no weights",
            expected=MESSAGE_NAME,
            got=", ".join(str(name) for name, _ in named[:3]) or "nothing",
        )
    tensor = named[0][1]
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise DeviceError("a message to gpusync is a uint8 tensor of one dimension")
    if tensor.numel() > _MAX_MESSAGE_NBYTES:
        raise DeviceError("a message to gpusync is too long", got=tensor.numel())
    return parse_text(tensor.cpu().numpy().tobytes())


def takes(model_path: str, load_format: str | None, source_dir: str) -> bool:
    """Return whether an update from disk is gpusync's; see :func:`parse_path` for the rule.

    Parameters
    ----------
    source_dir
        The setting, "" where it is not set.
    """
    if load_format == LOAD_FORMAT:
        return True
    return load_format in (None, "auto") and bool(source_dir) and _is_local(model_path)


def parse_path(model_path: str, source_dir: str) -> Request:
    """Return what an update from ``model_path`` asks for.

    Parameters
    ----------
    model_path
        A JSON object: a request. A folder ``weight_vNNNNNN``: that published version, of the folder around it. A local
        checkpoint, with its marker: the version that a pull brought it to, out of the source folder that is set.
    source_dir
        The setting, "" where it is not set.

    Raises
    ------
    DeviceError
        It is none of them.
    SourceNotReadyError
        It is no path.
    """
    if model_path.lstrip().startswith("{"):
        return parse_text(model_path.encode("utf-8", "surrogatepass"))
    folder = absolute_path(model_path, SourceNotReadyError, "model_path")
    version = parse_version_dir_name(folder.name)
    if version is not None:
        return Request(source_dir=str(folder.parent), target_version=version)
    marker = read_marker(folder).marker
    if marker is None:
        raise DeviceError(
            "model_path is no JSON request, no published version (weight_vNNNNNN) and no local checkpoint that a pull "
            "has finished; for SGLang's own loading give a load_format such as safetensors",
            file=model_path,
        )
    if not source_dir:
        raise DeviceError(
            "a local checkpoint does not say where its versions are published: set GPUSYNC_SOURCE_DIR for the engine, "
            "or give a JSON request",
            file=model_path,
        )
    return Request(source_dir=source_dir, target_version=marker.version, checkpoint=str(folder))


def merge_payload(first: Any, then: Any) -> Request:
    """Return what a receiver's round asks for: its own payload over what the receiver was made with."""
    for payload in (first, then):
        if payload is not None and not isinstance(payload, Mapping):
            raise DeviceError("a payload is no JSON object", got=repr(payload)[:80])
    return parse_request({**cast(dict[str, Any], first or {}), **cast(dict[str, Any], then or {})})


def _is_local(model_path: str) -> bool:
    try:
        return read_marker(Path(model_path)).marker is not None
    except (OSError, ValueError):
        return False
