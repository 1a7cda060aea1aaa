"""The task set ``tbench2``: a folder of task folders as :class:`rlcore.types.Task`."""

from __future__ import annotations

import fnmatch
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from rlcore.errors import ConfigError, TaskError
from rlcore.types import Message, SandboxSpec, Task

from rlcore_tbench2.discovery import Found, find_tasks
from rlcore_tbench2.env import filled
from rlcore_tbench2.folder import TB1_MESSAGE, TaskFolder, content_hash, read_folder

__all__ = ["Report", "TaskFolders"]

_log = logging.getLogger("rlcore.tbench2")
_SLICE = re.compile(r"\[\s*([+-]?\d*)\s*:\s*([+-]?\d*)\s*(?::\s*([+-]?\d*)\s*)?\]")
OLD_DEFAULTS = {"cpus": 1, "memory_mb": 2048, "storage_mb": 10240}
"""What the tools of schemas 1.0 to 1.2 assumed where a task says nothing."""


@dataclass(slots=True)
class Report:
    """What became of every folder.

    Attributes:
        folders: the tasks that can run, in order.
        problems: folder and message of what is broken.
        skipped: folder and reason of what is not supported here.
        found: what discovery saw.
    """

    found: Found
    folders: list[TaskFolder] = field(default_factory=list)
    problems: list[tuple[Path, str]] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)


