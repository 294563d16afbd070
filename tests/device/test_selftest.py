"""The self-test of nvCOMP: what its corpus holds, and that it notices what must not be trusted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zstandard

from gpusync.device import selftest
from gpusync.device.corpus import Sample, make_corpus
from gpusync.device.nvcomp import Nvcomp
from gpusync.device.runtime import Runtime
from gpusync.device.selftest import check_nvcomp, nvcomp_is_trusted
from gpusync.errors import ModelPoisonedError, OutOfScratchError
from gpusync.format.encode import compress_single
from gpusync.format.frames import Where, walk_frames
from gpusync.format.zstd.encode_runs import compress_runs
from gpusync.testing import EmulatedRuntime, Order
from tests.device.nvcomp_faults import Fault, faulty, own_stand_in

CODES = ("literal lengths", "offsets", "match lengths")
KINDS = {
    *(("block", kind) for kind in ("raw", "RLE", "compressed")),
    ("block", "empty, the last"),
    *(("blocks", number) for number in ("1", "2", "3", "more")),
    *(("literals raw, header of", nbytes) for nbytes in (1, 2, 3)),
    ("literals RLE, header of", 2),
    *(("literals in 1 stream, header of", nbytes) for nbytes in (3,)),
    *(("literals in 4 streams, header of", nbytes) for nbytes in (3, 4, 5)),
    *(("literals in 1 stream, tree repeated, header of", nbytes) for nbytes in (3,)),
    *(("literals in 4 streams, tree repeated, header of", nbytes) for nbytes in (3, 4, 5)),
    *(("tree", kind) for kind in ("direct", "FSE")),
    *(("bytes of the number of sequences", nbytes) for nbytes in (0, 1, 2, 3)),
    *((code, mode) for code in CODES for mode in ("predefined", "RLE", "FSE", "repeat")),
    *(("window", log) for log in (10, 17, 19, 27)),
    ("window", "the content"),
    *(("bytes of the content size", nbytes) for nbytes in (0, 1, 2, 4)),
}


@pytest.fixture(scope="module")
def corpus() -> tuple[Sample, ...]:
    return make_corpus()


@pytest.fixture
def short_corpus(monkeypatch: pytest.MonkeyPatch, corpus: tuple[Sample, ...]) -> None:
    """The self-test decodes a few frames only: what is tested is what it makes of them."""
    monkeypatch.setattr(selftest, "make_corpus", lambda: corpus[-3:])


def kinds_of(frame: bytes) -> set[tuple[str, object]]:
    """Every kind of header, block and section in a frame (RFC 8878, 3.1.1)."""
    descriptor, single = frame[4], frame[4] >> 5 & 1
    size_nbytes = (single, 2, 4, 8)[descriptor >> 6]
    window: object = "the content" if single else 10 + (frame[5] >> 3)
    kinds: Counter[tuple[str, object]] = Counter()
    kinds["window", window] += 1
    kinds["bytes of the content size", size_nbytes] += 1
    at = 5 + (not single) + size_nbytes
    blocks, last = 0, 0
    while not last:
        word = int.from_bytes(frame[at : at + 3], "little")
        last, kind, nbytes = word & 1, word >> 1 & 3, word >> 3
        at, blocks = at + 3, blocks + 1
        kinds["block", ("raw", "RLE", "compressed")[kind]] += 1
        if last and not nbytes:
            kinds["block", "empty, the last"] += 1
        if kind == 2:
            kinds.update(section_kinds(frame[at : at + nbytes]))
        at += 1 if kind == 1 else nbytes
    assert at == len(frame)
    kinds["blocks", str(blocks) if blocks < 4 else "more"] += 1
    return set(kinds)


def section_kinds(block: bytes) -> list[tuple[str, object]]:
    """The kinds of a compressed block's literals and sequences."""
    kind, size_format = block[0] & 3, block[0] >> 2 & 3
    kinds: list[tuple[str, object]] = []
    if kind < 2:
        header = (1, 2, 1, 3)[size_format]
        literals = int.from_bytes(block[:header], "little") >> (3 if header == 1 else 4)
        kinds.append((f"literals {('raw', 'RLE')[kind]}, header of", header))
        at = header + (1 if kind else literals)
    else:
        header, bits = ((3, 10), (3, 10), (4, 14), (5, 18))[size_format]
        streams = "4 streams" if size_format else "1 stream"
        repeated = ", tree repeated" if kind == 3 else ""
        kinds.append((f"literals in {streams}{repeated}, header of", header))
        if kind == 2:
            kinds.append(("tree", "FSE" if block[header] < 128 else "direct"))
        at = header + (int.from_bytes(block[:header], "little") >> 4 + bits)
    if not block[at]:
        assert at + 1 == len(block)
        return [*kinds, ("bytes of the number of sequences", 0)]
    count_nbytes = 1 if block[at] < 128 else 3 if block[at] == 255 else 2
    modes = block[at + count_nbytes]
    kinds.append(("bytes of the number of sequences", count_nbytes))
    for code, shift in zip(CODES, (6, 4, 2), strict=True):
        kinds.append((code, ("predefined", "RLE", "FSE", "repeat")[modes >> shift & 3]))
    return kinds


