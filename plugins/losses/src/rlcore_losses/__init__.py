"""Advantages, corrections (every TIS variant), policy losses and aggregations for rlcore."""
