"""Everything about gpusync that only a GPU can answer, in one command under six minutes: see gpu_check.md.

Each section runs in a process of its own with a share of the time; one that fails, hangs or is ended by the driver is
reported, and the others run. With ``--device emulated --smoke`` the same program runs without a GPU: a check of the
program, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_apply import run_apply
from gpu_engine import run_graphs
from gpu_frames import run_decoding, run_odd_frames
from gpu_isolate import NeedsCudaError, Outcome, Record, run_isolated
from gpu_lab import Task
from gpu_machine import run_machine
from gpu_outside import run_sanitizer, run_tests
from gpu_rates import run_decode_rates, run_kernels
from report import machine_info, publish_result
from tables import table

_RESULTS = Path(__file__).with_name("results")
_LAST_SECONDS = 5.0  # for printing and writing
_BAD = ("failed", "over time", "died", "not run")


@dataclass(frozen=True)
class Section:
    """Part of the check. Of the time left, it gets its share of the shares left."""

    name: str
    title: str
    run: Callable[[Task], None]
    share: float


SECTIONS = (
    Section("machine", "Machine, and warm-up", run_machine, 20),
    Section("decoding", "Decoding frames that a CPU made", run_decoding, 45),
    Section("odd", "Odd and broken frames", run_odd_frames, 50),
    Section("decode", "Decode rate", run_decode_rates, 60),
    Section("kernels", "Kernels", run_kernels, 30),
    Section("apply", "Updates of a live model", run_apply, 95),
    Section("graphs", "CUDA graphs", run_graphs, 30),
    Section("sanitizer", "compute-sanitizer memcheck", run_sanitizer, 35),
    Section("tests", "pytest -m gpu", run_tests, 50),
)


@dataclass
class Found:
    """What a section told, and how it ended."""

    section: Section
    limit_seconds: float
    records: list[Record] = field(default_factory=list)
    outcome: Outcome = field(default_factory=lambda: Outcome("not run", "the time was over", 0.0))

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of one kind, without that word."""
        return [
            {key: value for key, value in record.items() if key != "kind"}
            for record in self.records
            if record["kind"] == kind
        ]

    @property
    def ok(self) -> bool:
        wrong = any(check["ok"] is False for check in self.of_kind("check"))
        return not wrong and self.outcome.state not in _BAD

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.section.title,
            **asdict(self.outcome),
            "limit_seconds": round(self.limit_seconds, 1),
            "ok": self.ok,
            "checks": self.of_kind("check"),
            "rows": self.of_kind("row"),
            "targets": self.of_kind("target"),
        }


def main() -> None:
    begin = time.monotonic()
    args = parse_args()
    if args.section:
        raise SystemExit(run_here(args))
    chosen = [section for section in SECTIONS if not args.only or section.name in args.only]
    found: list[Found] = []
    for number, section in enumerate(chosen):
        left = args.budget_seconds - _LAST_SECONDS - (time.monotonic() - begin)
        share = section.share / sum(later.share for later in chosen[number:])
        found.append(run_section(section, args, left * share))
        print_progress(found[-1])
    document = {
        "device": args.device,
        "budget_seconds": args.budget_seconds,
        "seconds": round(time.monotonic() - begin, 1),
        "gpu": next((r["values"] for f in found for r in f.of_kind("machine")), {}),
        "sections": {f.section.name: f.to_dict() for f in found},
    }
    if document["gpu"] and args.device == "cuda" and not args.smoke and not args.json_out:
        card = str(document["gpu"]["name"]).lower().replace("_", "-")
        card = "-".join(card.split())
        args.json_out = _RESULTS / f"gpu_check_{card}_{time.strftime('%Y-%m-%d')}.json"
    machine = machine_info(Path(tempfile.gettempdir()))
    publish_result("gpu_check", args, machine, document, make_tables(args, document, found))
    raise SystemExit(0 if all(f.ok for f in found) else 1)


