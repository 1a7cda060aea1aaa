"""Evaluation over attempts: what the infrastructure lost is made again, what was made is not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from rlcore.rollout.evaluate import evaluate
from rlcore.types import EndReason, Task, Trajectory

pytestmark = pytest.mark.anyio
TASKS = [Task("a-1"), Task("b")]


class Runner:
    """Plays attempts whose ends are scripted by id; others are solved."""

    def __init__(self, ends: dict[str, str]) -> None:
        self.ends = ends
        self.ids: list[str] = []

    async def run(self, task: Task, *, trajectory_id: str, group_id: str) -> Trajectory:
        self.ids.append(trajectory_id)
        end = self.ends.get(trajectory_id, "done")
        return Trajectory(trajectory_id, task.id, group_id, end=end, reward=None if trajectory_id in self.ends else 1.0)


async def play(ends: dict[str, str], **options: Any) -> tuple[Any, Runner, list[str]]:
    runner: Any = Runner(ends)
    told: list[str] = []
    result = await evaluate(
        runner,
        TASKS,
        samples_per_task=2,
        in_flight=2,
        prefix="e",
        attempted=lambda attempt: told.append(attempt.id),
        **options,
    )
    return result, runner, told


async def test_lost_attempts_are_made_again_under_another_id() -> None:
    lost = {"e-b-1": EndReason.POLICY_LOST, "e-b-1-1": EndReason.SANDBOX_LOST, "e-a-1-0": EndReason.ERROR}
    result, runner, told = await play(lost, retries=2)
    assert sorted(runner.ids) == sorted(told) == ["e-a-1-0", "e-a-1-1", "e-b-0", "e-b-1", "e-b-1-1", "e-b-1-2"]
    assert (result.attempts, result.success, result.no_verdict) == (4, 1.0, 1), "a bug is not made again"
    result, runner, _ = await play(lost)
    assert (result.attempts, result.no_verdict, len(runner.ids)) == (4, 2, 4)
    assert result.ends == {"done": 2, "error": 1, "policy_lost": 1}


@pytest.mark.fault("DAT-06")
async def test_attempts_made_before_count_and_are_not_made_again() -> None:
    before = {
        ("a-1", 1): Trajectory("old", "a-1", "", end="length", reward=0.0),
        ("a-1", 7): Trajectory("of more samples", "a-1", "", end="done", reward=1.0),
        ("gone", 0): Trajectory("of a task that is gone", "gone", "", end="done", reward=1.0),
    }
    result, runner, _ = await play({}, made=before)
    assert Counter(runner.ids) == Counter(["e-a-1-0", "e-b-0", "e-b-1"])
    assert result.by_task == {"a-1": [0.0, 1.0], "b": [1.0, 1.0]}
    assert result.ends == {"done": 3, "length": 1}
