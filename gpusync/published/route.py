"""Routes: the published versions between one starting point and the target, and what they must agree on."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpusync import fsio
from gpusync.errors import (
    BaseMismatchError,
    ChainError,
    IndexFormatError,
    SourceNotReadyError,
    VersionConflictError,
    printable,
)
from gpusync.folder.layout import Layout
from gpusync.format.index import MAX_VERSION
from gpusync.published.source import SourceVersion

_TIED_NAMES = ("lm_head.weight", "model.embed_tokens.weight")
_MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class Route:
    """How to get to ``target`` from one starting point.

    Parameters
    ----------
    start
        "applied": patch what stands at ``start_version``. "full": a full version (``full``). "base": the base
        checkpoint. "aggregate" is "base" with ``deltas[0]`` replaced by one delta that holds several versions.
    deltas
        Delta versions to fold in, oldest first.
    """

    start: Literal["applied", "full", "base", "aggregate"]
    start_version: int
    target: int
    deltas: tuple[SourceVersion, ...] = ()
    full: SourceVersion | None = None

    @property
    def versions(self) -> list[SourceVersion]:
        """Every published version that the route reads."""
        return ([self.full] if self.full is not None else []) + list(self.deltas)

    @property
    def wire_nbytes(self) -> int:
        return sum(version.wire_nbytes for version in self.versions)

    def notes(self) -> list[str]:
        """What a report should say of these versions."""
        notes = [
            printable(
                f"version {found.version}: ignored {', '.join(found.strays[:3])}, which its index does not name"
            )
            for found in self.versions
            if found.strays
        ]
        weak = [
            str(delta.version)
            for delta in self.deltas
            if delta.index is not None and delta.digests and delta.index.algorithm == "adler32"
        ]
        if weak:
            notes.append(
                f"adler32 is a weak digest, publish with xxh3-128: version(s) {', '.join(weak)}"
            )
        return notes


def check_target(target_version: int) -> int:
    """Return the target as an int.

    Raises
    ------
    ChainError
        It is not an integer, or negative.
    SourceNotReadyError
        No version folder can have that number.
    """
    try:
        if isinstance(target_version, bool):
            raise TypeError("a bool is not a version")
        target = operator.index(target_version)
    except TypeError as err:
        raise ChainError("target_version is not an integer", got=repr(target_version)) from err
    if target < 0:
        raise ChainError("target_version is negative: 0 is the base, published versions begin at 1")
    if target > MAX_VERSION:
        raise SourceNotReadyError(f"versions end at {MAX_VERSION}; this one is never published")
    return target


def check_order(route: Route) -> Route:
    """Return the route, after checking that every delta builds on the version before it.

    Raises
    ------
    BaseMismatchError
        A delta's base is another version, or its manifest names other bytes.
    VersionConflictError
        The deltas are not of one run.
    """
    before = route.start_version
    known = route.full.fingerprint if route.full is not None else None
    run_id: str | None = None
    for delta in route.deltas:
        base = delta.index.base_version if delta.index is not None else None
        if base != before:
            raise BaseMismatchError(
                "out-of-order delta: its base is not the version before it",
                version=delta.version,
                expected=before,
                got=base,
            )
        if known is not None:
            check_base_fingerprint(delta, known)
        check_run(delta, run_id)
        run_id = delta.manifest.run_id if delta.manifest is not None else run_id
        before, known = delta.version, delta.fingerprint
    return route


def check_run(delta: SourceVersion, run_id: str | None) -> None:
    """Refuse a delta of another run than the bytes it would be applied to.

    Raises
    ------
    VersionConflictError
        Its manifest names another run.
    """
    stated = delta.manifest.run_id if delta.manifest is not None else None
    if stated is not None and run_id is not None and stated != run_id:
        raise VersionConflictError(
            "the delta is of another run than the version before it; pull target 0 to reset to the base",
            version=delta.version,
            expected=run_id,
            got=stated,
        )


def check_base_fingerprint(delta: SourceVersion, fingerprint: str) -> None:
    """Refuse a delta whose manifest names another base than the bytes it would be applied to.

    Raises
    ------
    BaseMismatchError
        The fingerprints differ.
    """
    stated = delta.manifest.base_fingerprint if delta.manifest is not None else None
    if stated is not None and stated != fingerprint:
        raise BaseMismatchError(
            "the delta was made from other bytes than this base version: another run, or it was published again",
            version=delta.version,
            expected=fingerprint,
            got=stated,
        )


def check_targets(route: Route, layout: Layout) -> None:
    """Check that every tensor the deltas name is in the checkpoint they will be applied to.

    Raises
    ------
    IndexFormatError
        A delta names a tensor that is not there, or its manifest disagrees on size, dtype or shape.
    """
    for delta in route.deltas:
        for name in delta.digests:
            if name not in layout:
                if is_tied_copy(delta, name, layout):
                    continue
                raise IndexFormatError(
                    "the delta names a tensor that the checkpoint does not hold",
                    version=delta.version,
                    file=delta.blob(name)[0].path.name,
                    tensor=name,
                )
            entry = layout.entry(name)
            stated = delta.manifest.tensors.get(name) if delta.manifest is not None else None
            if stated is not None and (stated.nbytes, stated.dtype, stated.shape) != (
                entry.nbytes,
                entry.dtype,
                entry.shape,
            ):
                raise IndexFormatError(
                    "the manifest describes another tensor than the checkpoint holds",
                    version=delta.version,
                    tensor=name,
                    expected=f"{entry.dtype} {list(entry.shape)}, {entry.nbytes} bytes",
                    got=f"{stated.dtype} {list(stated.shape)}, {stated.nbytes} bytes",
                )


def is_tied_copy(delta: SourceVersion, name: str, layout: Layout) -> bool:
    """True for an output head that a tied checkpoint does not hold, published along with its equal embedding."""
    head, embedding = _TIED_NAMES
    return (
        name == head
        and embedding in layout
        and delta.digests.get(embedding) == delta.digests[head]
        and _config_ties(layout.folder)
    )


def _config_ties(folder: Path) -> bool:
    try:
        config = json.loads(fsio.read_file(folder / "config.json", _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("tie_word_embeddings") is True
