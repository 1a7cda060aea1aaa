"""Answer with vowels: a task set, and an agent loop that judges the answers itself."""

from pydantic import BaseModel, Field
from rlcore.types import AgentResult, Message, Task


class VowelTasks:
    """Requests of the form "sing n"."""

    class Config(BaseModel, extra="forbid"):
        count: int = Field(8, ge=1, description="number of tasks")

    def __init__(self, config: Config):
        self.config = config

    def load(self):
        return [Task(id=f"sing-{n}", messages=(Message("user", f"sing {n}"),)) for n in range(self.config.count)]


class VowelAgent:
    """Asks once; the reward is the share of vowels in the answer."""

    class Config(BaseModel, extra="forbid"):
        letters: str = Field("aeiou", min_length=1, description="letters that are wanted")

    def __init__(self, config: Config):
        self.config = config

    async def run(self, task, episode):
        reply = await episode.session.ask(task.messages)
        return AgentResult("answered", reward=self.reward(reply.text))

    def reward(self, text: str) -> float:
        return sum(character in self.config.letters for character in text) / max(len(text), 1)
