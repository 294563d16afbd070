"""Puts committed results into documents, so that no figure in them is typed by hand.

    python bench/quote.py [--check]

Between ``<!-- quote: NAME -->`` and ``<!-- end of quote -->`` stands what the newest result of the bench NAME says; for
``targets`` and ``summary``, what all of them say; and for ``plots`` the PNGs that bench/plot.py has drawn. With
``--check`` nothing is written, and a document that says something else ends it with status 1.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import FOLDER, Result, latest
from tables import table

ROOT = FOLDER.parent.parent
DOCUMENTS = ("README.md", "docs/PERFORMANCE.md")
THEMES = (
    "disk_path", "seed", "recovery", "live_apply", "decode", "digest", "publisher", "placement",
    "memory", "scaling",
)  # fmt: skip
_PLOTS = {
    "pause": ("scaling", "Seconds of prepare, pause and reload by density and by model size"),
    "stages": ("live_apply", "Where the seconds of a pull and of a live update go"),
}
_QUOTE = re.compile(r"(<!-- quote: (\w+) -->\n).*?(<!-- end of quote -->)", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """A line of the summary: two cases of a bench's section."""

    what: str
    theme: str
    section: str
    ours: str
    baseline: str


_SUMMARY = (
    Line("pull one version", "disk_path", "one version, seekable", "pull", "baseline"),
    Line("pull one version, durable", "disk_path", "one version, seekable", "pull durable", "baseline"),
    Line("its floor: decode alone + copy alone", "disk_path", "one version, seekable", "floor", "baseline"),
    Line("eight versions in one pull, not eight", "disk_path", "chain", "one pull", "eight pulls"),
    Line("join late: base and three versions", "seed", "late joiner", "pull", "baseline"),
    Line("finish after kill -9 at the first rename", "recovery", "after", "after the first rename", "baseline"),
    Line("live model, while serving: prepare", "live_apply", "one", "live.prepare", "baseline.pull"),
    Line("its floor: decode, xxh3, XOR, each alone", "live_apply", "one", "floor of prepare", "baseline.pull"),
    Line("live model, the pause: commit", "live_apply", "one", "live.commit", "baseline.reload"),
    Line("its floor: gather and scatter", "live_apply", "one", "floor of the pause", "baseline.reload"),
    Line("live model, all: open, prepare, commit", "live_apply", "one", "live", "baseline"),
    Line("publish one version, durable", "publisher", "one version", "publisher", "plain loop"),
)  # fmt: skip


def quoted(text: str, beside: Path, folder: Path = FOLDER) -> str:
    """Return a document's text with its quotes filled in; ``beside`` is the document's folder."""

    def fill(match: re.Match[str]) -> str:
        blocks = list(_blocks(match[2], beside, folder))
        return match[1] + "".join(f"{block}\n\n" for block in blocks) + match[3]

    return _QUOTE.sub(fill, text)


def _blocks(name: str, beside: Path, folder: Path) -> Iterator[str]:
    if name == "plots":
        yield from _plots(beside, folder)
    elif name == "summary":
        yield from _summary(folder)
    elif name == "targets":
        yield from _targets(beside, folder)
    else:
        result = latest(name, folder)
        if result is None:
            yield f"Not measured yet in this form (`bench/{name}.py`)."
            return
        yield f"{_link(result.path.name, result.path, beside)}: {result.where()}."
        yield from _tables(result)


def _link(text: str, path: Path, beside: Path) -> str:
    return f"[{text}]({os.path.relpath(path, beside)})"


def _plots(beside: Path, folder: Path) -> Iterator[str]:
    for plot, (theme, text) in _PLOTS.items():
        result = latest(theme, folder)
        file = folder / f"{plot}_{result.run}.png" if result is not None else folder
        if file.is_file():
            yield f"![{text}]({os.path.relpath(file, beside)})"


def _summary(folder: Path) -> Iterator[str]:
    rows = []
    for line in _SUMMARY:
        result = latest(line.theme, folder)
        if result is not None:
            ours, other = (result.median(line.section, case) for case in (line.ours, line.baseline))
            rows.append([line.what, f"{ours:.3f} s", f"{other:.3f} s", f"{ours / other:.2f}"])
    if rows:
        yield table(["medians", "gpusync", "baseline", "gpusync / baseline"], rows)


def _targets(beside: Path, folder: Path) -> Iterator[str]:
    rows = []
    for theme in THEMES:
        result = latest(theme, folder)
        if result is None:
            continue
        for target in result.document.get("targets", ()):
            what = f"{_link(theme, result.path, beside)}: {target['name']}"
            aim = f"{target['sense']} {target['limit']:g}"
            rows.append([what, f"{target['value']:.2f}", aim, "met" if target["met"] else "missed"])
    yield table(["bench: what", "got", "aim", ""], rows)


def _tables(result: Result) -> Iterator[str]:
    document = result.document
    if result.document["bench"] == "decode":
        yield _decode_table(document["sections"])
        return
    for title, section in document.get("sections", {}).items():
        rows = [[row, *_spread(section["seconds"][row], 3)] for row in section["seconds"]]
        rows += [[row, *_spread(section["ratios"][row], 2)] for row in section["ratios"]]
        yield table([f"{title}: seconds, then ratios of paired runs", "median", "min to max"], rows)
    for axis, points in document.get("series", {}).items():
        yield _scaling_table(axis, points)
    if "targets" in document and "sections" not in document:
        yield table(
            ["", "got", "aim"],
            [[t["name"], f"{t['value']:.2f}", f"{t['sense']} {t['limit']:g}"] for t in document["targets"]],
        )  # fmt: skip


def _spread(values: dict[str, float], digits: int) -> tuple[str, str]:
    low, high = (f"{values[key]:.{digits}f}" for key in ("min", "max"))
    return f"{values['median']:.{digits}f}", f"{low} to {high}"


def _decode_table(sections: dict[str, Any]) -> str:
    rows = []
    for encoding, section in sections.items():
        rates = section["notes"]["GB of weights per second"]
        for what, share in section["notes"]["wire bytes / model bytes"].items():
            shown = [rates.get(f"{what}: {case}") for case in ("ours", "baseline", "zstd alone")]
            cells = ["-" if rate is None else f"{rate:.2f}" for rate in shown]
            rows.append([f"{encoding}, {what}", f"{share:.2%}", *cells])
    head = ["GB of weights per second", "wire / model", "ours", "baseline", "zstd alone"]
    return table(head, rows)


def _scaling_table(axis: str, points: list[dict[str, Any]]) -> str:
    shown = ("live.prepare", "live.commit", "pull", "baseline.pull", "baseline.reload")
    keys = {"model": "model_nbytes"}
    rows = [
        [f"{point[keys.get(axis, axis)]:g}"]
        + [f"{point['seconds'][row]['median']:.3f}" for row in shown]
        for point in points
    ]
    return table([axis, *(row.removeprefix("live.") for row in shown)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the newest results into the documents.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where they differ"
    )
    args = parser.parse_args()
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        new = quoted(text, path.parent)
        if new != text and args.check:
            stale.append(name)
        elif new != text:
            path.write_text(new)
    if stale:
        raise SystemExit(f"not what bench/results says, run bench/quote.py: {', '.join(stale)}")


if __name__ == "__main__":
    main()
