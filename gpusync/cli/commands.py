"""The ``gpusync`` command. Each command calls one function of the package and shows what it returned.

Exit status: 0 done or nothing to do, 2 usage, 3 source not ready, 4 format, chain or digest, 5 local checkpoint,
6 device or placement, 7 poisoned, 130 stopped by a signal, 1 a bug.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

import gpusync
from gpusync.cli import console
from gpusync.config import Settings
from gpusync.errors import DigestMismatchError, GpuSyncError
from gpusync.outcome import (
    STOPPED_EXIT_CODE,
    StopFlag,
    Stopped,
    describe_pull,
    error_document,
    success_document,
)

USAGE_EXIT_CODE = 2
REBUILD_ADVICE = (
    "gpusync verify LOCAL --repair --source SOURCE rebuilds the bad tensors from what is published"
)

app = typer.Typer(
    name="gpusync",
    help="Bring a serving engine's live weights, and its local checkpoint, to a published version.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class EncodingName(str, Enum):
    """Values of ``--encoding``."""

    xor = "xor"
    overwrite = "overwrite"
    xor_sparse = "xor_sparse"
    xor_rows = "xor_rows"


class ChecksumName(str, Enum):
    """Values of ``--checksum``."""

    xxh3_128 = "xxh3-128"
    blake3 = "blake3"
    adler32 = "adler32"


class FramingName(str, Enum):
    """Values of ``--framing``."""

    seekable = "seekable"
    single = "single"


class DeviceName(str, Enum):
    """Values of ``--device``."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    emulated = "emulated"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
SourceDir = Annotated[Path, typer.Option("--source", help="Folder of published versions.")]
Hook = Annotated[
    str | None, typer.Option("--pre-read-hook", help="module:function, called before reading.")
]
Durable = Annotated[bool, typer.Option(help="fsync what is written.")]
VisibilityTimeout = Annotated[
    float, typer.Option(min=0, help="Seconds to wait for a version to become visible.")
]
LockTimeout = Annotated[float, typer.Option(min=0, help="Seconds to wait for the folder's lock.")]


@app.command()
def demo(
    megabytes: Annotated[int, typer.Option(min=1, help="Size of the checkpoint.")] = 100,
    keep: Annotated[Path | None, typer.Option(help="Keep the files in this new folder.")] = None,
    as_json: AsJson = False,
) -> int:
    """Publish five RL-like steps, apply them to a live model, and check every byte against a full reload."""
    from gpusync.cli import views
    from gpusync.cli.demo import run_demo

    stop = StopFlag()
    with console.stop_on_signals(stop), console.progress_shown(stop) as progress:
        result = run_demo(megabytes, keep, progress)
    if not as_json:
        views.show_demo(result)
        if keep is not None:
            console.print_line(
                f"to look at it: gpusync inspect {keep / 'published'} --checkpoint {keep / 'local'}"
            )
    document = success_document("every comparison held", result.to_dict())
    if console.is_terminal() and not as_json:  # whose reader has seen these in the table
        del document["steps"], document["healed"]
    console.print_document(document)
    return 0


@app.command()
def publish(
    base: Annotated[Path, typer.Option(help="Checkpoint of the last published version.")],
    new: Annotated[Path, typer.Option(help="Checkpoint to publish.")],
    source: SourceDir,
    encoding: EncodingName = EncodingName.xor,
    checksum: ChecksumName = ChecksumName.xxh3_128,
    framing: FramingName = FramingName.seekable,
    full: Annotated[bool, typer.Option("--full", help="Publish a full version.")] = False,
    as_json: AsJson = False,
) -> int:
    """Publish a checkpoint as the next version: what differs from the last one, or with --full all of it."""
    from gpusync.cli import views
    from gpusync.publisher.publish import publish_checkpoint

    stop = StopFlag()
    with console.stop_on_signals(stop), console.progress_shown(stop) as progress:
        report = publish_checkpoint(
            base,
            new,
            source,
            encoding=encoding.value,
            checksum=checksum.value,
            framing=framing.value,
            full=full,
            progress=progress,
        )
    if as_json:
        message = f"published version {report.version}"
        console.print_document(success_document(message, report.to_dict()))
    else:
        views.show_publish(report)
    return 0


