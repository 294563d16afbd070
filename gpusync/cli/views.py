"""Reports as tables, for people at a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap
from typing import TYPE_CHECKING

from gpusync.cli.chart import chain_lines, ranges, summary_lines
from gpusync.cli.console import human_bytes, print_line, print_table
from gpusync.cli.doctor import Diagnosis
from gpusync.cli.survey import Survey
from gpusync.outcome import describe_pull
from gpusync.publisher.version_writer import PublishReport
from gpusync.types import PullReport, StageTimes, VerifyReport

if TYPE_CHECKING:  # the demo loads torch
    from gpusync.cli.demo import DemoResult


LARGE_NBYTES = 500_000_000
"""Models from this size on outgrow the last cache of most CPUs."""


def show_pull(report: PullReport) -> None:
    """Print what a pull did, and where its time went."""
    print_line(describe_pull(report))
    if report.outcome in ("unchanged", "stale"):
        return
    healed = len(report.tensors_healed)
    print_line(
        f"{report.tensors_changed} tensors changed, {report.tensors_copied} copied, {healed} healed; "
        f"read {human_bytes(report.wire_bytes)}, wrote {human_bytes(report.written_bytes)} "
        f"in {report.seconds:.2f} s; swap {report.swap}, seed {report.seed}, "
        f"{'durable' if report.durable else 'not fsynced'}"
    )
    show_stages("stages", report.stages)
    _show_notes(report.notes)
    if report.unverified_source:
        versions = ", ".join(map(str, report.unverified_source))
        print_line(f"note: full versions carry no digests to check against: {versions}")


def show_publish(report: PublishReport) -> None:
    """Print what was published."""
    print_line(f"published version {report.version} ({report.kind}) as {report.path}")
    how = f"; {report.encoding}, {report.checksum}, {report.framing}" if report.encoding else ""
    print_line(
        f"{report.tensors_changed} of {report.tensors} tensors, {human_bytes(report.wire_bytes)} for "
        f"{human_bytes(report.nbytes)} in {report.seconds:.2f} s{how}; run {report.run_id}"
    )


def show_stages(title: str, stages: StageTimes) -> None:
    """Print seconds and bytes per stage; a stage that only counts bytes is shown too."""
    names = dict.fromkeys([*stages.seconds, *stages.bytes])
    rows = [
        (
            name,
            stages.seconds.get(name, 0.0),
            human_bytes(stages.bytes[name]) if name in stages.bytes else None,
        )
        for name in names
    ]
    print_table(title, ("stage", "seconds", "bytes"), rows)


def show_survey(found: Survey) -> None:
    """Print the versions of a source folder and how they hang together."""
    if not found.versions:
        print_line(f"no versions in {found.source_dir}")
        return
    print_line(found.source_dir)
    for line in (*summary_lines(found), "", *chain_lines(found), ""):
        print_line(line)
    for row in found.versions:
        if row.state == "broken":
            print_line(f"version {row.version}: {row.problem}")
    if found.marker is not None:
        stands_at = (
            "at no version"
            if found.applied_version is None
            else f"at version {found.applied_version}"
        )
        print_line(f"local checkpoint: {stands_at}, marker {found.marker}")
    if found.checkpoint_problem is not None:
        print_line(f"local checkpoint: {found.checkpoint_problem}; the next pull finishes it")
    print_line(f"newest full version: {_or_none(found.seed_version)}")
    print_line(f"newest version that a pull reaches: {_or_none(found.newest_ready)}")
    if found.gaps:
        print_line(f"missing versions: {ranges(found.gaps)}")
    cut_off = [row.version for row in found.versions if row.state == "gap"]
    if cut_off:
        print_line(f"not reached, for what is missing or broken before them: {ranges(cut_off)}")


def show_verify(report: VerifyReport, message: str) -> None:
    """Print what a scrub found."""
    print_line(
        f"{message}; {human_bytes(report.nbytes)} in {report.seconds:.2f} s against "
        f"{report.evidence} digests, {report.unproven} without any"
    )
    if report.bad:
        print_table(
            "bad tensors" if not report.repaired else "tensors that were bad, rebuilt now",
            ("file", "tensor", "expected", "got"),
            [(bad.file, bad.tensor, bad.expected, bad.got) for bad in report.bad],
        )
    _show_notes(report.notes)


def show_diagnosis(found: Diagnosis) -> None:
    """Print what this machine offers on one screen of 80 columns: what it has, what works, what to install."""
    memlock = "unlimited" if found.memlock_bytes is None else human_bytes(found.memlock_bytes)
    here = {name: version for name, version in found.packages.items() if version is not None}
    print_line(f"gpusync {found.gpusync}, Python {found.python}, {found.platform}")
    print_line(f"{found.cores} usable cores, locked memory: {memlock}")
    print_line(f"NVIDIA driver: {found.driver or 'none'}; GPUs: {', '.join(found.gpus) or 'none'}")
    for line in wrap(", ".join(f"{name} {version}" for name, version in here.items()), 78):
        print_line(line)
    for folder in found.folders:
        print_line(f"{folder.path}: {_folder_text(folder.file_system, folder.free_bytes)}")
    print_line("")
    for ability in found.abilities:
        print_line(f"{'no ' if ability.missing else 'yes':<5}{ability.name}")
        if ability.missing:
            for line in wrap(f"missing: {'; '.join(ability.missing)}", 75):
                print_line(f"     {line}")
        if ability.install is not None:
            print_line(f"     {ability.install}")
    print_line("")
    print_line(
        "a model on a GPU: updated in place, by cuda"
        if found.device == "cuda"
        else "a model on a GPU: not updated in place here; pull, and let the engine reload"
    )
    for warning in found.warnings:
        for line in wrap(f"warning: {warning}", 80, subsequent_indent="  "):
            print_line(line)


def show_demo(result: DemoResult) -> None:
    """Print the demo's table: per version, where the seconds and bytes went, and the pause against a reload."""
    print_line(
        f"device {result.device}; model of {result.tensors} bf16 tensors, {human_bytes(result.nbytes)}; "
        f"each step moves {result.changed_fraction:.0%} of the elements by one unit in the last place"
    )
    rows = []
    for step in result.steps:
        update = step.update
        rows.append(
            (
                step.version,
                human_bytes(update.wire_bytes),
                step.publish_seconds,
                update.prepare_seconds,
                update.pause_seconds,
                update.finish_seconds,
                step.reload_seconds,
            )
        )
    print_line("")
    columns = ("version", "delta", "publish", "prepare", "pause", "finish", "full reload")
    print_table("bytes and seconds per version", columns, rows)
    print_line(
        f"pause {result.pause_seconds * 1000:.1f} ms, against {result.reload_seconds * 1000:.1f} ms for a full reload "
        f"from the page cache (best of 3): {result.pause_seconds / result.reload_seconds:.0%} "
        "(medians; version 1 is the warm-up)"
    )
    if result.nbytes < LARGE_NBYTES:
        print_line(
            "a model this small reloads out of the CPU's cache; --megabytes 1000 is closer to a real one"
        )
    last = result.steps[-1].update
    print_line("")
    show_stages(f"live model: stages of preparing version {last.to_version}", last.stages)
    if last.pull is not None:
        print_line("")
        show_stages(f"local checkpoint: stages of version {last.to_version}", last.pull.stages)
    print_line("")
    healed = result.healed
    left = "resumed" if healed.recovered == "resumed" else "cleared away"
    print_line(
        f"second host: killed (kill -9) half-way through its first pull, in {result.killed_at}; its next pull {left} "
        f"what was left, and was at version {healed.to_version} in {healed.seconds:.2f} s"
    )
    print_line(
        f"every byte compared and equal: live model, full reload and trainer after each of {len(result.steps)} "
        "versions, and the healed host"
    )


def _folder_text(file_system: str, free_bytes: int) -> str:
    return f"{file_system}, {human_bytes(free_bytes)} free"


def _show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print_line(f"note: {note}")


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)
