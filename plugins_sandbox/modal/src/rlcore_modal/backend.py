"""The Modal backend: one Modal sandbox per sandbox, in one app; one client per process."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError, InfraError, SandboxLost, Throttled
from rlcore.sandbox_tools import close_all, speaks_of_quota
from rlcore.shell_sandbox import Creates, ShellSandbox
from rlcore.types import Problem, SandboxInfo, SandboxSpec

__all__ = ["ModalBackend", "preflight"]

CHUNK = 1 << 20
REMEDY = "run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"


class ModalBackend:
    """Sandboxes of Modal. Credentials are those of its SDK: ``MODAL_TOKEN_ID`` and ``MODAL_TOKEN_SECRET``, or its file."""

    class Config(BaseModel):
        """Options of ``sandbox.name = "modal"``."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        app: str = Field("rlcore", description="app that the sandboxes belong to; made if it is not there")
        image: str = Field("python:3.12-slim", description="image of a task that names none and has no Dockerfile")
        cpus: float | None = Field(
            None, gt=0, description="CPU cores of a sandbox whose task names none; null: the provider's"
        )
        memory_mb: int | None = Field(None, ge=128, description="memory of a sandbox whose task names none, in MiB")
        timeout_s: int = Field(
            4 * 3600, ge=60, le=24 * 3600, description="a sandbox ends after so many seconds; must exceed an episode"
        )
        idle_timeout_s: int = Field(1800, ge=60, description="a sandbox ends after so many seconds without a command")
        region: str | None = Field(None, description="region; null: any")
        create_seconds: float = Field(600.0, gt=0, description="a sandbox that is not up by then is given up")
        max_download_mb: int = Field(1024, ge=1, description="largest folder that is copied out of a sandbox, in MiB")

    _users = 0

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lacks = {
            "disk_limit": "the provider has no disk size per sandbox",
            "users": "needs an image whose user is root and that has setpriv",
        }
        self._app: Any = None
        self._client: Any = None
        self._connecting: asyncio.Future[None] | None = None
        self._open: dict[str, ShellSandbox] = {}
        self._creates = Creates(self._marked, self.delete)

    async def start(self, spec: SandboxSpec) -> ShellSandbox:
        """Create a sandbox and wait until commands can run.

        Raises ``Throttled`` for used-up quotas, ``ConfigError`` for a spec, an image or credentials that the provider
        refuses for good, ``InfraError`` for the rest. Cancelled, what comes up later is deleted.
        """
        self._check(spec)
        await self._connected()
        box = await self._creates.one(lambda mark: self._create(spec, {**spec.labels, Creates.MARK: mark}))
        self._open[box.id] = box
        return box

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Live sandboxes of the app with these tags, whoever started them."""
        await self._connected()
        found: list[SandboxInfo] = []
        before = 0.0
        async with _translated("list sandboxes"):
            while True:
                page = await _page(self._client, self._app.app_id, dict(labels), before)
                for one in page:
                    tags = {tag.tag_name: tag.tag_value for tag in one.tags}
                    found.append(SandboxInfo(one.id, tags, one.created_at or None))
                if not page or page[-1].created_at in (0.0, before):
                    return found
                before = page[-1].created_at

    async def delete(self, sandbox_id: str) -> None:
        """Terminate by id; unknown ids are fine."""
        await self._connected()
        await _terminated(lambda: _terminate_id(self._client, sandbox_id), sandbox_id)

    async def aclose(self) -> None:
        """Close every sandbox that this backend started, wait for what is being reaped, let go of the client."""
        try:
            await close_all(list(self._open.values()))
        finally:
            await self._creates.settled(self.config.create_seconds + 30)
            if self._connecting is not None:
                await asyncio.wait([self._connecting])
            if self._app is not None:
                self._app, self._connecting = None, None
                ModalBackend._users -= 1
                if ModalBackend._users == 0:  # the SDK has one client for the process
                    await self._client.close.aio()

    async def _create(self, spec: SandboxSpec, labels: Mapping[str, str]) -> ShellSandbox:
        import modal

        cpus, memory = spec.cpus or self.config.cpus, spec.memory_mb or self.config.memory_mb
        life = min(self.config.timeout_s, math.ceil(spec.lifetime_s)) if spec.lifetime_s else self.config.timeout_s
        async with _translated("create a sandbox"):
            async with asyncio.timeout(self.config.create_seconds):
                sandbox = await modal.Sandbox.create.aio(
                    *("sleep", str(life)),
                    app=self._app,
                    client=self._client,
                    image=self._image(spec),
                    tags=dict(labels),
                    timeout=max(1, life),
                    idle_timeout=min(self.config.idle_timeout_s, life),
                    cpu=cpus,
                    # a request and a limit: without the second the provider only reserves
                    memory=(memory, memory) if memory else None,
                    region=self.config.region,
                    block_network=not spec.network,
                )
        box = ShellSandbox(
            _Carrier(sandbox, self._forget),
            sandbox_id=sandbox.object_id,
            workdir=spec.workdir or "/workspace",
            env=spec.env,
            user=spec.user,
            max_download=self.config.max_download_mb * 1024 * 1024,
        )
        try:
            async with asyncio.timeout(self.config.create_seconds):
                return await box.prepare()
        except (SandboxLost, TimeoutError) as error:
            await sandbox.detach.aio()
            raise InfraError(f"the sandbox {sandbox.object_id} was lost while it started: {error}") from None

    def _image(self, spec: SandboxSpec) -> Any:
        import modal

        if spec.build_context and not spec.image:
            folder = Path(spec.build_context)
            return modal.Image.from_dockerfile(folder / "Dockerfile", context_dir=folder)
        return modal.Image.from_registry(spec.image or self.config.image)

    def _check(self, spec: SandboxSpec) -> None:
        if spec.workdir is not None and not spec.workdir.startswith("/"):
            raise ConfigError(f"the sandbox's workdir must be absolute, not {spec.workdir!r}")
        if spec.build_context and not spec.image and not (Path(spec.build_context) / "Dockerfile").is_file():
            raise ConfigError(
                f"{Path(spec.build_context) / 'Dockerfile'} is not there: a task without an image needs one"
            )

    def _forget(self, sandbox_id: str) -> None:
        self._open.pop(sandbox_id, None)

    async def _marked(self, mark: str) -> Sequence[str]:
        return [info.id for info in await self.list({Creates.MARK: mark})]

    async def _connected(self) -> None:
        """Connect once; a caller that is cancelled meanwhile leaves no half-open client behind."""
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            self._connecting = asyncio.ensure_future(self._connect())
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        import modal

        async with _translated("reach Modal"), asyncio.timeout(60):
            self._client = await modal.Client.from_env.aio()
            try:
                self._app = await modal.App.lookup.aio(self.config.app, create_if_missing=True, client=self._client)
            except BaseException:
                if ModalBackend._users == 0:  # the SDK would go on with these credentials
                    await self._client.close.aio()
                raise
        ModalBackend._users += 1


class _Carrier:
    """The calls of a shell sandbox, over the SDK."""

    def __init__(self, sandbox: Any, on_closed: Callable[[str], None]) -> None:
        self._sandbox = sandbox
        self._on_closed = on_closed

    async def call(self, script: str, *, seconds: float) -> str:
        """Run a script; the SDK says −1 for a time-out instead of raising."""
        async with self._running("run a command", seconds + 15):
            process = await self._sandbox.exec.aio("sh", "-c", script, timeout=math.ceil(seconds), text=False)
            out = await process.stdout.read.aio()
            if await process.wait.aio() == -1:
                raise InfraError(f"a call was not over after {seconds:.0f} s")
        return bytes(out).decode("ascii", "replace")

    async def put(self, path: str, data: IO[bytes]) -> None:
        """Write a file through the stdin of a command."""
        data.seek(0)
        async with self._running("upload a file", 300):
            process = await self._sandbox.exec.aio("sh", "-c", f"cat > {path}", timeout=300, text=False)
            while chunk := await asyncio.to_thread(data.read, CHUNK):
                process.stdin.write(chunk)
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            if await process.wait.aio() != 0:
                raise InfraError(f"{path} was not written")

    async def get(self, path: str, out: IO[bytes], *, max_bytes: int) -> None:
        """Read a file from the stdout of a command, chunk by chunk."""
        left = max_bytes
        async with self._running("download a file", 300):
            process = await self._sandbox.exec.aio("cat", path, timeout=300, text=False)
            async for chunk in process.stdout:
                left -= len(chunk)
                if left < 0:
                    raise ValueError(f"the file is larger than {max_bytes} bytes")
                out.write(chunk)
            if await process.wait.aio() != 0:
                raise InfraError(f"{path} was not read")

    async def alive(self) -> bool:
        """Whether the provider has no end of it on record."""
        try:
            async with _translated("ask for a sandbox", running=True), asyncio.timeout(60):
                return await self._sandbox.poll.aio() is None
        except SandboxLost:
            return False

    async def close(self) -> None:
        """Terminate it and let go of the connection to it."""
        try:
            await _terminated(self._sandbox.terminate.aio, self._sandbox.object_id)
        finally:
            self._on_closed(self._sandbox.object_id)
            await self._sandbox.detach.aio()

    @asynccontextmanager
    async def _running(self, what: str, seconds: float) -> AsyncIterator[None]:
        async with _translated(what, running=True):
            async with asyncio.timeout(seconds):
                yield


async def _page(client: Any, app_id: str, labels: Mapping[str, str], before: float) -> Any:
    """One page of the app's live sandboxes with their tags, which the public listing leaves out."""
    from modal._utils.async_utils import synchronizer
    from modal.sandbox._impl_v2 import SandboxImplV2
    from modal_proto import api_pb2

    async def page(inner: Any) -> Any:
        tags = [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in labels.items()]
        request = api_pb2.SandboxListRequest(app_id=app_id, before_timestamp=before, include_finished=False, tags=tags)
        return list((await SandboxImplV2.list_page(inner, request)).sandboxes)

    return await synchronizer.create_blocking(page, "page", __name__).aio(client)


