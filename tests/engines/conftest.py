"""Settings of the engines for tests, which are read when an engine is imported; and what runs where one is missing."""

from __future__ import annotations

import os
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of engines that are not installed."""
    missing = [
        name
        for mark in item.iter_markers("engine")
        for name in mark.args
        if find_spec(name) is None
    ]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed; see `make test-engines`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Where engines are what is asked for (`pytest -m engine`), a skip is a failure."""
    report = yield
    if report.skipped and item.config.option.markexpr == "engine":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} would have been skipped: {report.longrepr[2]}"
    return report
