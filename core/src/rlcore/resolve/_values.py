"""Types of keys, and the right side of a ``--set`` read as its key's type wants it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

_FLOAT = re.compile(r"[+-]?(0|[1-9]\d*(_\d+)*)?(\.\d+(_\d+)*|\.)?([eE][+-]?\d+)?")
_QUOTED = re.compile(r"""\s*("([^"\\]|\\.)*"|'[^']*')\s*""")


class Text(str):
    """The right side of a ``--set``, which is read when the type of its key is known."""


def arms(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type: classes and generic types, literals as the types of their values."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return tuple(arm for part in get_args(annotation) for arm in arms(part))
    if origin is Annotated:
        return arms(get_args(annotation)[0])
    if origin is Literal:
        return tuple({type(value) for value in get_args(annotation)})
    return (annotation,)


def field_of(annotation: Any, key: int | str) -> Any:
    """The type of what ``key`` names in a value of this type; ``Any`` where that is open."""
    for arm in arms(annotation):
        if isinstance(arm, type) and issubclass(arm, BaseModel):
            for name, info in arm.model_fields.items():
                if key in (name, info.alias):
                    return info.annotation
        elif arguments := get_args(arm):
            return arguments[-1] if isinstance(key, str) else arguments[0]
    return Any


def keys(annotation: Any) -> set[str]:
    """The keys that a table of this type may have."""
    models = (arm for arm in arms(annotation) if isinstance(arm, type) and issubclass(arm, BaseModel))
    return {info.alias or name for model in models for name, info in model.model_fields.items()}


def typed(value: Any, annotation: Any) -> Any:
    """A value with every text of ``--set`` in it read as its key's type wants it."""
    if isinstance(value, dict):
        return {key: typed(inner, field_of(annotation, key)) for key, inner in value.items()}
    return read(value, annotation)


def read(value: Any, annotation: Any) -> Any:
    """One value: text of ``--set`` as a key of this type wants it, anything else as it is."""
    if not isinstance(value, Text):
        return value
    text = str(value)
    wanted = {get_origin(arm) or arm for arm in arms(annotation)}
    if text == "null" and NoneType in wanted:
        return None
    parsed = _parse(text)
    if not isinstance(parsed, str):
        wants_text = any(isinstance(arm, type) and issubclass(arm, (str, Path)) for arm in wanted)
        if wants_text and not any(type(parsed) is arm for arm in wanted):
            return text
        if type(parsed) is int and float in wanted and int not in wanted:
            return float(parsed)
    return parsed


def _parse(text: str) -> Any:
    """As TOML, and floats also as ``1e-6``, ``1E3``, ``.5``; what is neither is text, as it is."""
    if _FLOAT.fullmatch(text) and re.search(r"\d", text) and not re.fullmatch(r"[+-]?[\d_]+", text):
        return float(text.replace("_", ""))
    try:
        parsed = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(parsed, str) and not _QUOTED.fullmatch(text) else parsed
