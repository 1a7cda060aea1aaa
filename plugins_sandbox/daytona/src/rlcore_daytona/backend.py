"""The Daytona backend: one sandbox of the provider per sandbox, one client per process."""

from __future__ import annotations

import asyncio
import base64
import math
import os
import re
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field
from rlcore.config import Secret
from rlcore.errors import ConfigError, InfraError, SandboxLost, Throttled
from rlcore.sandbox_tools import close_all, speaks_of_quota
from rlcore.shell_sandbox import Creates, ShellSandbox
from rlcore.types import Problem, SandboxInfo, SandboxSpec

__all__ = ["DaytonaBackend", "preflight"]

GONE = {"destroyed", "destroying", "archived", "archiving"}


class DaytonaBackend:
    """Sandboxes of Daytona.

    Credentials come from ``api_key`` or ``DAYTONA_API_KEY``; ``DAYTONA_API_URL`` and ``DAYTONA_TARGET`` as the SDK reads
    them. Outputs are kept apart and bounded by a supervisor in the sandbox, because the provider's own exec
    merges them and returns them whole.
    """

    class Config(BaseModel):
        """Options of ``sandbox.name = "daytona"``."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        image: str | None = Field(None, description="image of a task that names none and has no Dockerfile")
        snapshot: str | None = Field(
            None, description="snapshot of such a task, if there is no image; null: the default one"
        )
        cpus: int | None = Field(
            None, ge=1, description="CPU cores of a sandbox whose task names none; null: the provider's"
        )
        memory_mb: int | None = Field(None, ge=1, description="memory of a sandbox whose task names none, in MiB")
        disk_mb: int | None = Field(None, ge=1, description="disk of a sandbox whose task names none, in MiB")
        api_key: Secret | None = Field(
            None, description="API key, {env = NAME} or {file = PATH}; null: DAYTONA_API_KEY"
        )
        api_url: str | None = Field(None, description="address of the API; null: DAYTONA_API_URL, else the provider's")
        target: str | None = Field(None, description="region; null: DAYTONA_TARGET, else the organization's")
        auto_stop_min: int = Field(
            30, ge=1, description="minutes without a call after which a sandbox stops; raised above a task's lifetime"
        )
        auto_delete_min: int = Field(120, ge=1, description="minutes after which a stopped sandbox is deleted")
        ephemeral: bool = Field(False, description="delete a sandbox as soon as it stops")
        create_seconds: float = Field(300.0, gt=0, description="a sandbox that is not up by then is given up")
        max_download_mb: int = Field(1024, ge=1, description="largest folder that is copied out of a sandbox, in MiB")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lacks = {
            "memory_limit": "the provider counts memory in GiB, so that 64 MiB become 1 GiB",
            "disk_limit": "the provider counts disk in GiB, so that 16 MiB become 1 GiB",
            "users": "needs an image whose user is root and that has setpriv",
        }
        self._client: Any = None
        self._open: dict[str, ShellSandbox] = {}
        self._creates = Creates(self._marked, self.delete)

    async def start(self, spec: SandboxSpec) -> ShellSandbox:
        """Create a sandbox and wait until commands can run.

        Raises ``Throttled`` for rate limits and used-up quotas in every wording, ``ConfigError`` for a spec or credentials
        that the provider refuses for good, ``InfraError`` for the rest. Cancelled, what comes up later is deleted.
        """
        client = self._connected()
        params = self._params(spec)

        async def create(mark: str) -> ShellSandbox:
            params.labels = {**spec.labels, Creates.MARK: mark}
            return await self._create(client, params, spec)

        box = await self._creates.one(create)
        self._open[box.id] = box
        return box

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Sandboxes of this organization with these labels, page by page, whoever started them."""
        from daytona import ListSandboxesQuery

        client = self._connected()
        found = []
        async with _translated("list sandboxes"):
            async for one in client.list(ListSandboxesQuery(labels=dict(labels), limit=100)):
                if _state(one) not in GONE:
                    found.append(SandboxInfo(one.id, dict(one.labels or {}), _epoch(one.created_at)))
        return found

    async def delete(self, sandbox_id: str) -> None:
        """Delete by id; unknown ids are fine."""
        from daytona.common.errors import DaytonaNotFoundError

        async with _translated("delete a sandbox"):
            try:
                sandbox = await self._connected().get(sandbox_id)
            except DaytonaNotFoundError:
                return
        await _delete(sandbox)

    async def aclose(self) -> None:
        """Close every sandbox that this backend started, wait for what is being reaped, close the client."""
        try:
            await close_all(list(self._open.values()))
        finally:
            await self._creates.settled(self.config.create_seconds + 30)
            if self._client is not None:
                await self._client.close()
                self._client = None

    async def _create(self, client: Any, params: Any, spec: SandboxSpec) -> ShellSandbox:
        async with _translated("create a sandbox"):
            async with asyncio.timeout(self.config.create_seconds + 10):
                sandbox = await client.create(params, timeout=self.config.create_seconds)
        box = ShellSandbox(
            _Carrier(client, sandbox, self._forget),
            sandbox_id=sandbox.id,
            workdir=spec.workdir or "/workspace",
            env=spec.env,
            user=spec.user,
            max_download=self.config.max_download_mb * 1024 * 1024,
        )
        try:
            return await box.prepare()
        except SandboxLost as error:
            raise InfraError(f"the sandbox {sandbox.id} was lost while it started: {error}") from None

    def _forget(self, sandbox_id: str) -> None:
        self._open.pop(sandbox_id, None)

    async def _marked(self, mark: str) -> Sequence[str]:
        return [info.id for info in await self.list({Creates.MARK: mark})]

    def _params(self, spec: SandboxSpec) -> Any:
        from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Image, Resources

        if spec.workdir is not None and not spec.workdir.startswith("/"):
            raise ConfigError(f"the sandbox's workdir must be absolute, not {spec.workdir!r}")
        life = math.ceil((spec.lifetime_s or 0) / 60)
        common: dict[str, Any] = {
            # a model may think longer than the usual interval, and no call resets the clock meanwhile
            "auto_stop_interval": max(self.config.auto_stop_min, life + 1 if life else 0),
            "auto_delete_interval": 0 if self.config.ephemeral else self.config.auto_delete_min,
            "network_block_all": not spec.network,
        }
        image: Any = spec.image or (None if spec.build_context else self.config.image)
        if spec.build_context and not spec.image:
            dockerfile = Path(spec.build_context) / "Dockerfile"
            if not dockerfile.is_file():
                raise ConfigError(f"{dockerfile} is not there: a task without an image needs one")
            image = Image.from_dockerfile(dockerfile, strict_context=True)
        if image is None:
            return CreateSandboxFromSnapshotParams(snapshot=self.config.snapshot, **common)
        cpus, memory, disk = (
            spec.cpus or self.config.cpus,
            spec.memory_mb or self.config.memory_mb,
            spec.disk_mb or self.config.disk_mb,
        )
        resources = Resources(
            cpu=math.ceil(cpus) if cpus else None,
            memory=math.ceil(memory / 1024) if memory else None,
            disk=math.ceil(disk / 1024) if disk else None,
        )
        return CreateSandboxFromImageParams(image=image, resources=resources, **common)

    def _connected(self) -> Any:
        from daytona import AsyncDaytona, DaytonaConfig

        if self._client is None:
            options = {"api_key": _key(self.config), "api_url": self.config.api_url, "target": self.config.target}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the SDK reads an old name of its own
                self._client = AsyncDaytona(DaytonaConfig(**{name: value for name, value in options.items() if value}))
        return self._client


