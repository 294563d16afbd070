"""What ``inspect`` and ``doctor`` draw: lines for people, of 80 columns."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from gpusync.cli import abilities, commands
from gpusync.cli.abilities import Ability, Cuda, find_abilities, pip_command
from gpusync.cli.chart import chain_lines, ranges, summary_lines
from gpusync.cli.survey import Survey, VersionRow, survey
from tests import driver, wire

HERE = dict.fromkeys(
    ("numba", "blake3", "prometheus-client", "starlette", "uvicorn", "cupy", "nvcomp"), "1.0"
)


def delta(version: int, state: str = "ready", wire_bytes: int = 1000) -> VersionRow:
    return VersionRow(
        version, "delta", "xor", "xxh3-128", version - 1, 3, wire_bytes, 100_000, 0.01, state=state
    )


def found(
    rows: list[VersionRow], applied: int | None = None, aggregate: VersionRow | None = None
) -> Survey:
    return Survey("/run", tuple(rows), applied, None, None, None, (), aggregate)


def drawn(chart: Survey) -> list[list[str]]:
    """Return the words of every line but the head's; no line is wider than a terminal."""
    lines = chain_lines(chart)
    assert all(len(line) <= 80 for line in lines)
    return [line.split() for line in lines[1:]]


# ---- inspect ------------------------------------------------------------------------------------------


def test_a_chain_shows_seed_position_hole_and_what_is_behind_it() -> None:
    full = VersionRow(2, "full", tensors=3, wire_bytes=100_000, state="seed")
    rows = [delta(1, "behind"), full, delta(3, "applied"), delta(6, "gap", 500)]
    assert drawn(found(rows, applied=3)) == [
        ["0", "base"],
        ["1", "delta", "#" * 20, "1.0", "kB", "1.00%", "behind"],
        ["2", "full", "#" * 19 + ">", "100.0", "kB", "seed"],
        ["3", "delta", "#" * 20, "1.0", "kB", "1.00%", "applied", "<-", "local"],
        ["4-5", "MISSING"],
        ["6", "delta", "#" * 10, "500", "B", "1.00%", "gap"],
    ]


def test_an_applied_version_that_was_pruned_is_drawn_where_it_was() -> None:
    assert [line[0] for line in drawn(found([delta(7), delta(8)], applied=3))] == [
        "0",
        "3",
        "7",
        "8",
    ]
    assert "pruned" in drawn(found([delta(7)], applied=3))[1]
    assert drawn(found([delta(1)], applied=0))[0][-1] == "local"


def test_an_aggregate_is_a_line_of_its_own() -> None:
    last = drawn(found([delta(1)], aggregate=delta(5, wire_bytes=4000)))[-1]
    assert last[:2] == ["1-5", "aggr."]


def test_a_long_chain_fits_a_screen_and_loses_no_version_or_byte() -> None:
    rows = [delta(number, "behind") for number in range(1, 400)]
    rows += [delta(400, "applied"), *(delta(number) for number in range(401, 1001))]
    lines = drawn(found(rows, applied=400))
    assert [line[0] for line in lines] == (
        ["0", "1", "2", "3-397", "398", "399", "400", "401", "402", "403-998", "999", "1000"]
    )
    assert lines[3][1:] == ["395", "behind,", "395.0", "kB"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([3, 4], "3-4"), ([1, 3, 4, 5, 9], "1, 3-5, 9")]
)
def test_neighbours_are_joined(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_a_real_folder_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = wire.Stream(tmp_path / "stream")
    for _ in range(3):
        stream.delta()
    stream.full()
    stream.delta()
    stream.aggregate(3)
    driver.pull(stream, 2)
    stream.hide(1)
    seen = survey(stream.source, checkpoint=stream.local)
    assert seen.aggregate is not None and seen.aggregate.version == 3
    assert seen.model_bytes == sum(map(len, stream.states[2].values()))
    assert [line[0] for line in drawn(seen)] == ["0", "2", "3", "4", "5", "1-3"]
    assert "versions: 3 deltas, 1 full" in " ".join(summary_lines(seen))
    assert commands.main(["inspect", str(stream.source), "--checkpoint", str(stream.local)]) == 0
    out = capsys.readouterr().out.splitlines()
    for line in chain_lines(seen):
        assert line in out


def test_a_full_version_that_is_applied_is_still_the_newest_full_one(tmp_path: Path) -> None:
    stream = wire.Stream(tmp_path / "stream")
    stream.full()
    stream.delta()
    for target, states in ((1, ["applied", "ready"]), (2, ["seed", "applied"])):
        driver.pull(stream, target)
        seen = survey(stream.source, checkpoint=stream.local)
        assert seen.seed_version == 1
        assert [row.state for row in seen.versions] == states


# ---- doctor -------------------------------------------------------------------------------------------


def cuda_of(abilities: tuple[Ability, ...]) -> Ability:
    return next(one for one in abilities if one.name == "models on CUDA devices")


def test_what_is_complete_has_nothing_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abilities.loops, "are_kept", lambda: True)
    every = find_abilities(HERE, Cuda("12", "570.1", None))
    assert [one for one in every[:5] if one.missing or one.install] == []


def test_loops_that_were_not_compiled_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abilities.loops, "are_kept", lambda: False)
    found = find_abilities(HERE, Cuda("12", "570.1", None))[1]
    assert found.missing and found.install == "gpusync warmup --device cpu"
    without = find_abilities({**HERE, "numba": None}, Cuda("12", "570.1", None))[1]
    assert without.missing == ("numba",)


@pytest.mark.parametrize("major", ["12", "13"])
def test_packages_for_the_cuda_that_torch_was_built_for(
    major: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        f"cupy-cuda{n}x>=14; extra == 'cuda{n}'" for n in (12, 13)
    ] + ["numpy>=1.24"]  # fmt: skip
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    lacking = cuda_of(
        find_abilities({**HERE, "cupy": None, "nvcomp": None}, Cuda(major, "570.1", None))
    )
    assert lacking.missing == ("cupy", "nvcomp")
    assert lacking.install == f"pip install 'cupy-cuda{major}x>=14'"


def test_without_a_driver_there_is_nothing_to_install() -> None:
    lacking = cuda_of(
        find_abilities({**HERE, "cupy": None}, Cuda(None, None, "torch is a CPU build"))
    )
    assert lacking.install is None
    assert any("no NVIDIA driver" in reason for reason in lacking.missing)


def test_a_cpu_build_of_torch_beside_a_driver_is_what_to_change_first() -> None:
    lacking = cuda_of(find_abilities(HERE, Cuda(None, "570.1", "torch is a CPU build")))
    assert lacking.missing == ("torch is a CPU build", "first of all a CUDA build of torch")


def test_an_absent_extra_is_named_by_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ['uvicorn>=0.29; extra == "server"', "blake3>=0.4; extra == 'blake3'"]
    assert pip_command("server", lambda name: wanted) == "pip install 'uvicorn>=0.29'"

    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError

    assert "checkout" in pip_command("server", absent)


def test_the_screen_names_command_and_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abilities.shutil, "which", lambda name: None)
    assert commands.main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "apt-get install g++" in out
    assert str(tmp_path) in out
    assert "yes  checkpoints on disk" in out
    assert len(out.splitlines()) <= 24
    reasons = [line for line in out.splitlines() if line.startswith("     ")]
    reasons = [
        line for line in reasons if not line.strip().startswith(("pip ", "apt-get ", "gpusync "))
    ]
    assert reasons and all(len(line) <= 80 for line in reasons)
