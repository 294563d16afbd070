"""Bad blobs, a bad decoder and failing calls in prepare: refused as on the CPU, nothing touched, the next update works."""

from __future__ import annotations

import itertools
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import gpusync
from gpusync.device import selftest
from gpusync.device.corpus import make_corpus
from gpusync.errors import (
    DecodeError,
    DeviceError,
    DigestMismatchError,
    FrameFormatError,
    GpuSyncError,
    KernelError,
    ModelPoisonedError,
    OutOfScratchError,
)
from tests import live, wire
from tests.device.nvcomp_faults import Fault, faulty, own_stand_in
from tests.device.updates import (
    DEVICES,
    KINDS,
    LAYOUT,
    NAMES,
    Device,
    Failing,
    check_next_update,
    counted_device,
    model_at,
    prepare,
    publish,
    published,
)
from tests.reference import xor_rows
from tests.support import make_stream
from tests.unit.strategies import (
    RAW,
    RESERVED,
    RLE,
    block,
    compress,
    flushed,
    frame,
    seekable,
    skippable,
)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with counted_device(request.param, monkeypatch) as made:
        yield made


# ---- blobs that break a rule --------------------------------------------------------------------------

VICTIM = wire.Row(wire.SECOND, "victim.weight", "U8", (40_000,), 40_000)
VICTIMS = (*LAYOUT, VICTIM)
SINGLE = 0x20  # of a frame header's descriptor: no window, the content's size is the window's


def sized(nbytes: int, width: int) -> dict[str, Any]:
    """Return the header fields of a frame that says its content's size in 4 or 8 bytes."""
    return {
        "descriptor": SINGLE | {4: 2, 8: 3}[width] << 6,
        "window": None,
        "fields": nbytes.to_bytes(width, "little"),
    }


def stored(content: bytes) -> list[bytes]:
    """Return raw blocks of a content."""
    parts = [content[at : at + 10_000] for at in range(0, len(content), 10_000)]
    return [
        block(part, last=number == len(parts) - 1, kind=RAW) for number, part in enumerate(parts)
    ]


def with_seek_table(frames: list[bytes], contents: list[int]) -> bytes:
    table = b"".join(
        struct.pack("<II", len(one), n) for one, n in zip(frames, contents, strict=True)
    )
    table += struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    return b"".join(frames) + skippable(table, 14)


def flip(data: bytes, at: int, bits: int = 0xFF) -> bytes:
    """Return data with one byte changed; a negative position counts from the end."""
    changed = bytearray(data)
    changed[at] ^= bits
    return bytes(changed)


