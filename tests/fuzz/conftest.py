"""How many mutants a run takes; by hand: ``pytest tests/fuzz --fuzz-mutants=100000``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-mutants", type=int, default=5000, help="mutants over all campaigns")
    parser.addoption("--fuzz-seed", type=int, default=0, help="number of the first mutant")
