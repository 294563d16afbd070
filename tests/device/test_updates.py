"""Updates through the device path: any checkpoint and chain ends on the bytes that the CPU path makes, and reports how."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpusync
from gpusync.errors import DigestMismatchError
from gpusync.placement.tensors import DTYPE_NAMES
from gpusync.publisher.publish import publish_checkpoint
from gpusync.testing import emulated_runtime
from gpusync.types import ENCODINGS
from tests import live, wire
from tests.support import DTYPE_BYTES
from tests.unit.strategies import compress, fixed, flushed, seekable, skippable

ON_EVERY_DEVICE = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
EDGES = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 240, 241, 1023, 1024, 1025)
LARGE = (65535, 65536, 65537, 131_073, 200_001)
DTYPES = [name for name in DTYPE_BYTES if hasattr(torch, DTYPE_NAMES[name])]
MARGIN = 64
SMALL_SCRATCH = 9_250_000
"""Next to the least: a batch is 1 MiB of deltas."""


# ---- blobs -------------------------------------------------------------------------------------------

SEVERAL_NBYTES = 1000


def several(payload: bytes, **options: Any) -> bytes:
    """Frames side by side, without a table."""
    parts = range(0, len(payload), SEVERAL_NBYTES)
    return b"".join(compress(payload[at : at + SEVERAL_NBYTES], **options) for at in parts)


FRAMINGS = {
    "single": compress,
    "single, checksum": lambda payload: compress(payload, write_checksum=True),
    "single, no content size": lambda payload: flushed(payload, 700),
    "seekable, small": lambda payload: seekable(payload, 1021),
    "seekable, large": lambda payload: seekable(payload, 65536),
    "seekable, checksum": lambda payload: seekable(payload, 4096, write_checksum=True),
    "several": several,
    "several, behind a note": lambda payload: skippable(b"note") + several(payload),
    "several, no content size": lambda payload: several(payload, write_content_size=False),
}


def frame_up(framing: str, payload: bytes) -> bytes:
    """Return a blob; there is always a frame."""
    return FRAMINGS[framing](payload) if payload else compress(payload)


def is_for_the_host(framing: str, encoding: str, payload_nbytes: int, nbytes: int) -> bool:
    """What only the host decodes: checksums, and what a frame's header does not tell."""
    if "checksum" in framing:
        return True
    if encoding == "xor_rows":
        # Taken where every record is a frame of a size that is known; there is one record.
        if "no content size" in framing:
            return nbytes > 1
        most = {"single": payload_nbytes, "seekable, small": 1021, "seekable, large": 65536}
        return payload_nbytes > most.get(framing, SEVERAL_NBYTES)
    if framing == "single, no content size":
        return encoding != "xor"
    if framing == "several, no content size":
        return encoding != "xor" or payload_nbytes > SEVERAL_NBYTES
    # Its first frame's header promises a whole sparse payload, until the blob is read.
    return framing == "several" and encoding != "xor" and payload_nbytes > SEVERAL_NBYTES


# ---- cases -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A tensor, and how many bytes lie between it and the one before; ``tied_to`` has the same storage."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    gap: int = 0
    tied_to: str | None = None

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def row(self) -> wire.Row:
        return wire.Row(wire.FIRST, self.name, self.dtype, self.shape, self.nbytes)


@dataclass(frozen=True)
class Step:
    """A version. ``framings`` has every tensor that it names; the others, and ``still`` ones, do not change."""

    full: bool
    encoding: str
    checksum: str
    framings: Mapping[str, str]
    still: frozenset[str]
    density: float


@dataclass(frozen=True)
class Case:
    tensors: tuple[Spec, ...]
    steps: tuple[Step, ...]
    halfway: int
    seed: int


