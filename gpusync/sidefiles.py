"""What a seed brings besides tensors: config, tokenizer, index; and which old files it makes stale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpusync import fsio
from gpusync.chain import Chain
from gpusync.index import INDEX_NAME, MANIFEST_NAME
from gpusync.layout import Layout
from gpusync.route import Route

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
    present = set(fsio.regular_files(folder)) if fsio.exists(folder) else set()
    copies = {name: layout.folder for name in layout.side_files}
    if CONFIG_NAME not in copies and CONFIG_NAME not in present and chain.base_dir is not None:
        base = chain.base_layout()
        copies = {**{name: base.folder for name in base.side_files}, **copies}
    if layout.index_raw is not None:
        copies[INDEX_NAME] = layout.folder
    copies.pop(MANIFEST_NAME, None)
    new = {*layout.shards, *copies}
    if CONFIG_NAME in copies:
        stale = present - new
    else:
        stale = {name for name in present - new if _is_weights(name)}
    return SideFiles(copies, tuple(sorted(stale)))


def _is_weights(name: str) -> bool:
    return name == INDEX_NAME or name.endswith(".safetensors")
