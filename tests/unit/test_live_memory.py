"""gpusync keeps no weights alive: an engine that lets go of a storage has its memory back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import gpusync
from tests import live, wire


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    made = wire.Stream(tmp_path / "stream")
    made.delta()
    return made


def storages_of(model: torch.nn.Module) -> list[StorageWeakRef]:
    tensors = [*model.parameters(), *model.buffers()]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.numel()]


def check_all_go(model: torch.nn.Module, storages: list[StorageWeakRef]) -> None:
    gc.collect()
    model.to("meta")
    assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("stage", ["attached", "finished", "discarded"])
def test_no_storage_is_kept(stream: wire.Stream, stage: str, device: str) -> None:
    model = live.model_from(stream.base, device=device)
    gpusync.attach(model, stream.base)
    update = None
    if stage != "attached":
        chain = gpusync.open_chain(stream.source, 1, base_dir=stream.base)
        update = gpusync.prepare(model, chain, device=device)
        if stage == "finished":
            update.commit()
            update.finish()
        else:
            update.discard()
    check_all_go(model, storages_of(model))
    del update


def test_a_prepared_update_does_not_keep_the_model(stream: wire.Stream) -> None:
    model = live.model_from(stream.base)
    chain = gpusync.open_chain(stream.source, 1, base_dir=stream.base)
    update = gpusync.prepare(model, chain)
    del model
    gc.collect()
    with pytest.raises(gpusync.PlacementError, match="gone"):
        update.commit()