class TaskFolders:
    """Harbor / terminal-bench-2 task folders below one folder, in the order of their paths."""

    class Config(BaseModel):
        """Options of the ``tbench2`` task set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field(description="folder of task folders, or one task folder; may end in a slice: tasks@[-100:]")
        slice: str | None = Field(None, description="part of the tasks, after every filter: [-100:], [:20], [::2]")
        include: tuple[str, ...] = Field((), description="patterns of ids to take (*, ?, [abc]); default: all")
        exclude: tuple[str, ...] = Field((), description="patterns of ids to leave out")
        where: dict[str, str] = Field(
            default_factory=dict, description="metadata that a task must have, as in where.difficulty = 'easy'"
        )
        split: str | None = Field(None, description="file of ids that `rlcore tasks split` wrote")
        skip: Literal["nothing", "unsupported", "broken"] = Field(
            "unsupported",
            description="what is left out with a warning and not an error: nothing, tasks that this program cannot run "
            "(GPUs, compose, steps, …), or broken folders too",
        )
        strict: bool = Field(False, description="unknown keys of task.toml are errors")
        include_root: bool = Field(False, description="take the root itself where it is a task and holds others")
        images: Literal["auto", "always", "dockerfile"] = Field(
            "auto",
            description="auto: docker_image, else Dockerfile, and none for tasks whose image is optional; always: also "
            "for those; dockerfile: always, and the Dockerfile before docker_image",
        )
        host_env: tuple[str, ...] = Field(
            (), description="host variables that ${VAR} in the env tables of a task may bring into a sandbox"
        )
        localhost_images: bool = Field(False, description="images on localhost/ are there, so run their tasks")
        old_defaults: bool = Field(
            False, description="1 CPU, 2048 MiB, 10240 MiB for tasks of schema 1.0 to 1.2 that state nothing"
        )
        min_cpus: float = Field(0, ge=0, lt=inf, description="floor of CPU cores (and the value if nothing is stated)")
        min_memory_mb: int = Field(0, ge=0, description="floor of memory, MiB")
        min_disk_mb: int = Field(0, ge=0, description="floor of disk, MiB")
        max_cpus: float | None = Field(None, gt=0, description="cap of CPU cores")
        max_memory_mb: int | None = Field(None, gt=0, description="cap of memory, MiB")
        max_disk_mb: int | None = Field(None, gt=0, description="cap of disk, MiB")
        max_agent_seconds: float | None = Field(None, gt=0, description="cap of a task's clock for the agent")
        max_verifier_seconds: float | None = Field(None, gt=0, description="cap of a task's clock for its tests")

        @field_validator("slice")
        @classmethod
        def _slice(cls, value: str | None) -> str | None:
            if value is not None:
                parse_slice(value)
            return value

        @field_validator("path")
        @classmethod
        def _path(cls, value: str) -> str:
            parse_slice(_split_path(value)[1] or "[:]")
            return value

        @model_validator(mode="after")
        def _consistent(self) -> Self:
            for low, high in (
                ("min_cpus", "max_cpus"),
                ("min_memory_mb", "max_memory_mb"),
                ("min_disk_mb", "max_disk_mb"),
            ):
                cap = getattr(self, high)
                if cap is not None and getattr(self, low) > cap:
                    raise ValueError(f"{low} {getattr(self, low)} is above {high} {cap}")
            if self.slice is not None and _split_path(self.path)[1] is not None:
                raise ValueError("path ends in a slice and slice is set too; keep one")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def root(self) -> Path:
        """The folder, without the slice that ``path`` may end in."""
        return Path(_split_path(self.config.path)[0])

    def load(self) -> Sequence[Task]:
        """All tasks; see :class:`rlcore.protocols.Taskset`. What is left out is logged by name with its reason."""
        report = self.report()
        if report.problems and self.config.skip != "broken":
            raise TaskError("\n".join(message for _, message in report.problems))
        if report.skipped and self.config.skip == "nothing":
            raise TaskError("\n".join(f"{path}: {reason}" for path, reason in report.skipped))
        for path, reason in [*report.skipped, *report.problems]:
            _log.warning("left out: %s: %s", path, reason)
        tasks = [self._task(folder) for folder in report.folders]
        if not tasks:
            raise TaskError(f"{self.config.path}: no tasks{_why_none(report)}")
        return tasks

    def report(self) -> Report:
        """Every folder below ``path``, read and sorted into what runs, what is skipped and what is broken.

        Raises:
            TaskError: no folder, or the split names tasks that are not there or changed since.
        """
        config = self.config
        found = find_tasks(self.root, include_root=config.include_root)
        report = Report(found)
        same_names = {path.name: path for path in found.tasks}
        for path in found.old:
            twin = same_names.get(path.name)
            also = f" A Harbor folder of the same name is {twin}." if twin else ""
            report.problems.append((path, TB1_MESSAGE.format(folder=path) + also))
        wanted = self._wanted()
        seen: dict[str, Path] = {}
        for path in found.tasks:
            self._read(path, found, wanted, seen, report)
        if config.split is not None and wanted.missing:
            raise TaskError(f"{config.split}: no such task below {self.root}: {', '.join(sorted(wanted.missing)[:5])}")
        report.folders = report.folders[parse_slice(_split_path(config.path)[1] or config.slice or "[:]")]
        return report

    def _read(self, path: Path, found: Found, wanted: _Wanted, seen: dict[str, Path], report: Report) -> None:
        try:
            folder = read_folder(path, found.root, strict=self.config.strict)
        except TaskError as error:
            report.problems.append((path, str(error)))
            return
        if folder.id in seen:
            report.problems.append((path, f"{path}: duplicate id {folder.id!r}, also of {seen[folder.id]}"))
            return
        seen[folder.id] = path
        if not wanted(folder):
            return
        reasons = [
            reason
            for reason in folder.unsupported
            if not (self.config.localhost_images and reason.endswith("is not pullable"))
        ]
        if reasons:
            report.skipped.append((path, "; ".join(reasons)))
            return
        report.folders.append(folder)

    def _wanted(self) -> _Wanted:
        config = self.config
        ids = None if config.split is None else read_split(Path(config.split))
        return _Wanted(config.include, config.exclude, config.where, ids, config.split or "")

    def _task(self, folder: TaskFolder) -> Task:
        config, file = self.config, folder.file
        image, build_context = self._image(folder)
        uploaded = image is None and build_context is None
        if file.docker_image is not None and image is not None and not folder.dockerfile:
            uploaded = folder.environment.is_dir()
        data: dict[str, Any] = {
            "folder": str(folder.path),
            "tests": str(folder.tests),
            "verifier_user": file.verifier.user,
            "verifier_env": dict(file.verifier_env),
            "host_env": config.host_env,
        }
        if uploaded:
            data["upload"] = str(folder.environment)
        if file.healthcheck is not None:
            data["healthcheck"] = dict(file.healthcheck)
        if folder.max_commands is not None:
            data["max_commands"] = folder.max_commands
        if folder.end_processes:
            data["end_processes"] = True
        where = f"{folder.path / 'task.toml'}"
        filled(file.verifier_env, f"{where}: verifier.env", config.host_env)
        metadata = {key: value for key, value in file.metadata.items() if key != "rlcore"}
        return Task(
            id=folder.id,
            messages=(*folder.examples, Message("user", folder.instruction)),
            sandbox=SandboxSpec(
                image=image,
                build_context=build_context,
                cpus=self._limit(folder, "cpus", config.min_cpus, config.max_cpus),
                memory_mb=self._limit(folder, "memory_mb", config.min_memory_mb, config.max_memory_mb),
                disk_mb=self._limit(folder, "storage_mb", config.min_disk_mb, config.max_disk_mb),
                workdir=file.workdir,
                user=file.agent.user,
                env=filled(file.env, f"{where}: environment.env", config.host_env),
                network=(file.agent.network_mode or file.network_mode) == "public",
            ),
            data=data,
            metadata=metadata,
            agent_seconds=_at_most(file.agent.timeout_sec, config.max_agent_seconds),
            verifier_seconds=_at_most(file.verifier.timeout_sec, config.max_verifier_seconds) or 600.0,
        )

    def _image(self, folder: TaskFolder) -> tuple[str | None, str | None]:
        if folder.image_optional and self.config.images == "auto":
            return None, None
        context = str(folder.environment) if folder.dockerfile else None
        if context is not None and (self.config.images == "dockerfile" or folder.file.docker_image is None):
            return None, context
        return folder.file.docker_image, None

    def _limit(self, folder: TaskFolder, key: str, floor: float, cap: float | None) -> Any:
        stated = getattr(folder.file, key)
        if stated is None and self.config.old_defaults and folder.file.schema in ("1.0", "1.1", "1.2"):
            stated = OLD_DEFAULTS[key]
        if stated is None:
            return floor or None
        raised = max(stated, floor)
        return raised if cap is None else min(raised, cap)


@dataclass(slots=True)
class _Wanted:
    """The filters of a configuration; keeps what a split names and nobody has seen."""

    include: Sequence[str]
    exclude: Sequence[str]
    where: dict[str, str]
    ids: dict[str, str] | None
    source: str
    missing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.missing = set(self.ids or ())

    def __call__(self, folder: TaskFolder) -> bool:
        if self.ids is not None:
            if folder.id not in self.ids:
                return False
            self.missing.discard(folder.id)
            if content_hash(folder.path) != self.ids[folder.id]:
                raise TaskError(f"{self.source}: the task {folder.id} changed since the split was written")
        return (
            (not self.include or _matches(folder.id, self.include))
            and not _matches(folder.id, self.exclude)
            and all(str(folder.file.metadata.get(key)) == value for key, value in self.where.items())
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def parse_slice(text: str) -> slice:
    """``[-100:]``, ``[:20]``, ``[1:3]``, ``[::2]`` as a Python slice. Raises ``ValueError``."""
    match = _SLICE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a slice such as [-100:], [:20] or [::2]")
    start, stop, step = (int(part) if part else None for part in match.groups())
    if step == 0:
        raise ValueError(f"{text!r}: a step of 0 takes nothing")
    return slice(start, stop, step)


def _split_path(path: str) -> tuple[str, str | None]:
    name, at, part = path.rpartition("@[")
    return (name, f"[{part}") if at and path.endswith("]") else (path, None)


def read_split(path: Path) -> dict[str, str]:
    """Content hash by id of a split file. Raises ``ConfigError``."""
    try:
        tasks = json.loads(path.read_text("utf-8"))["tasks"]
        return {str(name): str(digest) for name, digest in tasks.items()}
    except FileNotFoundError as error:
        raise ConfigError(f"taskset.split: no such file: {path}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"taskset.split: {path} is not a file that `rlcore tasks split` wrote") from error


def _at_most(seconds: float | None, cap: float | None) -> float | None:
    return cap if seconds is None else seconds if cap is None else min(seconds, cap)


def _why_none(report: Report) -> str:
    found = report.found
    parts = [
        f"{len(found.tasks)} found" if found.tasks else "no folder with task.toml",
        f"{len(report.skipped)} not supported here" if report.skipped else "",
        f"{len(report.problems)} broken" if report.problems else "",
        f"{len(found.parked)} hidden or archived folders not entered" if found.parked else "",
        f"{len(found.templates)} without instruction.md" if found.templates else "",
    ]
    return f" ({', '.join(part for part in parts if part)}); `rlcore tasks check` lists them"
