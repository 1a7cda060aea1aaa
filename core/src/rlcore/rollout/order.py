"""The order of tasks: a seeded shuffle per epoch, with a cursor that survives a restart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.errors import ConfigError
from rlcore.types import Task

__all__ = ["TaskOrder"]


class TaskOrder:
    """Position p of a run is always the same task: epoch ``p // len(tasks)`` of a shuffle seeded by seed and epoch.

    The state holds the next position and the positions that were given out but not yet finished with, so a resumed run
    makes those again and skips none.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ConfigError("taskset: no tasks; check its path and filters")
        ids = [task.id for task in tasks]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ConfigError(f"taskset: the task id {twice!r} stands for more than one task")
        self._tasks = tasks
        self._seed = seed
        self._next = 0
        self._open: list[int] = []
        self._again: list[int] = []
        self._fingerprint = hashlib.sha256("\0".join([str(seed), *ids]).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._tasks)

    def task_at(self, position: int) -> Task:
        """The task of a position, whatever was given out."""
        epoch, index = divmod(position, len(self._tasks))
        shuffled = list(range(len(self._tasks)))
        random.Random(f"{self._seed}:{epoch}").shuffle(shuffled)
        return self._tasks[shuffled[index]]

    def take(self) -> tuple[int, Task]:
        """The next position and its task: first those that a restart left unfinished, then new ones."""
        if self._again:
            position = self._again.pop(0)
        else:
            position, self._next = self._next, self._next + 1
        self._open.append(position)
        return position, self.task_at(position)

    def finish(self, position: int) -> None:
        """The position was trained or given up for good."""
        self._open.remove(position)

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs; JSON."""
        return {"next": self._next, "open": sorted([*self._open, *self._again]), "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Raises ``ConfigError`` if it belongs to another task set or seed."""
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                "taskset: the tasks or the seed differ from those of the checkpoint, so its position means nothing here; "
                "resume with the same task set, or start a new run"
            )
        self._next = int(state["next"])
        self._again = [int(position) for position in state["open"]]
        self._open = []
