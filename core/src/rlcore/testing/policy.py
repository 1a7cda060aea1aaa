"""Conformance of a policy client that speaks HTTP: about ten behaviours that sessions rely on."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from rlcore.errors import PolicyUnavailable, Throttled
from rlcore.types import Completion, FinishReason, Message, ModelRequest, RunContext, Sampling

__all__ = ["PolicyClientConformance", "Server"]

SECONDS = 10.0
"""No test of the kit may take longer."""

Respond = Callable[[Mapping[str, Any]], tuple[int, str]]


class Server:
    """A small HTTP server on a free local port that answers what it is told, and counts.

    Attributes:
        requests: bodies of the generations that arrived, in order; other calls (an abort) are in ``calls``.
        calls: paths of everything that arrived.
        open: generations whose connection is open now.
        hang: never answer a generation.
        respond: status and body for a generation.
    """

    def __init__(self, respond: Respond) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.calls: list[str] = []
        self.open = 0
        self.hang = False
        self.respond = respond
        self.url = ""
        self._aborted = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        """Serve while the block runs."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path = line.split()[1].decode()
                length = 0
                while header := (await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = json.loads(await reader.readexactly(length) or b"{}")
                self.calls.append(path)
                if "abort" in path:
                    self._aborted.set()
                status, text = 200, "{}"
                if length and "abort" not in path:
                    self.requests.append(body)
                    status, text = await self._generate(reader, body)
                content = text.encode()
                kind = "application/json" if text[:1] in "{[" else "text/html"
                head = f"HTTP/1.1 {status} Told\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
                writer.write(head.encode() + content)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            writer.close()

    async def _generate(self, reader: asyncio.StreamReader, body: Mapping[str, Any]) -> tuple[int, str]:
        self.open += 1
        try:
            if self.hang:
                gone = asyncio.ensure_future(reader.read(1))
                aborted = asyncio.ensure_future(self._aborted.wait())
                await asyncio.wait([gone, aborted], return_when=asyncio.FIRST_COMPLETED)
                aborted.cancel()
                if gone.done():
                    raise ConnectionResetError
                gone.cancel()
            return self.respond(body)
        finally:
            self.open -= 1


class PolicyClientConformance:
    """Subclass it in a test module, name the client, and say what its server answers. ::

    class TestMyClient(PolicyClientConformance):
        client = MyClient

        def options_for(self, url):
            return {"base_url": url}

        def answer(self, body):
            return {"text": "hello", "finish_reason": "stop"}
    """

    client: ClassVar[type]

    def options_for(self, url: str) -> Mapping[str, Any]:
        """Options of a client of the server at ``url``."""
        raise NotImplementedError("return the client's options for this server")

    def answer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the server answers to a generation, as JSON; ``body`` is the client's request."""
        raise NotImplementedError("return what your server answers")

    def context(self) -> RunContext:
        """The facts of the run that the client starts with."""
        return RunContext(run_id="kit", run_dir=Path("."), seed=0, model={"path": None, "dtype": "auto"})

    def request(self, **changes: Any) -> ModelRequest:
        """One generation; token ids for clients with a renderer, messages for the others."""
        fields: dict[str, Any] = {
            "id": "request-1",
            "session_id": "session-1",
            "max_tokens": 16,
            "sampling": Sampling(),
            "seconds": 5.0,
            "prompt_ids": (1, 2, 3),
            "messages": (Message("user", "hello"),),
        }
        return ModelRequest(**{**fields, **changes})

    # --- the machine

    def run(self, test: Callable[[Any, Server], Awaitable[None]], respond: Respond | None = None) -> None:
        """Run ``test`` with a started client and its server."""

        async def bounded() -> None:
            async with asyncio.timeout(SECONDS), Server(respond or self._good).running() as server:
                client = self.client(self.client.Config(**self.options_for(server.url)))  # type: ignore[attr-defined]
                await client.start(self.context())
                server.requests.clear()
                try:
                    await test(client, server)
                finally:
                    await client.aclose()

        asyncio.run(bounded())

    def _good(self, body: Mapping[str, Any]) -> tuple[int, str]:
        return 200, json.dumps(self.answer(body))

    def _refused(self, respond: Respond, error: type[Exception]) -> None:
        async def test(client: Any, server: Server) -> None:
            try:
                completion = await client.complete(self.request())
            except error:
                assert len(server.requests) == 1, f"the request was sent {len(server.requests)} times"
            else:
                raise AssertionError(f"{error.__name__} was not raised, but {completion} returned")

        self.run(test, respond)

    # --- what is checked

    def test_a_completion_is_complete(self) -> None:
        """Its reason is known; ids have as many finite log-probs; no more than was asked for."""

        async def test(client: Any, server: Server) -> None:
            completion = await client.complete(self.request())
            assert isinstance(completion, Completion)
            assert isinstance(completion.finish_reason, FinishReason)
            assert len(completion.token_ids) == len(completion.logprobs)
            assert all(math.isfinite(p) and p <= 0 for p in completion.logprobs)
            assert len(completion.token_ids) <= 16
            if client.renderer is not None:
                assert completion.token_ids, "a token-exact client gave no ids"
            else:
                assert completion.message is not None, "a client of messages gave no message"

        self.run(test)

    def test_a_generation_is_sent_once(self) -> None:
        """And every one of many at once."""

        async def test(client: Any, server: Server) -> None:
            await asyncio.gather(*(client.complete(self.request(id=f"request-{i}")) for i in range(20)))
            assert len(server.requests) == 20

        self.run(test)

    def test_a_failing_server_is_not_asked_again(self) -> None:
        """Status 500: the session decides what comes next."""
        self._refused(lambda body: (500, '{"error": "internal"}'), PolicyUnavailable)

    def test_a_refusal_for_now_is_throttled(self) -> None:
        """Status 429."""
        self._refused(lambda body: (429, '{"error": "slow down"}'), Throttled)

    def test_an_error_with_status_200_is_no_answer(self) -> None:
        """Servers do that."""
        self._refused(lambda body: (200, '{"object": "error", "error": "no", "message": "no"}'), PolicyUnavailable)

    def test_a_page_is_no_answer(self) -> None:
        """A proxy's HTML."""
        self._refused(lambda body: (200, "<html>welcome</html>"), PolicyUnavailable)

    def test_nobody_there_is_no_answer(self) -> None:
        """Connection refused."""

        async def test() -> None:
            client = self.client(self.client.Config(**self.options_for("http://127.0.0.1:1")))  # type: ignore[attr-defined]
            try:
                async with asyncio.timeout(SECONDS):
                    await client.start(self.context())
                    await client.complete(self.request())
            except PolicyUnavailable:
                return
            finally:
                await client.aclose()
            raise AssertionError("PolicyUnavailable was not raised")

        asyncio.run(test())

    def test_a_silent_server_is_left_in_time(self) -> None:
        """``request.seconds`` bounds the call, and the connection is closed."""

        async def test(client: Any, server: Server) -> None:
            server.hang = True
            started = asyncio.get_running_loop().time()
            try:
                await client.complete(self.request(seconds=0.3))
            except PolicyUnavailable:
                took = asyncio.get_running_loop().time() - started
                assert took < 3, f"took {took:.1f} s of 0.3"
            else:
                raise AssertionError("PolicyUnavailable was not raised")
            await _until(lambda: server.open == 0)

        self.run(test)

    def test_a_cancelled_generation_is_ended_at_the_server(self) -> None:
        """Its connection is closed or it is aborted by its id: nobody generates for nobody."""

        async def test(client: Any, server: Server) -> None:
            server.hang = True
            calls = [asyncio.create_task(client.complete(self.request(id=f"request-{i}"))) for i in range(4)]
            await _until(lambda: server.open == 4)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert all(call.cancelled() for call in calls)
            await _until(lambda: server.open == 0)

        self.run(test)

    def test_housekeeping(self) -> None:
        """Unknown ids may be aborted; what runs is a set or unknown; closing twice is fine."""

        async def test(client: Any, server: Server) -> None:
            await client.abort("never-sent")
            running = await client.running()
            assert running is None or isinstance(running, frozenset)
            await client.aclose()

        self.run(test)


async def _until(true: Callable[[], bool]) -> None:
    """Wait at most two seconds for it."""
    async with asyncio.timeout(2):
        while not true():  # noqa: ASYNC110 - a counter of another task, looked at for two seconds at most
            await asyncio.sleep(0.01)
