"""Conformance of an agent loop: about ten behaviours that every run relies on."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from rlcore.errors import PolicyUnavailable, SandboxLost
from rlcore.rollout.budget import BudgetExhausted
from rlcore.rollout.rewards import coerce_reward
from rlcore.types import AgentResult, BudgetLeft, EndReason, ExecResult, FinishReason, Message, Reply, Task

__all__ = ["AgentLoopConformance", "ScriptedEpisode", "ScriptedSandbox", "ScriptedSession"]

SECONDS = 10.0
"""No attempt of the kit may take longer."""


class ScriptedSession:
    """A conversation whose answers are written down beforehand; then its budget is exhausted.

    Args:
        replies: texts of the policy, or errors that are raised instead.
        finish: why each reply ended.
    """

    def __init__(self, replies: Sequence[str | Exception], finish: FinishReason = FinishReason.STOP) -> None:
        self.asked: list[list[Message]] = []
        self._replies = list(replies)
        self._finish = finish

    async def ask(self, new_messages: Sequence[Message]) -> Reply:
        """The next answer."""
        self.asked.append(list(new_messages))
        await asyncio.sleep(0)
        if len(self.asked) > len(self._replies):
            raise BudgetExhausted(EndReason.MAX_TURNS, "no turn is left")
        reply = self._replies[len(self.asked) - 1]
        if isinstance(reply, Exception):
            raise reply
        return Reply(reply, self._finish, Message("assistant", reply))

    @property
    def left(self) -> BudgetLeft:
        """Turns count down, the rest does not."""
        return BudgetLeft(tokens=4096, turns=max(len(self._replies) - len(self.asked), 0), seconds=60.0)


class ScriptedSandbox:
    """A sandbox that only notes what it is asked: commands succeed with ``output``, files are a dictionary."""

    id = "scripted"

    def __init__(self, output: str | Exception = "") -> None:
        self.commands: list[str | Sequence[str]] = []
        self.files: dict[str, bytes] = {}
        self._output = output

    async def exec(self, command: str | Sequence[str], *, timeout: float, **_: Any) -> ExecResult:
        """Note the command."""
        self.commands.append(command)
        await asyncio.sleep(0)
        if isinstance(self._output, Exception):
            raise self._output
        return ExecResult(0, self._output, "")

    async def read_file(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        """What was written."""
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Keep the content."""
        self.files[path] = data

    async def upload_dir(self, source: Path, target: str) -> None:
        """Nothing is copied."""

    async def download_dir(self, source: str, target: Path) -> None:
        """Nothing is copied."""

    async def alive(self) -> bool:
        """Always."""
        return True

    async def close(self) -> None:
        """Nothing is open."""


class ScriptedEpisode:
    """What an agent loop gets in these tests."""

    def __init__(self, session: ScriptedSession, sandbox: ScriptedSandbox | None) -> None:
        self.session = session
        self.sandbox = sandbox


