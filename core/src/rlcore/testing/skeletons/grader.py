"""A grader: the verdict on an attempt."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rlcore.errors import VerifierUnavailable
from rlcore.protocols import Sandbox
from rlcore.types import Task, Trajectory, Verdict


class Skeleton:
    """1 if a file in the sandbox has the content that ``task.data["content"]`` says, else 0."""

    class Config(BaseModel):
        """Options of this grader."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field("/app/answer.txt", description="the file that is looked at")

    def __init__(self, config: Config) -> None:
        self.config = config

    async def grade(self, task: Task, sandbox: Sandbox | None, trajectory: Trajectory) -> Verdict:
        """The verdict; see :class:`rlcore.protocols.Grader`."""
        if sandbox is None:
            raise VerifierUnavailable(f"task {task.id} has no sandbox to look into")  # no verdict, which is not 0
        try:
            content = await sandbox.read_file(self.config.path)
        except FileNotFoundError:
            return Verdict(0.0, {"missing": self.config.path})
        return Verdict(float(content.decode(errors="replace").strip() == task.data["content"]))
