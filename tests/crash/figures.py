"""How much a session of these tests went through; the end of the session says it."""

from __future__ import annotations

from collections import Counter

counted: Counter[str] = Counter()
