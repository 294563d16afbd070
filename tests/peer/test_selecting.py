"""Which versions a pull chooses, and in which order it walks them."""

from __future__ import annotations

import json
import shutil

import pytest

from gpusync.errors import BaseMismatchError, ChainError, SourceNotReadyError, VersionConflictError
from tests import wire
from tests.driver import Trace, check_at, model_at, pull, refused, update
from tests.live import bytes_of

ENCODINGS = ("xor", "overwrite", "xor_sparse")


# ---- the seed of a fresh host ---------------------------------------------------------------------


def test_a_fresh_host_seeds_from_the_newest_full_version_up_to_the_target(
    stream: wire.Stream,
) -> None:
    stream.delta()
    stream.full()
    stream.delta()
    stream.full()
    stream.hide(1)
    report = pull(stream, 3)
    check_at(stream, 3)
    assert (report.seed, report.seed_version, report.versions) == ("full", 2, (3,))


def test_a_fresh_host_without_a_full_version_seeds_from_the_base(stream: wire.Stream) -> None:
    stream.delta()
    stream.delta()
    stream.full()
    report = pull(stream, 2)
    check_at(stream, 2)
    assert (report.seed, report.from_version, report.versions) == ("base", None, (1, 2))


def test_a_target_that_is_itself_a_full_version_asks_for_nothing_beyond_it(
    stream: wire.Stream,
) -> None:
    stream.delta()
    stream.full()
    report = pull(stream, 2)
    check_at(stream, 2)
    assert (report.seed, report.versions, report.unverified_source) == ("full", (), (2,))


# ---- from an applied version --------------------------------------------------------------------------


