"""One local sandbox: the contract of :class:`rlcore.protocols.Sandbox` over the wire to its agent."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from rlcore.errors import ConfigError, SandboxLost
from rlcore.sandbox_tools import checked_timeout, clipped_text, no_nul, pack_folder, shares, unpack_folder
from rlcore.types import ExecResult

from rlcore_local.channel import CHUNK, Channel
from rlcore_local.limits import ControlGroup

__all__ = ["LocalSandbox"]

GRACE = 15.0
"""Seconds that the agent gets to end a command after its time-out, before the sandbox counts as lost."""
FILE_SECONDS = 300.0


class LocalSandbox:
    """A started local sandbox; see :class:`rlcore.protocols.Sandbox`."""

    def __init__(
        self,
        sandbox_id: str,
        *,
        process: asyncio.subprocess.Process,
        channel: Channel,
        cgroup: ControlGroup,
        inner: int | None,
        user: tuple[str, int],
        max_download: int,
        on_closed: Callable[[LocalSandbox], Awaitable[None]],
    ) -> None:
        self.id = sandbox_id
        self._process = process
        self._channel = channel
        self._cgroup = cgroup
        self._inner = inner
        self._user = user
        self._max_download = max_download
        self._on_closed = on_closed
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LocalSandbox:
        """The sandbox itself."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        await self.close()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        max_output: int = 64 * 1024,
    ) -> ExecResult:
        """Run a command; ``ConfigError`` for a user other than the sandbox's own."""
        timeout = checked_timeout(timeout)
        head, tail = shares(max_output)
        self._check_user(user)
        argv = None if isinstance(command, str) else list(command)
        if argv is not None and not argv:
            raise ValueError("the command is empty")
        script = command.encode("utf-8", "surrogateescape") if isinstance(command, str) else b""
        no_nul(*(argv or [command]), cwd or "", *(f"{key}={value}" for key, value in (env or {}).items()))
        kills = self._cgroup.oom_kills()
        request = {
            "argv": argv,
            "timeout": timeout,
            "cwd": cwd,
            "env": dict(env or {}),
            "limit": max_output,
            "head": head,
            "tail": tail,
        }
        self._check_open()
        answer, data = await self._channel.call(
            "exec", request, script, seconds=timeout + GRACE, max_bytes=2 * max_output
        )
        sizes = [int(size) for size in answer["parts"]]
        totals = [int(total) for total in answer["totals"]]
        a, b, c = sizes[0], sizes[0] + sizes[1], sizes[0] + sizes[1] + sizes[2]
        code = int(answer["code"])
        return ExecResult(
            exit_code=code,
            stdout=clipped_text(data[:a], data[a:b], totals[0]),
            stderr=clipped_text(data[b:c], data[c:], totals[1]),
            truncated=any(total > max_output for total in totals),
            timed_out=bool(answer["timed_out"]),
            seconds=float(answer["seconds"]),
            oom=code != 0 and self._cgroup.oom_kills() > kills,
        )

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """The content of a regular file."""
        no_nul(path)
        self._check_open()
        data = bytearray()
        with _with_path(path):
            await self._channel.call(
                "read",
                {"path": path, "limit": max_bytes},
                seconds=FILE_SECONDS,
                max_bytes=max_bytes + CHUNK,
                sink=data.extend,
            )
        return bytes(data)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write all of it or nothing."""
        no_nul(path)
        self._check_open()
        chunks = (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))
        with _with_path(path):
            await self._channel.stream(
                "write", {"path": path, "mode": mode}, lambda: next(chunks, b""), seconds=FILE_SECONDS
            )

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copy a folder's content in; a link that stands in the way inside is replaced, never followed."""
        no_nul(target)
        self._check_open()
        with tempfile.SpooledTemporaryFile(max_size=8 * 1024 * 1024) as archive:
            await asyncio.to_thread(pack_folder, Path(source), archive)
            archive.seek(0)
            with _with_path(target):
                await self._channel.stream(
                    "extract", {"path": target}, lambda: archive.read(CHUNK), seconds=FILE_SECONDS
                )

    async def download_dir(self, source: str, target: Path) -> None:
        """Copy files and folders out; links stay inside."""
        no_nul(source)
        self._check_open()
        with tempfile.SpooledTemporaryFile(max_size=8 * 1024 * 1024) as archive:
            with _with_path(source):
                await self._channel.call(
                    "pack",
                    {"path": source, "limit": self._max_download},
                    seconds=FILE_SECONDS,
                    max_bytes=self._max_download + CHUNK,
                    sink=archive.write,
                )
            archive.seek(0)
            await asyncio.to_thread(unpack_folder, archive, Path(target), max_bytes=self._max_download)

    async def alive(self) -> bool:
        """Whether the agent answers."""
        if self._closing is not None or self._channel.lost is not None:
            return False
        try:
            await self._channel.call("ping", {}, seconds=GRACE)
        except SandboxLost:
            return False
        return True

    async def close(self) -> None:
        """End every process and delete everything; goes on to the end even if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._inner is not None:
            # process 1 first: the outer process ends once the kernel has ended everything inside
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner, signal.SIGKILL)
        elif self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), GRACE)
        except TimeoutError:
            kill_group(self._process)
            await self._process.wait()
        if self._inner is not None:
            os.close(self._inner)
            self._inner = None
        self._channel.fail("the sandbox is closed")
        await self._channel.aclose()
        await self._on_closed(self)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxLost(f"the sandbox {self.id} is closed")

    def _check_user(self, user: str | int | None) -> None:
        if user is not None and str(user) not in (self._user[0], str(self._user[1])):
            name, uid = self._user
            raise ConfigError(
                f"the local sandbox has one user, {name} ({uid}): it cannot run a command as {user!r}. Name that user in "
                "the task's sandbox, or use a backend that has several"
            )


def kill_group(process: asyncio.subprocess.Process) -> None:
    """SIGKILL a launched process and, in the moments before they leave its group, the ones that it has forked."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _with_path:  # noqa: N801 - reads as a verb where it is used
    """Names the path in errors of the agent, which come as bare numbers; too large is a ``ValueError``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            if error.errno == errno.EFBIG:
                raise ValueError(f"{self._path} {error.strerror}") from None
            raise OSError(error.errno, error.strerror, self._path) from None
