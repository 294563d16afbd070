"""The trainer's side: diffs against the last version, written as a version that is whole or not there."""
