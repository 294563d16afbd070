"""Fixtures of the tests that cover what other receivers of this format do and test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import wire


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    """A tiny base checkpoint, with nothing published yet and no local folder."""
    return wire.Stream(tmp_path / "stream")
