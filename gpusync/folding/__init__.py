"""Folding: the new bytes of one tensor, from its origin and the deltas; planned, in pieces, digested on the way."""
