"""Where the tasks are in a folder: by recursion, stopping at a task; what is passed over is counted, never lost."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.errors import TaskError

__all__ = ["Found", "find_tasks"]

PARKED = ("archive",)
"""Folders of retired copies; names that start with ``.`` or ``_`` are parked as well."""


@dataclass(slots=True)
class Found:
    """What lies below a folder.

    Attributes:
        root: the folder.
        tasks: folders with ``task.toml``, sorted.
        old: terminal-bench 1 folders (``task.yaml`` and no ``task.toml``).
        parked: hidden and retired folders that were not entered.
        templates: folders with ``task.toml`` and neither ``instruction.md`` nor ``steps/``: no tasks.
        warnings: about the tree as a whole.
    """

    root: Path
    tasks: list[Path] = field(default_factory=list)
    old: list[Path] = field(default_factory=list)
    parked: list[Path] = field(default_factory=list)
    templates: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def find_tasks(root: Path, *, include_root: bool = False) -> Found:
    """Find the task folders below ``root``, or ``root`` itself if it is one.

    A root with ``task.toml`` that also holds tasks deeper down gives those; with ``include_root`` it gives itself.
    Links to folders are not followed.

    Raises:
        TaskError: ``root`` is no folder.
    """
    if not root.is_dir():
        raise TaskError(f"{root}: no such folder of tasks")
    found = Found(root)
    root_is_task = _is_task(root) or (root / "task.yaml").is_file()
    if root_is_task and include_root:
        _take(root, found)
        return found
    _walk(root, found, at_root=True)
    if root_is_task:
        if found.tasks:
            found.warnings.append(
                f"{root} is a task and holds {len(found.tasks)} more; those are taken, not the root (ask for it with "
                "include_root)"
            )
        else:
            found.parked.clear()
            found.old.clear()
            _take(root, found)
    return found


def _is_task(path: Path) -> bool:
    return (path / "task.toml").is_file()


def _take(path: Path, found: Found) -> None:
    if not _is_task(path):
        found.old.append(path)
    elif not (path / "instruction.md").is_file() and not (path / "steps").is_dir():
        found.templates.append(path)
    else:
        found.tasks.append(path)


def _walk(path: Path, found: Found, *, at_root: bool) -> None:
    if not at_root and (_is_task(path) or (path / "task.yaml").is_file()):
        _take(path, found)
        return
    with os.scandir(path) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in folders:
        child = path / name
        if at_root and _is_task(path) and name in ("environment", "tests", "solution", "steps"):
            continue
        if name.startswith((".", "_")) or name in PARKED:
            found.parked.append(child)
        else:
            _walk(child, found, at_root=False)