def shapes(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of so many elements."""
    if count == 0:
        return st.sampled_from([(0,), (0, 5), (3, 0, 2)])
    flat = [(count,), (1, count), (count, 1)]
    return st.sampled_from([*flat, ()] if count == 1 else flat)


@st.composite
def specs(draw: st.DrawFn) -> tuple[Spec, ...]:
    """One to seven tensors, at most two of them large, close together; the last may be tied to the first."""
    count, large = draw(st.integers(1, 6)), draw(st.integers(0, 2))
    found = []
    for number in range(count):
        dtype = draw(st.sampled_from(DTYPES))
        if number < large:
            elements = draw(st.sampled_from(LARGE)) // DTYPE_BYTES[dtype]
        else:
            elements = draw(st.one_of(st.sampled_from((0, *EDGES)), st.integers(1, 3000)))
        gap = draw(st.sampled_from((0, 0, 1, 2, 3, 16)))
        found.append(Spec(f"t{number}.weight", dtype, draw(shapes(elements)), gap))
    if found[0].nbytes and draw(st.booleans()):
        first = found[0]
        found.append(Spec("z.tied", first.dtype, first.shape, 0, first.name))
    return tuple(found)


@st.composite
def steps(draw: st.DrawFn, tensors: Sequence[Spec]) -> Step:
    encoding = draw(st.sampled_from(ENCODINGS))
    named = {spec.name for spec in tensors if not spec.tied_to and draw(st.integers(0, 3))} or {
        tensors[0].name
    }
    still = {name for name in sorted(named) if not draw(st.integers(0, 4))}
    for spec in tensors:
        for names in (named, still):
            if spec.tied_to in names:
                names.add(spec.name)
    framing = st.sampled_from(sorted(FRAMINGS))
    return Step(
        full=not draw(st.integers(0, 5)),
        encoding=encoding,
        checksum=draw(st.sampled_from(("xxh3-128", "xxh3-128", "blake3", "adler32"))),
        framings={name: draw(framing) for name in sorted(named)},
        still=frozenset(still),
        density=draw(st.sampled_from((0.001, 0.01, 0.5))),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors = draw(specs())
    chain = tuple(draw(steps(tensors)) for _ in range(draw(st.integers(1, 4))))
    return Case(tensors, chain, draw(st.integers(0, len(chain))), draw(st.integers(0, 1 << 32)))


class Published:
    """A case as a stream on disk, with the bytes of every version."""

    def __init__(self, root: Path, case: Case) -> None:
        self.case = case
        self.stream = wire.Stream(root, tuple(spec.row for spec in case.tensors), case.seed)
        self.rng = np.random.default_rng(case.seed)
        self.tie(self.stream.states[0])
        self.stream.write_checkpoint(self.stream.base, self.stream.states[0])
        for step in case.steps:
            self.publish(step)

    @property
    def states(self) -> dict[int, wire.State]:
        return self.stream.states

    def publish(self, step: Step) -> None:
        old = self.states[self.stream.last]
        new = {
            spec.name: self.changed(spec, old[spec.name], step)
            if (step.full or spec.name in step.framings) and spec.name not in step.still
            else old[spec.name]
            for spec in self.case.tensors
        }
        self.tie(new)
        if step.full:
            self.stream.last += 1
            self.states[self.stream.last] = new
            self.stream.write_checkpoint(self.stream.folder(self.stream.last), new)
            return
        blobs = {
            name: frame_up(framing, wire.encode(step.encoding, old[name], new[name]))
            for name, framing in step.framings.items()
        }
        self.stream.delta(
            new=new, encoding=step.encoding, checksum=step.checksum, bend=wire.Bend(blob=blobs)
        )

    def changed(self, spec: Spec, old: bytes, step: Step) -> bytes:
        new = np.frombuffer(old, np.uint8).copy()
        density = step.density if spec.nbytes < 50_000 else min(step.density, 0.01)
        at = np.flatnonzero(self.rng.random(new.size) < density)
        if new.size:
            at = np.union1d(at, self.rng.choice([0, new.size - 1], 1))
        new[at] ^= self.rng.integers(1, 256, at.size, np.uint8)
        return new.tobytes()

    def tie(self, state: wire.State) -> None:
        for spec in self.case.tensors:
            if spec.tied_to:
                state[spec.name] = state[spec.tied_to]

    def chain(self, target: int) -> gpusync.Chain:
        return gpusync.open_chain(self.stream.source, target, base_dir=self.stream.base)

    def paths(self, version: int, target: int) -> Counter[str]:
        """Return how many tensors the host decodes, and how many the device, on the way between two versions."""
        found: Counter[str] = Counter()
        chain = list(enumerate(self.case.steps, 1))[:target]
        full = max((number for number, step in chain if step.full and number > version), default=0)
        begin = full or version
        for spec in self.case.tensors:
            steps = [
                (number, step)
                for number, step in chain
                if number > begin and spec.name in step.framings
            ]
            if steps or full or target == 0:
                by_host = not spec.nbytes or any(self.by_host(spec, *pair) for pair in steps)
                found["host" if by_host else "device"] += 1
        return found

    def by_host(self, spec: Spec, number: int, step: Step) -> bool:
        old, new = (self.states[version][spec.name] for version in (number - 1, number))
        payload = wire.encode(step.encoding, old, new)
        return is_for_the_host(step.framings[spec.name], step.encoding, len(payload), spec.nbytes)


class Model:
    """Tensors in one piece of memory, at any address, between bytes that are nobody's."""

    def __init__(self, tensors: Sequence[Spec], state: wire.State, device: str) -> None:
        self.offsets: dict[str, int] = {}
        self.module = nn.Module()
        end = MARGIN
        for spec in tensors:
            if not spec.tied_to:
                self.offsets[spec.name] = end + spec.gap
                end += spec.gap + spec.nbytes
        self.offsets |= {spec.name: self.offsets[spec.tied_to] for spec in tensors if spec.tied_to}
        where = "cuda" if device == "cuda" else "cpu"
        self.memory = torch.full((end + MARGIN,), 0xEE, dtype=torch.uint8, device=where)
        made: dict[str, torch.Tensor] = {}
        for spec in tensors:
            made[spec.name] = made.get(spec.tied_to or "", self._over(spec, where))
            live.place(self.module, spec.name, made[spec.name])
        self.memory.copy_(torch.frombuffer(bytearray(self.image(state)), dtype=torch.uint8))

    def image(self, state: wire.State) -> bytes:
        """Return what the whole memory should hold."""
        image = bytearray(b"\xee" * self.memory.numel())
        for name, at in self.offsets.items():
            image[at : at + len(state[name])] = state[name]
        return bytes(image)

    def held(self) -> bytes:
        return self.memory.cpu().numpy().tobytes()

    def _over(self, spec: Spec, where: str) -> torch.Tensor:
        """A contiguous tensor with a storage of its own over some of the memory, aligned or not."""
        dtype = getattr(torch, DTYPE_NAMES[spec.dtype])
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=dtype, device=where)
        at = self.offsets[spec.name]
        storage = self.memory.untyped_storage()[at : at + spec.nbytes]
        flat = torch.empty(0, dtype=torch.uint8, device=where).set_(storage)
        return flat.view(dtype).reshape(spec.shape)


