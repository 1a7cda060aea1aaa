"""A task set: problems in a fixed order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from rlcore.types import Message, Task


class Skeleton:
    """Sums of two numbers; ``data["answer"]`` is the right answer."""

    class Config(BaseModel):
        """Options of this task set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        count: int = Field(64, ge=1, description="number of tasks")
        seed: int = Field(0, description="which tasks; another seed for held-out ones")

    def __init__(self, config: Config) -> None:
        self.config = config

    def load(self) -> Sequence[Task]:
        """All tasks; see :class:`rlcore.protocols.Taskset`."""
        rng = random.Random(self.config.seed)
        tasks = []
        for number in range(self.config.count):
            a, b = rng.randint(0, 99), rng.randint(0, 99)
            question = Message("user", f"What is {a} + {b}? Answer with the number alone.")
            tasks.append(Task(id=f"sum-{self.config.seed}-{number}", messages=(question,), data={"answer": str(a + b)}))
        return tasks
