from digits_env.environment import DigitAgent, DigitTasks
from rlcore.testing import AgentLoopConformance


class TestDigitAgent(AgentLoopConformance):
    agent = DigitAgent
    replies = ("1 2 3 4 5",)

    def task(self):
        return DigitTasks(DigitTasks.Config()).load()[3]

    def test_more_digits_are_better(self):
        rewards = [self.play(self.episode([text])).reward for text in ("none", "1", "1 2", "12345678")]
        assert rewards == [0.0, 0.25, 0.5, 1.0]
