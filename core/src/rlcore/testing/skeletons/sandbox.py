"""A sandbox backend: where the commands of agents run.

As written it starts its sandboxes on this machine, through rlcore-local. Replace what stands behind ``_provider`` and
``_inner`` by your provider's calls, one method after the other, with the tests green.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlcore.types import ExecResult, SandboxInfo, SandboxSpec


class Skeleton:
    """Starts sandboxes; one instance, and one connection to the provider, per process.

    Raise ``Throttled`` for "later", ``ConfigError`` for what can never start, ``InfraError`` for everything else: the
    caller waits, retries and keeps the books.
    """

    class Config(BaseModel):
        """Options of this backend; a key of the provider's would be a ``rlcore.config.Secret``."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        memory_mb: int = Field(512, ge=32, description="memory of a sandbox whose task names none, in MiB")

    lacks: Mapping[str, str] = {"users": "a sandbox has one user"}
    """What this backend cannot do, by the names of ``rlcore.testing.sandbox.BEHAVIOURS``."""

    def __init__(self, config: Config) -> None:
        from rlcore_local.backend import LocalBackend

        self._provider: Any = LocalBackend(LocalBackend.Config(memory_mb=config.memory_mb))

    async def start(self, spec: SandboxSpec) -> SkeletonSandbox:
        """Create and wait until commands can run; cancelled half-way, nothing is left behind."""
        return SkeletonSandbox(await self._provider.start(spec))

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Every live sandbox that carries all of ``labels``, also those of other processes."""
        found: Sequence[SandboxInfo] = await self._provider.list(labels)
        return found

    async def delete(self, sandbox_id: str) -> None:
        """Delete by id; unknown ids are fine."""
        await self._provider.delete(sandbox_id)

    async def aclose(self) -> None:
        """Close what is open, sandboxes first."""
        await self._provider.aclose()


class SkeletonSandbox:
    """One sandbox; the contract of every method is in :class:`rlcore.protocols.Sandbox`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.id: str = inner.id

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
        """Run a command; a time-out kills everything that it started."""
        result: ExecResult = await self._inner.exec(
            command, timeout=timeout, cwd=cwd, env=env, user=user, max_output=max_output
        )
        return result

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """The content of a file."""
        content: bytes = await self._inner.read_file(path, max_bytes=max_bytes)
        return content

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, creating parent folders."""
        await self._inner.write_file(path, data, mode=mode)

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copy a folder in."""
        await self._inner.upload_dir(source, target)

    async def download_dir(self, source: str, target: Path) -> None:
        """Copy a folder out; nothing is ever written outside ``target``."""
        await self._inner.download_dir(source, target)

    async def alive(self) -> bool:
        """Whether commands can still run."""
        return bool(await self._inner.alive())

    async def close(self) -> None:
        """End every process and delete everything; a second call does nothing."""
        await self._inner.close()
