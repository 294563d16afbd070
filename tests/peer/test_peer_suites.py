"""One test for each test of the two public receivers' own suites (SGLang's, and the fork with folds)."""

from __future__ import annotations

import json
import shutil

import pytest

import gpusync
from gpusync.errors import (
    BaseMismatchError,
    DigestMismatchError,
    GpuSyncError,
    SourceNotReadyError,
)
from tests import wire
from tests.driver import Trace, check_at, pull, refused

WRONG = "0" * 32


# ---- SGLang: test/registered/unit/weight_sync/test_local_checkpoint.py -----------------------------------


def test_first_pull_seeds_the_base_and_applies_an_xor_delta_onto_it(stream: wire.Stream) -> None:
    stream.delta(encoding="xor")
    pull(stream, 1)
    check_at(stream, 1)
    assert (stream.local / "config.json").read_bytes() == (stream.base / "config.json").read_bytes()
    assert json.loads((stream.local / wire.MARKER).read_text())["version"] == "000001"


def test_an_overwrite_delta_follows_an_xor_delta_and_pulling_again_changes_nothing(
    stream: wire.Stream,
) -> None:
    stream.delta(encoding="xor")
    pull(stream, 1)
    stream.delta(encoding="overwrite")
    pull(stream, 2)
    check_at(stream, 2)
    before = wire.snapshot(stream.local)
    assert pull(stream, 2).outcome == "unchanged"
    assert wire.snapshot(stream.local) == before


def test_a_fresh_host_takes_the_newest_full_version_and_keeps_no_file_of_the_base(
    stream: wire.Stream,
) -> None:
    pull(stream, 0)
    shutil.rmtree(stream.local / ".weight_sync")
    stream.delta()
    stream.full(single=True)
    stream.delta()
    pull(stream, 3)
    check_at(stream, 3)
    assert [path.name for path in stream.local.glob("*.safetensors")] == ["model.safetensors"]
    assert not (stream.local / wire.INDEX).exists()


def test_a_checksum_mismatch_raises_keeps_the_old_version_and_a_fixed_publication_applies(
    stream: wire.Stream,
) -> None:
    """Theirs drops the marker and reseeds; ours keeps both the bytes and the marker."""
    stream.delta()
    pull(stream, 1)
    stream.delta(bend=wire.Bend(digest={"a.weight": WRONG}))
    with refused(stream, DigestMismatchError):
        pull(stream, 2)
    shutil.rmtree(stream.folder(2))
    stream.last = 1
    stream.delta()
    assert pull(stream, 2).seed == "local"
    check_at(stream, 2)


def test_pulling_below_the_applied_version_is_a_no_op_that_says_so(stream: wire.Stream) -> None:
    """One release of theirs raises here, most do nothing; ours does nothing and reports it."""
    stream.delta()
    stream.delta()
    pull(stream, 2)
    report = pull(stream, 1)
    assert (report.outcome, report.to_version) == ("stale", 2)
    check_at(stream, 2)


