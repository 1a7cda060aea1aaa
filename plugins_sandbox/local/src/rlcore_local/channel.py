"""The wire to the agent in a sandbox: frames of one JSON line and raw bytes, requests and answers matched by id.

What comes back is untrusted: sizes are bounded, and anything that is not a frame means that the sandbox is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.errors import SandboxLost

__all__ = ["Channel"]

CHUNK = 256 * 1024
MAX_HEADER = 64 * 1024
SLACK = 4096


class _Pending:
    def __init__(self, max_bytes: int, sink: Callable[[bytes], object] | None) -> None:
        self.answer: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self.left = max_bytes + SLACK
        self.sink = sink


class Channel:
    """Requests to one agent over the pipes of its process; owns the task that reads the answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._pending: dict[int, _Pending] = {}
        self._next = 1
        self._errors = bytearray()
        self.lost: str | None = None
        self.ready = self._expect(0, 0, None)
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._read_errors())]

    async def call(
        self,
        op: str,
        fields: Mapping[str, Any],
        body: bytes = b"",
        *,
        seconds: float,
        max_bytes: int = 0,
        sink: Callable[[bytes], object] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """One request and its answer; cancelling it ends the work in the sandbox.

        Raises ``SandboxLost`` if the agent is gone, answers nonsense or is silent for ``seconds``; ``OSError`` with the
        errno of the agent.
        """
        ident = self.new_id()
        pending = self._expect(ident, max_bytes, sink)
        try:
            async with asyncio.timeout(seconds):
                await self.send(ident, op, fields, body)
                header, data = await asyncio.shield(pending.answer)
        except TimeoutError:
            self.fail(f"the sandbox's agent did not answer within {seconds:.0f} s")
            raise SandboxLost(str(self.lost)) from None
        except asyncio.CancelledError:
            self.post(ident, "cancel", {})
            raise
        finally:
            self._pending.pop(ident, None)
        return _checked(header), data

    async def stream(self, op: str, fields: Mapping[str, Any], source: Callable[[], bytes], *, seconds: float) -> None:
        """Open an upload, send what ``source`` gives until it is empty, finish it by ``op``."""
        ident = self.new_id()
        pending = self._expect(ident, 0, None)
        try:
            async with asyncio.timeout(seconds):
                await self.send(ident, "open", {"path": fields["path"] if op == "write" else None})
                while chunk := source():
                    await self.send(ident, "data", {}, chunk)
                await self.send(ident, op, fields)
                header, _ = await asyncio.shield(pending.answer)
        except TimeoutError:
            self.fail(f"the sandbox took no more data for {seconds:.0f} s")
            raise SandboxLost(str(self.lost)) from None
        except asyncio.CancelledError:
            self.post(ident, "cancel", {})
            raise
        finally:
            self._pending.pop(ident, None)
        _checked(header)

    def new_id(self) -> int:
        """An id that was not used before on this wire."""
        self._next += 1
        return self._next

    async def send(self, ident: int, op: str, fields: Mapping[str, Any], body: bytes = b"") -> None:
        """Write one frame and wait while the pipe is full."""
        self.post(ident, op, fields, body)
        assert self._process.stdin is not None
        try:
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            await asyncio.sleep(0)
            raise SandboxLost(self.lost or "the sandbox's agent is gone") from None

    def post(self, ident: int, op: str, fields: Mapping[str, Any], body: bytes = b"") -> None:
        """Write one frame without waiting."""
        if self.lost is not None:
            return
        header = json.dumps({**fields, "id": ident, "op": op, "size": len(body)})
        assert self._process.stdin is not None
        self._process.stdin.write(header.encode() + b"\n" + body)

    def fail(self, reason: str) -> None:
        """The agent is gone or not to be trusted any more."""
        if self.lost is None:
            self.lost = reason
            for pending in self._pending.values():
                if not pending.answer.done():
                    pending.answer.set_exception(SandboxLost(reason))
                    pending.answer.exception()  # a cancelled caller may never look

    def complaints(self) -> str:
        """The last lines that bubblewrap or the agent wrote to stderr."""
        return self._errors.decode("utf-8", "replace").strip()

    async def aclose(self) -> None:
        """End the reading tasks; the process must be dead."""
        for task in self._tasks:
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(task, 1)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _expect(self, ident: int, max_bytes: int, sink: Callable[[bytes], object] | None) -> _Pending:
        if self.lost is not None:
            raise SandboxLost(self.lost)
        self._pending[ident] = pending = _Pending(max_bytes, sink)
        return pending

    async def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        try:
            while True:
                header = json.loads(await stream.readuntil(b"\n"))
                size, pending = int(header["size"]), self._pending.get(header["id"])
                if not 0 <= size <= (pending.left if pending else 64 * 1024 * 1024):
                    raise ValueError(f"a frame of {size} bytes was not asked for")
                data = await stream.readexactly(size)
                if pending is None or pending.answer.done():
                    continue
                pending.left -= size
                if not header.get("more"):
                    pending.answer.set_result((header, data))
                elif pending.sink is not None:
                    pending.sink(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.wait({self._tasks[1]}, timeout=0.5)
            complaint = self.complaints()
            self.fail("the sandbox's agent is gone" + (f": {complaint.splitlines()[-1]}" if complaint else ""))
        except (asyncio.LimitOverrunError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.fail(f"the sandbox's agent sent something that is not an answer: {error}")

    async def _read_errors(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        while data := await stream.read(4096):
            self._errors += data
            del self._errors[:-4096]


def _checked(header: dict[str, Any]) -> dict[str, Any]:
    if "errno" in header:
        raise OSError(int(header["errno"]), str(header.get("error", "failed")))
    return header
