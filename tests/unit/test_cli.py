"""The ``gpusync`` command: exit status, what goes to stdout and what to stderr, for people and for machines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gpusync.cli import commands as cli
from gpusync.cli import console
from gpusync.errors import (
    CheckpointError,
    DeviceError,
    FormatError,
    GpuSyncError,
    ModelPoisonedError,
    SourceNotReadyError,
)
from gpusync.outcome import StopFlag, Stopped, advice_for
from gpusync.types import Progress
from tests import driver, wire


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    """A tiny base checkpoint, with nothing published yet and no local folder."""
    return wire.Stream(tmp_path / "stream")


def pull_arguments(stream: wire.Stream, target: int) -> list[str]:
    folders = {"--local": stream.local, "--base": stream.base, "--source": stream.source}
    named = [text for name, path in folders.items() for text in (name, str(path))]
    return ["pull", *named, "--target", str(target)]


def run_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, Any]:
    """Run a command with ``--json``; stdout must be exactly one JSON document."""
    code = cli.main([*arguments, "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return code, json.loads(out)


# ---- usage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["pull"],
        ["pull", "--no-such-option"],
        ["pull", "--local", "a", "--base", "b", "--source", "c", "--target", "-1"],
        ["pull", "--local", "a", "--base", "b", "--source", "c", "--target", "x"],
        ["publish", "--base", "a", "--new", "b", "--source", "c", "--encoding", "zip"],
        ["serve", "--base-dir", "a", "--port", "70000"],
        ["doctor", "/no/such/folder"],
        ["warmup", "--device", "tpu"],
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert "usage error" in captured.err
    assert captured.out == ""
    code, document = run_json(capsys, arguments)
    assert code == 2
    assert document["success"] is False
    assert document["error"] == "UsageError"


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "Usage" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("demo", "publish", "pull", "inspect", "verify", "serve", "doctor", "warmup"):
        assert command in out
        assert cli.main([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_a_bad_setting_in_the_environment_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSYNC_THREADS", "many")
    code, document = run_json(capsys, ["doctor"])
    assert code == 2
    assert "GPUSYNC_THREADS" in document["message"]


# ---- pull ----------------------------------------------------------------------------------------------


def test_pull_applies_then_has_nothing_to_do(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    stream.delta()
    code, document = run_json(capsys, pull_arguments(stream, 2))
    assert code == 0
    assert document["success"] is True
    assert (document["outcome"], document["to_version"]) == ("applied", 2)
    assert document["versions"] == [1, 2]
    driver.check_at(stream, 2)
    assert cli.main(pull_arguments(stream, 2)) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_pull_needs_a_base_only_where_the_folder_is_seeded_from_it(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    stream.delta()
    without_base = ["pull", "--local", str(stream.local), "--source", str(stream.source)]
    code, document = run_json(capsys, [*without_base, "--target", "1"])
    assert (code, document["error"]) == (4, "ChainError")
    assert "base" in document["message"]
    assert cli.main(pull_arguments(stream, 1)) == 0
    assert cli.main([*without_base, "--target", "2"]) == 0
    driver.check_at(stream, 2)


def test_pull_shows_stages_to_people(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    assert cli.main([*pull_arguments(stream, 1), "--no-durable"]) == 0
    out = capsys.readouterr().out
    assert "applied version 1" in out
    assert "materialize" in out
    assert "not fsynced" in out


def test_an_absent_version_exits_with_3_and_says_what_to_do(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    assert cli.main(pull_arguments(stream, 7)) == 3
    captured = capsys.readouterr()
    assert "SourceNotReadyError" in captured.err
    assert "what to do" in captured.err
    code, document = run_json(capsys, pull_arguments(stream, 7))
    assert code == 3
    assert document["error"] == "SourceNotReadyError"
    assert document["what_to_do"]


def test_a_broken_index_exits_with_4(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    (stream.folder(1) / wire.INDEX).write_text("{not json")
    code, document = run_json(capsys, pull_arguments(stream, 1))
    assert code == 4
    assert document["error"] == "IndexFormatError"


def test_a_base_that_is_the_local_folder_exits_with_5(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    arguments = pull_arguments(stream, 1)
    arguments[arguments.index("--local") + 1] = str(stream.base)
    code, document = run_json(capsys, arguments)
    assert code == 5
    assert document["error"] == "CheckpointError"


# ---- the other commands --------------------------------------------------------------------------------


def test_inspect_reports_versions_frames_and_chain_state(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(4):
        stream.delta()
    driver.pull(stream, 2)
    stream.hide(3)
    code, document = run_json(
        capsys, ["inspect", str(stream.source), "--checkpoint", str(stream.local)]
    )
    assert code == 0
    states = {row["version"]: row["state"] for row in document["versions"]}
    assert states == {1: "behind", 2: "applied", 4: "gap"}
    assert document["gaps"] == [3]
    assert document["applied_version"] == 2
    assert document["newest_ready"] == 2
    first = document["versions"][0]
    assert (first["kind"], first["encoding"], first["tensors"]) == ("delta", "xor", 3)
    assert (first["frames"], first["max_frames_per_blob"]) == (3, 1)
    assert first["target_bytes"] == 4096 + 4 + 2049
    assert first["ratio"] == first["wire_bytes"] / first["target_bytes"]


def test_inspect_shows_a_broken_version_as_a_row(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    stream.full()
    stream.delta()
    stream.delta(("a.weight",), bend=wire.Bend(blob={"a.weight": b"no zstd frame here, sorry"}))
    assert cli.main(["inspect", str(stream.source)]) == 0
    out = capsys.readouterr().out
    assert "FrameFormatError" in out
    _, document = run_json(capsys, ["inspect", str(stream.source)])
    states = {row["version"]: row["state"] for row in document["versions"]}
    assert states == {1: "ready", 2: "seed", 3: "ready", 4: "broken"}
    assert document["seed_version"] == 2
    assert document["newest_ready"] == 3


def test_inspect_of_an_absent_folder_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run_json(capsys, ["inspect", str(tmp_path / "absent")])
    assert code == 3


def test_inspect_with_an_absent_checkpoint_exits_with_5(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    arguments = ["inspect", str(stream.source), "--checkpoint", str(stream.local)]
    code, document = run_json(capsys, arguments)
    assert (code, document["error"]) == (5, "CheckpointError")


def test_inspect_shows_the_chain_beside_a_checkpoint_that_a_pull_left_unfinished(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    (stream.local / ".weight_sync").mkdir(parents=True)
    arguments = ["inspect", str(stream.source), "--checkpoint", str(stream.local)]
    code, document = run_json(capsys, arguments)
    assert (code, document["applied_version"], document["newest_ready"]) == (0, None, 1)
    assert "cannot be read" in document["checkpoint_problem"]
    assert cli.main(arguments) == 0
    assert "the next pull finishes it" in capsys.readouterr().out
    driver.pull(stream, 1)
    assert run_json(capsys, arguments)[1]["checkpoint_problem"] is None


def test_inspect_holds_blobs_against_the_manifest(
    stream: wire.Stream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(stream.base)]) == 0
    assert "no versions" in capsys.readouterr().out
    new = tmp_path / "new"
    stream.write_checkpoint(new, stream.changed(("a.weight",), stream.states[0]))
    arguments = ["publish", "--base", str(stream.base), "--new", str(new)]
    assert cli.main([*arguments, "--source", str(stream.source), "--encoding", "overwrite"]) == 0
    capsys.readouterr()
    wire.flip_tensor_byte(stream.folder(1), "a.weight", 16)
    _, document = run_json(capsys, ["inspect", str(stream.source)])
    (row,) = document["versions"]
    assert row["state"] == "broken"
    assert "manifest" in row["problem"]


@pytest.mark.parametrize("setting", ["GPUSYNC_MAX_INDEX_BYTES", "GPUSYNC_MAX_HEADER_BYTES"])
def test_a_cap_that_is_exceeded_names_the_setting_that_raises_it(
    stream: wire.Stream,
    setting: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream.delta()
    monkeypatch.setenv(setting, "10")
    folders = ["--local", str(stream.local), "--base", str(stream.base)]
    arguments = ["pull", *folders, "--source", str(stream.source), "--target", "1"]
    code, document = run_json(capsys, arguments)
    assert code == 4
    assert "over the cap" in document["message"]
    assert setting in document["message"]


def test_verify_exits_with_4_until_repaired(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.delta()
    driver.pull(stream, 1)
    assert cli.main(["verify", str(stream.local)]) == 0
    capsys.readouterr()
    wire.flip_tensor_byte(stream.local, "b.lut", 7)
    code, document = run_json(capsys, ["verify", str(stream.local)])
    assert code == 4
    assert document["success"] is False
    assert [bad["tensor"] for bad in document["bad"]] == ["b.lut"]
    assert "--repair --source" in document["what_to_do"]
    assert cli.main(["verify", str(stream.local)]) == 4
    shown = capsys.readouterr()
    assert "b.lut" in shown.out and "--repair --source" in shown.err
    code, document = run_json(capsys, ["verify", str(stream.local), "--repair"])
    assert code == 4
    assert "--source" in document["message"]
    folders = ["--source", str(stream.source), "--base", str(stream.base)]
    code, document = run_json(capsys, ["verify", str(stream.local), "--repair", *folders])
    assert code == 0
    assert document["repaired"] == ["b.lut"]
    driver.check_at(stream, 1)


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse", "xor_rows"])
def test_publish_then_pull_gives_the_new_checkpoint(
    stream: wire.Stream, tmp_path: Path, capsys: pytest.CaptureFixture[str], encoding: str
) -> None:
    states = [stream.states[0]]
    before = stream.base
    for number in (1, 2):
        states.append(stream.changed(("a.weight", "b.lut"), states[-1]))
        new = tmp_path / f"new{number}"
        stream.write_checkpoint(new, states[-1])
        arguments = ["publish", "--base", str(before), "--new", str(new)]
        arguments += ["--source", str(stream.source), "--encoding", encoding]
        code, document = run_json(capsys, arguments)
        assert code == 0, document
        assert document["version"] == number
        before = new
    assert driver.pull(stream, 2).versions == (1, 2)
    assert wire.read_tensors(stream.local) == states[2]


def test_publish_refuses_a_base_that_is_not_the_last_version(
    stream: wire.Stream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    stream.write_checkpoint(new, stream.changed(("a.weight",), stream.states[0]))
    arguments = ["publish", "--base", str(stream.base), "--new", str(new)]
    arguments += ["--source", str(stream.source)]
    assert cli.main(arguments) == 0
    capsys.readouterr()
    code, document = run_json(
        capsys, arguments
    )  # the base is version 0 still, the last version is 1
    assert code == 4, document
    assert "to publish" in document["what_to_do"]
    assert not stream.folder(2).exists()


def test_publish_full(
    stream: wire.Stream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    state = stream.changed(("a.weight",), stream.states[0])
    stream.write_checkpoint(new, state)
    arguments = ["publish", "--base", str(stream.base), "--new", str(new)]
    code, document = run_json(capsys, [*arguments, "--source", str(stream.source), "--full"])
    assert code == 0, document
    assert driver.pull(stream, 1).seed == "full"
    assert wire.read_tensors(stream.local) == state


def test_warmup_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, ["warmup", "--device", "cpu"])
    assert (code, document["device"]) == (0, "cpu")


def test_doctor_shows_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "models on CUDA devices" in shown
    assert "a model on a GPU: not updated in place here" in shown
    code, document = run_json(capsys, ["doctor", str(tmp_path)])
    assert (code, document["device"]) == (0, "cpu")
    assert document["folders"][0]["path"] == os.path.realpath(tmp_path)


def test_demo_verifies_and_ends_with_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    assert cli.main(["demo", "--megabytes", "2", "--keep", str(kept)]) == 0
    out = capsys.readouterr().out
    assert "device cpu" in out
    document = json.loads(out.splitlines()[-1])
    assert document["verified"] is True
    assert document["device"] == "cpu"
    assert len(document["steps"]) == 5
    assert document["killed_at"]
    assert document["pause_seconds"] > 0
    assert document["reload_seconds"] > 0
    assert document["healed"]["to_version"] == 5
    assert (kept / "published" / "weight_v000005").is_dir()
    code, document = run_json(capsys, ["demo", "--keep", str(kept)])
    assert code == 5, "a folder with something in it is refused"
    shown = next(line for line in out.splitlines() if line.startswith("to look at it: gpusync "))
    assert cli.main(shown.split()[5:]) == 0
    assert "applied <- local" in capsys.readouterr().out


def test_demo_at_a_terminal_ends_with_a_short_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["demo", "--megabytes", "2"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("every byte compared and equal")
    document = json.loads(last)
    assert document["verified"] is True
    assert not {"steps", "healed"} & document.keys()  # the table says what is in them


# ---- errors and signals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SourceNotReadyError, 3),
        (FormatError, 4),
        (CheckpointError, 5),
        (DeviceError, 6),
        (ModelPoisonedError, 7),
    ],
)
def test_exit_status_is_the_errors_own(
    error: type[GpuSyncError],
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(device: str) -> None:
        raise error("it broke", tensor="t.weight", expected=1, got=2)

    monkeypatch.setattr("gpusync.warmup", fail, raising=False)
    got, document = run_json(capsys, ["warmup"])
    assert got == code
    assert document["error"] == error.__name__
    assert (document["tensor"], document["expected"], document["got"]) == ("t.weight", 1, 2)


def test_a_bug_exits_with_1_and_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: str) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("gpusync.warmup", fail, raising=False)
    assert cli.main(["warmup"]) == 1
    assert "Traceback" in capsys.readouterr().err
    code, document = run_json(capsys, ["warmup"])
    assert (code, document["error"]) == (1, "ZeroDivisionError")


def test_every_error_class_has_its_advice() -> None:
    def classes(base: type[GpuSyncError]) -> list[type[GpuSyncError]]:
        return [base, *(found for kind in base.__subclasses__() for found in classes(kind))]

    for kind in classes(GpuSyncError)[1:]:
        if kind.__module__ == "gpusync.errors":
            assert "bug" not in advice_for(kind("x")), kind


def test_the_first_signal_asks_to_stop_at_a_safe_point(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    stop = StopFlag()
    # A shell starts background jobs with SIGINT ignored: the test brings its own handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with console.stop_on_signals(stop), console.progress_shown(stop) as progress:
        progress(Progress("materialize", 1, 2))
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped, match="materialize"):
            progress(Progress("materialize", 2, 2))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "safe point" in capsys.readouterr().err


def test_ctrl_c_during_a_pull_leaves_the_old_version_whole(
    stream: wire.Stream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    stream.delta()
    driver.pull(stream, 1)
    before = wire.snapshot(stream.local)
    check = StopFlag.check
    once = iter([True])

    def interrupt(self: StopFlag, progress: Progress | None = None) -> None:
        # Once: the handler runs in the main thread, and another worker may be here before it has.
        if progress is not None and progress.stage == "materialize" and next(once, False):
            signal.raise_signal(signal.SIGINT)
        check(self, progress)

    monkeypatch.setattr(StopFlag, "check", interrupt)
    code, document = run_json(capsys, pull_arguments(stream, 2))
    assert code == 130
    assert document["error"] == "Stopped"
    assert wire.snapshot(stream.local) == before
    monkeypatch.undo()
    assert cli.main(pull_arguments(stream, 2)) == 0
    driver.check_at(stream, 2)
