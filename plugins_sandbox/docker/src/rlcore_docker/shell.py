"""A shell in a container that stays open over one exec socket and runs one command after the other.

An exec of its own costs 80 ms, a line to an open shell a fraction of one. Each command runs in a session of its own; its
outputs are the two streams of the socket, read by a thread in bounded memory up to a random mark that the shell prints on
both when the command has ended. If something that the command started is still there, it may still hold those streams:
such a shell is used no more (but drained), and the next command gets a fresh one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shlex
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.sandbox_tools import BoundedBytes
from rlcore.shell_sandbox import kill_marked

__all__ = ["Answer", "Shell", "ShellClosed", "kill_script", "run_script"]

LONGEST_ARGUMENT = 100_000
"""Linux takes no argument above 128 KiB; longer scripts go through a file."""


class ShellClosed(Exception):
    """The shell or the connection to it is gone; says nothing about the container."""


@dataclass
class Answer:
    """What a command gave: its exit code, both streams, and whether it left processes behind."""

    code: int
    out: BoundedBytes
    err: BoundedBytes
    left_some: bool


class _Stream:
    """One stream up to its mark; what comes behind a mark is thrown away."""

    def __init__(self, mark: bytes, limit: int) -> None:
        self.kept = BoundedBytes(limit)
        self._end = re.compile(rb"\n" + mark + rb" (\d+) (\d)\n")
        self._room = len(mark) + 16
        self._window = b""
        self.found: re.Match[bytes] | None = None

    def feed(self, data: bytes) -> None:
        if self.found is None:
            self._window += data
            self.found = self._end.search(self._window)
            certain = self.found.start() if self.found else max(0, len(self._window) - self._room)
            self.kept.feed(self._window[:certain])
            self._window = self._window[certain:]

    def give_up(self) -> None:
        self.kept.feed(self._window)
        self._window = b""


class _Job:
    def __init__(self, mark: bytes, limit: int) -> None:
        self.streams = {1: _Stream(mark, limit), 2: _Stream(mark, limit)}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self) -> Answer | None:
        out, err = self.streams[1], self.streams[2]
        if out.found is None or err.found is None:
            return None
        return Answer(int(out.found[1]), out.kept, err.kept, out.found[2] == b"1")


class Shell:
    """One open shell. :meth:`run` takes one command at a time."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._socket = getattr(stream, "_sock", stream)
        self._socket.settimeout(None)
        self._loop = asyncio.get_running_loop()
        self._job: _Job | None = None
        self._lock = threading.Lock()
        self.closed = False
        self.tainted = False
        threading.Thread(target=self._read, name="rlcore-docker-shell", daemon=True).start()

    def begin(self, script: str, limit: int) -> None:
        """Send a script; its answer is fetched by :meth:`wait`. Raises ``ShellClosed``."""
        mark = secrets.token_hex(16).encode()
        job = _Job(mark, limit)
        with self._lock:
            self._job = job
        text = script.replace("@MARK@", mark.decode())
        try:
            self._socket.sendall(text.encode("utf-8", "surrogateescape"))
        except OSError as error:
            self.closed = True
            raise ShellClosed(str(error)) from None
        if self.closed:
            raise ShellClosed("the shell has ended")

    async def wait(self) -> Answer:
        """The answer to what :meth:`begin` sent. May be waited for again after a time-out. Raises ``ShellClosed``."""
        job = self._job
        assert job is not None
        await asyncio.shield(job.done)
        answer = job.answer()
        if answer is None:
            raise ShellClosed("the shell has ended")
        self.tainted = self.tainted or answer.left_some
        return answer

    def so_far(self) -> Answer:
        """What came before the shell ended or was given up."""
        job = self._job
        assert job is not None
        with self._lock:
            for stream in job.streams.values():
                stream.give_up()
        return Answer(-1, job.streams[1].kept, job.streams[2].kept, True)

    def close(self) -> None:
        """Let go of the connection; the reading thread ends by itself."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)
        # docker-py hands out the inside of a response: closing one closes part of the other
        for part in (getattr(self._stream, "_response", None), self._stream, self._socket):
            with contextlib.suppress(OSError, ValueError):
                if part is not None:
                    part.close()

    def _read(self) -> None:
        try:
            while header := self._exactly(8):
                kind, left = struct.unpack(">BxxxL", header)
                while left:
                    data = self._socket.recv(min(left, 65536))
                    if not data:
                        return
                    left -= len(data)
                    self._feed(kind, data)
        except (OSError, ValueError):
            pass
        finally:
            self.closed = True
            self._finish()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                return b""
            data += more
        return data

    def _feed(self, kind: int, data: bytes) -> None:
        with self._lock:
            job = self._job
            if job is None or kind not in job.streams:
                return
            job.streams[kind].feed(data)
            ended = job.answer() is not None
        if ended:
            self._finish()

    def _finish(self) -> None:
        job = self._job
        if job is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
                self._loop.call_soon_threadsafe(lambda: job.done.done() or job.done.set_result(None))


def run_script(argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], ident: str, setsid: bool) -> str:
    """Lines for a :class:`Shell`: run ``argv`` with stdin at its end and say how it ended on both streams.

    Builtins alone tell whether processes were left behind: whatever has a number now that had none before.
    """
    words = " ".join(map(shlex.quote, argv))
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in {**env, "RLCORE_EXEC": ident}.items())
    go = f"cd {shlex.quote(cwd)} || exit 126; " if cwd is not None else ""
    return (
        'set -- /proc/[0-9]*; b=" $* "\n'
        f"( {go}{exports}exec {'setsid ' if setsid else ''}{words} ) </dev/null\n"
        'c=$?; l=0; for p in /proc/[0-9]*; do case $b in *" $p "*) ;; *) l=1;; esac; done\n'
        "printf '\\n%s %d %d\\n' @MARK@ $c $l; printf '\\n%s %d %d\\n' @MARK@ $c $l >&2\n"
    )


def kill_script(ident: str) -> str:
    """Lines for a :class:`Shell`: end every process with this id in its environment, daemons too, by builtins alone.

    Where a fork bomb has taken every process number nothing can be started any more, so this starts nothing.
    """
    return f"{kill_marked(ident)}\nprintf '\\n%s %d 0\\n' @MARK@ $n; printf '\\n%s %d 0\\n' @MARK@ $n >&2\n"
