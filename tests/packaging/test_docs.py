"""The documents against the code: examples run, tables say what the code says, links lead somewhere."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import gpusync
from gpusync import errors
from gpusync.config import Settings
from tests import support, wire

DOCUMENTS = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
    "docs/ARCHITECTURE.md", "docs/DEVICE.md", "docs/ENGINES.md", "docs/FORMAT.md", "docs/OPERATIONS.md", "docs/PERFORMANCE.md", "docs/RELIABILITY.md",
    "bench/README.md", "bench/gpu_check.md",
)  # fmt: skip
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return [body for found, body in _FENCE.findall(text) if found == language]


def table(text: str, heading: str) -> list[list[str]]:
    """Return the first table after a heading or marker: its rows as cells, the head left out."""
    rows: list[list[str]] = []
    for line in text.split(heading, 1)[1].splitlines()[1:]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif rows:
            break
    return [[cell.strip("| ") for cell in row] for row in rows[2:]]


def words(cell: str) -> list[str]:
    """Return what a cell has between backquotes."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture
def read(repository: Path) -> Any:
    return lambda name: (repository / name).read_text(encoding="utf-8")


# ---- examples -----------------------------------------------------------------------------------------


def test_readme_python_blocks_run(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch import nn

    from tests.live import bytes_of, model_from

    base, _, states = support.make_stream(tmp_path, versions=3)
    trained = support.move_one_ulp(states[3], 0.05, seed=9)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "load_model": lambda folder: model_from(Path(folder)),
        "trained_tensors": lambda: iter(support.as_torch(trained).items()),
    }
    receiver, trainer = blocks(read("README.md"), "python")
    exec(compile(receiver, "README.md", "exec"), names)
    assert isinstance(names["model"], nn.Module)
    assert gpusync.live_version(names["model"]) == 3
    assert bytes_of(names["model"]) == support.bytes_of(states[3])
    assert support.read_checkpoint(tmp_path / "local") == support.bytes_of(states[3])
    assert capsys.readouterr().out.startswith("applied 2 2 ")
    exec(compile(trainer, "README.md", "exec"), {**names})
    replayed = support.replay(base, tmp_path / "published", 4)
    assert support.bytes_of(replayed) == support.bytes_of(trained)
    code = [line for line in receiver.splitlines() if line and not line.startswith("import")]
    assert len(code) <= 10, "README promises ten lines"


def test_format_python_blocks_are_what_the_code_computes(read: Any) -> None:
    from gpusync.folder.marker import Marker
    from gpusync.format.digest import fingerprint

    names: dict[str, Any] = {}
    for block in blocks(read("docs/FORMAT.md"), "python"):
        exec(compile(block, "FORMAT.md", "exec"), names)
    for index in (None, b"", b'{"weight_map":{}}'):
        for headers in (
            {},
            {"b.safetensors": b"1", "a.safetensors": b"", "\u00fc.safetensors": b"23"},
        ):
            assert names["fingerprint"](index, headers) == fingerprint(index, headers)
    marker = Marker(7, run_id="l\u00e4uft", base="/b", history={7: "0" * 32}).advanced(
        durable=False
    )
    assert names["seal"](marker.to_json()) == marker.to_json()["seal"]


def shell_lines(text: str) -> Iterator[list[str]]:
    for block in blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shell_lines_name_commands_options_and_targets_that_exist(
    document: str, read: Any, repository: Path
) -> None:
    import typer

    from gpusync.cli.commands import app

    command = typer.main.get_command(app)
    targets = re.findall(r"^([\w-]+):", (repository / "Makefile").read_text(), re.MULTILINE)
    seen = set()
    for line in shell_lines(read(document)):
        if line[:1] == ["make"]:
            assert line[1] in targets, line
        if line[:1] == ["gpusync"]:
            found = command.commands[line[1]]  # type: ignore[attr-defined]
            known = {option for param in found.params for option in param.opts}
            assert {word for word in line[2:] if word.startswith("--")} <= known, line
            seen.add(line[1])
    if document == "README.md":
        assert seen == set(command.commands)  # type: ignore[attr-defined]


