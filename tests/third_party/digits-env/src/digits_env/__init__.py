"""Answer with digits."""
