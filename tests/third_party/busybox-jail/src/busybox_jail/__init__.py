"""A foreign sandbox backend for rlcore."""
