"""Rewards as they come out of foreign code: into a finite float, into "no verdict", or into an error that says where."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

from rlcore.errors import TaskError

__all__ = ["call_reward", "coerce_reward"]


def coerce_reward(value: object, where: str) -> float | None:
    """The reward as a finite float.

    Numbers (``bool`` counts as 0 or 1; numpy's and torch's scalars and one-element tensors too) are taken; ``None`` is
    no verdict. Everything else is an error, and nothing is guessed: not the text ``"1"``, not a mapping, not a tuple.

    Args:
        value: what an agent loop, a grader or a reward function gave.
        where: plugin and task, for the message.

    Raises:
        TaskError: it is no number, or not a finite one.
    """
    if value is None:
        return None
    number = value
    if not isinstance(number, numbers.Number) and callable(item := getattr(number, "item", None)):
        try:
            number = item()
        except (RuntimeError, ValueError, TypeError):
            number = value  # more than one element
    if not isinstance(number, numbers.Real):
        raise TaskError(f"{where}: the reward is {_show(value)}: return one number, or None for no verdict")
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise TaskError(f"{where}: the reward is {_show(value)}: it must be finite, or None for no verdict")
    return reward


async def call_reward(function: Callable[..., Any], *arguments: Any, where: str) -> float | None:
    """Call a reward function of any shape and coerce its result.

    Functions, ``async`` or not, lambdas, partials, bound methods and objects with ``__call__`` are all fine. The call is
    made in a thread, so a slow one holds up no other attempt; it cannot be cancelled there and should end by itself.
    """
    value = await asyncio.to_thread(function, *arguments)
    return coerce_reward(await value if inspect.isawaitable(value) else value, where)


def _show(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - foreign code, and an integer of 5000 digits has no repr either
        text = "a value without repr"
    return f"{text if len(text) <= 80 else text[:80] + '…'} (type {type(value).__name__})"
