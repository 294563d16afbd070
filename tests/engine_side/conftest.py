"""Fixtures of the tests of the engine's side."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import live, wire
from tests.crash.conftest import fast_path, fast_root  # noqa: F401
from tests.driver import pull
from tests.engine_side.scene import NAMES
from tests.warm import Warm


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Tests look at what is left once nothing waits for collection: not to go through all of torch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["cpu", "emulated"])
def device(request: pytest.FixtureRequest) -> str:
    """The applier to go through; both work on host memory."""
    live.need(request.param)
    return str(request.param)


@pytest.fixture
def stream(fast_path: Path) -> Iterator[wire.Stream]:  # noqa: F811
    """A host at version 1, with versions 2 and 3 published."""
    made = wire.Stream(fast_path / "stream")
    made.delta(NAMES)
    pull(made, 1)
    made.delta(NAMES)
    made.delta(NAMES)
    yield made


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Processes that have imported what an engine has."""
    made = Warm(
        "gpusync", "gpusync.live.apply", "gpusync.testing", "tests.live", "tests.crash.harness"
    )
    yield made
    made.close()
