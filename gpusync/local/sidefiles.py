"""What a seed brings besides tensors: config, tokenizer, index; and which old files it makes stale."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpusync import fsio
from gpusync.errors import CheckpointError
from gpusync.folder.layout import Layout
from gpusync.folder.marker import STATE_DIR
from gpusync.format.index import INDEX_NAME, MANIFEST_NAME
from gpusync.published.chain import Chain
from gpusync.published.route import Route

CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class SideFiles:
    """Files to copy into staging (name to the folder they come from) and names to remove from the local folder."""

    copies: Mapping[str, Path] = field(default_factory=dict)
    removes: tuple[str, ...] = ()

    @property
    def renames(self) -> tuple[str, ...]:
        """Copied files that are renamed like shards, the index last; config.json has steps of its own."""
        names = sorted(self.copies.keys() - {CONFIG_NAME, INDEX_NAME})
        return (*names, *([INDEX_NAME] if INDEX_NAME in self.copies else []))

    @property
    def new_config(self) -> bool:
        return CONFIG_NAME in self.copies


def plan_side_files(folder: Path, route: Route, layout: Layout, chain: Chain) -> SideFiles:
    """Plan the side files of a route.

    A patched folder keeps its own. A seed with a config.json is a whole checkpoint: the folder becomes its image, and
    every other top-level file is stale. A full version without one brings weights only: the folder's side files stay,
    or a fresh folder takes the base's.
    """
    if route.start == "applied":
        return SideFiles()
    present = _visible_files(folder)
    copies = {name: layout.folder for name in layout.side_files}
    if CONFIG_NAME not in copies and CONFIG_NAME not in present and chain.base_dir is not None:
        base = chain.base_layout()
        copies = {**{name: base.folder for name in base.side_files}, **copies}
    # Shards that no index names are not updated by any delta: a copy would be stale weights beside new ones.
    copies = {name: source for name, source in copies.items() if not _is_weights(name)}
    if layout.index_raw is not None:
        copies[INDEX_NAME] = layout.folder
    for reserved in (MANIFEST_NAME, STATE_DIR):
        copies.pop(reserved, None)
    new = {*layout.shards, *copies}
    if CONFIG_NAME in copies:
        stale = present - new
    else:
        stale = {name for name in present - new if _is_weights(name)}
    return SideFiles(copies, tuple(sorted(stale)))


def refuse_other_folder(folder: Path) -> None:
    """Refuse to seed a folder that was never a checkpoint and holds something else.

    Raises
    ------
    CheckpointError
        There are files, and none of them is a checkpoint's.
    """
    present = _visible_files(folder)
    if present and CONFIG_NAME not in present and not any(map(_is_weights, present)):
        raise CheckpointError(
            "the folder holds files that are not a checkpoint's, and seeding would remove them: give an empty or new "
            "folder",
            file=str(folder),
            got=", ".join(sorted(present)[:5]),
        )


def refuse_folders_in_the_way(folder: Path, names: Iterable[str]) -> None:
    """Refuse, before anything is swapped, what a rename could not replace.

    Raises
    ------
    CheckpointError
        A folder stands where a file must go.
    """
    for name in names:
        path = folder / name
        if fsio.exists(path) and stat.S_ISDIR(fsio.lstat(path).st_mode):
            raise CheckpointError(
                f"a folder named {name} stands where a file of the new version must go; move it away",
                file=str(path),
            )


def _visible_files(folder: Path) -> set[str]:
    """Top-level files; hidden ones are never ours."""
    if not fsio.exists(folder):
        return set()
    return {name for name in fsio.regular_files(folder) if not name.startswith(".")}


def _is_weights(name: str) -> bool:
    return name == INDEX_NAME or name.endswith(".safetensors")
