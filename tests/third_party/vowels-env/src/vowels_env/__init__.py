"""Answer with vowels."""
