"""Timed rounds: cases in turns, in alternating order, each checked; medians and paired ratios."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import table


class Parts:
    """Wall and CPU seconds of the parts of one case."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time the block as ``part``."""
        begin, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds[part] = time.perf_counter() - begin
        self.cpu_seconds[part] = time.process_time() - cpu


@dataclass(frozen=True)
class Timings:
    """Timed rounds: wall seconds, and CPU seconds of this process, by case and by its parts.

    ``others_cores`` is how many cores the rest of the machine kept busy while cases ran: figures taken next to
    other work say little, and this tells.
    """

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    others_cores: float

    def ratio(self, top: str, bottom: str) -> list[float]:
        """Return the ratios of paired runs of two cases or parts."""
        return [a / b for a, b in zip(self.seconds[top], self.seconds[bottom], strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": {name: spread(values) for name, values in self.seconds.items()},
            "cpu_seconds": {name: spread(values) for name, values in self.cpu_seconds.items()},
            "others_cores": self.others_cores,
        }

    def table(self) -> str:
        """Return wall seconds, and the median of CPU seconds, as a table."""
        rows = []
        for name, values in self.seconds.items():
            summary = spread(values)
            rows.append(
                [
                    name,
                    *(f"{summary[key]:.3f}" for key in ("median", "min", "max")),
                    f"{statistics.median(self.cpu_seconds[name]):.3f}",
                    str(len(values)),
                ]
            )
        return (
            table(["seconds", "median", "min", "max", "CPU", "runs"], rows)
            + f"\n\nOther processes kept {self.others_cores:.2f} cores busy meanwhile."
        )


Case = Callable[[int], Parts | None]
"""Runs one round, given its number; returns its parts where it has any."""


def run_rounds(
    cases: Mapping[str, Case],
    rounds: int,
    *,
    before: Callable[[str, int], None],
    check: Callable[[str, int], None],
) -> Timings:
    """Run every case once per round, in alternating order, and time all rounds but the first.

    Round 0 is run and checked but not timed. ``before`` (settle, warm), ``check`` and a garbage
    collection run outside the clock. A case that returns parts is timed by their sum.
    """
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    cpu_seconds: dict[str, list[float]] = {}
    wall = others = 0.0
    for number in range(rounds + 1):
        for name in cases if number % 2 == 0 else reversed(list(cases)):
            before(name, number)
            gc.collect()
            begin, cpu, machine = time.perf_counter(), time.process_time(), _machine_cpu_seconds()
            parts = cases[name](number)
            total, cpu = time.perf_counter() - begin, time.process_time() - cpu
            machine = _machine_cpu_seconds() - machine
            check(name, number)
            if number == 0:
                continue
            wall += total
            others += machine - cpu
            if parts is not None:
                total, cpu = sum(parts.seconds.values()), sum(parts.cpu_seconds.values())
            rows = {name: (total, cpu)}
            for part in parts.seconds if parts is not None else ():
                rows[f"{name}.{part}"] = (parts.seconds[part], parts.cpu_seconds[part])
            for row, (value, cpu_value) in rows.items():
                seconds[name].setdefault(row, []).append(value)
                cpu_seconds.setdefault(row, []).append(cpu_value)
    in_order = {row: values for rows in seconds.values() for row, values in rows.items()}
    return Timings(in_order, cpu_seconds, round(max(0.0, others / wall), 2))


def _machine_cpu_seconds() -> float:
    """Return the CPU seconds that all processes have used, guests and interrupts included, idle and I/O wait not."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, min and max."""
    return {
        "median": round(statistics.median(values), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
    }
