"""``python -m gpusync.cli``."""

from __future__ import annotations

import sys

from gpusync.cli import main

sys.exit(main())
