"""Evaluation: every task exactly once per sample, with an interval that says what the number is worth."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rlcore.rollout.episode import EpisodeRunner
from rlcore.rollout.scheduler import INFRASTRUCTURE
from rlcore.types import Task, Trajectory

__all__ = ["Evaluation", "evaluate", "summarize", "wilson"]


@dataclass(slots=True)
class Evaluation:
    """What an evaluation came to.

    Attributes:
        success: share of attempts with reward ≥ 1 among those with a verdict; ``None`` without any.
        interval: 95 % Wilson interval of ``success``.
        reward: mean reward of those with a verdict.
        attempts: number of attempts.
        no_verdict: attempts without a verdict; they are in no mean.
        pass_at_k: share of tasks that k attempts solve at least once, unbiased over the attempts made; by k.
        by_kind: success by ``task.metadata["kind"]`` (else ``category``, else absent).
        by_task: rewards by task id.
        ends: attempts by end reason.
    """

    success: float | None
    interval: tuple[float, float]
    reward: float | None
    attempts: int
    no_verdict: int
    pass_at_k: dict[int, float] = field(default_factory=dict)
    by_kind: dict[str, float | None] = field(default_factory=dict)
    by_task: dict[str, list[float | None]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "success": self.success,
            "interval": list(self.interval),
            "reward": self.reward,
            "attempts": self.attempts,
            "no_verdict": self.no_verdict,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "by_kind": self.by_kind,
            "by_task": self.by_task,
            "ends": self.ends,
        }


async def evaluate(
    runner: EpisodeRunner,
    tasks: Sequence[Task],
    *,
    samples_per_task: int,
    in_flight: int,
    prefix: str,
    attempted: Callable[[Trajectory], None] = lambda _: None,
    retries: int = 0,
    made: Mapping[tuple[str, int], Trajectory] = MappingProxyType({}),
) -> Evaluation:
    """Play every task ``samples_per_task`` times, ``in_flight`` at once.

    Args:
        runner: plays one attempt.
        tasks: with unique ids.
        samples_per_task: attempts at each.
        in_flight: attempts at the same time.
        prefix: makes the ids of the attempts.
        attempted: is told each attempt as it ends.
        retries: times that an attempt which the infrastructure ended is made again; all of them are told, the last counts.
        made: attempts that were made before, by task and sample: they count and are not made again.
    """
    slots = asyncio.Semaphore(in_flight)

    async def play(task: Task, member: int) -> Trajectory:
        group_id = f"{prefix}-{task.id}"
        for attempt in range(1 + retries):
            trajectory_id = f"{group_id}-{member}" + (f"-{attempt}" if attempt else "")
            async with slots:
                trajectory = await runner.run(task, trajectory_id=trajectory_id, group_id=group_id)
            attempted(trajectory)
            if trajectory.end not in INFRASTRUCTURE:
                break
        return trajectory

    wanted = [(task, member) for task in tasks for member in range(samples_per_task)]
    async with asyncio.TaskGroup() as attempts:
        new = [attempts.create_task(play(task, n)) for task, n in wanted if (task.id, n) not in made]
    old = [made[task.id, n] for task, n in wanted if (task.id, n) in made]
    return summarize(tasks, [*old, *(attempt.result() for attempt in new)])


def summarize(tasks: Sequence[Task], attempts: Iterable[Trajectory]) -> Evaluation:
    """The figures of attempts that were made, whenever that was."""
    kinds = {task.id: str(task.metadata.get("kind") or task.metadata.get("category") or "") for task in tasks}
    by_task: dict[str, list[float | None]] = {task.id: [] for task in tasks}
    ends: Counter[str] = Counter()
    for attempt in attempts:
        by_task[attempt.task_id].append(attempt.reward)
        ends[attempt.end] += 1
    rewards = [reward for rewards in by_task.values() for reward in rewards]
    scored = [reward for reward in rewards if reward is not None]
    wins = sum(reward >= 1 for reward in scored)
    by_kind = {
        kind: _success([r for task_id, rewards in by_task.items() if kinds[task_id] == kind for r in rewards])
        for kind in sorted(set(kinds.values()) - {""})
    }
    return Evaluation(
        success=wins / len(scored) if scored else None,
        interval=wilson(wins, len(scored)),
        reward=sum(scored) / len(scored) if scored else None,
        attempts=len(rewards),
        no_verdict=len(rewards) - len(scored),
        pass_at_k=_pass_at_k(list(by_task.values())),
        by_kind=by_kind,
        by_task=by_task,
        ends=dict(sorted(ends.items())),
    )


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927); ``(0, 1)`` without trials."""
    if not trials:
        return 0.0, 1.0
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def _success(rewards: Sequence[float | None]) -> float | None:
    scored = [reward for reward in rewards if reward is not None]
    return sum(reward >= 1 for reward in scored) / len(scored) if scored else None


def _pass_at_k(by_task: Sequence[Sequence[float | None]]) -> dict[int, float]:
    """1 − C(n − c, k)/C(n, k) per task, averaged (Chen et al. 2021), for each k that every task has attempts for."""
    counts = []
    for rewards in by_task:
        scored = [reward for reward in rewards if reward is not None]
        counts.append((len(scored), sum(reward >= 1 for reward in scored)))
    most = min((n for n, _ in counts), default=0)
    return {
        k: sum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts) for k in range(1, most + 1)
    }