@contextmanager
def published(case: Case) -> Iterator[Published]:
    with tempfile.TemporaryDirectory() as folder:
        yield Published(Path(folder) / "stream", case)


def follow(stream: Published, model: Model, device: str, targets: Sequence[int]) -> None:
    """Bring a model to one version after the other, and hold bytes and reports against what they should be."""
    version = 0
    names = {spec.name for spec in stream.case.tensors}
    for target in targets:
        report = gpusync.apply_to_model(model.module, stream.chain(target), device=device)
        assert model.held() == model.image(stream.states[target]), f"version {target}"
        assert gpusync.live_version(model.module) == target
        assert report.to_version == target
        if target == version:
            assert report.outcome == "unchanged" and not report.tensors_by_path
            continue
        expected = stream.paths(version, target)
        assert report.tensors_changed == expected.total() <= len(names)
        if device == "cpu":
            assert report.tensors_by_path == {"cpu": expected.total()}
        else:
            by_path = {device: expected["device"], "host_decode": expected["host"]}
            assert report.tensors_by_path == {path: n for path, n in by_path.items() if n}
            assert set(report.reasons) == {device} | (
                {"host_decode"} if expected["host"] else set()
            )
        version = target


def check(case: Case, device: str) -> None:
    live.need(device)
    with published(case) as stream:
        targets = (case.halfway, len(case.steps), 0)
        for path in ("cpu", device):
            model = Model(case.tensors, stream.states[0], path)
            follow(stream, model, path, targets)
    if device == "emulated":
        assert emulated_runtime().damage == ()


