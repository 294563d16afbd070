"""The local checkpoint: materialized, swapped in, recovered, verified; pulled, or followed by a live update."""