class AgentLoopConformance:
    """Subclass it in a test module, name the agent loop, and say how an attempt of it goes. ::

    class TestMyAgent(AgentLoopConformance):
        agent = MyAgent
        replies = ("first answer", "last answer, after which the loop ends by itself")

        def task(self):
            return Task(id="t", messages=(Message("user", "…"),), data={"answer": "…"})
    """

    agent: ClassVar[type]
    options: ClassVar[Mapping[str, Any]] = {}

    replies: ClassVar[Sequence[str]]
    """What the policy says in an attempt that ends by itself."""

    output: ClassVar[str] = "done"
    """What commands print in the sandbox of a task that has one."""

    def task(self) -> Task:
        """A task as the loop expects it."""
        raise NotImplementedError("return a Task that the agent loop can play")

    # --- the machine

    def make(self) -> Any:
        """A new instance with ``options``."""
        return self.agent(self.agent.Config(**self.options))  # type: ignore[attr-defined]

    def episode(
        self, replies: Sequence[str | Exception] | None = None, finish: FinishReason = FinishReason.STOP
    ) -> ScriptedEpisode:
        """An episode with these answers (default: ``replies``)."""
        sandbox = ScriptedSandbox(self.output) if self.task().sandbox is not None else None
        return ScriptedEpisode(ScriptedSession(self.replies if replies is None else replies, finish), sandbox)

    def play(self, episode: ScriptedEpisode, task: Task | None = None) -> AgentResult:
        """One attempt, bounded in time."""
        return asyncio.run(self._play(self.make(), episode, task or self.task()))

    async def _play(self, agent: Any, episode: ScriptedEpisode, task: Task) -> AgentResult:
        async with asyncio.timeout(SECONDS):
            result = await agent.run(task, episode)
        assert isinstance(result, AgentResult), f"run() returned a {type(result).__name__}, not an AgentResult"
        return result

    # --- what is checked

    def test_an_attempt_ends_with_a_reason(self) -> None:
        """And with no more model calls than answers."""
        episode = self.episode()
        result = self.play(episode)
        assert isinstance(result.end, str)
        assert result.end
        assert len(episode.session.asked) <= len(self.replies)

    def test_the_reward_is_a_finite_number_or_none(self) -> None:
        """Never NaN, a text or a mapping."""
        result = self.play(self.episode())
        assert result.reward == coerce_reward(result.reward, "the kit's attempt")

    def test_the_policy_sees_the_task(self) -> None:
        """All its messages are in the first question."""
        episode = self.episode()
        self.play(episode)
        missing = [message for message in self.task().messages if message not in episode.session.asked[0]]
        assert not missing, f"the first question lacks {missing}"

    def test_the_task_stays_as_it_is(self) -> None:
        """A task is played any number of times."""
        task = self.task()
        before = copy.deepcopy(task)
        self.play(self.episode(), task)
        assert task == before

    def test_one_instance_plays_many_attempts_at_once(self) -> None:
        """It keeps no state of one: all come to the same result as one alone."""
        alone = self.play(self.episode())

        async def together() -> list[AgentResult]:
            agent = self.make()
            return await asyncio.gather(*(self._play(agent, self.episode(), self.task()) for _ in range(8)))

        for result in asyncio.run(together()):
            assert (result.end, result.reward) == (alone.end, alone.reward)

    def test_a_reply_that_was_cut_is_not_executed(self) -> None:
        """It ends the attempt: no command runs and nothing more is asked."""
        episode = self.episode(finish=FinishReason.LENGTH)
        before = len(self._commands_before_the_first_reply())
        self.play(episode)
        assert len(episode.session.asked) == 1, "the attempt went on after a reply that was cut"
        if episode.sandbox is not None:
            assert len(episode.sandbox.commands) == before, f"executed: {episode.sandbox.commands[before:]}"

    def test_an_exhausted_budget_ends_the_attempt(self) -> None:
        """Left to the caller or answered with a result, but nothing more is asked."""
        episode = self.episode(replies=[])
        with suppress(BudgetExhausted):
            self.play(episode)
        assert len(episode.session.asked) == 1, "the loop asked again after its budget was exhausted"

    def test_a_lost_policy_is_left_to_the_caller(self) -> None:
        """It is the infrastructure's fault: no reward is made of it."""
        self._must_raise(PolicyUnavailable("no answer"), self.episode(replies=[PolicyUnavailable("no answer")]))

    def test_a_lost_sandbox_is_left_to_the_caller(self) -> None:
        """The same, for loops that work in one."""
        if self.task().sandbox is None:
            return
        episode = ScriptedEpisode(ScriptedSession(self.replies), ScriptedSandbox(SandboxLost("gone")))
        self._must_raise(SandboxLost("gone"), episode)

    def test_it_can_be_cancelled(self) -> None:
        """At any await, at once."""

        class Silent(ScriptedSession):
            async def ask(self, new_messages: Sequence[Message]) -> Reply:
                await asyncio.sleep(3600)
                raise AssertionError

        async def cancel() -> None:
            episode = self.episode()
            episode.session = Silent([])
            attempt = asyncio.create_task(self.make().run(self.task(), episode))
            await asyncio.sleep(0.05)
            attempt.cancel()
            done, _ = await asyncio.wait([attempt], timeout=SECONDS)
            assert done, "a cancelled attempt does not end"
            assert attempt.cancelled(), "a cancelled attempt went on to an end of its own"

        asyncio.run(cancel())

    def _commands_before_the_first_reply(self) -> Sequence[Any]:
        episode = self.episode(replies=[])
        with suppress(BudgetExhausted):
            self.play(episode)
        return episode.sandbox.commands if episode.sandbox is not None else ()

    def _must_raise(self, error: Exception, episode: ScriptedEpisode) -> None:
        try:
            result = self.play(episode)
        except type(error):
            return
        raise AssertionError(f"{type(error).__name__} became {result}")
