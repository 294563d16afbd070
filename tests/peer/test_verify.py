"""Decoding, checking, healing: what is written, when, and on which evidence."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

import gpusync
from gpusync import fsio
from gpusync.errors import (
    ChainError,
    CheckpointError,
    DigestMismatchError,
    FormatError,
    FrameFormatError,
    GpuSyncError,
    SourceNotReadyError,
)
from tests import wire
from tests.driver import Call, Trace, check_at, model_at, pull, refused, update
from tests.live import bytes_of

WRONG = "0" * 32


@pytest.fixture
def one(stream: wire.Stream) -> wire.Stream:
    """A host at version 1."""
    stream.delta()
    pull(stream, 1)
    return stream


# ---- sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32", "blake3"])
def test_tensors_of_every_size_around_a_piece_come_out_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, checksum: str
) -> None:
    if checksum == "blake3":
        pytest.importorskip("blake3", reason="needs the blake3 package")
    monkeypatch.setenv("GPUSYNC_PIECE_BYTES", "4096")
    sizes = (1, 3, 15, 16, 17, 240, 241, 1023, 1024, 1025, 4095, 4096, 4097, 12287, 12288, 12289)
    layout = tuple(
        wire.Row(wire.FIRST if at % 2 else wire.SECOND, f"t{size}", "U8", (size,), size)
        for at, size in enumerate(sizes)
    )
    stream = wire.Stream(tmp_path / "sizes", layout)
    names = [row.name for row in layout]
    dense = {row.name: stream.random.bytes(row.nbytes) for row in layout}
    stream.delta(new=dense, encoding=encoding, checksum=checksum)
    stream.delta(names, encoding=encoding, checksum=checksum)
    pull(stream, 1)
    check_at(stream, 1)
    pull(stream, 2)
    check_at(stream, 2)
    model = model_at(stream, 0)
    shutil.rmtree(stream.local)
    pull(stream, 0)
    update(stream, model, 2)
    assert bytes_of(model) == stream.states[2]
    check_at(stream, 2)


def test_a_delta_that_changes_every_byte_and_one_that_changes_none(stream: wire.Stream) -> None:
    flipped = {name: bytes(byte ^ 255 for byte in data) for name, data in stream.states[0].items()}
    stream.delta(new=flipped)
    same = {name: wire.compress(bytes(len(data))) for name, data in flipped.items() if data}
    stream.delta((), bend=wire.Bend(blob=same))
    pull(stream, 1)
    check_at(stream, 1)
    pull(stream, 2)
    check_at(stream, 2)


# ---- a digest that is missed ---------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse"])
def test_a_wrong_digest_keeps_the_version_and_the_next_pull_is_safe(
    one: wire.Stream, encoding: str
) -> None:
    model = model_at(one, 1)
    one.delta(encoding=encoding, bend=wire.Bend(digest={"b.lut": WRONG}))
    for _ in range(2):
        with refused(one, DigestMismatchError, text=r"b\.lut", model=model) as caught:
            update(one, model, 2)
        assert (caught.value.version, caught.value.tensor) == (2, "b.lut")
        with refused(one, DigestMismatchError, text=r"b\.lut") as caught:
            pull(one, 2)
        assert (caught.value.version, caught.value.tensor) == (2, "b.lut")
        assert WRONG in str(caught.value.expected)
    shutil.rmtree(one.folder(2))
    one.last = 1
    one.delta(encoding=encoding)
    update(one, model, 2)
    assert bytes_of(model) == one.states[2]
    check_at(one, 2)


@pytest.mark.parametrize("swap", ["staged", "rolling"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_corrupt_frame_in_the_last_tensor_keeps_the_folder_byte_for_byte(
    one: wire.Stream, monkeypatch: pytest.MonkeyPatch, swap: str, shards: int
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    new = one.changed(("a.weight", "c.weight", "o.byte", "b.lut"), one.states[1])
    blob = bytearray(
        wire.compress(wire.xor(one.states[1]["b.lut"], new["b.lut"]), write_checksum=True)
    )
    blob[-1] ^= 1
    one.delta(new=new, shards=shards, bend=wire.Bend(blob={"b.lut": bytes(blob)}))
    with refused(one, FrameFormatError, text=r"b\.lut"):
        pull(one, 2)
    assert gpusync.verify(one.local).ok


def test_a_fold_enforces_the_digest_of_the_last_version_that_touches_a_tensor(
    stream: wire.Stream,
) -> None:
    pull(stream, 0)
    stream.delta(("a.weight", "b.lut"))
    stream.delta(("a.weight",), bend=wire.Bend(digest={"a.weight": WRONG}))
    stream.delta(("b.lut",))
    with refused(stream, DigestMismatchError, text=r"a\.weight") as caught:
        pull(stream, 3)
    assert caught.value.version == 2


def test_a_fold_does_not_enforce_an_intermediate_digest(stream: wire.Stream) -> None:
    pull(stream, 0)
    model = model_at(stream, 0)
    stream.delta(("a.weight", "b.lut"), bend=wire.Bend(digest={"a.weight": WRONG}))
    stream.delta(("a.weight",))
    update(stream, model, 2)
    check_at(stream, 2)
    assert bytes_of(model) == stream.states[2]


def test_a_bad_tensor_in_one_shard_leaves_the_other_shards_at_the_old_version(
    one: wire.Stream,
) -> None:
    one.delta(("a.weight", "c.weight"), bend=wire.Bend(digest={"c.weight": WRONG}))
    with refused(one, DigestMismatchError):
        pull(one, 2)
    check_at(one, 1)


def test_upper_case_digests_are_read(stream: wire.Stream) -> None:
    new = stream.changed(("a.weight",), stream.states[0])
    upper = wire.digest("xxh3-128", new["a.weight"]).upper()
    assert upper != upper.lower()
    stream.delta(new=new, bend=wire.Bend(digest={"a.weight": upper}))
    pull(stream, 1)
    check_at(stream, 1)


@pytest.mark.parametrize("text", [None, "", "12", "g" * 32, "0" * 31, "0" * 33, " " + "0" * 31])
def test_a_digest_that_is_none_is_refused(one: wire.Stream, text: str | None) -> None:
    one.delta(bend=wire.Bend(digest={"a.weight": text}))
    with refused(one, FormatError, text=r"a\.weight"):
        pull(one, 2)


def test_a_chain_may_change_its_checksum_format(stream: wire.Stream) -> None:
    pull(stream, 0)
    model = model_at(stream, 0)
    stream.delta(("a.weight", "b.lut"), checksum="adler32")
    stream.delta(("b.lut", "c.weight"), checksum="xxh3-128")
    stream.delta(("d.weight",), checksum="adler32")
    update(stream, model, 3)
    check_at(stream, 3)
    assert bytes_of(model) == stream.states[3]


def test_adler32_is_still_enforced_in_a_mixed_chain(stream: wire.Stream) -> None:
    pull(stream, 0)
    stream.delta(("a.weight",), checksum="adler32", bend=wire.Bend(digest={"a.weight": "00000001"}))
    stream.delta(("b.lut",))
    with refused(stream, DigestMismatchError, text=r"a\.weight"):
        pull(stream, 2)


# ---- bad local bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [1, 3])
def test_bit_rot_in_a_touched_tensor_is_healed_once_from_seed_and_chain(
    one: wire.Stream, chain: int
) -> None:
    for _ in range(chain):
        one.delta(("a.weight", "b.lut"))
    wire.flip_tensor_byte(one.local, "a.weight", 77)
    report = pull(one, 1 + chain)
    check_at(one, 1 + chain)
    assert report.tensors_healed == ("a.weight",)
    assert gpusync.verify(one.local).ok


def test_bit_rot_in_an_untouched_tensor_is_found_by_verify_and_repaired(one: wire.Stream) -> None:
    wire.flip_tensor_byte(one.local, "c.weight", 5)
    found = gpusync.verify(one.local)
    assert not found.ok
    assert [(bad.tensor, bad.file) for bad in found.bad] == [("c.weight", wire.SECOND)]
    assert found.bad[0].expected != found.bad[0].got
    assert wire.read_tensors(one.local) != one.states[1]
    repaired = gpusync.verify(one.local, repair=True, source_dir=one.source, base_dir=one.base)
    assert repaired.ok
    assert repaired.repaired == ("c.weight",)
    check_at(one, 1)
    assert gpusync.verify(one.local).ok


def test_bit_rot_beside_a_touched_tensor_of_the_same_shard_is_not_copied_on(
    one: wire.Stream,
) -> None:
    one.delta(("b.lut",))
    wire.flip_tensor_byte(one.local, "c.weight", 5)
    report = pull(one, 2)
    check_at(one, 2)
    assert report.tensors_healed == ("c.weight",)


def test_rot_in_a_folder_of_another_receiver_is_healed_by_the_published_digest(
    stream: wire.Stream,
) -> None:
    stream.delta()
    stream.foreign_local(1)
    wire.flip_tensor_byte(stream.local, "a.weight", 1000)
    stream.delta(("a.weight",))
    report = pull(stream, 2)
    check_at(stream, 2)
    assert report.tensors_healed == ("a.weight",)


def test_rot_whose_versions_are_gone_names_what_is_missing_and_keeps_the_folder(
    one: wire.Stream,
) -> None:
    one.delta(("a.weight",))
    one.hide(1)
    wire.flip_tensor_byte(one.local, "a.weight")
    with refused(one, GpuSyncError, text=r"\b1\b") as caught:
        pull(one, 2)
    assert isinstance(caught.value, ChainError | SourceNotReadyError)
    one.show(1)
    pull(one, 2)
    check_at(one, 2)


def test_rot_whose_versions_are_gone_is_healed_from_the_newest_full_version(
    stream: wire.Stream,
) -> None:
    stream.full()
    stream.delta()
    pull(stream, 2)
    stream.delta(("a.weight",))
    wire.flip_tensor_byte(stream.local, "a.weight")
    report = pull(stream, 3)
    check_at(stream, 3)
    assert report.tensors_healed == ("a.weight",)


def test_rot_healed_once_with_a_publication_that_is_bad_itself_still_raises(
    one: wire.Stream,
) -> None:
    one.delta(("a.weight",), bend=wire.Bend(digest={"a.weight": WRONG}))
    wire.flip_tensor_byte(one.local, "a.weight")
    with refused(one, DigestMismatchError, text=r"a\.weight"):
        pull(one, 2)


def test_the_base_is_latched_at_the_first_pull(one: wire.Stream) -> None:
    """Engines point model_path at the local folder after their first reload, and pass that as the base."""
    one.delta(("a.weight",))
    wire.flip_tensor_byte(one.local, "a.weight")
    report = gpusync.pull(one.local, one.local, one.source, 2)
    check_at(one, 2)
    assert report.tensors_healed == ("a.weight",)
    gpusync.pull(one.local, one.local, one.source, 0)
    check_at(one, 0)


def test_a_latched_base_is_not_replaced_by_a_later_one(one: wire.Stream, tmp_path: Path) -> None:
    other = wire.Stream(tmp_path / "other", seed=5)
    one.delta(("a.weight",))
    wire.flip_tensor_byte(one.local, "a.weight")
    gpusync.pull(one.local, other.base, one.source, 2)
    check_at(one, 2)


# ---- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [1, 2])
def test_a_tensor_that_the_local_checkpoint_does_not_have_is_refused_without_a_reseed(
    one: wire.Stream, monkeypatch: pytest.MonkeyPatch, chain: int
) -> None:
    one.delta(bend=wire.Bend(extra={"zz.weight": wire.compress(b"\1" * 16)}))
    if chain == 2:
        one.delta()
    trace = Trace(monkeypatch)
    with refused(one, FormatError, text=r"zz\.weight"):
        pull(one, 1 + chain)
    assert not [call for call in trace.of("open_regular", one.base) if call.path.suffix != ".json"]
    assert not [call for call in trace.of("create") if call.path.suffix == ".safetensors"]


def test_a_shard_that_the_index_does_not_name_is_ignored(one: wire.Stream) -> None:
    one.delta()
    stray = one.folder(2) / "model-00009-of-00009.safetensors"
    shutil.copy(sorted(one.folder(1).glob("*.safetensors"))[0], stray)
    pull(one, 2)
    check_at(one, 2)


def copy_into_second_shard(stream: wire.Stream, version: int, name: str, digest: str) -> None:
    """Let a second shard of a version hold ``name`` too; the index keeps the first."""
    first, second = sorted(stream.folder(version).glob("*.safetensors"))
    header, start = wire.raw_header(first)
    begin, end = header[name]["data_offsets"]
    blob = first.read_bytes()[start + begin : start + end]
    header, start = wire.raw_header(second)
    data = second.read_bytes()[start:]
    metadata = header.pop("__metadata__")
    rows = [
        (key, entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for key, entry in header.items()
    ]
    rows.append((name, "U8", (len(blob),), blob))
    second.write_bytes(wire.pack(rows, {**metadata, name: digest}))


def test_a_tensor_in_two_shards_with_equal_digests_is_applied_once(one: wire.Stream) -> None:
    one.delta()
    name = json.loads((one.folder(2) / wire.INDEX).read_text())["weight_map"]
    tensor = next(key for key, file in name.items() if file.startswith("model-00000"))
    copy_into_second_shard(one, 2, tensor, wire.digest("xxh3-128", one.states[2][tensor]))
    model = model_at(one, 1)
    update(one, model, 2)
    check_at(one, 2)
    assert bytes_of(model) == one.states[2]


def test_a_tensor_in_two_shards_with_unequal_digests_is_refused(one: wire.Stream) -> None:
    one.delta(("a.weight", "b.lut"))
    copy_into_second_shard(one, 2, "a.weight", WRONG)
    with refused(one, FormatError, text=r"a\.weight"):
        pull(one, 2)


TIED = (
    wire.Row(wire.FIRST, "model.embed_tokens.weight", "BF16", (16, 8), 256),
    wire.Row(wire.SECOND, "model.norm.weight", "BF16", (8,), 16),
)


def tied_stream(tmp_path: Path, *, ties: bool, same: bool = True) -> wire.Stream:
    """A checkpoint without lm_head, whose delta holds the embedding and its tied lm_head."""
    stream = wire.Stream(tmp_path / "tied", TIED)
    config = json.dumps({"model_type": "tiny", "tie_word_embeddings": ties})
    (stream.base / "config.json").write_text(config)
    pull(stream, 0)
    name = "model.embed_tokens.weight"
    new = stream.changed((name,), stream.states[0])
    flips = wire.xor(stream.states[0][name], new[name])
    twin = wire.compress(flips if same else bytes(255) + b"\1")
    stream.delta(
        new=new,
        bend=wire.Bend(
            extra={"lm_head.weight": twin},
            digest={"lm_head.weight": wire.digest("xxh3-128", new[name])},
        ),
    )
    return stream


def test_a_tied_lm_head_that_is_not_in_the_checkpoint_is_allowed(tmp_path: Path) -> None:
    stream = tied_stream(tmp_path, ties=True)
    pull(stream, 1)
    check_at(stream, 1)


def test_a_tied_lm_head_reaches_a_module_whose_head_shares_the_storage(tmp_path: Path) -> None:
    from torch import nn

    stream = tied_stream(tmp_path, ties=True)
    model = model_at(stream, 0)
    head = nn.Module()
    head.weight = model.get_submodule("model.embed_tokens").weight
    model.lm_head = head
    update(stream, model, 1)
    assert bytes_of(model) == stream.states[1]
    assert head.weight.data_ptr() == model.get_submodule("model.embed_tokens").weight.data_ptr()
    check_at(stream, 1)


def test_an_lm_head_that_the_config_does_not_tie_is_refused(tmp_path: Path) -> None:
    stream = tied_stream(tmp_path, ties=False)
    with refused(stream, FormatError, text=r"lm_head\.weight"):
        pull(stream, 1)


def test_a_tied_lm_head_with_another_digest_is_refused(tmp_path: Path) -> None:
    stream = wire.Stream(tmp_path / "tied", TIED)
    (stream.base / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    pull(stream, 0)
    extra = {"lm_head.weight": wire.compress(bytes(256))}
    stream.delta(
        ("model.embed_tokens.weight",),
        bend=wire.Bend(extra=extra, digest={"lm_head.weight": WRONG}),
    )
    with refused(stream, GpuSyncError, text=r"lm_head\.weight"):
        pull(stream, 1)


@pytest.mark.parametrize(
    "metadata",
    [
        {"delta_encoding": "xor2"},
        {"delta_encoding": 7},
        {"compression_format": "lz4"},
        {"checksum_format": "sha256"},
        {"version": "two"},
        {"version": "-2"},
        {"version": 2.5},
        {"base_version": None},
    ],
    ids=lambda metadata: "-".join(f"{key}={value}" for key, value in metadata.items()),
)
def test_an_index_with_unknown_or_senseless_metadata_is_refused(
    one: wire.Stream, metadata: dict[str, object]
) -> None:
    one.delta(bend=wire.Bend(metadata=metadata))
    with refused(one, FormatError):
        pull(one, 2)


# ---- frames and payloads -----------------------------------------------------------------------------------


def flips_of(stream: wire.Stream, new: wire.State, name: str = "a.weight") -> bytes:
    return wire.xor(stream.states[1][name], new[name])


@pytest.mark.parametrize("how", ["short", "long", "empty", "cut", "junk", "dictionary", "nothing"])
def test_a_blob_that_does_not_decode_to_exactly_the_tensor_is_refused(
    one: wire.Stream, how: str
) -> None:
    new = one.changed(("a.weight", "c.weight"), one.states[1])
    flips = flips_of(one, new)
    good = wire.compress(flips)
    blob = {
        "short": wire.compress(flips[:-1]),
        "long": wire.compress(flips + b"\0"),
        "empty": wire.compress(b""),
        "cut": good[:-3],
        "junk": good + b"junk",
        "dictionary": good[:4] + bytes([good[4] | 1]) + good[5:],
        "nothing": b"",
    }[how]
    one.delta(new=new, bend=wire.Bend(blob={"a.weight": blob}))
    with refused(one, FormatError, text=r"a\.weight"):
        pull(one, 2)


def test_several_frames_and_skippable_frames_are_one_blob(one: wire.Stream) -> None:
    new = one.changed(("a.weight",), one.states[1], nbytes=300)
    flips = flips_of(one, new)
    skippable = struct.pack("<II", 0x184D2A53, 5) + b"hello"
    parts = [wire.compress(flips[at : at + 1000]) for at in range(0, 4096, 1000)]
    blob = skippable + skippable.join(parts) + wire.compress(b"") + skippable
    one.delta(new=new, bend=wire.Bend(blob={"a.weight": blob}))
    model = model_at(one, 1)
    update(one, model, 2)
    check_at(one, 2)
    assert bytes_of(model) == one.states[2]


def overwrite(positions: list[int], values: bytes, count: int | None = None) -> bytes:
    number = len(positions) if count is None else count
    return struct.pack(f"<I{len(positions)}I", number, *positions) + values


def sparse(positions: list[int], values: bytes, count: int | None = None) -> bytes:
    number = len(positions) if count is None else count
    return struct.pack(f"<Q{len(positions)}Q", number, *positions) + values


@pytest.mark.parametrize(
    ("encoding", "payload"),
    [
        ("overwrite", overwrite([5, 4096], b"ab")),
        ("overwrite", overwrite([5, 5], b"ab")),
        ("overwrite", overwrite([5, 9], b"a")),
        ("overwrite", overwrite([5, 9], b"abc")),
        ("overwrite", overwrite([5, 9], b"ab", count=1 << 31)),
        ("overwrite", overwrite([5, 9], b"ab", count=1)),
        ("overwrite", b"\1\0\0"),
        ("overwrite", b""),
        ("xor_sparse", sparse([5, 4096], b"ab")),
        ("xor_sparse", sparse([9, 5], b"ab")),
        ("xor_sparse", sparse([5, 5], b"ab")),
        ("xor_sparse", sparse([5, 9], b"ab", count=1 << 62)),
        ("xor_sparse", sparse([5, 9], b"a")),
        ("xor_sparse", sparse([(1 << 63) + 5], b"a")),
        ("xor_sparse", b"\0" * 7),
    ],
)
def test_a_sparse_payload_that_breaks_a_rule_is_refused_before_a_byte_changes(
    one: wire.Stream, encoding: str, payload: bytes
) -> None:
    model = model_at(one, 1)
    one.delta(("c.weight",), encoding=encoding, bend=wire.Bend(payload={"a.weight": payload}))
    with refused(one, FrameFormatError, text=r"a\.weight"):
        pull(one, 2)
    with refused(one, FrameFormatError, text=r"a\.weight", model=model):
        update(one, model, 2)


def test_unsorted_overwrite_positions_are_fine(one: wire.Stream) -> None:
    new = dict(one.states[1])
    data = bytearray(new["a.weight"])
    data[9], data[5], data[4095] = 1, 2, 3
    new["a.weight"] = bytes(data)
    payload = overwrite([9, 4095, 5], bytes([1, 3, 2]))
    one.delta(new=new, encoding="overwrite", bend=wire.Bend(payload={"a.weight": payload}))
    pull(one, 2)
    check_at(one, 2)


# ---- order of durability ------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", ["staged", "rolling"])
@pytest.mark.parametrize("chain", [1, 2])
def test_the_marker_is_removed_before_the_first_rename_and_written_last(
    one: wire.Stream, monkeypatch: pytest.MonkeyPatch, swap: str, chain: int
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    for _ in range(chain):
        one.delta()
    marker = one.local / wire.MARKER
    seen: list[tuple[str, bool]] = []

    def look(call: Call) -> None:
        if call.operation == "rename" and call.to is not None and call.to.parent == one.local:
            seen.append((call.to.name, marker.exists()))

    trace = Trace(monkeypatch, look)
    pull(one, 1 + chain)
    check_at(one, 1 + chain)
    shards = [there for name, there in seen if name.endswith(".safetensors")]
    assert len(shards) == 2
    assert not any(shards), "a shard was renamed into place under a valid marker"
    order = [call.to for call in trace.of("rename") if call.to is not None]
    assert order.index(marker) > max(
        order.index(one.local / name) for name in (wire.FIRST, wire.SECOND)
    )


@pytest.mark.parametrize("swap", ["staged", "rolling"])
@pytest.mark.parametrize("chain", [1, 3])
def test_every_new_byte_is_fsynced_before_its_rename_and_every_rename_before_the_marker(
    one: wire.Stream, monkeypatch: pytest.MonkeyPatch, swap: str, chain: int
) -> None:
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    for _ in range(chain):
        one.delta()
    trace = Trace(monkeypatch)
    pull(one, 1 + chain)
    check_at(one, 1 + chain)
    calls = trace.calls
    renames = [
        at
        for at, call in enumerate(calls)
        if call.operation == "rename"
        and call.to
        and call.to.suffix == ".safetensors"
        and call.to.parent == one.local
    ]
    assert len(renames) == 2
    for at in renames:
        writes = [
            before
            for before, call in enumerate(calls[:at])
            if call.operation in ("pwrite", "allocate") and call.path == calls[at].path
        ]
        syncs = [
            before
            for before, call in enumerate(calls[:at])
            if call.operation == "fsync" and call.path == calls[at].path
        ]
        assert syncs, f"{calls[at].path.name} was renamed without an fsync"
        assert not writes or max(syncs) > max(writes)
    marker = max(
        at
        for at, call in enumerate(calls)
        if call.operation == "rename" and call.to == one.local / wire.MARKER
    )
    folder_syncs = [
        at
        for at, call in enumerate(calls)
        if call.operation == "fsync_dir" and call.path == one.local
    ]
    assert any(renames[-1] < at < marker for at in folder_syncs)
    assert any(
        call.operation == "fsync" and call.path.parent.name == ".weight_sync"
        for call in calls[renames[-1] : marker]
    )


def test_a_pull_that_is_not_durable_fsyncs_no_shard_and_a_later_durable_one_does(
    one: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.delta(("a.weight",))
    with monkeypatch.context() as patch:
        trace = Trace(patch)
        assert not pull(one, 2, durable=False).durable
        assert not [call for call in trace.of("fsync") if call.path.suffix == ".safetensors"]
    check_at(one, 2)
    one.delta(("b.lut",))
    with monkeypatch.context() as patch:
        trace = Trace(patch)
        assert pull(one, 3).durable
        synced = {call.path.name for call in trace.of("fsync")}
    check_at(one, 3)
    assert {wire.FIRST, wire.SECOND} <= {Path(name).name for name in synced} or len(
        [name for name in synced if name.endswith(".safetensors")]
    ) >= 2, "what the pull before left unsynced was not made durable"


def test_bytes_that_were_never_fsynced_are_hashed_again_after_a_reboot(
    one: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may have lost what the page cache held: here a tensor that the next delta leaves alone."""
    one.delta(("a.weight", "c.weight"))
    pull(one, 2, durable=False)
    wire.flip_tensor_byte(one.local, "c.weight")
    one.delta(("a.weight",))
    assert json.loads((one.local / wire.MARKER).read_text())["boot_id"]
    real = fsio.pread_into

    def rebooted(fd: int, buffer: memoryview, offset: int) -> int:
        got = real(fd, buffer, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/boot_id"):
            buffer[:got] = buffer[:got].tobytes()[::-1]
        return got

    monkeypatch.setattr(fsio, "pread_into", rebooted)
    report = pull(one, 3)
    check_at(one, 3)
    assert report.tensors_healed == ("c.weight",)


def test_a_folder_of_another_receiver_is_verified_against_what_is_published(
    stream: wire.Stream,
) -> None:
    stream.delta()
    stream.foreign_local(1)
    report = gpusync.verify(stream.local, source_dir=stream.source, base_dir=stream.base)
    assert (report.ok, report.evidence, report.unproven) == (True, "published", 0)
    for name in ("a.weight", "c.weight"):
        wire.flip_tensor_byte(stream.local, name)
    report = gpusync.verify(stream.local, source_dir=stream.source, base_dir=stream.base)
    assert {bad.tensor for bad in report.bad} == {"a.weight", "c.weight"}
    fixed = gpusync.verify(
        stream.local, repair=True, source_dir=stream.source, base_dir=stream.base
    )
    assert set(fixed.repaired) == {"a.weight", "c.weight"}
    check_at(stream, 1)


def test_a_repair_without_a_source_says_so_and_changes_nothing(one: wire.Stream) -> None:
    wire.flip_tensor_byte(one.local, "c.weight")
    with refused(one, GpuSyncError, text="source"):
        gpusync.verify(one.local, repair=True)


def test_verify_of_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        gpusync.verify(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("text", [None, "", "[]", '{"id": "x", "tensors": {}}', "wrong types"])
def test_a_damaged_digest_table_is_made_anew_and_hides_no_rot(
    one: wire.Stream, text: str | None
) -> None:
    table = one.local / ".weight_sync" / "digests.json"
    if text is None:
        table.unlink()
    elif text == "wrong types":
        document = json.loads(table.read_text())
        table.write_text(json.dumps({**document, "tensors": {"a.weight": 5, "c.weight": None}}))
    else:
        table.write_text(text)
    wire.flip_tensor_byte(one.local, "c.weight")
    wire.flip_tensor_byte(one.local, "a.weight")
    one.delta(("a.weight",))
    report = pull(one, 2)
    check_at(one, 2)
    assert set(report.tensors_healed) == {"a.weight", "c.weight"}
    assert gpusync.verify(one.local).evidence == "table"
