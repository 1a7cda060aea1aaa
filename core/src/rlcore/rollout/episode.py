"""One attempt from the first message to the verdict, whatever happens on the way.

Whose fault an ending is decides what it is worth: the policy's endings are graded, the infrastructure's have no verdict.
The agent's part runs under the episode's clock, the verifier in a window of its own.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from time import monotonic

from rlcore.errors import InfraError, PolicyUnavailable, TaskError, VerifierUnavailable
from rlcore.protocols import AgentLoop, Grader, Sandbox
from rlcore.rollout.rewards import coerce_reward
from rlcore.rollout.session import BudgetExhausted, Session
from rlcore.types import Budget, EndReason, SandboxSpec, Task, Trajectory

__all__ = ["EpisodeRunner"]

VERIFIER_GRACE = 30.0
"""Seconds beyond the verifier's own window (staging the tests, fetching the verdict) before the runner gives up."""

UNGRADED = (EndReason.POLICY_LOST, EndReason.SANDBOX_LOST, EndReason.ERROR)
"""Endings that say nothing about the policy: no verdict is asked for."""


@dataclass(slots=True)
class _Episode:
    session: Session
    sandbox: Sandbox | None


@dataclass(slots=True)
class EpisodeRunner:
    """Runs attempts; shared by all of them.

    Attributes:
        agent: the agent loop.
        grader: gives the verdict; ``None``: the agent loop's own reward counts.
        open_session: makes the conversation of one attempt from its id and its budget.
        open_sandbox: leases a sandbox for a task; entering may raise any ``InfraError``.
        budget: what one attempt may use; a task's own clock can only shorten it.
    """

    agent: AgentLoop
    grader: Grader | None
    open_session: Callable[[str, Budget], Session]
    open_sandbox: Callable[[SandboxSpec, str], AbstractAsyncContextManager[Sandbox]]
    budget: Budget

    async def run(self, task: Task, *, trajectory_id: str, group_id: str) -> Trajectory:
        """One attempt. Never raises for what happens in it, except ``CancelledError`` (after cleaning up)."""
        seconds = min(self.budget.seconds, task.agent_seconds or self.budget.seconds)
        trajectory = Trajectory(id=trajectory_id, task_id=task.id, group_id=group_id)
        clock = _Clock(trajectory)
        try:
            leased = nullcontext() if task.sandbox is None else self.open_sandbox(task.sandbox, task.id)
            async with leased as sandbox:
                clock.lap("reset")
                with closing(self.open_session(trajectory_id, replace(self.budget, seconds=seconds))) as session:
                    await self._play(task, _Episode(session, sandbox), seconds, trajectory)
                    trajectory.turns = list(session.turns)
                clock.lap("agent")
                await self._judge(task, sandbox, trajectory)
                clock.lap("verify")
            clock.lap("close")
        except InfraError as error:
            trajectory.end = trajectory.end or EndReason.SANDBOX_LOST
            trajectory.reward, trajectory.error = None, _say(error)
        if trajectory.reward is not None and not trajectory.turns:
            trajectory.reward, trajectory.error = None, "nothing was sampled"
        return trajectory

    async def _play(self, task: Task, episode: _Episode, seconds: float, trajectory: Trajectory) -> None:
        clock = asyncio.timeout(seconds)
        try:
            async with clock:
                result = await self.agent.run(task, episode)
            trajectory.end = result.end
            trajectory.info.update(result.info)
            if result.reward is not None:
                trajectory.reward = coerce_reward(result.reward, f"agent loop {_whose(self.agent)}, task {task.id}")
        except BudgetExhausted as error:
            trajectory.end = error.reason
        except InfraError as error:
            trajectory.end, trajectory.error = _lost(error), _say(error)
        except TaskError as error:
            trajectory.end, trajectory.error = EndReason.ERROR, _say(error)
        except Exception as error:  # noqa: BLE001 - an agent loop's bug: kept with its traceback; the scheduler stops a run of them
            if clock.expired() and isinstance(error, TimeoutError):
                trajectory.end = EndReason.TIMEOUT
            else:
                _blame(trajectory, error)

    async def _judge(self, task: Task, sandbox: Sandbox | None, trajectory: Trajectory) -> None:
        if trajectory.end in UNGRADED:
            trajectory.reward = None
            return
        if self.grader is None:
            if trajectory.reward is None and trajectory.error is None:
                trajectory.error = "the agent loop gave no reward and no grader is configured"
            return
        trajectory.reward = None
        clock = asyncio.timeout(task.verifier_seconds + VERIFIER_GRACE)
        try:
            async with clock:
                verdict = await self.grader.grade(task, sandbox, trajectory)
            trajectory.info.update(verdict.info)
            trajectory.reward = coerce_reward(verdict.reward, f"grader {_whose(self.grader)}, task {task.id}")
        except (VerifierUnavailable, TaskError) as error:
            trajectory.error = _say(error)
        except InfraError as error:  # lost while it was judged: made again, as if it had been lost before
            trajectory.end, trajectory.error = _lost(error), f"while it was judged: {_say(error)}"
        except Exception as error:  # noqa: BLE001 - a grader's bug: no verdict, kept with its traceback
            if clock.expired() and isinstance(error, TimeoutError):
                trajectory.error = f"no verdict within {task.verifier_seconds:g} s"
            else:
                _blame(trajectory, error)


class _Clock:
    """Writes the wall clock of each part into a trajectory."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._seconds = trajectory.seconds
        self._last = monotonic()

    def lap(self, part: str) -> None:
        now = monotonic()
        self._seconds[part] = now - self._last
        self._last = now


def _whose(part: object) -> str:
    """The class and the package that it comes from, for messages."""
    return f"{type(part).__name__} of {type(part).__module__.partition('.')[0]}"


def _lost(error: InfraError) -> EndReason:
    return EndReason.POLICY_LOST if isinstance(error, PolicyUnavailable) else EndReason.SANDBOX_LOST


def _blame(trajectory: Trajectory, error: Exception) -> None:
    """An agent loop or grader raised what it should not."""
    trajectory.end, trajectory.error = EndReason.ERROR, _say(error)
    trajectory.info["traceback"] = traceback.format_exc()


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
