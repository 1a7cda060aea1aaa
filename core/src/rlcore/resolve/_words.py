"""What is wrong with a value, in words: key, reason, nearest valid name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlcore.plugins import nearest
from rlcore.resolve._layers import Key
from rlcore.resolve._values import field_of, keys

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def place(location: Sequence[int | str], values: Any, model: Any) -> tuple[Key, Any]:
    """The key of an error and the type that holds it: its location without the tags of unions."""
    key: list[str] = []
    for number, part in enumerate(location):
        there = part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int)
        last = number == len(location) - 1
        if not there and not last:
            continue
        key.append(str(part))
        if not last:
            values, model = values[part], field_of(model, part)
    return tuple(key), model


def say(detail: ErrorDetails, holder: Any) -> str:
    """What pydantic found, as a user reads it; ``holder`` is the type that has the key."""
    kind, message, value = detail["type"], detail["msg"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key{nearest(str(detail['loc'][-1]), keys(holder))}"
    if kind == "missing":
        return "is missing"
    if kind == "secret_literal":
        return message  # and never the value
    if kind in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"should be a table of keys, not {json.dumps(value)}"
    message = message.replace("Input should", "should", 1)
    if isinstance(value, (str, int, float, bool)) or value is None:
        message += f", not {json.dumps(value)}"
    if kind == "string_type" and isinstance(value, (int, float)):
        message += ": put it in quotes"
    return message
