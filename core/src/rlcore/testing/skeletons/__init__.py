"""One small, complete class of each kind and its test: what ``rlcore plugins new`` writes under another name."""
