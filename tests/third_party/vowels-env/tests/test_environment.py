from rlcore.testing import AgentLoopConformance
from vowels_env.environment import VowelAgent, VowelTasks


class TestVowelAgent(AgentLoopConformance):
    agent = VowelAgent
    replies = ("aeiou and more",)

    def task(self):
        return VowelTasks(VowelTasks.Config()).load()[3]

    def test_more_vowels_are_better(self):
        rewards = [self.play(self.episode([text])).reward for text in ("", "shh", "lala", "ooo")]
        assert rewards == [0.0, 0.0, 0.5, 1.0]
