"""Every bench at its smallest: its checks pass, its last line is JSON; and what is made of the results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SECTIONS = {
    "disk_path": {"pull / (decode + copy)", "pull / baseline", "one pull / eight pulls"},
    "seed": {"late baseline / late pull"},
    "recovery": {
        f"{kill} / undisturbed"
        for kill in ("staged, no journal", "before the first rename", "after the first rename")
    },
    "live_apply": {
        "pause / reload",
        "open + prepare + commit / (pull + reload)",
        "prepare / (decode + xxh3 + XOR)",
    },
    "publisher": {"plain loop / publisher"},
    "decode": set(),
    "digest": set(),
}
"""Benches that are made of sections, and what each aims at."""
OTHERS = ("memory", "placement")
PNG = b"\x89PNG\r\n\x1a\n"

Smoke = Callable[..., dict[str, Any]]


def run(repository: Path, script: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script of bench/ from the root of the checkout."""
    command = [sys.executable, f"bench/{script}.py", *map(str, args)]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    return subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=110
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the results of this module's runs."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def smoke(repository: Path, results: Path, tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    """Run a bench once for all tests, with its smallest sizes; return its last line."""
    known: dict[str, dict[str, Any]] = {}

    def once(theme: str, *args: str) -> dict[str, Any]:
        if theme not in known:
            if theme == "digest":
                pytest.importorskip("blake3", reason="the extra gpusync[blake3] is absent")
            work = tmp_path_factory.mktemp(theme)
            out = results / f"{theme}_test-machine_2026-01-01.json"
            done = run(repository, theme, "--smoke", "--temp-dir", work, "--json-out", out, *args)
            assert done.returncode == 0, done.stderr
            assert not list(work.iterdir()), "the bench left something behind"
            known[theme] = json.loads(done.stdout.splitlines()[-1])
            assert json.loads(out.read_bytes()) == known[theme]
        return known[theme]

    return once


@pytest.mark.parametrize("theme", SECTIONS)
def test_a_bench_checks_times_and_ends_in_one_json_object(theme: str, smoke: Smoke) -> None:
    found = smoke(theme)
    assert (found["bench"], found["smoke"]) == (theme, True)
    assert found["machine"]["cores"] > 0 and found["exclusions"]
    assert {target["name"] for target in found["targets"]} == SECTIONS[theme]
    for section in found["sections"].values():
        assert section["ratios"], "nothing to compare with"
        for spread in (*section["seconds"].values(), *section["ratios"].values()):
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


@pytest.mark.parametrize("theme", OTHERS)
def test_a_bench_of_figures_ends_in_one_json_object(theme: str, smoke: Smoke) -> None:
    found = smoke(theme)
    assert (found["bench"], found["smoke"]) == (theme, True)
    assert all(target["value"] > 0 for target in found["targets"])


def test_scaling_varies_one_variable_and_runs_no_point_twice(
    repository: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "points"
    args = ("--smoke", "--axis", "density", "--points", "2", "--resume", kept)
    first, second = (run(repository, "scaling", *args, "--temp-dir", tmp_path) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    found = [json.loads(done.stdout.splitlines()[-1])["series"] for done in (first, second)]
    assert found[0] == found[1], "a kept point was run again"
    assert len(kept.read_text().splitlines()) == 2
    (points,) = found[0].values()
    assert [point["density"] for point in points] == [0.0005, 0.002]
    assert (
        len({(point["model_nbytes"], point["versions"], point["cores"]) for point in points}) == 1
    )


def test_results_become_plots_and_quotes(
    smoke: Smoke, results: Path, repository: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the dependency group dev is absent")
    (
        smoke("disk_path"),
        smoke("live_apply"),
        smoke("scaling", "--axis", "density", "--axis", "model", "--points", "1"),
    )
    done = run(repository, "plot", "--results", results, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    plots = sorted(tmp_path.glob("*.png"))
    assert [plot.name for plot in plots] == [
        "pause_test-machine_2026-01-01.png",
        "stages_test-machine_2026-01-01.png",
    ]
    assert all(plot.read_bytes().startswith(PNG) for plot in plots)

    for plot in plots:
        shutil.copy(plot, results)
    text = "".join(
        f"<!-- quote: {name} -->\nold\n<!-- end of quote -->\n"
        for name in ("plots", "summary", "targets", "live_apply", "scaling", "no_such_bench")
    )
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'bench'); import quote\n"
        f"print(quote.quoted({text!r}, Path({str(results)!r}), Path({str(results)!r})))"
    )
    filled = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    assert "\nold\n" not in filled
    assert all(f"]({plot.name})" in filled for plot in plots)
    median = smoke("live_apply")["targets"][0]["value"]
    assert re.search(rf": pause / reload +\| +{median:.2f} \|", filled)
    pause = smoke("live_apply")["sections"]["one version"]["seconds"]["live.commit"]["median"]
    assert re.search(rf"the pause: commit +\| +{pause:.3f} s \|", filled)
    assert "Not measured yet" in filled.split("no_such_bench")[1]


def test_documents_say_what_the_committed_results_say(repository: Path) -> None:
    done = run(repository, "quote", "--check")
    assert done.returncode == 0, done.stderr


def test_a_wrong_result_ends_a_bench_with_status_1(repository: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'bench'); from common import check_digests\n"
        "check_digests('pull', {'a': '1'}, {'a': '2'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "wrong result: pull: tensor=a expected=1 got=2" in done.stderr
