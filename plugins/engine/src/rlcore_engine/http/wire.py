"""Requests and answers on the wire: errors, clients that go away, streams of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

__all__ = ["ClientGone", "EventStream", "WireError", "error_response", "unless_gone"]

Result = TypeVar("Result")

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class WireError(Exception):
    """An answer that is an error: status, message, and the parameter that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


class ClientGone(Exception):
    """The client closed the connection before its answer was there."""


def error_response(error: WireError) -> JSONResponse:
    """The error as OpenAI words it."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    body = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return JSONResponse({"error": body}, status_code=error.status)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled as soon as the client closes the connection.

    Raises:
        ClientGone: it did.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task, gone)


class EventStream(Response):
    """Server-sent events, one for each item; the iterator is closed as soon as the client goes away.

    An error before the first item is an answer with its status; later it is an event. ``[DONE]`` ends every stream.
    """

    def __init__(self, items: AsyncIterator[dict[str, Any]], first: dict[str, Any]) -> None:
        """``first`` was already taken from ``items``."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._items, self._first = items, first

    @classmethod
    async def open(cls, request: Request, items: AsyncIterator[dict[str, Any]]) -> EventStream:
        """Wait for the first item."""
        try:
            return cls(items, await unless_gone(request, anext(items)))  # type: ignore[arg-type]
        except BaseException:
            await items.aclose()  # type: ignore[attr-defined]
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI side."""
        del self.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        task, gone = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            await _end(task, gone)

    async def _send(self, send: Send) -> None:
        async def event(data: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        async with aclosing(self._items) as items:  # type: ignore[type-var]
            try:
                await event(json.dumps(self._first))
                async for item in items:
                    await event(json.dumps(item))
            except WireError as error:
                await event(bytes(error_response(error).body).decode())
        await event("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
