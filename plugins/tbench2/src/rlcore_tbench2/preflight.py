"""What is wrong with a run's tasks, found before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.errors import RlcoreError
from rlcore.types import Problem

from rlcore_tbench2.folder import content_hash
from rlcore_tbench2.taskset import TaskFolders

__all__ = ["problems_of"]

SHOWN = 5
"""Broken folders that are named one by one."""


def problems_of(config: Any) -> Iterator[Problem]:
    """Broken, missing and empty task sets of a run, and tasks that are both trained on and evaluated on."""
    sections = {"taskset": config.taskset, "eval.taskset": config.eval.taskset}
    if config.eval.unseen is not None:
        sections["eval.unseen.taskset"] = config.eval.unseen.taskset
    trained: dict[str, str] = {}
    for where, section in sections.items():
        if section is None or not isinstance(section.options, TaskFolders.Config):
            continue
        hashes: dict[str, str] = {}
        yield from _problems_of_set(where, section.options, hashes)
        if where == "taskset":
            trained = hashes
            continue
        both = sorted(trained[digest] for digest in trained.keys() & hashes.keys())
        if both:
            yield Problem(
                "tasks",
                f"{len(both)} tasks are in taskset and in {where}: {', '.join(both[:SHOWN])}",
                "evaluate on other tasks: `rlcore tasks split` writes disjoint parts for taskset.split",
            )


def _problems_of_set(where: str, options: TaskFolders.Config, hashes: dict[str, str]) -> Iterator[Problem]:
    taskset = TaskFolders(options)
    if not taskset.root.exists() and taskset.root.absolute().is_relative_to(_cache()):
        return  # a recipe writes it when the run starts
    remedy = f"`rlcore tasks check {taskset.root}` lists everything"
    try:
        report = taskset.report()
    except RlcoreError as error:
        yield Problem("tasks", f"{where}: {error}", f"set {where}.path to a folder of task folders")
        return
    for _, message in report.problems[:SHOWN]:
        yield Problem("tasks", f"{where}: {message}", remedy, fatal=options.skip != "broken")
    more = len(report.problems) - SHOWN
    if more > 0:
        yield Problem("tasks", f"{where}: {more} more broken folders", remedy, fatal=options.skip != "broken")
    if report.skipped:
        path, reason = report.skipped[0]
        message = f"{where}: {len(report.skipped)} tasks cannot run here, such as {path.name}: {reason}"
        yield Problem("tasks", message, remedy, fatal=options.skip == "nothing")
    if not report.folders:
        yield Problem(
            "tasks", f"{where}: no folder below {taskset.root} is a task that can run (a task has a task.toml)", remedy
        )
    hashes.update({content_hash(folder.path): folder.id for folder in report.folders})


def _cache() -> Path:
    """Where recipes put what can be made again."""
    return Path(os.environ.get("RLCORE_CACHE") or Path.home() / ".cache" / "rlcore").absolute()
