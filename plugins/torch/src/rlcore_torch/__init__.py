"""The single-process trainer of rlcore (CPU or one GPU), with shared prefixes computed once."""
