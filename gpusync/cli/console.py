"""What the command line shows: tables and progress for people, one JSON document for machines.

Results go to stdout, everything else (progress, errors, log) to stderr, so that ``gpusync ... --json | jq`` works.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from gpusync.errors import GpuSyncError
from gpusync.outcome import StopFlag, advice_for, error_document
from gpusync.types import Progress, ProgressCallback

# A file or a pipe has no width: nothing is folded there, so that its lines can be searched.
_PIPE_COLUMNS = 400

_out = Console(
    highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPE_COLUMNS
)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


def is_terminal() -> bool:
    """Return whether a person looks at stdout."""
    return sys.stdout.isatty()


def print_document(document: dict[str, Any]) -> None:
    """Print one JSON document on one line of stdout."""
    sys.stdout.write(json.dumps(document, default=str) + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    _out.print(escape(text))


def print_note(text: str) -> None:
    """Print a line on stderr."""
    _err.print(escape(text))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; a column is aligned to the right where its first cell is a number."""
    cells = [list(row) for row in rows]
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for position, column in enumerate(columns):
        number = bool(cells) and isinstance(cells[0][position], int | float)
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in cells:
        table.add_row(*(escape(_text(cell)) for cell in row))
    _out.print(table)


def print_error(error: Exception, *, as_json: bool) -> None:
    """Say what failed and what to do: on stderr, and with ``--json`` as the document on stdout too."""
    if as_json:
        print_document(error_document(error))
    _err.print(f"[bold red]error[/] {escape(type(error).__name__)}: {escape(str(error))}")
    if isinstance(error, GpuSyncError):
        _err.print(f"[bold]what to do[/]: {escape(advice_for(error))}")


def human_bytes(nbytes: float) -> str:
    """Return a size with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


@contextmanager
def progress_shown(stop: StopFlag) -> Iterator[ProgressCallback]:
    """Yield a progress callback that draws one bar per stage where stderr is a terminal, and heeds ``stop``."""
    if not _err.is_terminal:
        yield stop.check
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Bars(*columns, console=_err, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        lock = threading.Lock()  # workers report too

        def show(progress: Progress) -> None:
            stop.check(progress)
            with lock:
                if progress.stage not in tasks:
                    tasks[progress.stage] = bars.add_task(progress.stage, total=None)
            bars.update(
                tasks[progress.stage],
                completed=progress.done_bytes,
                total=progress.total_bytes or None,
                description=f"{progress.stage} {escape(progress.message)}".rstrip(),
            )

        yield show


@contextmanager
def stop_on_signals(stop: StopFlag) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a stop at a safe point; the second ends the process as usual."""

    def ask(number: int, frame: FrameType | None) -> None:
        print_note("stopping at the next safe point; once more to stop at once")
        stop.ask()
        signal.signal(number, previous[signal.Signals(number)])

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, previous[number])


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.3f}"
    return "-" if cell is None else str(cell)
