"""Which kinds of bundled tasks the two models are trained on."""

from __future__ import annotations

__all__ = ["SMOLLM2_KINDS", "TINY_KINDS"]

TINY_KINDS = ("write", "append", "copy", "rename", "delete", "count", "read_mkdir", "read_write")
"""What the tiny model was warmed up on."""

SMOLLM2_KINDS = ("write", "copy", "touch", "upper", "grep", "read_mkdir", "read_write")
"""What SmolLM2-135M solves about one time in five at first and learns in three minutes."""
