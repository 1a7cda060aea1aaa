"""The application: routes, key, errors; and the server around it."""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from rlcore.errors import ConfigError, PolicyUnavailable

from rlcore_engine.engine import EmbeddedEngine
from rlcore_engine.http import chat, control, generate
from rlcore_engine.http.wire import ClientGone, WireError, error_response

__all__ = ["LOOPBACK", "create_app", "listen", "server", "serving", "url_of"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def create_app(engine: EmbeddedEngine, *, name: str, key: str | None = None) -> FastAPI:
    """The routes over a started engine. With a ``key`` every route but ``/health`` wants it as a bearer token."""

    def admit(request: Request) -> None:
        if key is None or request.url.path == "/health":
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise WireError(401, "the key is missing or wrong (Authorization: Bearer …)", None, "invalid_api_key")

    app = FastAPI(dependencies=[Depends(admit)], docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine, app.state.name, app.state.started = engine, name, int(time.time())
    app.state.staged = control.Staged()
    for module in (generate, chat, control):
        app.include_router(module.router)

    @app.exception_handler(WireError)
    async def wire_error(_request: Request, error: WireError) -> Response:
        return error_response(error)

    @app.exception_handler(PolicyUnavailable)
    async def unavailable(_request: Request, error: PolicyUnavailable) -> Response:
        return error_response(WireError(503, str(error)))

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "extra_forbidden":
            return error_response(WireError(400, f"{where}: not supported", where, "unsupported_parameter"))
        return error_response(WireError(400, f"{where}: {first['msg']}", where or None))

    @app.exception_handler(404)
    async def missing(request: Request, _error: Exception) -> Response:
        return error_response(WireError(404, f"there is no route {request.url.path}"))

    return app


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the port is in use, or the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}; choose another with --port") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server(app: FastAPI) -> uvicorn.Server:
    """A server for :func:`listen`'s socket; connections that are open at the end get a second."""
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1, ws="none")
    )


@asynccontextmanager
async def serving(
    engine: EmbeddedEngine, *, name: str, host: str = "127.0.0.1", port: int = 0, key: str | None = None
) -> AsyncIterator[str]:
    """Serve in the running loop; gives the URL."""
    sock = listen(host, port)
    http = server(create_app(engine, name=name, key=key))
    # `serve` would take the process's signals, which belong to the run
    task = asyncio.create_task(http._serve([sock]), name="rlcore-engine-http")
    try:
        while not http.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        if task.done():
            task.result()
        yield url_of(sock)
    finally:
        http.should_exit = True
        await task
        sock.close()
