"""Calls with a total deadline that always come to an end at the server too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rlcore.errors import PolicyUnavailable

__all__ = ["Calls"]

T = TypeVar("T")


class Calls:
    """The open calls of one client.

    Args:
        give_up: ends a call at the server (its id, its task); bounded in time. The task is cancelled afterwards, which
            closes its connection.
    """

    def __init__(self, give_up: Callable[[str, asyncio.Task[Any]], Awaitable[None]]) -> None:
        self._give_up = give_up
        self._open: dict[str, asyncio.Task[Any]] = {}
        self._endings: set[asyncio.Task[None]] = set()

    async def run(self, request_id: str, call: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result of ``call``.

        A call that takes too long, or whose caller is cancelled, is ended at the server before this returns: a time-out
        of the HTTP client alone is one of each read, and a server that drips one byte a second never meets it.

        Raises:
            PolicyUnavailable: it took longer than ``seconds``, or the client was closed.
        """
        task = asyncio.create_task(call, name=request_id)
        self._open[request_id] = task
        try:
            await asyncio.wait({task}, timeout=seconds)
            if not task.done():
                raise PolicyUnavailable(f"no answer within {seconds:.4g} s")
            if task.cancelled():
                raise PolicyUnavailable("the client was closed")
            return task.result()
        finally:
            del self._open[request_id]
            if task.done():
                _ = (
                    task.cancelled() or task.exception()
                )  # seen, where the caller is cancelled in the moment of a failure
            else:
                # cancelled once more while it ends the call, the caller goes, and close() waits for the ending
                await asyncio.shield(self._end(request_id, task))

    def _end(self, request_id: str, task: asyncio.Task[Any]) -> asyncio.Task[None]:
        async def end() -> None:
            try:
                await self._give_up(request_id, task)
            finally:
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()  # seen: nobody else will ask for it

        ending = asyncio.create_task(end(), name=f"end {request_id}")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return ending

    async def close(self) -> None:
        """End every open call."""
        for request_id, task in list(self._open.items()):
            self._end(request_id, task)
        if self._endings:
            await asyncio.wait(self._endings)
