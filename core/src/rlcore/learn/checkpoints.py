"""Checkpoints: a directory is complete or absent, and the last good one outlives every failure."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, RunFailed
from rlcore.record.directory import read_json, write_json

__all__ = ["complete", "latest", "save"]

STATE = "state.json"
"""Written last: a directory with it is complete."""


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a run's ``checkpoints`` folder, oldest first."""
    found = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"step-(\d+)", path.name)) and (path / STATE).is_file()
    ]
    return [path for _, path in sorted(found)]


def latest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest complete checkpoint and its state. Raises ``ConfigError`` if there is none."""
    found = complete(folder)
    if not found:
        raise ConfigError(f"{folder}: no complete checkpoint to resume from; start a new run")
    return found[-1], read_json(found[-1] / STATE)


async def save(
    folder: Path, step: int, state: Mapping[str, Any], write: Callable[[Path], Awaitable[None]], keep: int
) -> Path:
    """Write ``step-N`` through ``write(directory)`` and ``state``, then delete all but the newest ``keep``.

    Everything goes into a temporary directory that is synced and renamed; only then are older ones deleted.

    Raises:
        RunFailed: the disk is full or refuses; what was there before is still there.
    """
    target = folder / f"step-{step:06d}"
    part = folder / f".part-{step:06d}"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        await write(part)
        write_json(part / STATE, {**state, "step": step})
        for path in sorted(part.rglob("*")):
            _sync(path)
        _sync(part)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part, target)
        _sync(folder)
    except OSError as error:
        raise RunFailed(f"checkpoint of step {step} could not be written to {folder}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
