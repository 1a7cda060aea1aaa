"""An agent loop with its own reward and no sandbox."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rlcore.protocols import Episode
from rlcore.types import AgentResult, FinishReason, Message, Task


class Skeleton:
    """Asks until the answer is right; the reward is 1 for the right answer and 0 otherwise.

    ``task.data["answer"]`` is the right answer.
    """

    class Config(BaseModel):
        """Options of this agent loop."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        tries: int = Field(2, ge=1, description="answers that the model may give")

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(self, task: Task, episode: Episode) -> AgentResult:
        """Play one attempt; see :class:`rlcore.protocols.AgentLoop`."""
        new = task.messages
        for _ in range(self.config.tries):
            reply = await episode.session.ask(new)
            if reply.finish_reason is FinishReason.LENGTH:
                return AgentResult("length", reward=0.0)  # cut: nothing in it counts
            if reply.text.strip() == task.data["answer"]:
                return AgentResult("right", reward=1.0)
            new = (Message("user", "That is not it. Try again."),)
        return AgentResult("wrong", reward=0.0)
