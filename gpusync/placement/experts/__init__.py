"""Places of a checkpoint whose tensors a plain module keeps under other names, or stacked into larger parameters.

Libraries without a ``load_weights`` merge tensors as they load: the experts of a layer become one parameter, and modules
are renamed. No model is known by name here. Names say which parameters may hold a tensor, shape and dtype where in them it
would lie as one contiguous run, and bytes which of these runs it is. Equal bytes prove nothing: a run is taken only where
no other candidate holds the same bytes, or where other tensors of the stack show which row and which half is this one's.
"""

from __future__ import annotations

from gpusync.placement.experts.match import match_slices
from gpusync.placement.experts.spots import Read

__all__ = ["Read", "match_slices"]
