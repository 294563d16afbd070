"""A run drawn in 80 columns: what is published, how it hangs together, and where the local checkpoint stands. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpusync.cli.console import human_bytes
from gpusync.cli.survey import Survey, VersionRow

_BAR_COLUMNS = 20
_MOST_LINES = 40
"""A run of alike versions is folded where the chart would have more lines than this."""
_KEPT_AT_ENDS = 2


@dataclass(frozen=True)
class _Line:
    """One line of the chart; ``folds`` says that it may be hidden among others of its kind."""

    label: str
    kind: str
    nbytes: int | None
    share: float | None
    state: str
    folds: bool = False


def chain_lines(found: Survey) -> list[str]:
    """Return the chart's lines: versions upwards, a bar for the bytes of each, its state."""
    lines = list(_folded(list(_lines(found))))
    scale = max((row.wire_bytes for row in _deltas(found)), default=0)
    scale = scale or max((line.nbytes or 0 for line in lines), default=0)
    head = f"{'version':>9}  {'kind':<6}{'':<{_BAR_COLUMNS}} {'bytes':>9} {'of model':>8}  state"
    return [head, *(_draw(line, scale).rstrip() for line in lines)]


def summary_lines(found: Survey) -> list[str]:
    """Return what the versions are, in sum."""
    deltas, good = _deltas(found), [row for row in found.versions if row.kind is not None]
    lines = []
    for title, values in (
        ("run", [row.run_id for row in good]),
        ("encoding", [row.encoding for row in deltas]),
        ("digests", [row.checksum for row in deltas]),
    ):
        known = dict.fromkeys(value for value in values if value)
        if known:
            lines.append(f"{title}: {', '.join(known)}")
    total = sum(row.wire_bytes for row in good)
    full = len(good) - len(deltas)
    lines.append(f"versions: {len(deltas)} deltas, {full} full, {human_bytes(total)} in all")
    blobs = sum(row.tensors for row in deltas)
    if blobs:
        mean = sum(row.frames for row in deltas) / blobs
        most = max(row.max_frames_per_blob for row in deltas)
        lines.append(f"zstd frames per tensor: {mean:.1f}, at most {most}")
    return lines


def ranges(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text, neighbours joined: ``3, 5-7``."""
    parts = []
    for _, group in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)


def _deltas(found: Survey) -> list[VersionRow]:
    return [row for row in found.versions if row.kind == "delta"]


def _lines(found: Survey) -> Iterator[_Line]:
    """Give the base, every version and every hole between two, in order; the aggregate comes last."""
    applied = found.applied_version
    lines = {0: _Line("0", "base", found.model_bytes, None, _here("", applied == 0))}
    if applied:  # drawn over where the version is still there
        lines[applied] = _Line(str(applied), "", None, None, _here("pruned", True))
    for row, before in zip(found.versions, (None, *found.versions), strict=False):
        if before is not None and row.version > before.version + 1:
            lines.setdefault(before.version + 1, _hole(before.version + 1, row.version - 1))
        lines[row.version] = _Line(
            str(row.version),
            row.kind or "?",
            row.wire_bytes or None,
            row.ratio if row.kind == "delta" else None,
            _here(row.state, row.version == applied),
            folds=row.kind == "delta" and row.state in ("behind", "ready", "gap"),
        )
    yield from (lines[number] for number in sorted(lines))
    if found.aggregate is not None:
        row = found.aggregate
        yield _Line(f"1-{row.version}", "aggr.", row.wire_bytes, row.ratio, "for fresh folders")


def _here(state: str, is_here: bool) -> str:
    return f"{state} <- local".strip() if is_here else state


def _hole(first: int, last: int) -> _Line:
    return _Line(str(first) if first == last else f"{first}-{last}", "", None, None, "MISSING")


def _folded(lines: list[_Line]) -> Iterator[_Line]:
    """Give the lines; of many, those inside of a run of alike ones as one."""
    if len(lines) <= _MOST_LINES:
        yield from lines
        return
    for folds, group in groupby(lines, lambda line: (line.folds, line.state)):
        run = list(group)
        hidden = run[_KEPT_AT_ENDS:-_KEPT_AT_ENDS] if folds[0] else []
        if len(hidden) < 2:
            yield from run
            continue
        yield from run[:_KEPT_AT_ENDS]
        nbytes = human_bytes(sum(line.nbytes or 0 for line in hidden))
        label = f"{hidden[0].label}-{hidden[-1].label}"
        yield _Line(label, "", None, None, f"{len(hidden)} {run[0].state}, {nbytes}")
        yield from run[-_KEPT_AT_ENDS:]


def _draw(line: _Line, scale: int) -> str:
    size = human_bytes(line.nbytes) if line.nbytes else ""
    share = f"{line.share:.2%}" if line.share is not None else ""
    return (
        f"{line.label:>9}  {line.kind:<6}{_bar(line.nbytes or 0, scale):<{_BAR_COLUMNS}} "
        f"{size:>9} {share:>8}  {line.state}"
    )


def _bar(nbytes: int, scale: int) -> str:
    """Return the bar of a size; one that ends in ``>`` is longer than the largest delta's."""
    if nbytes > scale:
        return "#" * (_BAR_COLUMNS - 1) + ">"
    return "#" * (max(1, round(_BAR_COLUMNS * nbytes / scale)) if nbytes else 0)