@app.command()
def pull(
    local: Annotated[Path, typer.Option(help="Local checkpoint to bring to the target.")],
    source: SourceDir,
    target: Annotated[int, typer.Option(min=0, help="Version to reach; 0 is the base.")],
    base: Annotated[
        Path | None,
        typer.Option(help="Base checkpoint, version 0; not needed once the folder was seeded."),
    ] = None,
    pre_read_hook: Hook = None,
    durable: Durable = True,
    visibility_timeout: VisibilityTimeout = 0.0,
    lock_timeout: LockTimeout = 600.0,
    as_json: AsJson = False,
) -> int:
    """Bring a local checkpoint to a published version."""
    from gpusync.cli import views

    stop = StopFlag()
    with console.stop_on_signals(stop), console.progress_shown(stop) as progress:
        report = gpusync.pull(
            local,
            base,
            source,
            target,
            pre_read_hook,
            durable=durable,
            visibility_timeout_seconds=visibility_timeout,
            lock_timeout_seconds=lock_timeout,
            progress=progress,
        )
    if as_json:
        console.print_document(success_document(describe_pull(report), report.to_dict()))
    else:
        views.show_pull(report)
    return 0


@app.command()
def inspect(
    source: Annotated[Path, typer.Argument(help="Folder of published versions.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Local or base checkpoint: applied version and sizes.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show what is published, and how the versions hang together."""
    from gpusync.cli import views
    from gpusync.cli.survey import survey

    stop = StopFlag()
    with console.stop_on_signals(stop), console.progress_shown(stop) as progress:
        found = survey(source, checkpoint=checkpoint, progress=progress)
    if as_json:
        message = f"{len(found.versions)} versions"
        console.print_document(success_document(message, found.to_dict()))
    else:
        views.show_survey(found)
    return 0


@app.command()
def verify(
    local: Annotated[Path, typer.Argument(help="Local checkpoint to check.")],
    repair: Annotated[bool, typer.Option("--repair", help="Rebuild what is bad.")] = False,
    source: Annotated[Path | None, typer.Option(help="Folder of published versions.")] = None,
    base: Annotated[Path | None, typer.Option(help="Base checkpoint, version 0.")] = None,
    as_json: AsJson = False,
) -> int:
    """Check every tensor of a local checkpoint against its digest; status 4 where bad ones are left."""
    from gpusync.cli import views

    stop = StopFlag()
    with console.stop_on_signals(stop), console.progress_shown(stop) as progress:
        report = gpusync.verify(
            local, repair=repair, source_dir=source, base_dir=base, progress=progress
        )
    message = (
        f"{report.tensors} tensors checked, {len(report.bad)} bad, {len(report.repaired)} rebuilt"
    )
    if as_json:
        document = success_document(message, report.to_dict())
        if not report.ok:
            document = {**document, "success": False, "what_to_do": REBUILD_ADVICE}
        console.print_document(document)
    else:
        views.show_verify(report, message)
        if not report.ok:
            console.print_note(f"what to do: {REBUILD_ADVICE}")
    return 0 if report.ok else DigestMismatchError.exit_code


@app.command()
def serve(
    base_dir: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Base checkpoint, version 0.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 30010,
    root: Annotated[
        list[Path] | None, typer.Option(help="Folder that requests may name paths in; repeatable.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token that /pull_weights demands.")
    ] = None,
    pre_read_hook: Hook = None,
    durable: Durable = True,
    visibility_timeout: VisibilityTimeout = 0.0,
    lock_timeout: LockTimeout = 600.0,
    as_json: AsJson = False,
) -> int:
    """Serve POST /pull_weights, GET /health and GET /metrics until SIGINT or SIGTERM."""
    try:
        from gpusync.server import app as server
    except ImportError as err:
        raise gpusync.MissingDependencyError(
            f"the server needs the package {err.name}: pip install 'gpusync[server]'"
        ) from err
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    token = read_token(token_file) if token_file is not None else None
    if token is None and host not in ("127.0.0.1", "::1", "localhost"):
        console.print_note(f"anyone who reaches {host}:{port} can make this server pull: no token")
    config = server.ServerConfig(
        base_dir,
        tuple(root or ()),
        token,
        pre_read_hook,
        durable,
        visibility_timeout_seconds=visibility_timeout,
        lock_timeout_seconds=lock_timeout,
    )

    def ready(bound_port: int) -> None:
        if as_json:
            values = {"host": host, "port": bound_port}
            console.print_document(success_document("listening", values))
        console.print_note(f"listening on {host}:{bound_port}")

    try:
        server.serve(config, host, port, ready)
    except OSError as err:
        raise typer.BadParameter(f"cannot listen on {host}:{port}: {err.strerror}") from err
    return 0


@app.command()
def doctor(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders to look at; the current one by default.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show versions, limits, file systems, and which device path will be used and why not more."""
    from gpusync.cli import views
    from gpusync.cli.doctor import diagnose

    try:
        found = diagnose(tuple(folders or [Path()]))
    except OSError as err:
        raise typer.BadParameter(f"{err.filename}: {err.strerror}") from err
    if as_json:
        console.print_document(success_document(f"device {found.device}", found.to_dict()))
    else:
        views.show_diagnosis(found)
    return 0


@app.command()
def warmup(
    device: Annotated[DeviceName, typer.Option(help="Device to warm up.")] = DeviceName.auto,
    as_json: AsJson = False,
) -> int:
    """Load and compile what the first update would otherwise wait for."""
    if not as_json:
        console.print_note("compiling what this machine has not kept yet: up to half a minute")
    gpusync.warmup(device.value)
    message = f"device {device.value} is warm"
    if as_json:
        console.print_document(success_document(message, {"device": device.value}))
    else:
        console.print_line(message)
    return 0


def read_token(path: Path) -> str:
    """Return the token in a file, surrounding whitespace removed.

    Raises
    ------
    typer.BadParameter
        The file cannot be read, or holds none.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise typer.BadParameter(f"token file {path} cannot be read: {err}") from err
    if not token:
        raise typer.BadParameter(f"token file {path} is empty")
    return token


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Never raises but for SystemExit out of ``--help``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    try:
        Settings.from_env()
    except ValueError as err:
        return _usage(err, as_json)
    try:
        code = app(args=given, prog_name="gpusync", standalone_mode=False)
    except GpuSyncError as err:
        console.print_error(err, as_json=as_json)
        return err.exit_code
    except (Stopped, KeyboardInterrupt) as err:
        if as_json:
            console.print_document(error_document(Stopped(str(err))))
        console.print_note(str(err) or "stopped")
        return STOPPED_EXIT_CODE
    except Exception as err:
        if _is_usage_error(err):
            return _usage(err, as_json)
        traceback.print_exc()
        console.print_error(err, as_json=as_json)
        return GpuSyncError.exit_code
    return int(code or 0)


def _is_usage_error(error: Exception) -> bool:
    """True for the parser's errors: the class that they derive from moved between typer's releases."""
    return getattr(error, "exit_code", None) == USAGE_EXIT_CODE and hasattr(error, "format_message")


def _usage(error: Exception, as_json: bool) -> int:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    if as_json:
        console.print_document({"success": False, "error": "UsageError", "message": text})
    if text:  # without any argument the help was shown instead
        console.print_note(f"usage error: {text}")
        console.print_note("try gpusync --help, or gpusync COMMAND --help")
    return USAGE_EXIT_CODE
