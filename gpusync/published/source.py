"""Reading published versions: folders, indexes, shard headers, blobs.

A :class:`Source` opens versions of one ``source_dir`` and keeps their shards' descriptors. Nothing read here is
trusted before it is validated, and nothing is mapped into memory: a mount may shrink or replace a file at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpusync import fsio
from gpusync.config import Settings
from gpusync.errors import (
    ChainError,
    FormatError,
    GpuSyncError,
    HeaderFormatError,
    IndexFormatError,
    SourceNotReadyError,
    VersionConflictError,
)
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import (
    Layout,
    Shard,
    absolute_path,
    is_unchanged,
    read_layout,
    read_shard,
    unreadable,
)
from gpusync.format.digest import digest_of, fingerprint, parse_digest
from gpusync.format.index import (
    INDEX_NAME,
    MANIFEST_NAME,
    parse_index,
    parse_manifest,
    parse_version_dir_name,
    parse_version_number,
    version_dir_name,
)
from gpusync.format.jsontext import show
from gpusync.types import DeltaIndex, Digest, Manifest, TensorEntry

log = logging.getLogger(__name__)

AGGREGATE_NAME = "aggregate"
_AGGREGATE_VERSION_KEY = "__version__"


@dataclass(frozen=True)
class SourceVersion:
    """One published version, validated down to every shard header.

    ``digests`` maps each changed tensor to its published digest; it is empty for a full version, which carries none.
    ``strays`` are shard files that the index does not name: they are not part of the version.
    """

    version: int
    path: Path
    kind: Literal["delta", "full"]
    index: DeltaIndex | None
    shards: Mapping[str, Shard]
    fingerprint: str
    digests: Mapping[str, Digest] = field(default_factory=dict)
    layout: Layout | None = None
    manifest: Manifest | None = None
    strays: tuple[str, ...] = ()

    @property
    def wire_nbytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.header.file_nbytes for shard in self.shards.values())

    def blob(self, tensor: str) -> tuple[Shard, TensorEntry]:
        """Return the shard and entry that hold a tensor's blob (delta) or bytes (full)."""
        names = self.index.weight_map if self.index is not None else self._layout().file_of
        shard = self.shards[names[tensor]]
        return shard, shard.header.entries[tensor]

    def _layout(self) -> Layout:
        if self.layout is None:
            raise GpuSyncError("a full version without a layout", version=self.version)
        return self.layout


