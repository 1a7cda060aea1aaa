"""``${VAR}`` and ``${VAR:-default}`` in the environment tables of a task: filled from the host, by permission only."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping
from functools import partial

from rlcore.errors import TaskError

__all__ = ["filled"]

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def filled(values: Mapping[str, str], where: str, allowed: Container[str] | None = None) -> dict[str, str]:
    """The values with their references to host variables filled in.

    Args:
        values: as the task wrote them.
        where: for messages: file and table.
        allowed: names of host variables that may enter a sandbox; ``None``: they were checked before.

    Raises:
        TaskError: a variable that is not set (or not allowed) and has no default.
    """

    def value(key: str, match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if allowed is None or name in allowed:
            found = os.environ.get(name)
            if found is not None:
                return found
        if default is not None:
            return default
        if allowed is not None and name not in allowed:
            raise TaskError(
                f"{where}.{key} asks for the host variable {name}: host variables enter a sandbox only by name; "
                f"add {name!r} to taskset.host_env"
            )
        raise TaskError(f"{where}.{key}: the host variable {name} is not set and has no default")

    return {key: _REFERENCE.sub(partial(value, key), text) for key, text in values.items()}