# ---- bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@settings(fixed, max_examples=40)
@given(case=cases())
def test_any_chain_over_any_checkpoint(device: str, case: Case) -> None:
    check(case, device)


SIZES = (0, *EDGES, 65535, 65536, 65537)
DIGESTS = ("xxh3-128", "blake3", "adler32")


def every_size() -> tuple[Spec, ...]:
    """Bytes side by side: every region behind one of odd size begins and ends within a word."""
    return tuple(Spec(f"size{nbytes}", "U8", (nbytes,)) for nbytes in SIZES)


def step_of(tensors: Sequence[Spec], encoding: str, **options: Any) -> Step:
    """A delta of all tensors, each framed in another way."""
    framings = sorted(FRAMINGS)
    named = {spec.name: framings[at % len(framings)] for at, spec in enumerate(tensors)}
    fields = {"full": False, "checksum": "xxh3-128", "still": frozenset[str](), "density": 0.3}
    return Step(**{"encoding": encoding, "framings": named, **fields, **options})


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@pytest.mark.parametrize("checksum", DIGESTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sizes_around_every_edge(device: str, encoding: str, checksum: str) -> None:
    tensors = every_size()
    step = step_of(tensors, encoding, checksum=checksum)
    # turned, so that over three steps each size has come in several framings
    turned = [step_of(tensors[at:] + tensors[:at], encoding, checksum=checksum) for at in (0, 3, 5)]
    check(Case(tensors, (*turned, step), 1, 5), device)


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
def test_every_dtype(device: str) -> None:
    tensors = tuple(Spec(f"{name}.weight", name, (13, 5), gap=1) for name in DTYPES)
    scalars = tuple(Spec(f"{name}.scale", name, ()) for name in DTYPES)
    both = tensors + scalars
    check(Case(both, tuple(step_of(both, encoding) for encoding in ENCODINGS), 1, 6), device)


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("first", [0, 1])
def test_neighbours_within_one_word_do_not_disturb_each_other(
    device: str, encoding: str, first: int
) -> None:
    """Tensors of 1 and 3 bytes without a gap, from an even or an odd address on; every other one changes."""
    sizes = (1, 1, 3, 1, 1, 1, 3, 3) * 8
    tensors = tuple(
        Spec(f"{at:03d}", "U8", (nbytes,), gap=0 if at else first)
        for at, nbytes in enumerate(sizes)
    )
    changing = [step_of(tensors[at::2], encoding, density=1.0) for at in (0, 1)]
    check(Case(tensors, tuple(changing), 1, 7), device)


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
def test_more_versions_than_the_host_folds_at_once(device: str) -> None:
    tensors = (
        Spec("a.weight", "BF16", (300, 7), gap=1),
        Spec("b.lut", "U8", (70_001,)),
        Spec("c.scale", "F32", (), gap=2),
    )
    chain = [step_of(tensors, ENCODINGS[at * at % 5 % 4], density=0.02) for at in range(21)]
    check(Case(tensors, tuple(chain), 2, 8), device)


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@pytest.mark.parametrize("full", [None, 0, 1])
def test_regions_that_need_several_batches(
    device: str, full: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little scratch, and a ring of little slots: a region's chunks come in batch after batch."""
    live.need(device)
    monkeypatch.setenv("GPUSYNC_RING_BYTES", str(8 << 14))
    tensors = (
        Spec("a.weight", "BF16", (1_000_001,), gap=1),
        Spec("b.lut", "U8", (1_300_003,)),
        Spec("c.weight", "F32", (257, 513), gap=2),
        Spec("z.tied", "BF16", (1_000_001,), tied_to="a.weight"),
    )
    framings = {
        "a.weight": "seekable, large",
        "b.lut": "single",
        "c.weight": "seekable, small",
        "z.tied": "single, checksum",
    }
    chain = [
        step_of(tensors, encoding, framings=framings, full=full == at, density=0.004)
        for at, encoding in enumerate(("xor", "overwrite", "xor"))
    ]
    case = Case(tensors, tuple(chain), 0, 9)
    with published(case) as stream:
        model = Model(tensors, stream.states[0], device)
        report = gpusync.apply_to_model(
            model.module, stream.chain(3), device=device, scratch_bytes=SMALL_SCRATCH
        )
        assert model.held() == model.image(stream.states[3])
        # a frame of more than a batch decodes, and one with a checksum
        assert report.tensors_by_path == {device: 2, "host_decode": 2}


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
@pytest.mark.parametrize("checksum", DIGESTS)
@pytest.mark.parametrize("name", ["a", "b", "empty"])
def test_another_digest_than_the_published_one_changes_nothing(
    device: str, name: str, checksum: str
) -> None:
    live.need(device)
    tensors = (
        Spec("a", "U8", (70_000,)),
        Spec("b", "BF16", (99,), gap=1),
        Spec("empty", "U8", (0,)),
    )
    step = step_of(tensors, "xor", checksum=checksum, still=frozenset({"empty"}))
    with published(Case(tensors, (step,), 1, 14)) as stream:
        wrong = wire.digest(checksum, b"other bytes")
        bend = wire.Bend(
            blob={spec.name: compress(bytes(spec.nbytes)) for spec in tensors},
            digest={name: wrong},
        )
        stream.stream.delta(new=stream.states[1], checksum=checksum, bend=bend)
        model = Model(tensors, stream.states[0], device)
        gpusync.apply_to_model(model.module, stream.chain(1), device=device)
        with pytest.raises(DigestMismatchError) as refused:
            gpusync.apply_to_model(model.module, stream.chain(2), device=device)
        assert (refused.value.tensor, refused.value.version) == (name, 2)
        assert model.held() == model.image(stream.states[1])


# ---- reports -----------------------------------------------------------------------------------------

TOLD = (
    Spec("checksum", "U8", (3000,)),
    Spec("empty", "U8", (0,)),
    Spec("frames", "U8", (1 << 20,)),
    Spec("good", "BF16", (3000,)),
    Spec("unsized", "U8", (3002,)),
    Spec("whole", "U8", (1_200_000,)),
)
WHY = {
    "checksum": "a frame with a checksum",
    "empty": "no bytes",
    "frames": "2331 frames, far more than their content needs",
    "unsized": "a frame without content size",
    "whole": "1200384 bytes to decode for 65536 bytes: a batch takes 1048576",
}


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
def test_every_tensor_that_the_host_decodes_is_reported_with_its_reason(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.need(device)
    monkeypatch.setitem(FRAMINGS, "tiny", lambda payload: seekable(payload, 450))
    framings = {
        "checksum": "seekable, checksum",
        "empty": "single",
        "frames": "tiny",
        "good": "single",
        "unsized": "several, no content size",
        "whole": "single",
    }
    case = Case(TOLD, (step_of(TOLD, "xor", framings=framings, density=0.01),), 1, 10)
    with published(case) as stream:
        model = Model(TOLD, stream.states[0], device)
        report = gpusync.apply_to_model(
            model.module, stream.chain(1), device=device, scratch_bytes=SMALL_SCRATCH
        )
        assert model.held() == model.image(stream.states[1])
    assert report.device == device
    assert report.tensors_changed == len(TOLD)
    assert report.tensors_by_path == {device: 1, "host_decode": len(WHY)}
    assert set(report.reasons) == {device, "host_decode"}
    for reason in WHY.values():
        assert f"1 tensor(s): {reason}" in report.reasons["host_decode"]
    assert report.wire_bytes and report.change_list_bytes
    assert report.changed_bytes >= sum(
        a != b
        for name in stream.states[0]
        for a, b in zip(stream.states[0][name], stream.states[1][name], strict=True)
    )


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
def test_frames_that_are_not_what_they_promised_are_decoded_again_by_the_host(device: str) -> None:
    """The first frame of a sparse payload may be the whole of it, and is not."""
    tensors = (Spec("a", "U8", (5000,)), Spec("b", "U8", (5000,), gap=1), Spec("c", "U8", (9,)))
    framings = {"a": "several", "b": "several", "c": "several"}
    step = step_of(tensors, "xor_sparse", framings=framings)
    live.need(device)
    with published(Case(tensors, (step,), 1, 11)) as stream:
        model = Model(tensors, stream.states[0], device)
        report = gpusync.apply_to_model(model.module, stream.chain(1), device=device)
        assert model.held() == model.image(stream.states[1])
    assert report.tensors_by_path == {device: 1, "host_decode": 2}
    assert report.reasons["host_decode"].startswith("2 tensor(s): ")


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
def test_blobs_of_an_untrusted_source_are_decoded_by_the_host_unless_a_manifest_gives_their_digest(
    device: str, tmp_path: Path
) -> None:
    live.need(device)
    tensors = (Spec("a.weight", "BF16", (700,)), Spec("b.weight", "U8", (333,), gap=1))
    with published(Case(tensors, (step_of(tensors, "xor"),), 1, 12)) as stream:
        arrays = [
            (name, np.frombuffer(data, "<u2" if name.startswith("a") else "u1"))
            for name, data in stream.states[1].items()
        ]
        publisher = gpusync.Publisher(tmp_path / "ours", stream.stream.base)
        publisher.publish(arrays)
        for source, path in ((stream.stream.source, "host_decode"), (tmp_path / "ours", device)):
            model = Model(tensors, stream.states[0], device)
            chain = gpusync.open_chain(source, 1, base_dir=stream.stream.base)
            report = gpusync.apply_to_model(
                model.module, chain, device=device, untrusted_source=True
            )
            assert model.held() == model.image(stream.states[1])
            assert report.tensors_by_path == {path: 2}
            if path == "host_decode":
                assert "untrusted source" in report.reasons[path]


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
def test_lists_that_do_not_fit_the_device_go_to_the_host_and_are_reported(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.need(device)
    tensors = every_size()
    monkeypatch.setenv("GPUSYNC_DEVICE_LIST_BYTES", "4000")
    with published(Case(tensors, (step_of(tensors, "xor"),), 1, 13)) as stream:
        model = Model(tensors, stream.states[0], device)
        report = gpusync.apply_to_model(model.module, stream.chain(1), device=device)
        assert model.held() == model.image(stream.states[1])
    assert any("change lists are in host memory" in note for note in report.notes)


@pytest.mark.parametrize("device", ON_EVERY_DEVICE)
def test_a_publisher_of_rows_is_followed_on_the_device_alone(device: str, tmp_path: Path) -> None:
    """xor, then rows, overwrite and rows again, over tensors of several bands; folder and model end on the same bytes."""
    live.need(device)
    sizes = (0, 1, 3, 257, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (2 << 20) + 777)
    tensors = tuple(Spec(f"t{nbytes}", "U8", (nbytes,), gap=1) for nbytes in sizes)
    published = Published(tmp_path / "stream", Case(tensors, (), 0, 3))
    stream, base = published.stream, published.stream.base
    for encoding in ("xor", "xor_rows", "overwrite", "xor_rows"):
        step = step_of(tensors, encoding, density=0.01)
        old = published.states[stream.last]
        new = {spec.name: published.changed(spec, old[spec.name], step) for spec in tensors}
        folder = tmp_path / f"at_{stream.last + 1}"
        stream.write_checkpoint(folder, new)
        report = publish_checkpoint(base, folder, stream.source, encoding=encoding)
        assert report.tensors_changed == len(sizes) - 1
        stream.last += 1
        published.states[stream.last] = new
        base = folder
    model = live.model_from(stream.base, published.states[0], device)
    chain = gpusync.open_chain(stream.source, 4, checkpoint=stream.local, base_dir=stream.base)
    report = gpusync.apply_to_model(model, chain, device=device, durable=False)
    assert report.tensors_by_path == {device: len(sizes) - 1}
    assert live.bytes_of(model) == published.states[4]
    assert wire.read_tensors(stream.local) == published.states[4]
