"""Faults of scratch files: of a chain longer than the decoders, folded in passes, and of sparse payloads over their cap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpusync.folding import fold
from gpusync.format import encodings
from tests import wire
from tests.crash.harness import CHANGED, Case, Scenes
from tests.faults.campaign import Finished, Prepared, Pulled, Run, inject_at_every_call
from tests.faults.kinds import EVERYTHING, FAULTS, Fault

OF_SCRATCH = tuple(
    replace(fault, where="scratch") for fault in FAULTS if fault.name not in ("ESTALE", "EINTR")
)
DECODERS = 2
"""In place of 16: a chain of five is then folded in three passes, over both scratch files."""


def _publish(stream: wire.Stream) -> None:
    for encoding in ("xor", "xor", "xor_sparse", "xor", "overwrite", "xor"):
        stream.delta(CHANGED, encoding=encoding)


LONG = Case("long chain", 1, 6, _publish)
LONG_SEED = Case("seed of a long chain", None, 6, _publish)

RUNS: dict[str, tuple[str, Callable[[Scenes], Run]]] = {
    "pull": ("staged", lambda scenes: Pulled(scenes(LONG))),
    "rolling pull": ("rolling", lambda scenes: Pulled(scenes(LONG))),
    "seed": ("staged", lambda scenes: Pulled(scenes(LONG_SEED))),
    "prepare": ("staged", lambda scenes: Prepared(scenes(LONG))),
    "finish": ("staged", lambda scenes: Finished(scenes(LONG))),
}


@pytest.fixture(autouse=True)
def few_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSYNC_THREADS", "1")
    monkeypatch.setattr(fold, "_STREAMS", DECODERS)
    monkeypatch.setattr(encodings, "SPARSE_MEMORY_BYTES", 0)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", OF_SCRATCH, ids=lambda fault: fault.name)
@pytest.mark.parametrize("name", RUNS)
def test_a_fault_at_every_call_on_a_scratch_file(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch, name: str, fault: Fault, lasting: bool
) -> None:
    swap, make = RUNS[name]
    monkeypatch.setenv("GPUSYNC_SWAP", swap)
    stride = 1 if EVERYTHING else 15 if lasting else 6
    inject_at_every_call(make(scenes), fault, lasting=lasting, stride=stride)