def test_the_corpus_holds_every_kind_of_frame(corpus: tuple[Sample, ...]) -> None:
    found = set().union(*(kinds_of(sample.frame) for sample in corpus))
    assert KINDS - found == set()


def test_the_corpus_holds_every_kind_that_the_encoder_of_runs_writes() -> None:
    found: set[tuple[str, object]] = set()
    for nbytes in (100, 300, 5000, 1 << 16, 70_000, 1 << 17, 1 << 18, (1 << 20) - 3, 1 << 20):
        for density in (0, 0.0001, 0.001, 0.01, 0.05, 0.2, 0.3):
            for values in (1, 3, 255):
                rng = np.random.default_rng([nbytes, values])
                changed = rng.random(nbytes) < density
                content = (rng.integers(1, values + 1, nbytes) * changed).astype(np.uint8)
                found |= kinds_of(
                    compress_runs(content, content.size)[0] or compress_single(content.data)
                )
    assert len(found) > 20
    assert found - KINDS == set()


def test_the_corpus_holds_every_size_class(corpus: tuple[Sample, ...]) -> None:
    sizes = {len(sample.content) for sample in corpus}
    assert {1, 2, 15, 16, 17, 255, 256, 257, 65535, 65536, 65537, 131072, 131073} <= sizes
    assert max(sizes) > 1 << 20
    assert sum(len(sample.content) for sample in corpus) < 6.5 * (1 << 20)


def test_each_sample_is_one_frame_that_libzstd_decodes(corpus: tuple[Sample, ...]) -> None:
    decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    for sample in corpus:
        (frame,) = walk_frames(
            sample.frame, content_nbytes=len(sample.content), where=Where(tensor=sample.name)
        )
        assert not frame.has_checksum
        assert decoder.decompressobj().decompress(sample.frame) == sample.content, sample.name


def test_the_corpus_is_the_same_every_time(corpus: tuple[Sample, ...]) -> None:
    assert make_corpus() == corpus


def test_a_decoder_that_works_is_trusted(runtime: Runtime) -> None:
    assert check_nvcomp(runtime, Nvcomp(runtime.nvcomp_library())) is None


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("late", [False, True])
def test_memory_is_given_back_and_none_is_page_locked(late: bool) -> None:
    runtime = EmulatedRuntime(Order() if late else None)
    assert check_nvcomp(runtime, Nvcomp(runtime.nvcomp_library())) is None
    assert runtime.damage == ()
    assert runtime.scratch_nbytes == runtime.pinned_peak_nbytes == 0
    assert 20 << 20 < runtime.scratch_peak_nbytes < 26 << 20


@pytest.mark.usefixtures("needs_compiler", "short_corpus")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.AFTER_OUTPUT, "bytes outside the outputs were written: 1"),
        (Fault.BEFORE_OUTPUT, "bytes outside the outputs were written: 1"),
        (Fault.AFTER_TEMP, "bytes outside the scratch were written"),
        (Fault.WRONG_BYTE, "sample '131073 bytes': the byte at 131072 is wrong"),
        (Fault.WRONG_SIZE, "sample '131073 bytes': 131074 bytes, not 131073"),
        (Fault.STATUS, "sample '131073 bytes': cannot decompress (12)"),
        (Fault.CALL, "1000"),
    ],
)
def test_a_decoder_that_errs_is_not_trusted(
    tmp_path: Path, fault: Fault, reason: str, late: bool
) -> None:
    library = own_stand_in(tmp_path)
    runtime = EmulatedRuntime(Order() if late else None, nvcomp=library)
    with faulty(library, fault):
        verdict = check_nvcomp(runtime, Nvcomp(library))
    assert verdict is not None
    assert verdict.startswith("nvCOMP 6.0.0 fails its self-test on emulated")
    assert reason in verdict
    assert runtime.damage == ()


@pytest.mark.usefixtures("needs_compiler", "short_corpus")
@pytest.mark.parametrize("trusted", [False, True])
def test_the_verdict_is_kept_for_the_process(tmp_path: Path, trusted: bool) -> None:
    library = own_stand_in(tmp_path)
    runtime, nvcomp = EmulatedRuntime(nvcomp=library), Nvcomp(library)
    if trusted:
        verdict = nvcomp_is_trusted(runtime, nvcomp)
    else:
        with faulty(library, Fault.STATUS):
            verdict = nvcomp_is_trusted(runtime, nvcomp)
    assert (verdict is None) == trusted
    done = runtime.operations.copy()
    assert nvcomp_is_trusted(runtime, Nvcomp(library)) == verdict
    assert runtime.operations == done


@pytest.mark.usefixtures("needs_compiler", "short_corpus")
def test_what_says_nothing_about_the_decoder_is_raised_and_not_kept(tmp_path: Path) -> None:
    library = own_stand_in(tmp_path)
    nvcomp = Nvcomp(library)
    with pytest.raises(OutOfScratchError):
        nvcomp_is_trusted(EmulatedRuntime(nvcomp=library, capacity_nbytes=1 << 20), nvcomp)
    lost = EmulatedRuntime(nvcomp=library)
    lost.fail_at("synchronize", 1, ModelPoisonedError("the device is lost"))
    with pytest.raises(ModelPoisonedError):
        nvcomp_is_trusted(lost, nvcomp)
    assert nvcomp_is_trusted(EmulatedRuntime(nvcomp=library), nvcomp) is None
