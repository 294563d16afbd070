"""The CPU applier, and what it shares with every applier: the parts of an update and its change lists."""
