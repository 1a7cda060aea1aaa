"""What is put into a sandbox and when: the task's files before the agent's part, its tests for the verify window only."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.errors import InfraError, TaskError
from rlcore.protocols import Sandbox
from rlcore.types import Task

__all__ = ["prepare", "put_folder", "root_exec"]

STAGING_SECONDS = 20.0
IMAGE_FILES = ("Dockerfile", ".dockerignore")
"""What only an image build reads."""
FEW, SMALL = 16, 256 * 1024
"""Up to so many files and bytes a folder is written file by file: no archive, no copy."""


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
    if upload is not None:
        workdir = task.sandbox.workdir if task.sandbox else None
        if workdir is None:
            raise TaskError(f"{task.id}: environment/ is to be uploaded, so environment.workdir must be set")
        await put_folder(sandbox, Path(upload), workdir, skip=IMAGE_FILES)
    healthcheck = task.data.get("healthcheck")
    if healthcheck is not None:
        await wait_until_healthy(healthcheck, sandbox, task)


async def put_folder(sandbox: Sandbox, source: Path, target: str, *, skip: Sequence[str] = ()) -> None:
    """Copy a folder's content in, shell scripts with LF line ends. ``skip`` are names at its top that stay out."""
    files = _few_small_files(source, skip)
    if files is None:
        with tempfile.TemporaryDirectory(prefix="rlcore-stage-") as scratch:
            await sandbox.upload_dir(await asyncio.to_thread(_copied, source, Path(scratch, "copy"), skip), target)
        return
    for name, path in files:
        data, mode = path.read_bytes(), path.stat().st_mode & 0o777
        if name.endswith(".sh"):
            data = data.replace(b"\r\n", b"\n")
        await sandbox.write_file(f"{target.rstrip('/')}/{name}", data, mode=mode)


def _few_small_files(source: Path, skip: Sequence[str]) -> list[tuple[str, Path]] | None:
    """The files of a folder, if writing them one by one is the fast and complete way to copy it."""
    files, size = [], 0
    for path in sorted(source.rglob("*")):
        if path.is_symlink() or (path.is_dir() and not any(path.iterdir())):
            return None
        name = path.relative_to(source).as_posix()
        if path.is_file() and name not in skip:
            files.append((name, path))
            size += path.stat().st_size
            if len(files) > FEW or size > SMALL:
                return None
    return files


def _copied(source: Path, copy: Path, skip: Sequence[str]) -> Path:
    """A copy without what is to stay out, shell scripts with LF line ends; links stay links."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name in skip] if Path(folder) == source else []

    shutil.copytree(source, copy, symlinks=True, ignore=ignored)
    for path in copy.rglob("*.sh"):
        if path.is_file() and not path.is_symlink() and b"\r\n" in (data := path.read_bytes()):
            path.write_bytes(data.replace(b"\r\n", b"\n"))
    return copy


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