def test_a_full_version_on_the_way_resets_to_it(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    stream.full()
    stream.delta()
    stream.hide(2)
    report = pull(stream, 4)
    check_at(stream, 4)
    assert (report.from_version, report.seed, report.seed_version) == (1, "full", 3)


def test_the_scan_for_a_full_version_stops_above_the_applied_one(stream: wire.Stream) -> None:
    stream.full()
    stream.delta()
    pull(stream, 2)
    (stream.folder(1) / "model.safetensors").write_bytes(b"no longer a checkpoint")
    stream.delta()
    report = pull(stream, 3)
    check_at(stream, 3)
    assert (report.seed, report.versions) == ("local", (3,))


@pytest.mark.parametrize("fresh", [False, True])
def test_an_out_of_order_delta_is_refused(stream: wire.Stream, fresh: bool) -> None:
    stream.delta()
    if not fresh:
        pull(stream, 1)
    stream.delta(bend=wire.Bend(metadata={"base_version": "000000"}))
    with refused(stream, BaseMismatchError) as caught:
        pull(stream, 2)
    assert caught.value.version == 2
    assert {str(caught.value.expected), str(caught.value.got)} == {"0", "1"}


def test_a_delta_on_a_later_version_than_its_own_is_refused(stream: wire.Stream) -> None:
    stream.delta(bend=wire.Bend(metadata={"base_version": "000004"}))
    with refused(stream, ChainError):
        pull(stream, 1)


def test_an_index_with_plain_numbers_and_without_padding_is_read(stream: wire.Stream) -> None:
    stream.delta(bend=wire.Bend(metadata={"version": 1, "base_version": "0"}))
    stream.folder(1).rename(stream.source / "weight_v1")
    assert pull(stream, 1).outcome == "applied"
    check_at(stream, 1)


def test_a_version_that_stands_twice_under_two_paddings_is_read_once(stream: wire.Stream) -> None:
    stream.delta()
    shutil.copytree(stream.folder(1), stream.source / "weight_v1")
    pull(stream, 1)
    check_at(stream, 1)


# ---- nothing to do ---------------------------------------------------------------------------------------


def test_a_pull_to_the_applied_version_changes_nothing_and_needs_no_source(
    stream: wire.Stream,
) -> None:
    stream.delta()
    pull(stream, 1)
    before = wire.snapshot(stream.local)
    inodes = {path.name: path.stat().st_ino for path in stream.local.glob("*")}
    shutil.rmtree(stream.source)
    report = pull(stream, 1)
    assert (report.outcome, report.from_version, report.to_version) == ("unchanged", 1, 1)
    assert wire.snapshot(stream.local) == before
    assert {path.name: path.stat().st_ino for path in stream.local.glob("*")} == inodes


def test_a_pull_to_the_applied_version_reads_headers_but_no_tensor(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    pull(stream, 1)
    starts = {
        path.name: wire.raw_header(path)[1] for path in stream.folder(1).glob("*.safetensors")
    }
    trace = Trace(monkeypatch)
    assert pull(stream, 1).outcome == "unchanged"
    for call in trace.of("pread_into", stream.source):
        if call.path.name in starts:
            assert call.offset + call.nbytes <= starts[call.path.name]
    assert not trace.of("create", stream.local / "model.safetensors")
    assert not trace.renamed_onto(stream.local)


@pytest.mark.parametrize("gone", [False, True])
def test_a_stale_pull_is_a_successful_no_op(stream: wire.Stream, gone: bool) -> None:
    stream.delta()
    stream.delta()
    pull(stream, 2)
    before = wire.snapshot(stream.local)
    if gone:
        stream.hide(1)
    report = pull(stream, 1)
    assert (report.outcome, report.target_version, report.to_version) == ("stale", 1, 2)
    assert wire.snapshot(stream.local) == before


def test_a_stale_pull_of_a_live_module_is_a_successful_no_op(stream: wire.Stream) -> None:
    stream.delta()
    stream.delta()
    pull(stream, 2)
    model = model_at(stream, 2)
    report = update(stream, model, 1)
    assert (report.outcome, report.to_version) == ("stale", 2)
    assert bytes_of(model) == stream.states[2]
    check_at(stream, 2)


@pytest.mark.parametrize("target", [1, 2])
def test_an_applied_version_that_was_published_again_is_refused(
    stream: wire.Stream, target: int
) -> None:
    stream.delta()
    stream.delta()
    pull(stream, 1)
    pull(stream, 2)
    stream.republish(target)
    with refused(stream, VersionConflictError, text=f"{target}"):
        pull(stream, target)


def test_a_version_republished_below_a_fold_is_refused_too(stream: wire.Stream) -> None:
    stream.delta()
    stream.delta()
    pull(stream, 2)
    stream.republish(1)
    with refused(stream, VersionConflictError):
        pull(stream, 1)


def test_a_version_republished_with_an_equal_index_is_noticed_by_its_digests(
    stream: wire.Stream,
) -> None:
    stream.delta(("a.weight",))
    pull(stream, 1)
    index = (stream.folder(1) / wire.INDEX).read_bytes()
    stream.republish(1, ("a.weight",))
    assert (stream.folder(1) / wire.INDEX).read_bytes() == index
    with refused(stream, VersionConflictError):
        pull(stream, 1)


def test_another_run_whose_first_versions_were_never_applied_here_is_refused(
    stream: wire.Stream, tmp_path
) -> None:
    stream.delta()
    pull(stream, 1)
    other = wire.Stream(tmp_path / "other", seed=9)
    other.delta()
    other.delta()
    shutil.rmtree(stream.source)
    shutil.copytree(other.source, stream.source)
    with refused(stream, ChainError):
        pull(stream, 2)
    with refused(stream, VersionConflictError):
        pull(stream, 1)


# ---- target 0, and targets that are none ---------------------------------------------------------------


def test_target_0_resets_an_applied_host_to_the_base(stream: wire.Stream) -> None:
    stream.delta()
    stream.full()
    pull(stream, 2)
    report = pull(stream, 0)
    check_at(stream, 0)
    assert (report.outcome, report.from_version, report.to_version) == ("reset", 2, 0)
    base = {name: data for name, data in wire.snapshot(stream.base).items() if name != wire.MARKER}
    local = {
        name: data for name, data in wire.snapshot(stream.local).items() if name != wire.MARKER
    }
    assert local == base


@pytest.mark.parametrize("published", [False, True])
def test_target_0_on_a_fresh_host_seeds_the_base_and_applies_nothing(
    stream: wire.Stream, published: bool
) -> None:
    if published:
        stream.delta()
        stream.full()
    report = pull(stream, 0)
    check_at(stream, 0)
    assert (report.seed, report.to_version, report.versions) == ("base", 0, ())
    if published:
        pull(stream, 1)
        check_at(stream, 1)


def test_target_0_twice_does_nothing_the_second_time(stream: wire.Stream) -> None:
    pull(stream, 0)
    before = wire.snapshot(stream.local)
    assert pull(stream, 0).outcome == "unchanged"
    assert wire.snapshot(stream.local) == before


def test_a_later_run_is_pulled_after_a_reset(stream: wire.Stream) -> None:
    stream.delta()
    stream.delta()
    pull(stream, 2)
    stream.republish(1)
    shutil.rmtree(stream.folder(2))
    pull(stream, 0)
    assert pull(stream, 1).outcome == "applied"
    check_at(stream, 1)


@pytest.mark.parametrize("target", [-1, -(1 << 70), 999_999, 1 << 70])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_negative_or_unpublished_target_is_refused(
    stream: wire.Stream, target: int, fresh: bool
) -> None:
    stream.delta()
    if not fresh:
        pull(stream, 1)
    error = ChainError if target < 0 else SourceNotReadyError
    with refused(stream, error):
        pull(stream, target)
    pull(stream, 1)
    check_at(stream, 1)


# ---- empty deltas, aggregates, folds ---------------------------------------------------------------------


def test_an_empty_delta_advances_the_marker_and_writes_no_shard(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta(())
    assert json.loads((stream.folder(2) / wire.INDEX).read_text())["weight_map"] == {}
    trace = Trace(monkeypatch)
    report = pull(stream, 2)
    check_at(stream, 2)
    assert report.tensors_changed == 0
    assert not trace.renamed_onto(stream.local, ".safetensors")


def test_an_empty_delta_is_a_step_of_a_fold_and_of_a_live_update(stream: wire.Stream) -> None:
    stream.delta()
    stream.delta(())
    stream.delta()
    pull(stream, 0)
    model = model_at(stream, 0)
    assert update(stream, model, 3).versions == (1, 2, 3)
    assert bytes_of(model) == stream.states[3]
    check_at(stream, 3)


def test_a_fresh_host_goes_fast_forward_over_the_aggregate(stream: wire.Stream) -> None:
    for _ in range(4):
        stream.delta()
    stream.aggregate(3)
    stream.hide(1)
    stream.hide(2)
    report = pull(stream, 4)
    check_at(stream, 4)
    assert report.seed == "aggregate"


def test_a_torn_aggregate_is_skipped_and_the_chain_folded_from_the_base(
    stream: wire.Stream,
) -> None:
    stream.delta()
    stream.delta()
    stream.aggregate(2, stamp="000001")
    report = pull(stream, 2)
    check_at(stream, 2)
    assert (report.seed, report.versions) == ("base", (1, 2))


def test_an_aggregate_that_lost_a_shard_is_skipped(stream: wire.Stream) -> None:
    stream.delta()
    stream.delta()
    folder = stream.aggregate(2)
    sorted(folder.glob("*.safetensors"))[0].unlink()
    assert pull(stream, 2).seed == "base"
    check_at(stream, 2)


def test_an_aggregate_beyond_the_target_is_not_used(stream: wire.Stream) -> None:
    for _ in range(3):
        stream.delta()
    stream.aggregate(3)
    assert pull(stream, 2).seed == "base"
    check_at(stream, 2)


def test_an_aggregate_is_not_used_by_a_host_that_is_on_its_way(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    stream.aggregate(2)
    report = pull(stream, 2)
    check_at(stream, 2)
    assert (report.seed, report.versions) == ("local", (2,))


@pytest.mark.parametrize("encodings", [("xor",) * 4, ("xor", "overwrite", "xor_sparse", "xor")])
def test_a_chain_folds_in_one_pass_per_shard_whatever_its_encodings(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch, encodings: tuple[str, ...]
) -> None:
    pull(stream, 0)
    for encoding in encodings:
        stream.delta(encoding=encoding)
    sizes = {path.name: path.stat().st_size for path in stream.local.glob("*.safetensors")}
    trace = Trace(monkeypatch)
    report = pull(stream, 4)
    check_at(stream, 4)
    assert report.versions == (1, 2, 3, 4)
    renamed = trace.renamed_onto(stream.local, ".safetensors")
    assert sorted(renamed) == sorted(sizes)
    written = sum(call.nbytes for call in trace.of("pwrite", stream.local / ".weight_sync"))
    assert written <= sum(sizes.values()) + 64_000, "more than one write pass over the shards"
    read = sum(
        call.nbytes
        for call in trace.of("pread_into", stream.local)
        if call.path.suffix == ".safetensors" and call.path.parent == stream.local
    )
    assert read <= 2 * sum(sizes.values()), "more than one read pass, and one of the headers"


@pytest.mark.parametrize("second", ENCODINGS)
@pytest.mark.parametrize("first", ENCODINGS)
def test_every_pair_of_encodings_folds_over_the_same_bytes(
    stream: wire.Stream, first: str, second: str
) -> None:
    names = ("a.weight", "o.byte", "s.scale", "b.lut")
    stream.delta(names, encoding=first)
    stream.delta(names, encoding=second)
    back = dict(stream.states[0], **{"b.lut": stream.states[2]["b.lut"]})
    stream.delta(new=back, encoding=first)
    pull(stream, 3)
    check_at(stream, 3)
