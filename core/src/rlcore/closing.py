"""Closing the parts of a run: one that hangs or fails never keeps the others from closing, and is never silent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["CLOSE_SECONDS", "close_part"]

CLOSE_SECONDS = 5.0
"""Bound of closing one part that names none of its own."""


async def close_part(
    close: Callable[[], Awaitable[None]], seconds: float | None, told: Callable[[str], object]
) -> None:
    """Close one part within ``seconds`` (``None``: ``CLOSE_SECONDS``); what goes wrong is said to ``told``."""
    seconds = CLOSE_SECONDS if seconds is None else seconds
    clock = asyncio.timeout(seconds)
    try:
        async with clock:
            await close()
    except Exception as error:  # noqa: BLE001 - the run is over: what fails now is told, and the other parts still close
        what = f"no end within {seconds:g} s" if clock.expired() else f"{type(error).__name__}: {error}"
        told(f"{getattr(close, '__qualname__', close)}: {what}")
