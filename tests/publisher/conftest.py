"""A small checkpoint and its next versions, for both encoders of seekable frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusync.publisher import delta_options
from tests.support import (
    Tensors,
    make_checkpoint,
    move_one_ulp,
    tiny_llama_tensors,
)


@pytest.fixture(scope="module", autouse=True, params=[False, True], ids=["libzstd", "runs"])
def encoder_of_frames(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests of a publisher run with either encoder of seekable frames."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(delta_options, "_LARGE_CHECKPOINT_NBYTES", 0)
        yield


@pytest.fixture
def states() -> list[Tensors]:
    """Four versions of a small checkpoint."""
    found = [tiny_llama_tensors(7)]
    for version in (1, 2, 3):
        found.append(move_one_ulp(found[-1], 0.02, seed=version))
    return found


@pytest.fixture
def base_dir(tmp_path: Path, states: list[Tensors]) -> Path:
    return make_checkpoint(tmp_path / "base", states[0])
