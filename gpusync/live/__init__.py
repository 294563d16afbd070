"""A live model: attached, updated in place, or left as it was."""
