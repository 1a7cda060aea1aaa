"""The embedded engine of rlcore: a small fast forward with a slot KV cache, in process or over HTTP."""

__version__ = "0.1.0"
