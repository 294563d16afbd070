"""Fixtures of the crowd tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.conftest import fast_path, fast_root  # noqa: F401
from tests.warm import Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Processes that have imported what a receiver has."""
    made = Warm(
        "gpusync",
        "gpusync.local.pull",
        "gpusync.live.apply",
        "gpusync.testing",
        "tests.live",
        "tests.crash.frugal",
    )
    yield made
    made.close()