class _Carrier:
    """The calls of a shell sandbox, over the SDK."""

    def __init__(self, client: Any, sandbox: Any, on_closed: Callable[[str], None]) -> None:
        self._client = client
        self._sandbox = sandbox
        self._on_closed = on_closed

    async def call(self, script: str, *, seconds: float) -> str:
        """Run a script; encoded, because the provider's shell may be one that reads globs and words differently."""
        encoded = base64.b64encode(script.encode("utf-8", "surrogateescape")).decode()
        command = f'sh -c "$(printf %s {encoded} | base64 -d)" 2>/dev/null'
        async with _translated("run a command", running=True):
            async with asyncio.timeout(seconds + 10):
                answer = await self._sandbox.process.exec(command, timeout=max(1, math.ceil(seconds)))
        return str(answer.result)

    async def put(self, path: str, data: IO[bytes]) -> None:
        """Upload a file."""
        data.seek(0)
        content = await asyncio.to_thread(data.read)
        async with _translated("upload a file", running=True):
            await self._sandbox.fs.upload_file(content, path, 300)

    async def get(self, path: str, out: IO[bytes], *, max_bytes: int) -> None:
        """Download a file by way of the disk, so that it is never whole in memory."""
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "file"
            async with _translated("download a file", running=True):
                await self._sandbox.fs.download_file(path, str(local), 300)
            await asyncio.to_thread(_copy, local, out, max_bytes)

    async def alive(self) -> bool:
        """Whether the provider says ``started``."""
        try:
            async with _translated("ask for a sandbox", running=True):
                return _state(await self._client.get(self._sandbox.id)) == "started"
        except SandboxLost:
            return False

    async def close(self) -> None:
        """Delete it."""
        try:
            await _delete(self._sandbox)
        finally:
            self._on_closed(self._sandbox.id)


