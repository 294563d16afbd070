"""Draws the results: PNGs beside the JSON that they are made of.

    python bench/plot.py [--results DIR] [--out DIR]

pause_*.png    how prepare and the pause grow with what changes and with the model, beside a reload (scaling.py)
stages_*.png   where the seconds of a pull and of a live update go, beside their floors (disk_path.py, live_apply.py)

Colours are Okabe and Ito's, which colour-blind readers can tell apart; lines have markers of their own as well.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from results import FOLDER, Result, latest

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
    "#999999",
)  # fmt: skip
_LINES = (
    ("baseline.reload", "reload (others' pause)", VERMILION, "s", "-"),
    ("live.commit", "commit (the pause)", BLUE, "o", "-"),
    ("live.prepare", "prepare (while serving)", GREEN, "^", "--"),
    ("baseline.pull", "baseline's patch of the files", ORANGE, "v", "--"),
)
_COLOURS = {
    "decode": SKY, "xxh3": GREEN, "XOR": PURPLE, "copy": ORANGE, "gather + scatter": GREY,
    "materialize": BLUE, "prepare": BLUE, "pull": BLUE, "sync": GREY,
    "commit": VERMILION, "reload": VERMILION, "open": YELLOW, "swap": GREEN,
}  # fmt: skip
_DARK = (BLUE, VERMILION)
_CHARACTER = 0.011
"""Width of a label's character, as a share of the longest bar: parts that are narrower than their label have none."""
_LEAST_NAMED = 0.003
"""Narrower parts are not in the legend either."""


@dataclass(frozen=True)
class Bar:
    """Parts of one stacked bar, in seconds."""

    label: str
    parts: dict[str, float]


def draw_pause(result: Result, file: Path) -> None:
    """Draw seconds over the density and over the model's size, both axes logarithmic."""
    series = result.document["series"]
    panels = (
        ("density", "elements changed per version (%)", 100.0, "density"),
        ("model", "model (GB)", 1e-9, "model_nbytes"),
    )
    shown = [panel for panel in panels if panel[0] in series]
    figure, axes = plt.subplots(1, len(shown), figsize=(5.2 * len(shown), 4.4), sharey=True)
    for axis, (name, label, unit, key) in zip(
        [axes] if len(shown) == 1 else axes, shown, strict=True
    ):
        _draw_lines(axis, series[name], unit, key)
        axis.set_xlabel(label)
    (axes if len(shown) == 1 else axes[0]).set_ylabel("seconds (median; bars: min and max)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=2, frameon=False)
    figure.suptitle("The pause grows with what changed, a reload with the model")
    _save(figure, file, result.where(), bottom=0.14)


def _draw_lines(axis: Axes, points: list[dict[str, Any]], unit: float, key: str) -> None:
    at = [point[key] * unit for point in points]
    for row, label, colour, marker, style in _LINES:
        spreads = [point["seconds"][row] for point in points]
        median = [one["median"] for one in spreads]
        reach = [
            [one["median"] - one["min"] for one in spreads],
            [one["max"] - one["median"] for one in spreads],
        ]
        axis.errorbar(
            at, median, yerr=reach, label=label, color=colour, marker=marker, linestyle=style,
            capsize=3,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(at, [f"{value:.3g}" for value in at])
    axis.minorticks_off()
    axis.grid(True, which="major", alpha=0.3)


def draw_stages(disk: Result, live: Result, file: Path) -> None:
    """Draw stacked bars: ours, its floor and the usual receiver, for the disk and for a live model."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 6.2))
    _draw_bars(axes[0], disk_bars(disk), "one version into the local checkpoint")
    _draw_bars(axes[1], live_bars(live), "one version into a live model")
    axes[1].set_xlabel("seconds (median)")
    figure.suptitle("Where the seconds go, beside the floors of the same run")
    _save(figure, file, live.where(), bottom=0.04)


def disk_bars(disk: Result) -> list[Bar]:
    """Return the bars of a pull with seekable frames."""
    title = "one version, seekable"
    stages = next(iter(disk.section(title)["notes"].values()))
    floor = {part: disk.median(title, f"floor.{part}") for part in ("decode", "copy")}
    return [
        Bar("floor: each alone", floor),
        Bar("gpusync pull", stages["pull"]),
        Bar("baseline, in place", {"pull": disk.median(title, "baseline")}),
        Bar("gpusync pull, durable", stages["pull durable"]),
    ]


def live_bars(live: Result) -> list[Bar]:
    """Return the bars of a live update and its pause."""
    title = "one version"

    def parts(case: str, *names: str) -> dict[str, float]:
        return {name: live.median(title, f"{case}.{name}") for name in names}

    return [
        Bar(
            "floor: each alone",
            parts("floor of prepare", "decode", "xxh3", "XOR")
            | parts("floor of the pause", "gather + scatter"),
        ),
        Bar("gpusync", parts("live", "open", "prepare", "commit")),
        Bar("baseline: patch, reload", parts("baseline", "pull", "reload")),
    ]


def _draw_bars(axis: Axes, bars: list[Bar], title: str) -> None:
    longest = max(sum(bar.parts.values()) for bar in bars)
    named: dict[str, Any] = {}
    for number, bar in enumerate(bars):
        begin = 0.0
        for part, seconds in bar.parts.items():
            colour = _COLOURS.get(part, GREY)
            drawn = axis.barh(number, seconds, left=begin, color=colour, edgecolor="white")
            if seconds > _LEAST_NAMED * longest:
                named.setdefault(part, drawn)
            if seconds > max(len(part), len("0.00")) * _CHARACTER * longest:
                ink = "white" if colour in _DARK else "black"
                axis.bar_label(
                    drawn, [f"{part}\n{seconds:.2f}"], label_type="center", fontsize=8, color=ink
                )
            begin += seconds
        axis.text(begin + 0.01 * longest, number, f"{begin:.2f} s", va="center", fontsize=9)
    axis.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axis.set_xlim(0, 1.14 * longest)
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=10)
    axis.legend(
        named.values(),
        named.keys(),
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize=8,
    )
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, file: Path, where: str, bottom: float) -> None:
    figure.text(0.01, 0.005, where, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(file, dpi=130)
    plt.close(figure)
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the newest results.")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON")
    parser.add_argument("--out", type=Path, help="folder for the PNGs (default: that one)")
    args = parser.parse_args()
    out = args.out or args.results
    out.mkdir(parents=True, exist_ok=True)
    found = {theme: latest(theme, args.results) for theme in ("scaling", "disk_path", "live_apply")}
    scaling, disk, live = found.values()
    if scaling is not None:
        draw_pause(scaling, out / f"pause_{scaling.run}.png")
    if disk is not None and live is not None:
        draw_stages(disk, live, out / f"stages_{live.run}.png")
    missing = [theme for theme, result in found.items() if result is None]
    if missing:
        raise SystemExit(f"no result to draw in {args.results}: {', '.join(missing)}")


if __name__ == "__main__":
    main()
