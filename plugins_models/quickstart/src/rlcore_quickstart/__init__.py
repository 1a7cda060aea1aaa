"""The embedded recipe of rlcore: a 135M model learns to use a shell on a laptop."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tiny_model_path"]


def tiny_model_path() -> Path:
    """The folder of the 0.8 M byte-level Llama that ships with this package, in Hugging Face format.

    It was warmed up on the bundled tasks by ``python -m rlcore_quickstart.make_tiny`` and is meant for tests: it answers
    the short prompts of ``--model tiny`` and nothing else.
    """
    return Path(__file__).parent / "tiny"
