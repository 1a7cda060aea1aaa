"""What is put into a sandbox and when: the task's files before the agent's part, its tests for the verify window only."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcore.errors import InfraError, TaskError
from rlcore.protocols import Sandbox
from rlcore.types import Task

__all__ = ["prepare", "root_exec", "without_carriage_returns"]

STAGING_SECONDS = 20.0
IMAGE_FILES = ("Dockerfile", ".dockerignore")


async def root_exec(sandbox: Sandbox, script: str, task: Task, *, what: str) -> None:
    """Run a staging step outside the working directory; ``InfraError`` if it fails."""
    user = None if task.sandbox is None or task.sandbox.user is None else "root"
    result = await sandbox.exec(["/bin/sh", "-c", script], timeout=STAGING_SECONDS, cwd="/", user=user, max_output=2000)
    if result.timed_out or result.exit_code:
        how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
        raise InfraError(f"task {task.id}: {what} failed ({how}): {(result.stderr or result.stdout).strip()}")


async def prepare(task: Task, sandbox: Sandbox) -> None:
    """Put the task's files into the working directory, where no image was built from them, and wait until it is healthy.

    Called once in a fresh sandbox, before the agent's first command. Only files of ``environment/`` are ever copied.
    """
    upload = task.data.get("upload")
    workdir = task.sandbox.workdir if task.sandbox else None
    if upload is not None:
        if workdir is None:
            raise TaskError(f"{task.id}: environment/ is to be uploaded, so environment.workdir must be set")
        await upload_environment(Path(upload), workdir, sandbox, task)
    healthcheck = task.data.get("healthcheck")
    if healthcheck is not None:
        await wait_until_healthy(healthcheck, sandbox, task)


async def upload_environment(source: Path, workdir: str, sandbox: Sandbox, task: Task) -> None:
    """Copy ``environment/`` without what only an image build reads."""
    files = environment_files(source)
    if files is None:
        await sandbox.upload_dir(source, workdir)
        return
    for name, path in files:
        await sandbox.write_file(f"{workdir.rstrip('/')}/{name}", path.read_bytes(), mode=path.stat().st_mode & 0o777)


def environment_files(source: Path) -> list[tuple[str, Path]] | None:
    """The files one by one where some must stay out; ``None``: the whole folder goes. Raises ``TaskError``."""
    if not source.is_dir():
        return []
    if not any((source / name).exists() for name in IMAGE_FILES):
        return None
    files = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_symlink() or (path.is_dir() and not any(path.iterdir())):
            raise TaskError(f"{path}: links and empty folders beside a Dockerfile are not uploaded; use files")
        if path.is_file() and name not in IMAGE_FILES:
            files.append((name, path))
    return files


async def wait_until_healthy(healthcheck: Mapping[str, Any], sandbox: Sandbox, task: Task) -> None:
    """Run the task's health check until it passes; ``InfraError`` when its retries are used up."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    failures = 0
    while True:
        result = await sandbox.exec(healthcheck["command"], timeout=healthcheck["timeout_sec"])
        if not result.timed_out and result.exit_code == 0:
            return
        starting = loop.time() - started < healthcheck["start_period_sec"]
        failures += not starting
        if failures >= max(healthcheck["retries"], 1):
            raise InfraError(f"task {task.id}: environment.healthcheck failed {failures} times: {result.stderr[-500:]}")
        await asyncio.sleep(healthcheck["start_interval_sec" if starting else "interval_sec"])


@contextmanager
def without_carriage_returns(folder: Path) -> Iterator[Path]:
    """The folder itself, or a copy of it with LF line ends where shell scripts have CRLF."""
    scripts = [path for path in folder.rglob("*.sh") if path.is_file() and b"\r\n" in path.read_bytes()]
    if not scripts:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rlcore-stage-") as scratch:
        copy = Path(shutil.copytree(folder, Path(scratch, folder.name), symlinks=True))
        for path in scripts:
            script = copy / path.relative_to(folder)
            script.write_bytes(script.read_bytes().replace(b"\r\n", b"\n"))
        yield copy