class Source:
    """The published versions under one folder. Use as a context manager; closing releases descriptors."""

    def __init__(self, source_dir: str | os.PathLike[str], settings: Settings) -> None:
        self.path = absolute_path(source_dir, SourceNotReadyError, "source_dir")
        self.settings = settings
        self.files = OpenFiles(settings.max_open_files, settings.source_retries)

    def visible_versions(self) -> dict[int, str]:
        """Return version number to folder name, by listing (which also refreshes a stale directory entry).

        Raises
        ------
        SourceNotReadyError
            The folder itself is not there.
        """
        try:
            names = fsio.list_dir(self.path)
        except OSError as err:
            raise SourceNotReadyError(
                f"source folder {self.path} cannot be listed: {err.strerror}; check the mount"
            ) from err
        found: dict[int, str] = {}
        for name in names:
            version = parse_version_dir_name(name)
            if version is not None and (version not in found or name == version_dir_name(version)):
                found[version] = name
        return found

    def has_version(self, version: int) -> bool:
        """True where the version's folder is visible."""
        try:
            return version in self.visible_versions()
        except SourceNotReadyError:
            return False

    def open_version(self, version: int) -> SourceVersion:
        """Read and validate one version: index, manifest, every shard header and size, names, digests.

        Raises
        ------
        SourceNotReadyError
            The folder, its index or a shard is not (wholly) visible yet.
        FormatError
            Something in it breaks the format.
        """
        found = self.visible_versions()
        if version not in found:
            raise SourceNotReadyError(
                f"version {version} is not published (yet) in {self.path}; {self._diagnose(found)}",
                version=version,
            )
        try:
            return self._open_at(self.path / found[version], version)
        except SourceNotReadyError as err:
            err.message += f"; {self._diagnose(found)}"
            raise

    def open_aggregate(self) -> SourceVersion | None:
        """Return the ``aggregate`` folder as a delta from version 0, or None where there is none or it is torn.

        It is rewritten in place, so any disagreement only means that it cannot be used now.
        """
        folder = self.path / AGGREGATE_NAME
        try:
            if not fsio.exists(folder / INDEX_NAME):
                return None
            found = self._open(folder, None)
            if found.index is None or found.index.base_version != 0:
                raise IndexFormatError("the aggregate is not a delta on version 0")
            for shard in found.shards.values():
                torn = shard.header.metadata.get(_AGGREGATE_VERSION_KEY)
                if parse_version_number(torn) != found.version:
                    raise HeaderFormatError(
                        "the aggregate is torn", expected=found.version, got=show(torn)
                    )
        except (OSError, FormatError, SourceNotReadyError) as err:
            log.info("aggregate_skipped reason=%s", err)
            return None
        return found

    def check_unchanged(self, versions: list[SourceVersion]) -> None:
        """Notice a mount that shifted since the versions were validated.

        Raises
        ------
        VersionConflictError
            A version now has another fingerprint: what was read may be a mixture.
        SourceNotReadyError
            A version's files are gone or unreadable now, while other files of it were replaced.
        """
        for known in versions:
            try:
                if all(is_unchanged(shard) for shard in known.shards.values()):
                    continue
            except (SourceNotReadyError, FormatError) as err:
                if known.kind == "full":
                    raise err.located(version=known.version) from err.__cause__
            if known.kind == "full":  # equal headers say nothing of its bytes, and no digest does
                raise VersionConflictError(
                    "the full version was rewritten while it was read; pull again",
                    version=known.version,
                )
            for shard in known.shards.values():
                self.files.forget(shard.path)
            is_aggregate = known.path.name == AGGREGATE_NAME
            now = self._open_at(known.path, None if is_aggregate else known.version)
            if now.fingerprint != known.fingerprint:
                raise VersionConflictError(
                    "the version was replaced while it was read; pull again",
                    version=known.version,
                    expected=known.fingerprint,
                    got=now.fingerprint,
                )

    def close(self) -> None:
        self.files.close()

    # ---- one folder ------------------------------------------------------------------------------------

    def _open_at(self, folder: Path, version: int | None) -> SourceVersion:
        """``_open``, with the system's errors as typed ones that name the version."""
        try:
            return self._open(folder, version)
        except OSError as err:
            raise unreadable(err, folder, version=version) from err
        except GpuSyncError as err:
            raise err.located(version=version) from err.__cause__

    def _open(self, folder: Path, version: int | None) -> SourceVersion:
        self._check_inside(folder, "folder")
        index_path = folder / INDEX_NAME
        if not fsio.exists(index_path):
            return self._open_full(folder, version, None)
        self._check_inside(index_path, "regular file")
        try:
            raw = fsio.read_file(index_path, self.settings.max_index_bytes)
        except OSError as err:
            raise unreadable(err, index_path, version=version) from err
        index = parse_index(raw, file=INDEX_NAME)
        if index.version is not None and version is not None and index.version != version:
            raise ChainError(
                "the index is of another version than its folder",
                file=INDEX_NAME,
                expected=version,
                got=index.version,
            )
        if not isinstance(index, DeltaIndex):
            return self._open_full(folder, version, raw)
        return self._open_delta(folder, index, raw)

    def _open_delta(self, folder: Path, index: DeltaIndex, raw: bytes) -> SourceVersion:
        try:
            names = fsio.list_dir(folder)
        except OSError as err:
            raise unreadable(err, folder, version=index.version) from err
        shards = {}
        missing = []
        for name in sorted(set(index.weight_map.values())):
            if fsio.exists(folder / name):
                self._check_inside(folder / name, "regular file")
                shards[name] = read_shard(
                    folder / name, self.files, self.settings, version=index.version
                )
            else:
                missing.append(name)
        if missing:
            raise SourceNotReadyError(
                f"the index names {len(missing)} shard(s) that are not visible: {', '.join(missing[:5])}",
                version=index.version,
                file=missing[0],
            )
        digests = _check_delta(index, shards)
        headers = {name: shard.header.raw for name, shard in shards.items()}
        return SourceVersion(
            version=index.version,
            path=folder,
            kind="delta",
            index=index,
            shards=shards,
            fingerprint=fingerprint(raw, headers),
            digests=digests,
            manifest=self._read_manifest(folder, index.manifest_digest, index.version),
            strays=tuple(name for name in names if _is_stray(name, shards)),
        )

    def _open_full(self, folder: Path, version: int | None, raw: bytes | None) -> SourceVersion:
        for name in fsio.list_dir(folder):
            if name.endswith(".safetensors") or stat.S_ISLNK(fsio.lstat(folder / name).st_mode):
                self._check_inside(folder / name, "regular file")
        layout = read_layout(folder, self.files, self.settings, version=version, strict=True)
        headers = {name: shard.header.raw for name, shard in layout.shards.items()}
        return SourceVersion(
            version=version or 0,
            path=folder,
            kind="full",
            index=None,
            shards=layout.shards,
            fingerprint=fingerprint(raw, headers),
            layout=layout,
        )

    def _read_manifest(self, folder: Path, digest: str | None, version: int) -> Manifest | None:
        if digest is None:
            return None
        path = folder / MANIFEST_NAME
        self._check_inside(path, "regular file")
        try:
            raw = fsio.read_file(path, self.settings.max_index_bytes)
        except OSError as err:
            raise unreadable(err, path, version=version) from err
        got = digest_of("xxh3-128", raw).hex
        if got != digest:
            raise IndexFormatError(
                "the manifest is not the one that the index names",
                file=MANIFEST_NAME,
                expected=digest,
                got=got,
            )
        manifest = parse_manifest(raw, file=MANIFEST_NAME)
        if manifest.version != version:
            raise IndexFormatError(
                "the manifest is of another version",
                file=MANIFEST_NAME,
                expected=version,
                got=manifest.version,
            )
        return manifest

    def _check_inside(self, path: Path, kind: Literal["folder", "regular file"]) -> None:
        """Refuse links that leave ``source_dir`` and anything that is not what it should be, without opening it."""
        try:
            mode = fsio.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                real = Path(os.path.realpath(path))
                if not real.is_relative_to(os.path.realpath(self.path)):
                    raise HeaderFormatError(
                        f"{path.name} is a link that leaves the source folder",
                        file=path.name,
                        got=str(real),
                    )
                mode = fsio.lstat(real).st_mode
        except OSError as err:
            raise unreadable(err, path) from err
        if not (stat.S_ISDIR(mode) if kind == "folder" else stat.S_ISREG(mode)):
            raise HeaderFormatError(f"{path.name} is not a {kind}", file=path.name)

    def _diagnose(self, found: Mapping[int, str]) -> str:
        """What an operator would look for next: versions visible, and the store's own pointer."""
        numbers = sorted(found)
        visible = f"{numbers[0]}..{numbers[-1]} ({len(numbers)})" if numbers else "none"
        latest = self.path / "latest"
        with contextlib.suppress(OSError, FormatError, SourceNotReadyError):
            self._check_inside(latest, "regular file")  # a link could show any file
            text = fsio.read_file(latest, 4096).decode("utf-8", "replace").strip()
            visible += f"; the store's latest says {show(text)}"
        return f"versions visible: {visible}"