async def _terminate_id(client: Any, sandbox_id: str) -> None:
    """Terminate without a handle: the public way to one asks for more than the id."""
    from modal._utils.async_utils import synchronizer
    from modal.sandbox._impl_v2 import SandboxImplV2

    async def terminate(inner: Any) -> None:
        await SandboxImplV2(inner, sandbox_id).terminate()

    await synchronizer.create_blocking(terminate, "terminate", __name__).aio(client)


async def _terminated(terminate: Callable[[], Awaitable[Any]], sandbox_id: str) -> None:
    """Terminate; an answer that is lost is asked for again, "not there" is well."""
    import modal

    last: Exception | None = None
    for attempt in range(5):
        try:
            async with asyncio.timeout(30):
                await terminate()
            return
        except (modal.exception.NotFoundError, modal.exception.SandboxTerminatedError):
            return
        except (modal.exception.Error, TimeoutError, OSError) as error:
            last = error
        await asyncio.sleep(0.2 * 2**attempt)
    raise InfraError(f"the sandbox {sandbox_id} was not terminated: {last}")


@asynccontextmanager
async def _translated(what: str, *, running: bool = False) -> AsyncIterator[None]:
    """The SDK's errors in our words: later, never, gone, or failed. ``running``: a missing sandbox is a lost one."""
    from modal import exception as errors

    try:
        yield
    except (errors.SandboxTerminatedError, errors.SandboxTimeoutError) as error:
        raise SandboxLost(f"cannot {what}: {error}") from None
    except errors.ResourceExhaustedError as error:
        raise Throttled(f"cannot {what} now: {error}", quota="rate limit" not in str(error).lower()) from None
    except errors.Error as error:
        text = f"cannot {what}: {error}"
        if running:
            if isinstance(error, errors.NotFoundError | errors.ConflictError):
                raise SandboxLost(text) from None
            raise InfraError(text) from None
        if speaks_of_quota(str(error)):
            raise Throttled(text, quota=True) from None
        if isinstance(error, errors.AuthError):
            raise ConfigError(f"{text}: {REMEDY}") from None
        never = (errors.PermissionDeniedError, errors.InvalidError, errors.NotFoundError, errors.ImageBuildError)
        if isinstance(error, never):
            raise ConfigError(text) from None
        raise InfraError(text) from None
    except (TimeoutError, OSError) as error:
        raise InfraError(f"cannot {what}: {type(error).__name__}: {error}") from None


def preflight(options: ModalBackend.Config, episode_seconds: float) -> Sequence[Problem]:
    """What would stop the sandboxes of a run."""
    problems = []
    if episode_seconds >= options.timeout_s:
        problems.append(
            Problem(
                "sandbox",
                f"sandboxes end after {options.timeout_s} s, an episode may take {episode_seconds:.0f} s",
                f"set sandbox.timeout_s above {episode_seconds:.0f} s plus the verifier's time, or lower budget.seconds",
            )
        )
    if episode_seconds >= options.idle_timeout_s:
        problems.append(
            Problem(
                "sandbox",
                f"sandboxes end after {options.idle_timeout_s} s without a command, an episode may take {episode_seconds:.0f} s",
                f"set sandbox.idle_timeout_s above {episode_seconds:.0f}",
                fatal=False,
            )
        )
    file = Path(os.environ.get("MODAL_CONFIG_PATH") or "~/.modal.toml").expanduser()
    if not (os.environ.get("MODAL_TOKEN_ID") and os.environ.get("MODAL_TOKEN_SECRET")) and not file.is_file():
        problems.append(Problem("sandbox", "no Modal credentials", REMEDY))
    return problems
