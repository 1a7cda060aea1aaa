"""Giving an engine new weights without ever leaving it paused or with half of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from rlcore.errors import PolicyUnavailable
from rlcore.protocols import Engine
from rlcore.types import Array

__all__ = ["publish"]

STEP_SECONDS = 600.0
"""Bound of each call of an update."""

TRIES = 4
"""Times that flush and resume are tried: both are safe to repeat, and an engine that stays paused hangs the run."""


async def publish(engine: Engine, version: int, weights: Iterable[tuple[str, Array]]) -> None:
    """Pause, update, flush, resume, in this order and exactly once per version.

    A caller that is cancelled waits for the end of the update, so that the engine never sees half of one; an update that
    fails still resumes the engine, which then serves its old version.

    Raises:
        PolicyUnavailable: the engine does not serve ``version`` now, with the reason.
    """
    update = asyncio.ensure_future(_update(engine, version, weights))
    try:
        await asyncio.shield(update)
    except asyncio.CancelledError:
        await asyncio.wait([update])
        if not update.cancelled():
            update.exception()
        raise


async def _update(engine: Engine, version: int, weights: Iterable[tuple[str, Array]]) -> None:
    async with asyncio.timeout(STEP_SECONDS):
        await engine.pause()
    try:
        async with asyncio.timeout(STEP_SECONDS):
            await engine.update_weights(version, weights)
        await _persist("flush", engine.flush)
    finally:
        await _persist("resume", engine.resume)
    if engine.version != version:
        raise PolicyUnavailable(f"the engine serves version {engine.version} after an update to version {version}")


async def _persist(what: str, call: Callable[[], Awaitable[None]]) -> None:
    for attempt in range(TRIES):
        try:
            async with asyncio.timeout(STEP_SECONDS / TRIES):
                await call()
            return
        except (PolicyUnavailable, TimeoutError) as error:
            if attempt == TRIES - 1:
                raise PolicyUnavailable(f"the engine did not {what} in {TRIES} tries: {error}") from error
            await asyncio.sleep(0.5 * 2**attempt)
