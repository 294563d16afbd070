"""Ranks that update together: rounds over the group, ballots, and digests added over slices."""
