"""Where a model's own ``load_weights`` puts each checkpoint tensor, found by running it once without any bytes.

A trace says where the loader would copy, not what the live bytes are: what runs after loading may have changed them. Whoever
uses a trace proves it by comparing live bytes with the checkpoint.
"""

from __future__ import annotations

from gpusync.placement.trace.geometry import Copy
from gpusync.placement.trace.load import LoadWeights, Trace, trace_load

__all__ = ["Copy", "LoadWeights", "Trace", "trace_load"]
