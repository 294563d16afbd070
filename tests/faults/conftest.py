"""Fixtures of the fault tests: those of the crash tests."""

from __future__ import annotations

from tests.crash.conftest import fast_path, fast_root, scenes, victim

__all__ = ["fast_path", "fast_root", "scenes", "victim"]
