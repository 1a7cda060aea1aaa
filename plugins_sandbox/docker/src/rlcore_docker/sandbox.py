"""One container as a sandbox: commands through open shells, files through the engine's archive calls."""

from __future__ import annotations

import asyncio
import io
import posixpath
import secrets
import shlex
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.errors import SandboxLost
from rlcore.sandbox_tools import checked_timeout, no_nul, pack_folder, unpack_folder
from rlcore.types import ExecResult

from rlcore_docker.shell import LONGEST_ARGUMENT, Answer, Shell, ShellClosed, kill_script, run_script

__all__ = ["DockerSandbox"]

KILL_SECONDS = 3.0
FILE_SECONDS = 300.0
SCRATCH = "/tmp/.rlcore"


class DockerSandbox:
    """A started container; see :class:`rlcore.protocols.Sandbox`."""

    def __init__(
        self,
        container: Any,
        *,
        name: str,
        workdir: str,
        env: Mapping[str, str],
        user: str | None,
        max_download: int,
        on_closed: Callable[[DockerSandbox], Awaitable[None]],
    ) -> None:
        self.id = name
        self._container = container
        self._workdir = workdir
        self._env = dict(env)
        self._user = user
        self._max_download = max_download
        self._on_closed = on_closed
        self._idle: dict[str | None, list[Shell]] = {}
        self._killers: dict[str | None, Shell] = {}
        self._shells: set[Shell] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._bash = "sh"
        self._setsid = False
        self._owner = (0, 0)

    async def __aenter__(self) -> DockerSandbox:
        """The sandbox itself."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        await self.close()

    async def prepare(self) -> None:
        """Make the usual folders and learn what the image has; the last part of a start."""
        made = "mkdir -p /workspace /tests /logs /solution " + shlex.quote(self._workdir)
        done = await self._run(["sh", "-c", f"{made} && chmod 1777 /tmp"], cwd="/", user="0", timeout=60)
        if done.code != 0:
            raise SandboxLost(f"the container cannot make its folders: {done.err.text()[0].strip()}")
        probe = "command -v setsid >/dev/null && echo setsid; command -v bash >/dev/null && echo bash; id -u; id -g"
        told = (await self._run(["sh", "-c", probe], cwd="/", user=self._user, timeout=60)).out.text()[0].split()
        self._setsid, self._bash = "setsid" in told, "bash" if "bash" in told else "sh"
        self._owner = (int(told[-2]), int(told[-1]))
        if self._owner[0] != 0:
            chown = f"chown {self._owner[0]}:{self._owner[1]} /workspace /tests /logs /solution {shlex.quote(self._workdir)}"
            await self._run(["sh", "-c", chown], cwd="/", user="0", timeout=60)

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
        """Run a command in an open shell of its user."""
        timeout = checked_timeout(timeout)
        if max_output < 0:
            raise ValueError(f"max_output must not be negative, got {max_output}")
        argv = [self._bash, "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("the command is empty")
        no_nul(*argv, cwd or "", *(f"{name}={value}" for name, value in (env or {}).items()))
        self._check_open()
        if isinstance(command, str) and len(command) > LONGEST_ARGUMENT:
            path = f"{SCRATCH}/{secrets.token_hex(8)}"
            await self.write_file(path, command.encode("utf-8", "surrogateescape"), mode=0o755)
            argv = [self._bash, path]
        as_user = self._user if user is None else str(user)
        begun = asyncio.get_running_loop().time()
        timed_out = False
        try:
            answer = await self._run(
                argv, cwd=cwd or self._workdir, user=as_user, timeout=timeout, env=env or {}, limit=max_output
            )
        except _TimedOut as error:
            answer, timed_out = error.answer, True
        out, cut_out = answer.out.text()
        err, cut_err = answer.err.text()
        return ExecResult(
            exit_code=-1 if timed_out else answer.code,
            stdout=out,
            stderr=err,
            truncated=cut_out or cut_err,
            timed_out=timed_out,
            seconds=asyncio.get_running_loop().time() - begun,
            oom=answer.code == 137 and not timed_out and await self._out_of_memory(),
        )

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """The content of a regular file."""
        no_nul(path)
        self._check_open()
        path = posixpath.join(self._workdir, path)
        check = (
            '[ -e "$1" ] || exit 41; [ -d "$1" ] && exit 42; [ -f "$1" ] || exit 43; [ -r "$1" ] || exit 43; '
            'exec cat -- "$1"'
        )
        answer = await self._run(
            ["sh", "-c", check, "sh", path], cwd="/", user=self._user, timeout=FILE_SECONDS, limit=max_bytes
        )
        _raise_for(answer.code, path)
        if answer.out.total > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes} bytes")
        return answer.out.whole()

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write through the engine, as the sandbox's user."""
        no_nul(path)
        self._check_open()
        path = posixpath.join(self._workdir, path)
        folder, name = posixpath.split(path)
        check = '[ -d "$1" ] && exit 42; [ -e "$1" ] && ! [ -f "$1" ] && exit 43; mkdir -p -- "$2" || exit 43'
        answer = await self._run(
            ["sh", "-c", check, "sh", path, folder], cwd="/", user=self._user, timeout=FILE_SECONDS
        )
        _raise_for(answer.code, path)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            entry.uid, entry.gid = self._owner
            tar.addfile(entry, io.BytesIO(data))
        await self._put(folder, archive)

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copy a folder's content in; a link that stands in the way inside is replaced, never followed."""
        no_nul(target)
        self._check_open()
        target = posixpath.join(self._workdir, target)
        with tempfile.SpooledTemporaryFile(max_size=8 * 1024 * 1024) as archive:
            await asyncio.to_thread(pack_folder, Path(source), archive, owner=self._owner)
            make = 'if [ -L "$1" ]; then rm -- "$1"; fi; mkdir -p -- "$1" || exit 43'
            answer = await self._run(["sh", "-c", make, "sh", target], cwd="/", user=self._user, timeout=FILE_SECONDS)
            _raise_for(answer.code, target)
            await self._put(target, archive)

    async def download_dir(self, source: str, target: Path) -> None:
        """Copy files and folders out; links stay inside."""
        no_nul(source)
        self._check_open()
        source = posixpath.join(self._workdir, source)
        check = '[ -e "$1" ] || exit 41; [ -d "$1" ] || exit 44; cd -P -- "$1" && pwd'
        answer = await self._run(["sh", "-c", check, "sh", source], cwd="/", user=self._user, timeout=FILE_SECONDS)
        _raise_for(answer.code, source)
        real = answer.out.text()[0].removesuffix("\n")

        def fetch() -> None:
            with tempfile.SpooledTemporaryFile(max_size=8 * 1024 * 1024) as archive:
                chunks, _ = self._container.get_archive(real)
                size = 0
                for chunk in chunks:
                    size += len(chunk)
                    if size > self._max_download:
                        raise ValueError(f"{source} is larger than {self._max_download} bytes")
                    archive.write(chunk)
                archive.seek(0)
                unpack_folder(archive, Path(target), max_bytes=self._max_download, strip=1)

        await self._engine(fetch)

    async def alive(self) -> bool:
        """Whether the container runs."""
        return self._closing is None and await asyncio.to_thread(self._running)

    async def close(self) -> None:
        """Remove the container with everything in it; goes on to the end even if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await asyncio.to_thread(remove, self._container)
        finally:
            for task in self._opening:
                task.cancel()
            await asyncio.gather(*self._opening, return_exceptions=True)
            for shell in self._shells:
                shell.close()
            await self._on_closed(self)

    # --- shells -------------------------------------------------------------------------------------------------------

    async def _run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        user: str | None,
        timeout: float,
        env: Mapping[str, str] | None = None,
        limit: int = 64 * 1024,
    ) -> Answer:
        """Run in an idle shell of the user; raises ``_TimedOut`` with what came, ``SandboxLost``."""
        ident = secrets.token_hex(8)
        script = run_script(argv, cwd=cwd, env={**self._env, **(env or {})}, ident=ident, setsid=self._setsid)
        shell = await self._shell(user)
        try:
            try:
                await asyncio.to_thread(shell.begin, script, limit) if len(script) > 30_000 else shell.begin(
                    script, limit
                )
                async with asyncio.timeout(timeout):
                    answer = await shell.wait()
            except TimeoutError:
                raise _TimedOut(await self._end(shell, user, ident)) from None
            except asyncio.CancelledError:
                self._later(self._end(shell, user, ident))
                raise
        except ShellClosed:
            self._drop(shell)
            for _ in range(10):  # a container that lost its first process needs a moment to be gone
                if not await asyncio.to_thread(self._running):
                    raise SandboxLost(f"the container {self.id} is gone") from None
                await asyncio.sleep(0.1)
            answer = shell.so_far()  # the command killed its shell, but not its container
            answer.code = 137
            return answer
        self._give_back(shell, user)
        return answer

    async def _end(self, shell: Shell, user: str | None, ident: str) -> Answer:
        """End all that a command started; its shell is used again only if it answers then.

        Where that cannot be done (a fork bomb leaves the killer no time) the container is restarted: all its processes
        end, its files stay.
        """
        try:
            killer = self._killers.get(user)
            if killer is None or killer.closed:
                killer = self._killers[user] = await self._open(user)
            killer.begin(kill_script(ident), 4096)
            async with asyncio.timeout(KILL_SECONDS):
                ended = (await killer.wait()).code == 0
                if ended:
                    answer = await shell.wait()
        except (TimeoutError, ShellClosed):
            ended = False
        if not ended:
            answer = shell.so_far()
            await self._engine(lambda: self._container.restart(timeout=0))
            self._idle.clear()
            self._killers.clear()
            return answer
        self._give_back(shell, user)
        return answer

    async def _shell(self, user: str | None) -> Shell:
        idle = self._idle.setdefault(user, [])
        while idle:
            shell = idle.pop()
            if not shell.closed:
                return shell
            self._drop(shell)
        if user not in self._killers:
            self._killers[user], shell = await asyncio.gather(self._open(user), self._open(user))
            return shell
        return await self._open(user)

    def _give_back(self, shell: Shell, user: str | None) -> None:
        if shell.closed:
            self._drop(shell)
        idle = self._idle.setdefault(user, [])
        if not shell.tainted and not shell.closed:
            idle.append(shell)
        elif not idle and self._closing is None:
            self._later(self._warm(user))

    def _drop(self, shell: Shell) -> None:
        self._shells.discard(shell)
        shell.close()

    async def _warm(self, user: str | None) -> None:
        """Open the next shell while nobody waits for it."""
        shell = await self._open(user)
        self._idle.setdefault(user, []).append(shell)

    async def _open(self, user: str | None) -> Shell:
        def opened() -> Any:
            api = self._container.client.api
            created = api.exec_create(
                self._container.id, ["/bin/sh"], stdin=True, stdout=True, stderr=True, user=user or "", workdir="/"
            )
            return api.exec_start(created["Id"], socket=True)

        shell = Shell(await self._engine(opened))
        self._shells.add(shell)
        return shell

    def _later(self, work: Any) -> None:
        async def quietly() -> None:
            try:
                await work
            except (SandboxLost, ShellClosed):
                return

        task = asyncio.ensure_future(quietly())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def _put(self, folder: str, archive: Any) -> None:
        archive.seek(0)
        await self._engine(lambda: self._container.put_archive(folder, archive))

    async def _engine(self, work: Callable[[], Any]) -> Any:
        """Ask the engine in a thread; that the container is not there (any more) is ``SandboxLost``."""
        from docker.errors import APIError, DockerException, NotFound
        from requests.exceptions import RequestException

        try:
            return await asyncio.to_thread(work)
        except NotFound as error:
            if await asyncio.to_thread(self._running):
                raise FileNotFoundError(str(error.explanation)) from None
            raise SandboxLost(f"the container {self.id} is gone") from None
        except APIError as error:
            if "no space left" in str(error).lower():
                raise OSError(28, "No space left on device") from None
            if await asyncio.to_thread(self._running):
                raise OSError(f"the engine refused: {error.explanation or error}") from None
            raise SandboxLost(f"the container {self.id} is gone") from None
        except (DockerException, RequestException) as error:
            raise SandboxLost(f"the engine of the container {self.id} does not answer: {error}") from None

    def _running(self) -> bool:
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        try:
            self._container.reload()
        except (DockerException, RequestException):
            return False
        return bool(self._container.status == "running")

    async def _out_of_memory(self) -> bool:
        """Whether the kernel has killed something in this container for its memory."""
        look = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null"
        answer = await self._run(["sh", "-c", look], cwd="/", user=self._user, timeout=20)
        return any(
            line.startswith("oom_kill ") and line.split()[1] != "0" for line in answer.out.text()[0].splitlines()
        )

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxLost(f"the sandbox {self.id} is closed")


class _TimedOut(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


def remove(container: Any) -> None:
    """Kill and remove; a container that is gone or going is fine."""
    from docker.errors import APIError, NotFound

    try:
        container.remove(force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:  # another removal is at work
            raise


def _raise_for(code: int, path: str) -> None:
    errors = {41: FileNotFoundError, 42: IsADirectoryError, 43: PermissionError, 44: NotADirectoryError}
    texts = {41: "is not there", 42: "is a folder", 43: "may not be used", 44: "is not a folder"}
    if code in errors:
        raise errors[code](0, texts[code], path)
