"""What a verifier wrote: ``reward.json`` if it exists, else ``reward.txt``; anything doubtful is no verdict, never 0."""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["RewardError", "parse_json", "parse_text"]

MAX_BYTES = 64 * 1024

_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class RewardError(ValueError):
    """The file holds no verdict."""


def parse_text(data: bytes) -> float:
    """One finite decimal number, blanks around it allowed; ``float()`` would also take ``1_0``, ``nan`` and other digits."""
    text = _decode(data, "reward.txt").strip()
    if not text:
        raise RewardError("reward.txt is empty")
    if not _DECIMAL.fullmatch(text):
        raise RewardError(f"reward.txt holds {text[:40]!r}, not one decimal number")
    return _finite(float(text), "reward.txt")


def parse_json(data: bytes) -> dict[str, float]:
    """An object of finite numbers; one value of another type makes the whole file no verdict."""
    text = _decode(data, "reward.json")
    if not text.strip():
        raise RewardError("reward.json is empty")
    try:
        value: Any = json.loads(text, object_pairs_hook=_unique, parse_int=float)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RewardError(f"reward.json is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RewardError(f"reward.json holds a {type(value).__name__}, not an object of numbers")
    rewards = {}
    for key, number in value.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise RewardError(f"reward.json: {key} is a {type(number).__name__}, not a number")
        rewards[key] = _finite(number, f"reward.json: {key}")
    return rewards


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise RewardError("reward.json names a key twice")
    return value


def _decode(data: bytes, name: str) -> str:
    if len(data) > MAX_BYTES:
        raise RewardError(f"{name} has {len(data)} bytes; a verdict is short")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RewardError(f"{name} is not UTF-8 (byte {error.start})") from error


def _finite(number: float, where: str) -> float:
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise RewardError(f"{where} is {value}, not a finite number")
    return value
