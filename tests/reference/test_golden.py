"""Streams written by real trainers' own code end on the expected bytes, on the disk and in a live module."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpusync
from tests import live, wire

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / ".." / "shared" / "cases" / "golden"
STREAMS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
if not STREAMS:
    pytest.skip(f"no golden streams at {GOLDEN}", allow_module_level=True)


@dataclass(frozen=True)
class Golden:
    """A golden stream and what every version of it must be."""

    base: Path
    source: Path
    versions: Mapping[int, Mapping[str, Any]]

    @property
    def last(self) -> int:
        return max(self.versions)


@pytest.fixture(params=STREAMS)
def golden(request: pytest.FixtureRequest) -> Golden:
    folder = GOLDEN / request.param
    expected = json.loads((folder / "expected.json").read_text())
    if expected["checksum_format"] == "blake3":
        pytest.importorskip("blake3", reason="the stream's digests need the blake3 package")
    versions = {row["version"]: row for row in expected["versions"]}
    return Golden(folder / "base", folder / "published", versions)


def sha256_of(tensors: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}


def check_disk(local: Path, golden: Golden, version: int) -> None:
    """The folder holds exactly the expected files, and says that it is at this version."""
    expected = golden.versions[version]
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in local.iterdir()
        if path.is_file()
    }
    assert sha256_of(wire.read_tensors(local)) == expected["sha256"]
    assert files == expected["local_files_sha256"]
    assert wire.marker_version(local) == version


def test_the_streams_are_as_trainers_write_them(golden: Golden) -> None:
    assert not list(golden.source.rglob("gpusync.manifest.json"))
    assert sorted(golden.versions) == list(range(golden.last + 1))


def test_pull_one_version_at_a_time(golden: Golden, tmp_path: Path) -> None:
    local = tmp_path / "local"
    for version in range(golden.last + 1):
        report = gpusync.pull(local, golden.base, golden.source, version)
        assert report.to_version == version
        check_disk(local, golden, version)


@pytest.mark.parametrize("swap", ["staged", "rolling"])
def test_pull_straight_to_the_last(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    local = tmp_path / "local"
    report = gpusync.pull(local, golden.base, golden.source, golden.last)
    assert (report.outcome, report.to_version) == ("applied", golden.last)
    check_disk(local, golden, golden.last)
    assert gpusync.verify(local).ok


def test_pull_from_every_version_to_the_last(golden: Golden, tmp_path: Path) -> None:
    for start in range(golden.last):
        local = tmp_path / f"from_{start}"
        gpusync.pull(local, golden.base, golden.source, start)
        gpusync.pull(local, golden.base, golden.source, golden.last)
        check_disk(local, golden, golden.last)


@pytest.mark.parametrize("device", live.DEVICES)
def test_a_live_module_and_its_checkpoint_follow_one_version_at_a_time(
    golden: Golden, tmp_path: Path, device: str
) -> None:
    local = tmp_path / "local"
    gpusync.pull(local, golden.base, golden.source, 0)
    model = live.model_from(local, device=device)
    pointers = live.pointers_of(model)
    for version in range(1, golden.last + 1):
        chain = gpusync.open_chain(golden.source, version, checkpoint=local, base_dir=golden.base)
        report = gpusync.apply_to_model(model, chain, device=device)
        assert (report.to_version, report.disk_version) == (version, version)
        assert report.device == device or not report.tensors_changed
        assert gpusync.live_version(model) == version
        assert sha256_of(live.bytes_of(model)) == golden.versions[version]["sha256"]
        check_disk(local, golden, version)
    assert live.pointers_of(model) == pointers


@pytest.mark.parametrize("device", live.DEVICES)
def test_a_live_module_and_its_checkpoint_go_straight_to_the_last(
    golden: Golden, tmp_path: Path, device: str
) -> None:
    local = tmp_path / "local"
    gpusync.pull(local, golden.base, golden.source, 0)
    model = live.model_from(local, device=device)
    chain = gpusync.open_chain(golden.source, golden.last, checkpoint=local, base_dir=golden.base)
    report = gpusync.apply_to_model(model, chain, device=device)
    assert report.to_version == gpusync.live_version(model) == golden.last
    assert sha256_of(live.bytes_of(model)) == golden.versions[golden.last]["sha256"]
    check_disk(local, golden, golden.last)


@pytest.mark.parametrize("device", live.DEVICES)
def test_a_live_module_without_a_checkpoint_goes_straight_to_the_last_and_back(
    golden: Golden, device: str
) -> None:
    model = live.model_from(golden.base, device=device)
    chain = gpusync.open_chain(golden.source, golden.last, base_dir=golden.base)
    report = gpusync.apply_to_model(model, chain, device=device)
    assert report.write_back == "none"
    assert report.disk_version is None
    assert sha256_of(live.bytes_of(model)) == golden.versions[golden.last]["sha256"]
    back = gpusync.open_chain(golden.source, 0, base_dir=golden.base)
    assert gpusync.apply_to_model(model, back, device=device).to_version == 0
    assert sha256_of(live.bytes_of(model)) == golden.versions[0]["sha256"]
