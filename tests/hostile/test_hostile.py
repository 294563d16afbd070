"""Every malformed publication and damaged local state gets its outcome, and the next good update works."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gpusync
from gpusync.errors import (
    ChainError,
    DigestMismatchError,
    FormatError,
    GpuSyncError,
    SourceNotReadyError,
)
from tests import live, wire

REPOSITORY = Path(__file__).resolve().parents[2]
BUILDER = REPOSITORY / ".." / "shared" / "cases" / "hostile" / "make_hostile.py"
if not BUILDER.exists():
    pytest.skip(f"no builder of hostile cases at {BUILDER}", allow_module_level=True)

ERRORS: Mapping[str, type[GpuSyncError]] = {
    "retryable": SourceNotReadyError,
    "format": FormatError,
    "chain": ChainError,
    "digest": DigestMismatchError,
    "refuse": GpuSyncError,
}

# The local folder, not the publication, is what is wrong: a module cannot be attached to it as it is.
LOCAL_DAMAGE = (
    "killed_mid_apply",
    "local_dir_is_base",
    "marker_of_another_process",
    "state_json_empty",
)


def load_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_hostile", BUILDER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Case:
    """One case of the builder, with paths."""

    name: str
    source: Path
    local: Path
    base: Path
    target: int
    outcomes: tuple[str, ...]
    final: Mapping[str, str] | None
    before: Mapping[str, str] | None
    keep: Mapping[str, str]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Case:
        source = Path(row["source_dir"])
        local = Path(row["local_dir"] or source.parent / "local")
        return cls(
            name=row["name"],
            source=source,
            local=local,
            base=Path(row["base_dir"]),
            target=row["target_version"],
            outcomes=(row["expect"], *row["accept"]),
            final=row["final"],
            before=row["before"],
            keep=row["keep"],
        )


def build(folder: Path) -> dict[str, Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the builder closes no file
        rows = load_builder().build(str(folder))
    return {row["name"]: Case.of(row) for row in rows}


with tempfile.TemporaryDirectory() as _folder:
    NAMES = sorted(build(Path(_folder)))


@pytest.fixture(scope="module")
def for_pull(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return build(tmp_path_factory.mktemp("pull"))


@pytest.fixture(scope="module")
def for_live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Case]]:
    return {
        device: build(tmp_path_factory.mktemp(device)) for device in ("cpu", "emulated", "cuda")
    }


def sha256_of(tensors: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}


def check_kept(case: Case) -> None:
    for path, expected in case.keep.items():
        assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == expected, path


@contextmanager
def outcome_of(case: Case) -> Iterator[list[str]]:
    """Give a list that holds "ok" or the error's words after the block; an outcome that is not accepted fails."""
    words: list[str] = []
    try:
        yield words
        words.append("ok")
        assert "ok" in case.outcomes, f"{case.name} was accepted, expected {case.outcomes}"
    except GpuSyncError as err:
        words.append("error")
        fits = [word for word in case.outcomes if word != "ok" and isinstance(err, ERRORS[word])]
        assert fits, f"{case.name}: {type(err).__name__}: {err}, expected {case.outcomes}"
        assert len(str(err)) > 20


def publish_good(case: Case, version: int, old: wire.State) -> wire.State:
    """Put a good delta on ``old`` in the place of whatever stands at ``version`` and after it."""
    for path in case.source.glob("weight_v*"):
        if int(path.name[8:]) >= version:
            shutil.rmtree(path)
    new = dict(old)
    for name in ("a.weight", "big.weight", "c.weight"):
        if name in old:
            new[name] = bytes([old[name][0] ^ 1]) + old[name][1:]
    wire.Stream.continuing(case.source, version - 1, old).delta(new=new)
    return new


@pytest.mark.parametrize("name", NAMES)
def test_pull(for_pull: dict[str, Case], name: str) -> None:
    case = for_pull[name]
    before = wire.snapshot(case.local)
    marker = (case.local / wire.MARKER).exists() and (case.local / wire.MARKER).read_bytes()
    with outcome_of(case) as words:
        gpusync.pull(case.local, case.base, case.source, case.target)
    check_kept(case)
    if words == ["error"]:
        assert wire.snapshot(case.local) == before
        if marker:
            assert (case.local / wire.MARKER).read_bytes() == marker
    else:
        assert sha256_of(wire.read_tensors(case.local)) == case.final
        assert wire.marker_version(case.local) == case.target
    check_next_good_update(case, applied=words == ["ok"])
    check_kept(case)


def check_next_good_update(case: Case, applied: bool) -> None:
    local = case.local
    if case.name == "local_dir_is_base":
        local = case.local.parent / "elsewhere"
        gpusync.pull(local, case.base, case.source, case.target)
        applied = True
    elif not applied and case.name == "marker_of_another_process":
        gpusync.pull(local, case.base, case.source, 0)
        gpusync.pull(local, case.base, case.source, case.target)
        applied = True
    version = case.target
    old = wire.read_tensors(local)
    if applied:
        version += 1
    elif case.name == "gap_version_missing":
        old = publish_good(case, version - 1, old)
    new = publish_good(case, version, old)
    report = gpusync.pull(local, case.base, case.source, version)
    assert report.to_version == wire.marker_version(local) == version
    assert wire.read_tensors(local) == new
    assert gpusync.verify(local).ok


@pytest.mark.parametrize("device", live.DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_live_module(
    for_live: dict[str, dict[str, Case]], name: str, device: str, tmp_path: Path
) -> None:
    case = for_live[device][name]
    state = live_state(case, tmp_path)
    model = live.model_from(case.local, state, device)
    before = wire.snapshot(case.local)
    damaged = name in LOCAL_DAMAGE
    expected = case if not damaged else Case(**{**vars(case), "outcomes": ("ok", "refuse")})
    with outcome_of(expected) as words:
        chain = gpusync.open_chain(
            case.source, case.target, checkpoint=case.local, base_dir=case.base
        )
        gpusync.apply_to_model(model, chain, device=device)
    check_kept(case)
    if words == ["error"]:
        assert live.bytes_of(model) == state
        if not damaged:
            assert wire.snapshot(case.local) == before
    else:
        assert sha256_of(live.bytes_of(model)) == case.final
        assert gpusync.live_version(model) == case.target
        assert sha256_of(wire.read_tensors(case.local)) == case.final
    if not damaged:
        check_next_good_live_update(case, model, device, applied=words == ["ok"])
        check_kept(case)


def live_state(case: Case, tmp_path: Path) -> wire.State:
    """The right bytes of the version that the module stands at, whatever became of the local files."""
    if case.name in ("killed_mid_apply", "marker_of_another_process", "state_json_empty"):
        gpusync.pull(tmp_path / "right", case.base, case.source, 1)
        return wire.read_tensors(tmp_path / "right")
    return wire.read_tensors(case.local)


def check_next_good_live_update(case: Case, model: Any, device: str, applied: bool) -> None:
    version, old = case.target, live.bytes_of(model)
    if applied:
        version += 1
    elif case.name == "gap_version_missing":
        old = publish_good(case, version - 1, old)
    new = publish_good(case, version, old)
    chain = gpusync.open_chain(case.source, version, checkpoint=case.local, base_dir=case.base)
    report = gpusync.apply_to_model(model, chain, device=device)
    assert report.to_version == report.disk_version == version
    assert live.bytes_of(model) == new
    assert wire.read_tensors(case.local) == new
