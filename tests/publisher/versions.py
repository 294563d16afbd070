"""Published versions as they stand in a source folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpusync.config import Settings
from gpusync.published.source import Source


def visible(source_dir: Path) -> list[str]:
    return sorted(path.name for path in source_dir.glob("[!.]*"))


def open_version(source_dir: Path, version: int) -> Any:
    source = Source(source_dir, Settings())
    try:
        return source.open_version(version)
    finally:
        source.close()
