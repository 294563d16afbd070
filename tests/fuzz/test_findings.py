"""What fuzzing found, each with the input that showed it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import gpusync
from gpusync.errors import FormatError, HeaderFormatError, IndexFormatError, SourceNotReadyError
from gpusync.format.header import parse_header
from gpusync.format.index import MAX_RUN_ID_CHARS, parse_index, parse_manifest
from gpusync.local import swap
from gpusync.publisher.publish import publish_checkpoint
from tests import driver, wire
from tests.fuzz.scenes import Scene, local_scene
from tests.unit.strategies import header

MARKS = "\u0300\u0323" * 1_000_000
LONG = "k" * 5_000_000


# ---- published text ---------------------------------------------------------------------------------


def test_a_shard_name_of_a_million_marks_is_refused_by_its_length() -> None:
    """Unicode normalization takes the square of a run of marks in time: days for this name."""
    data = json.dumps({"weight_map": {"a": f"a{MARKS}.safetensors"}}).encode()
    with pytest.raises(IndexFormatError, match="over 255 bytes"):
        parse_index(data, file="i")


@pytest.mark.parametrize(
    "data",
    [
        f'{{"{LONG}": 1, "{LONG}": 2}}',
        json.dumps({"weight_map": {"a": LONG}}),
        json.dumps({"weight_map": {LONG: "m.safetensors"}}),
        json.dumps({"weight_map": {}, "metadata": {"delta_encoding": LONG}}),
        json.dumps({"weight_map": {}, "metadata": {"gpusync_manifest": LONG}}),
    ],
    ids=["key twice", "shard name", "tensor name", "encoding", "digest"],
)
def test_an_error_about_an_index_stays_short(data: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_index(data.encode(), file="i")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "rows",
    [
        {"__metadata__": {LONG: 7}},
        {LONG: 7},
        {"a": {"dtype": LONG, "shape": [1], "data_offsets": [0, 1]}},
        {"a": {"dtype": "U8", "shape": [1] * 500_000 + [2], "data_offsets": [0, 1]}},
    ],
    ids=["metadata key", "name", "dtype", "rank"],
)
def test_an_error_about_a_header_stays_short(rows: object) -> None:
    raw = header(rows)
    with pytest.raises(HeaderFormatError) as caught:
        parse_header(raw, file_nbytes=len(raw) + 1, file="f")
    assert len(str(caught.value)) < 1000


def test_a_value_nested_as_deep_as_json_may_be_is_refused_and_not_shown() -> None:
    for depth in (900, 950, 970, 980, 985, 990, 995):
        deep = b"[" * depth + b"]" * depth
        data = b'{"weight_map": {}, "metadata": {"delta_encoding": ' + deep + b"}}"
        with pytest.raises(IndexFormatError):
            parse_index(data, file="i")


def test_a_run_id_that_no_marker_could_hold_is_refused() -> None:
    """It stands in every marker: one of 70 MB made a marker that could not be read again."""
    for length, taken in ((MAX_RUN_ID_CHARS, True), (MAX_RUN_ID_CHARS + 1, False)):
        data = json.dumps({"version": "1", "run_id": "r" * length, "tensors": {}}).encode()
        if taken:
            assert parse_manifest(data, file="m").run_id == "r" * length
        else:
            with pytest.raises(IndexFormatError, match="run_id"):
                parse_manifest(data, file="m")


@pytest.mark.parametrize("length", [MAX_RUN_ID_CHARS + 1, 0])
def test_a_publisher_is_refused_a_run_id_that_receivers_refuse(tmp_path: Path, length: int) -> None:
    stream = wire.Stream(tmp_path)
    with pytest.raises(ValueError, match="run_id"):
        gpusync.Publisher(stream.source, stream.base, run_id="r" * length)
    with pytest.raises(ValueError, match="run_id"):
        publish_checkpoint(stream.base, stream.base, stream.source, run_id="r" * length)


@pytest.mark.parametrize("stamp", ["9" * 5000, "\u0662", "-2", "", "2.0"])
def test_an_aggregate_stamped_with_no_version_is_torn(tmp_path: Path, stamp: str) -> None:
    stream = wire.Stream(tmp_path)
    stream.delta()
    stream.delta()
    path = next(stream.aggregate(2).glob("*.safetensors"))
    text, _, body = path.read_bytes()[8:].partition(b"}}")
    raw = (text + b"}}").replace(
        b'"__version__": "000002"', b'"__version__": ' + json.dumps(stamp).encode()
    )
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body.lstrip(b" "))
    assert driver.pull(stream, 2).seed == "base"
    driver.check_at(stream, 2)


def test_latest_is_not_followed_out_of_the_source(tmp_path: Path) -> None:
    stream = wire.Stream(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    (stream.source / "latest").symlink_to(secret)
    with pytest.raises(SourceNotReadyError) as caught:
        driver.pull(stream, 1)
    assert "hunter2" not in str(caught.value)


def test_errors_can_be_written_to_any_stream(tmp_path: Path) -> None:
    stream = wire.Stream(tmp_path)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/source\xff"))
    with pytest.raises(SourceNotReadyError) as caught:
        gpusync.pull(stream.local, stream.base, odd, 1)
    assert "\\udcff" in str(caught.value)
    str(caught.value).encode()


# ---- the local folder -------------------------------------------------------------------------------


def pulled(scene: Scene) -> gpusync.PullReport:
    report = gpusync.pull(scene.stream.local, scene.stream.base, scene.stream.source, 2)
    driver.check_at(scene.stream, 2)
    return report


@pytest.mark.parametrize("name", ["staging", "spool"])
def test_a_link_in_the_place_of_a_folder_of_ours_is_removed_and_not_followed(
    tmp_path: Path, name: str
) -> None:
    scene = local_scene("at rest", tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("mine")
    (scene.stream.local / ".weight_sync" / name).symlink_to(outside)
    pulled(scene)
    assert (outside / "keep").read_text() == "mine"


@pytest.mark.parametrize("name", ["marker removed", "renamed", "table placed"])
@pytest.mark.parametrize("file", [wire.FIRST, wire.SECOND])
def test_a_staged_file_that_was_lost_is_not_taken_for_a_renamed_one(
    tmp_path: Path, name: str, file: str
) -> None:
    """The old file still stood in its place, and became part of the new version."""
    scene = local_scene(name, tmp_path)
    (scene.stream.local / ".weight_sync" / "staging" / "files" / file).unlink(missing_ok=True)
    if name == "marker removed":
        assert pulled(scene).recovered == "discarded"
    else:
        assert pulled(scene).recovered == "resumed"


def test_a_swap_in_a_folder_copied_to_another_disk_is_resumed_by_its_bytes(tmp_path: Path) -> None:
    """Inodes are others there: the digests that were staged say which files are the new ones."""
    scene = local_scene("renamed", tmp_path)
    scene.restore_local()
    for version in (1, 2):
        scene.stream.hide(version)
    assert pulled(scene).recovered == "resumed"


def _edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        lambda journal: journal.update(renames=journal["renames"][1:]),
        lambda journal: journal.update(renames=[], stamps={}),
        lambda journal: journal.update(removes=[wire.FIRST]),
        lambda journal: journal.update(renames=[7]),
        lambda journal: journal.update(renames=["../../keep.safetensors"]),
        lambda journal: journal.update(mode="rolling"),
    ],
    ids=["one less", "none", "removes a shard", "no name", "leads out", "another mode"],
)
def test_a_journal_that_was_changed_is_no_journal(
    tmp_path: Path, change: Callable[[dict[str, object]], object]
) -> None:
    scene = local_scene("marker removed", tmp_path)
    _edit(scene.stream.local / ".weight_sync" / "journal.json", change)
    assert pulled(scene).recovered == "discarded"


def test_a_journal_names_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    """Not even one whose seal fits."""
    scene = local_scene("marker removed", tmp_path)
    path = scene.stream.local / ".weight_sync" / "journal.json"
    document = json.loads(path.read_bytes())
    del document["seal"]
    for name in ("../keep", "/keep", "..", "", "a\0b", 7, None):
        path.write_text(json.dumps(swap.sealed({**document, "removes": [name]})))
        assert swap.read_journal(swap.FolderPaths(scene.stream.local)) is None
    path.write_text(json.dumps(swap.sealed({**document, "removes": ["keep"]})))
    assert swap.read_journal(swap.FolderPaths(scene.stream.local)) is not None


def test_a_damaged_digest_convicts_no_tensor(tmp_path: Path) -> None:
    """The tensor was rebuilt, missed the damaged digest again, and no pull got past it."""
    scene = local_scene("at rest", tmp_path)
    path = scene.stream.local / ".weight_sync" / "digests.json"
    _edit(path, lambda table: table["tensors"].update({"c.weight": "0" * 31}))  # type: ignore[attr-defined]
    report = pulled(scene)
    assert report.tensors_healed == ()


@pytest.mark.parametrize("line", [b"[[], 1]", b"[{}, 1]", b"7", b"[" * 100_000, b"\xff", b""])
def test_a_line_of_rolled_files_that_is_none_is_left_out(tmp_path: Path, line: bytes) -> None:
    scene = local_scene("rolling, marker removed", tmp_path)
    (scene.stream.local / ".weight_sync" / "rolled.jsonl").write_bytes(line + b"\n")
    pulled(scene)
