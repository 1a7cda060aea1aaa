"""Command lines as text for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

__all__ = ["quoted", "word"]

_REFERENCE = re.compile(r"(\$\{[A-Za-z_]\w*\})", re.ASCII)


def quoted(words: Sequence[str]) -> str:
    """A command line: ``${NAME}`` is filled in by the shell, everything else is literal."""
    return " ".join(map(word, words))


def word(text: str) -> str:
    """One word of it."""
    if not _REFERENCE.search(text):
        bare = shlex.quote(text)
        return f"'{text}'" if bare == text and "," in text else bare  # shellcheck minds bare commas in lists
    parts = [
        part if _REFERENCE.fullmatch(part) else re.sub(r'([\\"`$])', r"\\\1", part) for part in _REFERENCE.split(text)
    ]
    return '"' + "".join(parts) + '"'