def test_a_delta_on_another_base_version_than_the_applied_one_raises(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta(bend=wire.Bend(metadata={"base_version": "000009"}))
    with refused(stream, BaseMismatchError):
        pull(stream, 2)


# ---- the fork: test/registered/weight_sync/test_local_checkpoint.py ---------------------------------------


def test_seed_and_a_chain_of_three_in_one_pull(stream: wire.Stream) -> None:
    for _ in range(3):
        stream.delta()
    report = pull(stream, 3)
    assert (report.seed, report.versions) == ("base", (1, 2, 3))
    check_at(stream, 3)


def test_pulling_each_version_twice_is_idempotent(stream: wire.Stream) -> None:
    for version in (1, 2, 3):
        stream.delta()
        assert pull(stream, version).outcome == "applied"
        assert pull(stream, version).outcome == "unchanged"
        check_at(stream, version)


def test_an_interrupted_apply_is_neither_patched_again_nor_left_torn(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta(("a.weight", "c.weight"))
    events = []

    def interrupt(event: gpusync.Progress) -> None:
        events.append(event)
        if event.stage in ("materialize", "swap") and len(events) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(stream, 2, progress=interrupt)
    check_at(stream, 1)
    pull(stream, 2)
    check_at(stream, 2)


def test_flipped_local_bytes_are_healed_by_the_pull_itself(stream: wire.Stream) -> None:
    stream.delta(("a.weight",))
    pull(stream, 1)
    wire.flip_tensor_byte(stream.local, "a.weight", 11)
    stream.delta(("a.weight",))
    report = pull(stream, 2)
    check_at(stream, 2)
    assert report.tensors_healed == ("a.weight",)


def test_a_bad_published_delta_fails_loudly_and_its_republication_recovers(
    stream: wire.Stream,
) -> None:
    stream.delta()
    stream.delta(bend=wire.Bend(digest={"b.lut": WRONG}))
    with refused(stream, DigestMismatchError, text=r"b\.lut"):
        pull(stream, 2)
    stream.republish(2)
    pull(stream, 2)
    check_at(stream, 2)


def test_a_missing_version_fails_fast_without_a_reseed_and_a_later_pull_works(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.delta()
    pull(stream, 1)
    with monkeypatch.context() as patch:
        trace = Trace(patch)
        with refused(stream, SourceNotReadyError):
            pull(stream, 2)
        assert not [call for call in trace.of("create") if call.path.suffix == ".safetensors"]
        assert not trace.renamed_onto(stream.local)
    stream.delta()
    pull(stream, 2)
    check_at(stream, 2)


def test_a_version_without_one_of_its_shards_fails_fast_then_recovers(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    shard = sorted(stream.folder(2).glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.unlink()
    with refused(stream, SourceNotReadyError, text=shard.name):
        pull(stream, 2)
    shard.write_bytes(data)
    assert pull(stream, 2).seed == "local"
    check_at(stream, 2)


def test_a_truncated_shard_fails_fast_then_recovers(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    shard = sorted(stream.folder(2).glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-7])
    with refused(stream, SourceNotReadyError, text=shard.name):
        pull(stream, 2)
    shard.write_bytes(data)
    assert pull(stream, 2).seed == "local"
    check_at(stream, 2)


def test_a_fold_telescopes_a_tensor_that_every_version_changes(stream: wire.Stream) -> None:
    pull(stream, 0)
    for version in range(1, 5):
        wrong = {"a.weight": WRONG} if version < 4 else {}
        stream.delta(("a.weight",), bend=wire.Bend(digest=wrong))
    report = pull(stream, 4)
    check_at(stream, 4)
    assert (report.versions, report.tensors_changed) == ((1, 2, 3, 4), 1)


def test_a_fold_over_corrupt_local_bytes_heals(stream: wire.Stream) -> None:
    stream.delta()
    pull(stream, 1)
    stream.delta()
    stream.delta()
    wire.flip_tensor_byte(stream.local, "b.lut", 2048)
    report = pull(stream, 3)
    check_at(stream, 3)
    assert report.tensors_healed == ("b.lut",)


def test_target_0_seeds_the_base_without_applying_the_delta_that_is_there(
    stream: wire.Stream,
) -> None:
    stream.delta()
    pull(stream, 0)
    check_at(stream, 0)


def test_a_joiner_goes_over_the_aggregate_and_on_to_the_target(stream: wire.Stream) -> None:
    for _ in range(4):
        stream.delta()
    stream.aggregate(3)
    report = pull(stream, 4)
    check_at(stream, 4)
    assert report.seed == "aggregate"
    assert report.versions[-1] == 4


def test_an_aggregate_torn_by_its_writer_costs_a_fold_and_nothing_else(stream: wire.Stream) -> None:
    for _ in range(3):
        stream.delta()
    folder = stream.aggregate(2)
    newer = sorted(stream.aggregate(3).glob("*.safetensors"))[0].read_bytes()
    stream.aggregate(2)
    sorted(folder.glob("*.safetensors"))[0].write_bytes(newer)
    report = pull(stream, 3)
    check_at(stream, 3)
    assert report.seed == "base"


def test_a_checkpoint_that_lived_in_another_engine_processes_memory_is_not_trusted(
    stream: wire.Stream,
) -> None:
    stream.delta(("a.weight",))
    stream.delta(("c.weight",))
    stream.foreign_local(1, state=stream.states[0])
    text = {"version": "000001", "valid": True, "durability": "process", "run_id": "another-run"}
    wire.write_marker(stream.local, json.dumps(text))
    before = wire.read_tensors(stream.local)
    try:
        pull(stream, 2)
    except GpuSyncError:
        assert wire.read_tensors(stream.local) == before
    else:
        check_at(stream, 2)


def test_sparse_xor_deltas_update_and_verify_the_checkpoint(stream: wire.Stream) -> None:
    for _ in range(2):
        stream.delta(encoding="xor_sparse")
    pull(stream, 1)
    check_at(stream, 1)
    pull(stream, 2)
    check_at(stream, 2)
    assert gpusync.verify(stream.local).ok


def test_a_sparse_xor_delta_with_a_wrong_checksum_changes_nothing(stream: wire.Stream) -> None:
    stream.delta(encoding="xor_sparse")
    pull(stream, 1)
    stream.delta(encoding="xor_sparse", bend=wire.Bend(digest={"a.weight": WRONG}))
    with refused(stream, DigestMismatchError, text=r"a\.weight"):
        pull(stream, 2)


def test_a_torn_sparse_apply_ends_at_the_old_version_and_goes_on(stream: wire.Stream) -> None:
    """Theirs fails closed until an operator reseeds; ours never tears the folder."""
    stream.delta(encoding="xor_sparse")
    pull(stream, 1)
    new = stream.changed(("a.weight", "c.weight"), stream.states[1])
    payload = wire.encode("xor_sparse", stream.states[1]["c.weight"], new["c.weight"])
    bend = wire.Bend(blob={"c.weight": wire.compress(payload)[:-4]})
    stream.delta(new=new, encoding="xor_sparse", bend=bend)
    with refused(stream, GpuSyncError, text=r"c\.weight"):
        pull(stream, 2)
    stream.last = 1
    shutil.rmtree(stream.folder(2))
    stream.delta(new=new, encoding="xor_sparse")
    pull(stream, 2)
    check_at(stream, 2)


def test_corrupt_local_bytes_under_a_sparse_delta_are_healed(stream: wire.Stream) -> None:
    """Theirs fails closed; ours rebuilds the tensor from the base and the chain."""
    stream.delta(encoding="xor_sparse")
    pull(stream, 1)
    wire.flip_tensor_byte(stream.local, "a.weight")
    stream.delta(encoding="xor_sparse")
    assert pull(stream, 2).tensors_healed == ("a.weight",)
    check_at(stream, 2)


def test_corrupt_local_bytes_under_a_sparse_fold_are_healed(stream: wire.Stream) -> None:
    """Theirs fails closed; ours rebuilds the tensor from the base and the chain."""
    stream.delta(encoding="xor_sparse")
    pull(stream, 1)
    wire.flip_tensor_byte(stream.local, "a.weight")
    stream.delta(encoding="xor_sparse")
    stream.delta(encoding="xor_sparse")
    assert pull(stream, 3).tensors_healed == ("a.weight",)
    check_at(stream, 3)
