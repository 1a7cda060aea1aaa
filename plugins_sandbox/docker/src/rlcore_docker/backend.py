"""The Docker backend: one container per sandbox on the engine that ``DOCKER_HOST`` names."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError, InfraError, SandboxLost, Throttled
from rlcore.sandbox_tools import close_all, finished
from rlcore.types import Problem, SandboxInfo, SandboxSpec

from rlcore_docker.images import image_for
from rlcore_docker.sandbox import DockerSandbox, remove

__all__ = ["DockerBackend", "preflight"]

CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]
"""What root in a container keeps: enough to install packages and to change users, nothing that reaches outside."""
REMEDY = "start Docker, or set DOCKER_HOST to an engine that this user may use"
LABEL = "io.rlcore"
"""On every container of ours, so that labels of other tools never match."""


class DockerBackend:
    """Sandboxes in containers: no capabilities beyond those of package installs, no new privileges, no network by default."""

    class Config(BaseModel):
        """Options of ``sandbox.name = "docker"``. The engine is the one that ``DOCKER_HOST`` and its companions name."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        image: str = Field("python:3.12-slim", description="image of a task that names none and has no Dockerfile")
        memory_mb: int = Field(2048, ge=16, description="memory of a sandbox whose task names none, in MiB")
        cpus: float | None = Field(
            None, gt=0, description="CPU cores of a sandbox whose task names none; null: no limit"
        )
        pids: int = Field(512, ge=16, description="processes in a sandbox")
        init: bool = Field(True, description="a small init as process 1, which collects what ends")
        lifetime_s: float = Field(
            4 * 3600.0, gt=0, description="a container ends and goes by itself after so many seconds"
        )
        build_network: str = Field("default", description="network while a Dockerfile is built: default, none, host")
        engine_seconds: int = Field(120, ge=1, description="longest wait for an answer of the engine")
        max_download_mb: int = Field(1024, ge=1, description="largest folder that is copied out of a sandbox, in MiB")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lacks = {"disk_limit": "the engine's usual storage driver has no size limit per container"}
        self._client: Any = None
        self._lock = threading.Lock()
        self._builds: dict[tuple[str | None, str | None], asyncio.Lock] = {}
        self._open: set[DockerSandbox] = set()

    async def start(self, spec: SandboxSpec) -> DockerSandbox:
        """Create and start a container and wait until commands can run.

        Raises ``ConfigError`` for an image or a Dockerfile that can never start, ``Throttled`` if a registry says so,
        ``InfraError`` where the engine does not answer or fails.
        """
        if spec.workdir is not None and not spec.workdir.startswith("/"):
            raise ConfigError(f"the sandbox's workdir must be absolute, not {spec.workdir!r}")
        image = await self._image(spec)
        # from here on a thread is at work that no cancel stops: wait for what it makes, then take that back
        task = asyncio.ensure_future(self._start(f"rlcore-{secrets.token_hex(8)}", image, spec))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await finished(asyncio.ensure_future(_take_back(task)))
            raise

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Our containers on this engine, running or not, whoever started them."""

        def ask() -> list[SandboxInfo]:
            wanted = [LABEL, *(f"{key}={value}" for key, value in labels.items())]
            found = self._engine().api.containers(all=True, filters={"label": wanted})
            return [
                SandboxInfo(
                    id=one["Names"][0].lstrip("/"),
                    labels={key: value for key, value in one["Labels"].items() if key != LABEL},
                    created=float(one["Created"]),
                )
                for one in found
                if one["Names"] and one["State"] != "removing"
            ]

        return await _asked(ask)

    async def delete(self, sandbox_id: str) -> None:
        """Remove a container by name; unknown names are fine."""
        from docker.errors import NotFound

        def drop() -> None:
            try:
                container = self._engine().containers.get(sandbox_id)
            except NotFound:
                return
            if LABEL in container.labels:
                remove(container)

        await _asked(drop)

    async def aclose(self) -> None:
        """Close every sandbox that this backend started, then the connections."""
        try:
            await close_all(list(self._open))
        finally:
            if self._client is not None:
                await asyncio.to_thread(self._client.close)
                self._client = None

    async def _start(self, name: str, image: str, spec: SandboxSpec) -> DockerSandbox:
        workdir = spec.workdir or "/workspace"
        container = await _asked(lambda: self._run(name, image, spec))
        sandbox = DockerSandbox(
            container,
            name=name,
            workdir=workdir,
            env=spec.env,
            user=None if spec.user is None else str(spec.user),
            max_download=self.config.max_download_mb * 1024 * 1024,
            on_closed=self._closed,
        )
        self._open.add(sandbox)
        try:
            await sandbox.prepare()
        except SandboxLost as error:
            await sandbox.close()
            raise InfraError(f"a container of {image!r} does not run: {error}") from None
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _run(self, name: str, image: str, spec: SandboxSpec) -> Any:
        memory = f"{spec.memory_mb or self.config.memory_mb}m"
        cpus = spec.cpus or self.config.cpus
        seconds = int(min(spec.lifetime_s or self.config.lifetime_s, self.config.lifetime_s)) or 1
        return self._engine().containers.run(
            image,
            ["sleep", str(seconds)],
            name=name,
            entrypoint=[],
            detach=True,
            auto_remove=True,
            init=self.config.init,
            labels={**spec.labels, LABEL: "sandbox"},
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=self.config.pids,
            cap_drop=["ALL"],
            cap_add=CAPABILITIES,
            security_opt=["no-new-privileges"],
            user="0",
            working_dir="/",
            hostname="sandbox",
            **({"nano_cpus": int(cpus * 1e9)} if cpus else {}),
            **({} if spec.network else {"network_mode": "none"}),
        )

    async def _image(self, spec: SandboxSpec) -> str:
        image = spec.image or (None if spec.build_context else self.config.image)
        lock = self._builds.setdefault((image, spec.build_context), asyncio.Lock())
        async with lock:
            return await _asked(lambda: image_for(self._engine(), image, spec.build_context, self.config.build_network))

    async def _closed(self, sandbox: DockerSandbox) -> None:
        self._open.discard(sandbox)

    def _engine(self) -> Any:
        """The client of this process, made once."""
        import docker
        from docker.errors import DockerException

        with self._lock:
            if self._client is None:
                try:
                    self._client = docker.from_env(timeout=self.config.engine_seconds, max_pool_size=64)
                except DockerException as error:
                    raise InfraError(f"no Docker engine answers ({error}): {REMEDY}") from None
            return self._client


async def _asked(work: Any) -> Any:
    """Ask the engine in a thread; its errors in our words."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        return await asyncio.to_thread(work)
    except APIError as error:
        text = str(error.explanation or error)
        if error.status_code == 429 or "toomanyrequests" in text:
            raise Throttled(f"the engine refused for now: {text}") from None
        if error.status_code in (400, 404):
            raise ConfigError(f"the engine cannot start this sandbox: {text}") from None
        raise InfraError(f"the engine failed: {text}") from None
    except (DockerException, RequestException) as error:
        raise InfraError(f"no Docker engine answers ({error}): {REMEDY}") from None


async def _take_back(task: asyncio.Future[DockerSandbox]) -> None:
    """Close what a start brings whose caller is gone."""
    try:
        sandbox = await task
    except (ConfigError, InfraError):
        return
    await sandbox.close()


def preflight(options: Any) -> Sequence[Problem]:
    """The problem that would stop every sandbox of a run, if there is one."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=10)
        client.ping()
        client.close()
    except DockerException as error:
        return (Problem("sandbox", f"no Docker engine answers ({error})", REMEDY),)
    return ()