Make = Callable[[bytes], bytes]
REFUSED: Mapping[str, Make] = {
    # 18
    "magic wrong": lambda p: flip(compress(p), 0),
    "truncated by one": lambda p: compress(p)[:-1],
    "truncated in the header": lambda p: compress(p)[:5],
    "truncated in the middle": lambda p: compress(p)[: len(compress(p)) // 2],
    "reserved block type": lambda p: frame(
        [block(p[:5000], last=False), block(b"", kind=RESERVED, nbytes=9)], **sized(len(p), 4)
    ),
    "reserved descriptor bit": lambda p: flip(compress(p), 4, 0x08),
    "block over the block size": lambda p: frame([block(p, nbytes=130_000)], **sized(len(p), 4)),
    # 19
    "content size smaller": lambda p: frame(stored(p), **sized(len(p) - 1, 4)),
    "content size larger": lambda p: frame(stored(p), **sized(len(p) + 1, 4)),
    "content size 2^63": lambda p: frame(stored(p), **sized(1 << 63, 8)),
    "content shorter than the tensor": lambda p: compress(p[:-1]),
    "content longer than the tensor": lambda p: compress(p + b"x"),
    "seek table and frames shorter": lambda p: seekable(p[:-1], 16384),
    # 20
    "four billion bytes of RLE": lambda p: frame(
        [block(b"\0", last=at == 32767, kind=RLE, nbytes=131_072) for at in range(32768)],
        window=0x70,
    ),
    "a million empty blocks": lambda p: frame(
        [block(b"", last=False)] * 1_000_000 + stored(p), **sized(len(p), 4)
    ),
    "nested frames": lambda p: compress(compress(p)),
    "window of 2 GiB": lambda p: frame(stored(p), window=21 << 3),
    # 22
    "junk after the frame": lambda p: compress(p) + b"junk",
    "junk before the frame": lambda p: b"junk" + compress(p),
    "junk between frames": lambda p: compress(p[:9]) + b"\1" + compress(p[9:]),
    "zeros after the frame": lambda p: compress(p) + bytes(9),
    "skippable frame cut short": lambda p: compress(p) + skippable(b"12345")[:-1],
    "an extra frame": lambda p: compress(p) + compress(b"x"),
    "a frame twice": lambda p: compress(p) * 2,
    # 23
    "dictionary": lambda p: frame(
        stored(p),
        descriptor=SINGLE | 2 << 6 | 1,
        window=None,
        fields=b"\7" + len(p).to_bytes(4, "little"),
    ),
    "checksum wrong": lambda p: flip(compress(p, write_checksum=True), -1),
    "checksum wrong in a seekable blob": lambda p: flip(
        with_seek_table([compress(p, write_checksum=True)], [len(p)]),
        len(compress(p, write_checksum=True)) - 1,
    ),
    # 24
    "no bytes": lambda p: b"",
    "zeros": lambda p: bytes(len(compress(p))),
    "only a skippable frame": lambda p: skippable(b"nothing"),
    "an empty frame": lambda p: compress(b""),
    # digests
    "another change": lambda p: compress(flip(p, 77)),
    "no change": lambda p: compress(bytes(len(p))),
    "another change in the last frame": lambda p: seekable(flip(p, -1), 16384),
}
ACCEPTED: Mapping[str, Make] = {
    "no content size": lambda p: flushed(p, 999),
    "several frames": lambda p: compress(p[:9]) + compress(p[9:20_000]) + compress(p[20_000:]),
    "several frames without sizes": lambda p: flushed(p[:9], 999) + flushed(p[9:], 999),
    "skippable frames around": lambda p: skippable(b"a", 3) + compress(p) + skippable(b"", 0),
    "skippable frames between": lambda p: compress(p[:9]) + skippable(b"b" * 99) + compress(p[9:]),
    "empty frames around": lambda p: compress(b"") + compress(p) + compress(b""),
    "checksum": lambda p: compress(p, write_checksum=True),
    "raw blocks": lambda p: frame(stored(p), **sized(len(p), 4)),
    "an empty last block": lambda p: frame(
        [*(one for one in stored(p + b"")[:-1]), block(p[30_000:], last=False), block(b"")],
        **sized(len(p), 8),
    ),
    "seekable": lambda p: seekable(p, 16384),
    "a seek table of other sizes": lambda p: with_seek_table(
        [compress(p[:20_000]), compress(p[20_000:])], [20_001, len(p) - 20_001]
    ),
    "window of 128 MiB": lambda p: frame(stored(p), window=17 << 3),
}


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> wire.Stream:
    """A base to which a bad version 1 is published again and again, with a local checkpoint at version 0."""
    stream = wire.Stream(tmp_path_factory.mktemp("bad") / "stream", VICTIMS)
    publish(stream, NAMES)
    gpusync.pull(stream.local, stream.base, stream.source, 0)
    return stream


def republish(stream: wire.Stream, make: Make, nbytes: int = 9_000) -> None:
    """Publish version 1 anew: every tensor changes, and the victim's blob is what ``make`` makes of its payload."""
    old = stream.states[0]
    new = dict(stream.states[1])
    random = np.random.default_rng(1)
    data = np.frombuffer(old[VICTIM.name], np.uint8).copy()
    at = random.choice(VICTIM.nbytes, nbytes, replace=False)
    data[at] ^= random.integers(1, 40, nbytes, dtype=np.uint8)
    new[VICTIM.name] = data.tobytes()
    blobs = {name: compress(wire.xor(old[name], new[name])) for name in NAMES}
    blobs[VICTIM.name] = make(wire.xor(old[VICTIM.name], new[VICTIM.name]))
    stream.delta(version=1, base=0, new=new, bend=wire.Bend(blob=blobs))


def attempt(
    stream: wire.Stream, model: nn.Module, device: str, **options: Any
) -> GpuSyncError | None:
    """Prepare version 1 with the local checkpoint; return why it is refused, with nothing touched, or discard it."""
    before = wire.snapshot(stream.local)
    error = None
    try:
        prepare(
            stream, model, 1, device, checkpoint=stream.local, write_back="sync", **options
        ).discard()
    except GpuSyncError as err:
        error = err
    assert live.bytes_of(model) == stream.states[0]
    assert wire.snapshot(stream.local) == before
    assert gpusync.live_version(model) == 0
    return error


def compare(stream: wire.Stream, device: str, **options: Any) -> tuple[Any, Any]:
    """Return what the CPU path and the device make of version 1."""
    found = []
    for path in ("cpu", device):
        model = model_at(stream, 0, path)
        gpusync.attach(model, stream.base)
        found.append(attempt(stream, model, path, **({} if path == "cpu" else options)))
    return found[0], found[1]


def check_refused_alike(stream: wire.Stream, device: str, make: Make, **options: Any) -> None:
    republish(stream, make)
    expected, got = compare(stream, device, **options)
    assert expected is not None, "the CPU path accepts it"
    assert type(got) is type(expected), f"{got!r}, on the CPU {expected!r}"
    assert VICTIM.name == got.tensor == expected.tensor
    republish(stream, compress)
    model = model_at(stream, 0, device)
    check_next_update(stream, model, 1, device)


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_blob_is_refused_as_on_the_cpu(bad: wire.Stream, device: Device, name: str) -> None:
    check_refused_alike(bad, device.name, REFUSED[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_unusual_blob_is_accepted_as_on_the_cpu(
    bad: wire.Stream, device: Device, name: str
) -> None:
    republish(bad, ACCEPTED[name])
    model = model_at(bad, 0, device.name)
    check_next_update(bad, model, 1, device.name)


def blob_of(stream: wire.Stream, make: Make) -> bytes:
    """Publish version 1 with a good blob, and return it."""
    made: list[bytes] = []

    def keep(payload: bytes) -> bytes:
        made.append(make(payload))
        return made[-1]

    republish(stream, keep)
    return made[-1]


def outcome(stream: wire.Stream, model: nn.Module, device: str) -> type | None:
    """Return the class of what prepare raises; the model is as it was."""
    try:
        prepare(stream, model, 1, device).discard()
    except GpuSyncError as err:
        assert live.bytes_of(model) == stream.states[0]
        return type(err)
    return None


def check_flips(
    stream: wire.Stream, device: str, blob: bytes, places: list[int], **options: Any
) -> None:
    """Publish the victim's blob with one bit changed at each place; both paths make the same of it."""
    twin, model = model_at(stream, 0, "cpu"), model_at(stream, 0, device)
    seen: set[type | None] = set()
    for number, at in enumerate(places):
        bend = wire.Bend(blob={VICTIM.name: flip(blob, at, 1 << (3 * number) % 8)})
        new = {**stream.states[0], VICTIM.name: stream.states[1][VICTIM.name]}
        state = stream.states[1]
        stream.delta(version=1, base=0, new=new, bend=bend, **options)
        expected, got = outcome(stream, twin, "cpu"), outcome(stream, model, device)
        assert got is expected, f"byte {at}: {got}, on the CPU {expected}"
        stream.states[1] = state
        seen.add(got)
    assert {FrameFormatError, DigestMismatchError} <= seen


@pytest.mark.parametrize("framing", ["single", "seekable", "several"])
def test_one_flipped_bit_anywhere_is_refused_as_on_the_cpu(
    bad: wire.Stream, device: Device, framing: str
) -> None:
    """Headers, literals, sequence tables, offsets, seek table; some flips only libzstd notices, some only a digest."""
    make: Make = {
        "single": compress,
        "seekable": lambda p: seekable(p, 16384),
        "several": lambda p: b"".join(compress(p[at : at + 9999]) for at in range(0, len(p), 9999)),
    }[framing]
    blob = blob_of(bad, make)
    random = np.random.default_rng(len(framing))
    ends = [*range(12), *(len(blob) - 1 - at for at in range(0, 60, 9))]
    check_flips(bad, device.name, blob, [*ends, *random.integers(0, len(blob), 24).tolist()])
    republish(bad, make)
    check_next_update(bad, model_at(bad, 0, device.name), 1, device.name)


@pytest.mark.parametrize("encoding", ["overwrite", "xor_sparse", "xor_rows"])
def test_one_flipped_bit_of_a_sparse_blob_is_refused_as_on_the_cpu(
    bad: wire.Stream, device: Device, encoding: str
) -> None:
    republish(bad, compress)
    old, new = bad.states[0], bad.states[1]
    blob = compress(wire.encode(encoding, old[VICTIM.name], new[VICTIM.name]))
    places = np.linspace(0, len(blob) - 1, 36).astype(int).tolist()
    check_flips(bad, device.name, blob, places, encoding=encoding)
    bad.delta(version=1, base=0, new=new, encoding=encoding)
    check_next_update(bad, model_at(bad, 0, device.name), 1, device.name)


@pytest.mark.parametrize("name", [name for name, (record, _) in xor_rows.BROKEN.items() if record])
def test_a_record_that_breaks_a_rule_is_refused_as_on_the_cpu(
    device: Device, tmp_path: Path, name: str
) -> None:
    record, match = xor_rows.BROKEN[name]
    row = wire.Row(wire.SECOND, "t.weight", "U8", (xor_rows.NBYTES,), xor_rows.NBYTES)
    stream = wire.Stream(tmp_path / "rows", (*LAYOUT, row))
    bend = wire.Bend(blob={row.name: compress(record)})
    stream.delta([row.name], encoding="xor_rows", bend=bend)
    for where in ("cpu", device.name):
        model = model_at(stream, 0, where)
        before = live.bytes_of(model)
        with pytest.raises(FrameFormatError) as caught:
            prepare(stream, model, 1, where)
        assert (caught.value.version, caught.value.tensor) == (1, row.name)
        assert live.bytes_of(model) == before
        assert len(record) > 701 or any(part in caught.value.message for part in match.split("|"))


def test_a_bad_frame_late_in_a_large_tensor_is_refused_when_lists_are_there_already(
    device: Device, tmp_path: Path
) -> None:
    stream = published(tmp_path / "large", 1)
    old, new = stream.states[0], stream.states[1]
    name = "big.weight"
    good = seekable(wire.xor(old[name], new[name]), 64 << 10)
    payload = wire.xor(old[name], new[name])
    frames = [compress(payload[at : at + 65536]) for at in range(0, len(payload), 65536)]
    changes: tuple[Make, ...] = (
        lambda one: flip(one, len(one) // 2),
        lambda one: flip(one, -1),
        lambda one: compress(bytes(65536)),
    )
    for number in (0, len(frames) // 2, len(frames) - 1):
        for change in changes:
            bent = [change(f) if at == number else f for at, f in enumerate(frames)]
            blob = with_seek_table(bent, [65536] * len(frames))
            stream.delta(version=1, base=0, new=new, bend=wire.Bend(blob={name: blob}))
            twin, model = model_at(stream, 0, "cpu"), model_at(stream, 0, device.name)
            with pytest.raises(GpuSyncError) as expected:
                prepare(stream, twin, 1, "cpu")
            with pytest.raises(type(expected.value)) as got:
                prepare(stream, model, 1, device.name)
            assert type(got.value) is type(expected.value) and got.value.tensor == name
            assert live.bytes_of(model) == old
    stream.delta(version=1, base=0, new=new, bend=wire.Bend(blob={name: good}))
    check_next_update(stream, model, 1, device.name)


# ---- manifests and untrusted sources -----------------------------------------------------------------


@pytest.fixture
def with_manifest(tmp_path: Path) -> tuple[Path, Path, list[wire.State]]:
    """Base, source, and the states of versions 0 to 2, published with blob digests in a manifest."""
    base, source, states = make_stream(tmp_path / "manifest", 2, fraction=0.3)
    return base, source, [{name: data for name, (_, _, data) in state.items()} for state in states]


def apply(
    model: nn.Module, base: Path, source: Path, target: int, device: str, **options: Any
) -> gpusync.UpdateReport:
    chain = gpusync.open_chain(source, target, base_dir=base)
    return gpusync.apply_to_model(model, chain, device=device, write_back="none", **options)


def flip_in_blob(source: Path, version: int, at: float) -> tuple[Path, bytes, str]:
    """Flip a bit in the largest blob of a version; return the shard, what it held, and the tensor."""
    best: tuple[int, Path, str, int] | None = None
    for path in (source / f"weight_v{version:06d}").glob("*.safetensors"):
        header, start = wire.raw_header(path)
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                if best is None or end - begin > best[0]:
                    best = end - begin, path, name, start + begin
    assert best is not None
    nbytes, path, name, begin = best
    raw = path.read_bytes()
    path.write_bytes(flip(raw, begin + int(at * (nbytes - 1)), 0x20))
    return path, raw, name


@pytest.mark.parametrize("untrusted", [False, True])
@pytest.mark.parametrize("at", [0.0, 0.6, 1.0])
def test_a_blob_that_the_manifest_does_not_describe_never_reaches_the_decoder(
    with_manifest: tuple[Path, Path, list[wire.State]], device: Device, at: float, untrusted: bool
) -> None:
    base, source, states = with_manifest
    model, twin = (live.model_from(base, None, path) for path in (device.name, "cpu"))
    path, raw, name = flip_in_blob(source, 1, at)
    errors = []
    for one, where in ((twin, "cpu"), (model, device.name)):
        with pytest.raises(GpuSyncError) as caught:
            apply(one, base, source, 1, where, untrusted_source=untrusted)
        errors.append((type(caught.value), caught.value.tensor))
    assert errors == [(FrameFormatError, name)] * 2
    assert live.bytes_of(model) == states[0]
    path.write_bytes(raw)
    report = apply(model, base, source, 2, device.name, untrusted_source=untrusted)
    assert live.bytes_of(model) == states[2]
    assert set(report.tensors_by_path) == {device.name}  # their digests were checked


def test_an_untrusted_source_without_a_manifest_is_decoded_on_the_host(
    bad: wire.Stream, device: Device
) -> None:
    republish(bad, compress)
    model = model_at(bad, 0, device.name)
    before = calls_of(device)
    report = check_next_update(bad, model, 1, device.name, untrusted_source=True)
    assert set(report.tensors_by_path) == {"host_decode"}
    assert "untrusted source" in report.reasons["host_decode"]
    assert calls_of(device) == before


@pytest.mark.parametrize("name", ["another change", "checksum wrong", "zeros", "nested frames"])
def test_a_bad_blob_of_an_untrusted_source_is_refused_as_on_the_cpu(
    bad: wire.Stream, device: Device, name: str
) -> None:
    check_refused_alike(bad, device.name, REFUSED[name], untrusted_source=True)


def calls_of(device: Device) -> int:
    return device.runtime.operations["call"] if device.runtime is not None else 0


# ---- a decoder that fails -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> wire.Stream:
    """Versions 1 and 2, each of which changes every tensor."""
    return published(tmp_path_factory.mktemp("faults") / "stream")


@pytest.fixture
def short_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_corpus()[-3:]
    monkeypatch.setattr(selftest, "make_corpus", lambda: samples)


REFUSALS = {Fault.WRONG_BYTE, Fault.WRONG_SIZE, Fault.STATUS, Fault.CALL}


@pytest.mark.usefixtures("short_corpus")
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("alone", [True, False])
def test_a_decoder_that_fails_after_it_passed_its_self_test(
    stream: wire.Stream, fault: Fault, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong bytes and statuses refuse the update; bytes written outside poison the model. Nothing is stored."""
    library = own_stand_in(tmp_path)
    source = stream
    if (
        alone
    ):  # one frame, the first of the output buffer: nothing of another frame is before or behind it
        row = wire.Row(wire.FIRST, "one.weight", "U8", (1024,), 1024)
        source = wire.Stream(tmp_path / "one", (row,))
        for _ in range(2):
            source.delta(["one.weight"])
    with counted_device("emulated", monkeypatch, nvcomp=library) as device:
        check_next_update(source, model_at(source, 0, "emulated"), 1, "emulated")
        model = model_at(source, 0, "emulated")
        with faulty(library, fault), pytest.raises(GpuSyncError) as caught:
            prepare(source, model, 1, "emulated")
        assert live.bytes_of(model) == source.states[0]
        assert not device.emulated.damage, "written where no guard is"
        if isinstance(caught.value, ModelPoisonedError):
            assert fault not in REFUSALS
            assert gpusync.live_version(model) is None
            with pytest.raises(ModelPoisonedError):
                prepare(source, model, 1, "emulated")
            return
        assert isinstance(caught.value, DecodeError)
        assert not alone or fault in REFUSALS, "the guard zones did not tell"
        check_next_update(source, model, 1, "emulated")
        check_next_update(source, model, 2, "emulated")


@pytest.mark.usefixtures("short_corpus")
@pytest.mark.parametrize("fault", Fault)
def test_a_decoder_that_fails_its_self_test_is_not_used(
    stream: wire.Stream, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = own_stand_in(tmp_path)
    with counted_device("emulated", monkeypatch, nvcomp=library) as device:
        model = model_at(stream, 0, "emulated")
        with faulty(library, fault):
            report = check_next_update(stream, model, 1, "emulated")
        assert set(report.tensors_by_path) == {"host_decode"}
        assert "fails its self-test" in report.reasons["host_decode"]
        calls = device.emulated.operations["call"]
        report = check_next_update(stream, model, 2, "emulated")  # the verdict stands
        assert "fails its self-test" in report.reasons["host_decode"]
        assert device.emulated.operations["call"] == calls


# ---- calls that fail ----------------------------------------------------------------------------------


def check_after(
    stream: wire.Stream, device: Device, model: nn.Module, err: BaseException
) -> nn.Module:
    """Live bytes are as they were, memory is free; return a module that can be updated."""
    assert live.bytes_of(model) == stream.states[0]
    if isinstance(err, ModelPoisonedError):
        assert gpusync.live_version(model) is None
        with pytest.raises(ModelPoisonedError):
            prepare(stream, model, 1, device.name)
        model = model_at(stream, 0, device.name)
    assert not [one.name for one in threading.enumerate() if one.name.startswith("gpusync-")]
    return model


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_any_call_that_fails_in_prepare_leaves_everything_as_it_was(
    stream: wire.Stream, device: Device, kind: str, lasting: bool
) -> None:
    """The n-th call, for every n until none is left to fail; of the many launches every third."""
    errors = {
        "call": DecodeError("planned"),
        "synchronize": ModelPoisonedError("planned") if lasting else KernelError("planned"),
        "empty": OutOfScratchError("planned"),
        "pinned": OutOfScratchError("planned"),
    }
    planned = errors.get(kind, KernelError("planned"))
    model = model_at(stream, 0, device.name)
    for number in itertools.count(1, 3 if kind == "launch" else 1):
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, device.name, kind, number, planned, lasting=lasting)
            try:
                prepare(stream, model, 1, device.name).discard()
            except GpuSyncError as err:
                assert failing.happened
                assert isinstance(err, type(planned)) and "planned" in str(err)
                model = check_after(stream, device, model, err)
        if not failing.happened:
            break
        if number % 6 == 1:
            check_next_update(stream, model, 1, device.name)
            model = model_at(stream, 0, device.name)
    assert number > 2
    check_next_update(stream, model, 1, device.name)


def test_calls_that_fail_beside_the_local_checkpoint_leave_it_as_it_was(
    bad: wire.Stream, device: Device
) -> None:
    """The staging thread is stopped and its files are removed."""
    republish(bad, compress)
    model = model_at(bad, 0, device.name)
    gpusync.attach(model, bad.base)
    for kind, number in itertools.product(KINDS, (1, 3)):
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, device.name, kind, number, KernelError("planned"))
            err = attempt(bad, model, device.name)
            assert failing.happened or number > 1
            assert isinstance(err, KernelError) or kind == "synchronize" or not failing.happened
        assert not [path for path in wire.tree_sha256(bad.local) if "staging" in path]


class Enough(Exception):
    """What a caller's progress callback raises."""


@pytest.mark.parametrize("error", [Enough, KeyboardInterrupt, SystemExit, DeviceError])
def test_what_a_progress_callback_raises_stops_prepare(
    stream: wire.Stream, device: Device, error: type[BaseException]
) -> None:
    model = model_at(stream, 0, device.name)
    for number in itertools.count():
        events: list[gpusync.Progress] = []

        def progress(
            event: gpusync.Progress, number: int = number, events: list[Any] = events
        ) -> None:
            events.append(event)
            if len(events) > number:
                raise error("enough")

        try:
            prepare(stream, model, 1, device.name, progress=progress).discard()
        except BaseException as err:
            if not isinstance(err, error):
                raise
            assert len(events) == number + 1, "it went on"
            check_after(stream, device, model, err)
        else:
            break
    assert number > 2
    assert [event.done_bytes for event in events][-1] == events[-1].total_bytes
    check_next_update(stream, model, 1, device.name)


def test_an_interrupt_from_the_keyboard_stops_prepare(stream: wire.Stream, device: Device) -> None:
    """It arrives in the thread that called prepare, while another one does the work."""
    model = model_at(stream, 0, device.name)
    events = []

    def progress(event: gpusync.Progress) -> None:
        events.append(event)
        if len(events) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        prepare(stream, model, 1, device.name, progress=progress)
    check_after(stream, device, model, KeyboardInterrupt())
    check_next_update(stream, model, 1, device.name)
    check_next_update(stream, model, 2, device.name)


def test_a_failed_self_test_by_lack_of_memory_is_tried_again(
    stream: wire.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised is no verdict."""
    library = own_stand_in(tmp_path)
    with counted_device("emulated", monkeypatch, nvcomp=library):
        model = model_at(stream, 0, "emulated")
        for kind, error in (
            ("empty", OutOfScratchError("planned")),
            ("copy", KernelError("planned")),
            ("synchronize", KernelError("planned")),
        ):
            with pytest.MonkeyPatch.context() as patch:
                Failing(patch, "emulated", kind, 1, error)
                with pytest.raises(type(error), match="planned"):
                    prepare(stream, model, 1, "emulated")
            assert live.bytes_of(model) == stream.states[0]
        report = check_next_update(stream, model, 1, "emulated")
        assert report.tensors_by_path["emulated"] == len(NAMES)