def _check_delta(index: DeltaIndex, shards: Mapping[str, Shard]) -> dict[str, Digest]:
    """Check names, entry types and digests of a delta's shards against its index; return the digests."""
    digests: dict[str, Digest] = {}
    copies: list[tuple[str, str, Digest]] = []
    for file, shard in shards.items():
        for name, entry in shard.header.entries.items():
            where = {"version": index.version, "file": file, "tensor": name}
            mapped = index.weight_map.get(name)
            if mapped is None:
                raise HeaderFormatError("a tensor of this shard is not in weight_map", **where)  # type: ignore[arg-type]
            if entry.dtype != "U8" or len(entry.shape) != 1:
                raise HeaderFormatError(
                    "a blob is not a U8 vector",
                    expected="U8, 1 dimension",
                    got=f"{entry.dtype}, {len(entry.shape)} dimensions",
                    **where,  # type: ignore[arg-type]
                )
            text = shard.header.metadata.get(name)
            if text is None:
                raise HeaderFormatError("__metadata__ has no digest for a tensor", **where)  # type: ignore[arg-type]
            digest = parse_digest(index.algorithm, text, **where)  # type: ignore[arg-type]
            if mapped == file:
                digests[name] = digest
            else:
                copies.append((name, file, digest))
    for name, file in index.weight_map.items():
        if name not in digests:
            raise HeaderFormatError(
                "weight_map names a tensor that its shard does not hold",
                version=index.version,
                file=file,
                tensor=name,
            )
    for name, file, digest in copies:
        if digest != digests[name]:
            raise HeaderFormatError(
                "a second copy of a tensor has another digest than the one weight_map names",
                version=index.version,
                file=file,
                tensor=name,
                expected=digests[name],
                got=digest,
            )
    return digests


def _is_stray(name: str, shards: Mapping[str, Shard]) -> bool:
    return ".safetensors" in name and name != INDEX_NAME and name not in shards
