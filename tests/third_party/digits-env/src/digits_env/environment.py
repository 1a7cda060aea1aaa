"""Answer with digits: a task set, and an agent loop that judges the answers itself."""

from pydantic import BaseModel, Field
from rlcore.types import AgentResult, Message, Task


class DigitTasks:
    """Questions of the form "count to n"."""

    class Config(BaseModel, extra="forbid"):
        count: int = Field(8, ge=1, description="number of tasks")

    def __init__(self, config: Config):
        self.config = config

    def load(self):
        return [Task(id=f"count-{n}", messages=(Message("user", f"count to {n}"),)) for n in range(self.config.count)]


class DigitAgent:
    """Asks once; the more digits are in the answer, the better."""

    class Config(BaseModel, extra="forbid"):
        needed: int = Field(4, ge=1, description="digits of a full reward")

    def __init__(self, config: Config):
        self.config = config

    async def run(self, task, episode):
        reply = await episode.session.ask(task.messages)
        return AgentResult("answered", reward=self.reward(reply.text))

    def reward(self, text: str) -> float:
        digits = sum(character.isdigit() for character in text)
        return min(digits / self.config.needed, 1.0)
