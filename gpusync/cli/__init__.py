"""The ``gpusync`` command: what people call, and how it shows what came of it."""

from __future__ import annotations

from gpusync.cli.commands import main

__all__ = ["main"]