def test_readme_commands_run_one_after_the_other(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word by word as they stand there; the server, which stays, is started elsewhere."""
    from gpusync.cli.commands import main

    monkeypatch.chdir(tmp_path)
    section = read("README.md").split("## Command line\n")[1].split("\n## ")[0]
    commands = [line[1:] for line in shell_lines(section)]
    assert commands.pop()[0] == "serve"
    assert len(commands) >= 9
    for command in commands:
        assert main(command) == 0, command
    assert wire.marker_version(tmp_path / "run" / "host") == 7
    replayed = wire.read_tensors(tmp_path / "run" / "host")
    assert replayed == wire.read_tensors(tmp_path / "run" / "base")


def test_the_curl_example_is_a_request_that_the_server_takes(read: Any) -> None:
    server = pytest.importorskip("gpusync.server.app", reason="the extra gpusync[server] is absent")
    (curl,) = [line for line in shell_lines(read("README.md")) if line[:1] == ["curl"]]
    asked = server.parse_pull_request(curl[curl.index("-d") + 1].encode(), ())
    assert asked.target_version == 7
    from gpusync.cli import commands as cli

    port = inspect.signature(cli.serve).parameters["port"].default
    assert curl[1] == f"http://127.0.0.1:{port}/pull_weights"


# ---- tables -------------------------------------------------------------------------------------------


def test_json_table_lists_the_fields_of_the_reports(read: Any) -> None:
    from gpusync.cli import demo, doctor, survey
    from gpusync.publisher.version_writer import PublishReport
    from gpusync.types import BadTensor, PullReport, VerifyReport

    rows = table(read("docs/OPERATIONS.md"), "## What `--json` prints\n")
    listed = {row[0].strip("`"): words(row[1].split(";")[0]) for row in rows}
    shown: dict[str, Any] = {
        "demo": demo.DemoResult,
        "publish": PublishReport,
        "pull": PullReport,
        "inspect": survey.Survey,
        "each of `versions": survey.VersionRow,
        "verify": VerifyReport,
        "each of `bad": BadTensor,
        "doctor": doctor.Diagnosis,
    }
    for name, report in shown.items():
        assert listed.pop(name) == [field.name for field in fields(report)], name
    assert listed == {"warmup": ["device"], "serve": ["host", "port"]}


def test_settings_table_equals_settings(read: Any) -> None:
    rows = {
        words(row[0])[0]: "".join(words(row[1]))
        for row in table(read("README.md"), "## Settings\n")
    }
    assert rows == {
        f"GPUSYNC_{field.name.upper()}": str(field.default) for field in fields(Settings)
    }


def error_classes() -> dict[str, int]:
    return {
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, errors.GpuSyncError)
        and value is not errors.GpuSyncError
    }


def test_error_table_names_every_class_and_its_exit_status(read: Any) -> None:
    rows = table(read("README.md"), "## Errors\n")
    assert {words(row[0])[0]: int(row[1]) for row in rows} == error_classes()
    assert len(rows) == len(error_classes())


def test_exit_status_table_is_complete(read: Any) -> None:
    from gpusync.cli.commands import USAGE_EXIT_CODE
    from gpusync.outcome import STOPPED_EXIT_CODE

    rows = table(read("README.md"), "## Command line\n")
    bug = errors.GpuSyncError.exit_code
    expected = {0, bug, USAGE_EXIT_CODE, STOPPED_EXIT_CODE, *error_classes().values()}
    assert {int(row[0]) for row in rows} == expected


def test_swap_table_equals_the_steps(read: Any) -> None:
    from gpusync.local.swap import Step

    rows = table(read("docs/ARCHITECTURE.md"), "## 4. The swap\n")
    assert [(int(row[0]), row[1]) for row in rows] == [(step.value, step.name) for step in Step]


def test_wait_table_equals_the_waits(read: Any) -> None:
    from gpusync.device.runtime import Wait

    rows = table(read("docs/DEVICE.md"), "## 5. Streams\n")
    assert {words(row[0])[0]: row[1] for row in rows} == {wait.name: wait.value for wait in Wait}


def test_layer_picture_equals_the_import_contract(read: Any, repository: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    contract = project["tool"]["importlinter"]["contracts"][0]["layers"]
    package = repository / "gpusync"
    exist = {path.stem for path in package.glob("*.py")}
    exist |= {path.parent.name for path in package.glob("*/__init__.py")}
    expected = [set(re.findall(r"\w+", layer)) & exist for layer in contract]
    picture = blocks(read("docs/ARCHITECTURE.md").split("<!-- layers -->")[1], "")[0]
    drawn: list[set[str]] = []
    for part in re.split(r"^-+\+-+$", picture, flags=re.MULTILINE):
        lines = [set(line.rpartition("|")[2].split()) for line in part.splitlines() if line]
        # The topmost layers share a box, one line each.
        drawn += lines if not drawn else [set().union(*lines)]
    assert drawn == expected


def test_invariants_name_tests_that_exist(read: Any, repository: Path) -> None:
    source = (repository / "tests/unit/test_invariants.py").read_text()
    rows = table(read("docs/ARCHITECTURE.md"), "## 3. Invariants\n")
    assert [row[0] for row in rows] == [f"I{number}" for number in range(1, 8)]
    for row in rows:
        named = words(row[2])
        assert named and all(name.startswith(f"test_{row[0].lower()}_") for name in named)
        assert set(named) == set(re.findall(rf"def (test_{row[0].lower()}_\w+)", source))


def test_reliability_names_tests_that_exist(read: Any, repository: Path) -> None:
    """Each promise has tests, by file or by file and name."""
    promises = table(read("docs/RELIABILITY.md"), "## Promises\n")
    figures = table(read("docs/RELIABILITY.md"), "## Figures\n")
    assert len(promises) > 15 and len(figures) > 5
    for row in [*promises, *figures]:
        named = [name for name in words(row[-1]) if name.startswith("tests/")]
        assert named, row
        for file, _, test in (name.partition("::") for name in named):
            source = (repository / file).read_text(encoding="utf-8")
            assert f"def {test}(" in source if test else "def test_" in source, (file, test)


def exported() -> str:
    """What a process that pulls, updates and serves exports."""
    pytest.importorskip("prometheus_client", reason="the extra gpusync[server] is absent")
    from gpusync.metrics import Metrics
    from gpusync.types import PullReport, StageTimes, UpdateReport

    metrics = Metrics()
    metrics.count_in_flight(lambda: 0)
    metrics.pulled(PullReport("applied", 0, 1, 1, stages=StageTimes({"swap": 1.0})))
    metrics.updated(UpdateReport("applied", 0, 1, 1))
    return metrics.render().decode()


def test_metrics_table_equals_the_metrics(read: Any) -> None:
    shown = re.findall(r"^# TYPE (\S+) (\w+)$", exported(), re.MULTILINE)
    expected = {name: kind for name, kind in shown if not name.endswith("_created")}
    rows = table(read("docs/OPERATIONS.md"), "## Metrics\n")
    assert {words(row[0])[0]: re.split(r"\W", row[1])[0] for row in rows} == expected


def queries(read: Any, document: str) -> list[str]:
    """Return the PromQL of a document."""
    if document == "docs/OPERATIONS.md":
        (rules,) = blocks(read(document), "yaml")
        return re.findall(r"^ +expr: (.*)$", rules, re.MULTILINE)
    board = json.loads(read(document))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*asked, *(str(one["query"]) for one in board["templating"]["list"])]


@pytest.mark.parametrize("document", ["docs/OPERATIONS.md", "docs/grafana.json"])
def test_alerts_and_dashboard_ask_for_what_is_exported(document: str, read: Any) -> None:
    samples = dict(re.findall(r"^(gpusync_\w+)(\{.*\})? ", exported(), re.MULTILINE))
    asked = queries(read, document)
    assert len(asked) >= 10
    seen = set()
    for query in asked:
        assert all(query.count(begin) == query.count(end) for begin, end in ("()", "{}", "[]")), (
            query
        )
        for name, selector in re.findall(r"(gpusync_\w+)(\{[^}]*\})?", query):
            seen.add(re.sub("_(bucket|sum|count)$", "", name))
            assert name in samples, f"{name} is not exported"
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', selector):
                if label == "instance":  # Prometheus adds it
                    continue
                for one in value.split("|"):
                    assert f'{label}="{one}"' in exported(), (name, label, one)
    if document == "docs/grafana.json":
        named = {words(row[0])[0] for row in table(read("docs/OPERATIONS.md"), "## Metrics\n")}
        assert seen == named, "the dashboard shows every metric"


def test_the_dashboard_is_laid_out_and_asks_the_chosen_data_source(read: Any) -> None:
    board = json.loads(read("docs/grafana.json"))
    variables = {one["name"]: one["type"] for one in board["templating"]["list"]}
    assert variables["source"] == "datasource"
    asking = [*board["panels"], *(target for one in board["panels"] for target in one["targets"])]
    assert {one["datasource"]["uid"] for one in asking} == {"${source}"}
    ids = [one["id"] for one in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for one in board["panels"]:
        at = one["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24 and not cells & taken, one["title"]
        taken |= cells
        assert set(re.findall(r"\$(\w+)", json.dumps(one["targets"]))) <= {
            *variables,
            "__rate_interval",
        }


def test_the_metrics_example_serves_what_a_pull_counts(read: Any, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra gpusync[server] is absent")
    stream = wire.Stream(tmp_path / "stream")
    stream.delta()
    (example,) = blocks(read("docs/OPERATIONS.md"), "python")
    code = f"""{example.replace("9105", "0")}
import gpusync, sys
gpusync.pull(*sys.argv[1:4], 1)
print(prometheus_client.generate_latest().decode())
"""
    folders = (str(stream.local), str(stream.base), str(stream.source))
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], capture_output=True, text=True, timeout=100
    )
    assert "gpusync_applied_version 1.0" in done.stdout.splitlines(), done.stderr


def test_log_lines_in_the_document_have_the_fields_that_are_logged(
    read: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.driver import model_at, open_chain

    stream = wire.Stream(tmp_path / "stream")
    stream.delta()
    with open_chain(stream, 1, checkpoint=stream.local) as chain:
        caplog.set_level("INFO", "gpusync")
        gpusync.apply_to_model(model_at(stream, 1 - 1), chain)

    def shape(lines: list[str]) -> list[list[str]]:
        return [re.findall(r"^\w+|(?<= )\w+(?==)", line) for line in lines]

    (shown,) = [
        text for text in blocks(read("docs/OPERATIONS.md"), "") if "update_committed" in text
    ]
    said = [line for line in caplog.messages if line.startswith(("update_committed", "pull_done"))]
    assert shape(shown.splitlines()) == shape(said)


def test_events_that_the_document_names_are_logged(read: Any, repository: Path) -> None:
    code = "".join(path.read_text() for path in repository.glob("gpusync/**/*.py"))
    rows = table(read("docs/OPERATIONS.md"), "Warnings:\n")
    for row in rows:
        (event,) = words(row[0])
        assert f'"{event} ' in code or f'"{event}"' in code, event


def test_every_error_has_its_line_for_the_night(read: Any) -> None:
    rows = table(read("docs/OPERATIONS.md"), "## Each error at 3 a.m.\n")
    named = {word for row in rows for word in words(row[0]) if word.endswith("Error")}
    assert named == set(error_classes())
    assert all(len(row) == 3 and all(row) for row in rows)


def test_format_tables_list_the_fields_that_the_code_writes(read: Any) -> None:
    from gpusync.folder.marker import Marker
    from gpusync.format.index import build_manifest
    from gpusync.local.swap import Journal
    from gpusync.types import Manifest, ManifestEntry

    text = read("docs/FORMAT.md")

    def listed(heading: str) -> list[str]:
        return [words(row[0])[0] for row in table(text, heading)]

    marker = Marker(1)
    assert listed("### The marker\n") == list(marker.to_json())
    assert listed("### The journal\n") == [field.name for field in fields(Journal)]
    entry = ManifestEntry("0" * 32, 1, "U8", (1,), "single")
    manifest = json.loads(build_manifest(Manifest(1, "run", None, {"a": entry})))
    assert listed("## 11. gpusync.manifest.json\n") == list(manifest)
    assert listed("| `tensors` | object") == list(manifest["tensors"]["a"])


def test_format_tables_list_the_names_that_the_code_takes(read: Any) -> None:
    from gpusync.format.header import DTYPE_BITS
    from gpusync.types import ALGORITHMS, ENCODINGS

    text = read("docs/FORMAT.md")
    bits = {
        name: int(row[0])
        for row in table(text, "Rank 0 and size 0 are fine.")
        for name in words(row[1])
    }
    assert bits == DTYPE_BITS
    assert [words(row[0])[0] for row in table(text, "## 6. Digests\n")] == list(ALGORITHMS)
    payloads = table(text, "## 8. Payloads\n")
    assert [words(row[0])[0] for row in payloads] == list(ENCODINGS)


def test_bounds_in_the_format_are_the_codes(read: Any) -> None:
    from gpusync.format import encode, framewalk, jsontext

    text = " ".join(read("docs/FORMAT.md").split())
    assert f"a window over {framewalk.MAX_WINDOW >> 20} MiB" in text
    assert f"a block over {framewalk.MAX_BLOCK_NBYTES >> 10} KiB" in text
    assert f"1 to {jsontext.MAX_NAME_BYTES} bytes of UTF-8" in text
    assert f"{encode.MIN_FRAME_BYTES >> 10} KiB to {encode.MAX_FRAME_BYTES >> 20} MiB" in text
    assert f"`{encode.SEEK_TABLE_MAGIC:#010X}`".replace("0X", "0x") in text
    assert f"`{encode.SEEKABLE_MAGIC:#010X}`".replace("0X", "0x") in text


# ---- the documents themselves ---------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_of_the_repository(document: str, read: Any, repository: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", read(document)):
        if "://" not in target:
            assert ((repository / document).parent / target).exists(), target


def test_modules_that_the_reading_order_names_exist(read: Any, repository: Path) -> None:
    order = read("README.md").split("needs no looking ahead")[1]
    named = re.findall(r"`([\w/]+\.py)`", order)
    assert len(named) > 20
    assert [name for name in named if not (repository / "gpusync" / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_plain_text(document: str, read: Any) -> None:
    """ASCII, no trailing space, one final newline."""
    text = read(document)
    assert text.isascii(), sorted({char for char in text if ord(char) > 127})
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    assert text.endswith("\n") and not text.endswith("\n\n")