async def _delete(sandbox: Any) -> None:
    """Delete once; an answer that is lost or "busy" is asked for again, "not there" is well."""
    from daytona.common.errors import DaytonaConflictError, DaytonaError, DaytonaNotFoundError

    for attempt in range(5):
        try:
            await sandbox.delete(30)
            return
        except DaytonaNotFoundError:
            return
        except DaytonaConflictError as error:
            last: Exception = error
        except (DaytonaError, TimeoutError, OSError) as error:
            last = error
        await asyncio.sleep(0.2 * 2**attempt)
    raise InfraError(f"the sandbox {sandbox.id} was not deleted: {last}")


@asynccontextmanager
async def _translated(what: str, *, running: bool = False) -> AsyncIterator[None]:
    """The SDK's errors in our words: later, never, gone, or failed. ``running``: a missing sandbox is a lost one."""
    from daytona.common import errors

    try:
        yield
    except errors.DaytonaRateLimitError as error:
        raise Throttled(f"cannot {what} now: {error}", retry_after=_retry_after(error)) from None
    except errors.DaytonaError as error:
        text = f"cannot {what}: {error}"
        if running and isinstance(error, errors.DaytonaNotFoundError | errors.DaytonaGoneError):
            raise SandboxLost(text) from None
        if speaks_of_quota(str(error)):
            told = re.search(r"cpu limit\D+(\d+)", text, re.IGNORECASE)
            cpus = float(told[1]) if told else None
            raise Throttled(text, retry_after=_retry_after(error), quota=True, cpus=cpus) from None
        never = (
            errors.DaytonaAuthenticationError,
            errors.DaytonaForbiddenError,
            errors.DaytonaBadRequestError,
            errors.DaytonaUnprocessableEntityError,
            errors.DaytonaNotFoundError,
        )
        if isinstance(error, never) and not running:
            raise ConfigError(text) from None
        raise InfraError(text) from None
    except (TimeoutError, OSError) as error:
        raise InfraError(f"cannot {what}: {type(error).__name__}: {error}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("aiohttp", "daytona", "daytona_api_client_async"):
            raise InfraError(f"cannot {what}: {type(error).__name__}: {error}") from None
        raise


def _retry_after(error: Any) -> float | None:
    for name, value in dict(getattr(error, "headers", None) or {}).items():
        if name.lower() == "retry-after":
            try:
                return max(0.0, float(value))
            except ValueError:
                return None
    return None


def _copy(path: Path, out: IO[bytes], max_bytes: int) -> None:
    if path.stat().st_size > max_bytes:
        raise ValueError(f"the file is larger than {max_bytes} bytes")
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            out.write(data)


def _state(sandbox: Any) -> str:
    return str(getattr(sandbox.state, "value", sandbox.state))


def _epoch(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def _key(config: DaytonaBackend.Config) -> str | None:
    """The configured key; ``None``: the SDK reads the environment."""
    if config.api_key is not None:
        return config.api_key.read()
    if not (os.environ.get("DAYTONA_API_KEY") or os.environ.get("DAYTONA_JWT_TOKEN")):
        raise ConfigError(
            "no Daytona credentials: set DAYTONA_API_KEY, or sandbox.api_key.file to a file that holds it"
        )
    return None


def preflight(options: DaytonaBackend.Config, episode_seconds: float) -> Sequence[Problem]:
    """What would stop the sandboxes of a run."""
    problems = []
    try:
        _key(options)
    except ConfigError as error:
        problems.append(Problem("sandbox", str(error), "make a key at app.daytona.io and set DAYTONA_API_KEY"))
    if episode_seconds > options.auto_stop_min * 60:
        problems.append(
            Problem(
                "sandbox",
                f"sandboxes stop after {options.auto_stop_min} min without a call, an episode may take "
                f"{episode_seconds / 60:.0f} min",
                f"set sandbox.auto_stop_min above {math.ceil(episode_seconds / 60)}",
                fatal=False,
            )
        )
    return problems
