"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.crash.figures import counted

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see gpusync's own defaults, whatever ``GPUSYNC_*`` variables the caller's shell has."""
    for name in [name for name in os.environ if name.startswith("GPUSYNC_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in sorted(counted.items()):
        terminalreporter.write_line(f"{name}: {count:,}")
