"""Which results there are: ``THEME_HARDWARE_DATE.json``, as ``--json-out`` wrote them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Result:
    """One run of one bench."""

    path: Path
    document: dict[str, Any]

    @property
    def run(self) -> str:
        """Hardware and date, as in the file's name."""
        return self.path.stem.removeprefix(f"{self.document['bench']}_")

    def section(self, title: str) -> dict[str, Any]:
        """Return the section of which the title begins so."""
        sections: dict[str, dict[str, Any]] = self.document["sections"]
        return next(found for name, found in sections.items() if name.startswith(title))

    def median(self, title: str, row: str) -> float:
        """Return the median seconds of a case or part."""
        return float(self.section(title)["seconds"][row]["median"])

    def where(self) -> str:
        """Say what it was measured on, and when."""
        machine = self.document["machine"]
        small = ", smoke sizes: no figures" if self.document["smoke"] else ""
        return (
            f"{machine['cpu']}, {machine['cores']} cores, {machine['file_system']}, commit {machine['commit']},"
            f" {machine['utc'][:10]}{small}"
        )


def latest(theme: str, folder: Path = FOLDER) -> Result | None:
    """Return the newest result of a bench, by when it began; None where there is none in today's form."""
    found = [Result(path, json.loads(path.read_bytes())) for path in folder.glob(f"{theme}_*.json")]
    today = [one for one in found if {"sections", "series", "found", "peaks"} & set(one.document)]
    return max(today, key=lambda one: str(one.document["machine"]["utc"]), default=None)
