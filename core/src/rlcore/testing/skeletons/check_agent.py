"""The agent loop keeps its contract."""

from rlcore.testing.agent import AgentLoopConformance
from rlcore.testing.skeletons.agent import Skeleton
from rlcore.types import Message, Task


class TestSkeleton(AgentLoopConformance):
    """An attempt that is right at the second try."""

    agent = Skeleton
    replies = ("41", "42")

    def task(self) -> Task:
        """Six times seven."""
        return Task(id="6x7", messages=(Message("user", "What is 6 x 7?"),), data={"answer": "42"})

    def test_right_and_wrong_answers(self) -> None:
        """The reward follows the answer."""
        assert self.play(self.episode(["42"])).reward == 1.0
        assert self.play(self.episode(["1", "2"])).reward == 0.0