def parse_args() -> argparse.Namespace:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: checks, not figures")
    parser.add_argument("--budget-seconds", type=float, default=330.0, help="for everything")
    parser.add_argument("--only", nargs="+", choices=names, help="these sections")
    parser.add_argument(
        "--section", choices=names, help="one section, in this process, a JSON line per finding"
    )
    parser.add_argument(
        "--json-out",
        type=Path,
        help="write the JSON here, tables beside it as .md; default for full sizes on CUDA: bench/results/",
    )
    return parser.parse_args()


def run_section(section: Section, args: argparse.Namespace, seconds: float) -> Found:
    """Run a section in a process of its own."""
    found = Found(section, seconds)
    if seconds < 1:
        return found

    def work(tell: Callable[[Record], None]) -> None:
        section.run(Task(args.device, args.smoke, tell, seconds))

    found.outcome = run_isolated(work, seconds, found.records.append)
    return found


def run_here(args: argparse.Namespace) -> int:
    """Run one section in this process, for tools that watch a process; return the exit status."""
    wrong = False

    def tell(record: Record) -> None:
        nonlocal wrong
        wrong = wrong or record.get("ok") is False
        print(json.dumps(record), flush=True)

    (section,) = (section for section in SECTIONS if section.name == args.section)
    try:
        section.run(Task(args.device, args.smoke, tell, args.budget_seconds))
    except NeedsCudaError as err:
        print(json.dumps({"kind": "needs CUDA", "reason": str(err)}))
    return int(wrong)


def print_progress(found: Found) -> None:
    outcome = found.outcome
    print(
        f"{found.section.title}: {outcome.state} after {outcome.seconds:.1f} of {found.limit_seconds:.0f} s"
        f"{'; ' + outcome.reason if outcome.reason else ''}",
        flush=True,
    )


# ---- tables -----------------------------------------------------------------------------------------


def make_tables(
    args: argparse.Namespace, document: dict[str, Any], found: list[Found]
) -> list[str]:
    """Return what is printed and written for people."""
    where = ", ".join(f"{key} {value}" for key, value in document["gpu"].items())
    emulated = " (emulated)" if args.device == "emulated" else ""
    tables = [f"Device: {args.device}; {where}"]
    if emulated:
        tables.append(
            "Emulated on the host: nothing here was run on a GPU, and no figure means anything."
        )
    rows = [
        [
            f.section.title,
            f.outcome.state + (f": {f.outcome.reason}" if f.outcome.reason else ""),
            str(sum(check["ok"] is True for check in f.of_kind("check"))),
            str(sum(check["ok"] is False for check in f.of_kind("check"))),
            f"{f.outcome.seconds:.1f}",
        ]
        for f in found
    ]
    tables.append(table(["section", "ended", "right", "WRONG", "seconds"], rows))
    for f in found:
        tables += _section_tables(f, emulated)
    targets = [target for f in found for target in f.of_kind("target")]
    if targets:
        cells = [
            [
                t["name"],
                f"{t['value']:g}",
                f"{t['sense']} {t['limit']:g}",
                "met" if t["met"] else "MISSED",
            ]
            for t in targets
        ]
        tables += [f"## Targets{emulated}", table(["target", "got", "wanted", "verdict"], cells)]
    return tables


def _section_tables(found: Found, emulated: str) -> list[str]:
    checks, rows = found.of_kind("check"), found.of_kind("row")
    if not checks and not rows:
        return []
    tables = [f"## {found.section.title}{emulated}"]
    if checks:
        verdicts = {True: "right", False: "WRONG", None: "-"}
        cells = [[c["name"], verdicts[c["ok"]], c["detail"].replace("|", "/")] for c in checks]
        tables.append(table(["check", "verdict", "what was seen"], cells))
    for name in dict.fromkeys(row["table"] for row in rows):
        of_table = [row["cells"] for row in rows if row["table"] == name]
        head = list(dict.fromkeys(key for cells in of_table for key in cells))
        lines = [[_cell(cells.get(key, "")) for key in head] for cells in of_table]
        tables += [f"{name}{emulated}:", table(head, lines)]
    return tables


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
