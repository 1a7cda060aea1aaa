"""The producer: keeps attempts in flight and hands finished groups to the buffer.

Every group that is given out ends exactly once: trained, or dropped with a cause. A finished attempt frees its slot at
once. New groups are begun only while the step that they are for is within the age bound of the current step, so with
``max_age = 0`` rollout and training alternate.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from rlcore.errors import RunFailed
from rlcore.rollout.buffer import GroupBuffer
from rlcore.rollout.episode import EpisodeRunner
from rlcore.rollout.order import TaskOrder
from rlcore.types import EndReason, Group, Task, Trajectory

__all__ = ["Scheduler"]

INFRASTRUCTURE = (EndReason.SANDBOX_LOST, EndReason.POLICY_LOST)
"""Endings after which the attempt is made again."""


class Scheduler:
    """Makes groups until cancelled.

    Args:
        runner: plays one attempt.
        order: which task comes next.
        tasks_per_step: groups that one step takes.
        samples_per_task: attempts per group (G).
        in_flight: attempts at the same time.
        max_age: steps that rollout may run ahead of training.
        steps: steps that are still to come: no group is begun that none of them would take.
        attempt_retries: times that an attempt which the infrastructure ended is made again.
        min_group: attempts with a verdict that a group needs.
        max_lost: groups in a row without enough verdicts that end the run: it would go on for ever.
        life: how often the run was resumed; keeps the ids of attempts that are made again unique.
        attempted: called with each attempt that ended, with or without a verdict.
        finished: called with each group that ended.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        order: TaskOrder,
        *,
        tasks_per_step: int,
        samples_per_task: int,
        in_flight: int,
        max_age: int,
        steps: int,
        attempt_retries: int,
        min_group: int,
        max_lost: int,
        life: int,
        attempted: Callable[[Trajectory], None],
        finished: Callable[[Group], None],
    ) -> None:
        self._runner = runner
        self._order = order
        self._tasks_per_step = tasks_per_step
        self._samples_per_task = samples_per_task
        self._slots = asyncio.Semaphore(in_flight)
        self._retries = attempt_retries
        self._min_group = min(min_group, samples_per_task)
        self._suffix = f".{life}" if life else ""
        self._attempted = attempted
        self._finished = finished
        self._allowed = (1 + max_age) * tasks_per_step
        self._needed = steps * tasks_per_step
        self._begun = 0
        self._gate = asyncio.Event()
        self._max_lost = max_lost
        self._lost_in_a_row = 0
        self._errors: list[str] = []
        self._positions: dict[str, int] = {}
        self.dropped: Counter[str] = Counter()
        self.buffer = GroupBuffer(max_age, lambda group: self._drop(group, "age"))

    async def run(self) -> None:
        """Produce until cancelled; an error in any attempt's machinery ends it with that error."""
        async with asyncio.TaskGroup() as groups:
            while True:
                while self._begun >= min(self._allowed, self._needed):
                    self._gate.clear()
                    await self._gate.wait()
                self._begun += 1
                position, task = self._order.take()
                groups.create_task(self._make_group(position, task), name=f"group-{position}")

    async def take(self, version: int) -> list[Group]:
        """The groups of the next step, in the order of their positions."""
        groups = await self.buffer.take(self._tasks_per_step, version)
        return sorted(groups, key=lambda group: self._positions[group.id])

    def step_done(self, groups: list[Group]) -> None:
        """The step that took ``groups`` is over: the next groups may begin."""
        for group in groups:
            self._order.finish(self._positions.pop(group.id))
        self._allow(self._tasks_per_step)

    def _allow(self, more: int) -> None:
        self._allowed += more
        self._gate.set()

    def _drop(self, group: Group, cause: str) -> None:
        """Account for a group that is not trained, and let another take its place."""
        self.dropped[cause] += 1
        self._order.finish(self._positions.pop(group.id))
        self._needed += 1
        self._allow(1)

    async def _make_group(self, position: int, task: Task) -> None:
        group = Group(id=f"g{position}{self._suffix}", task=task)
        self._positions[group.id] = position
        async with asyncio.TaskGroup() as attempts:
            made = [
                attempts.create_task(self._attempt(task, group.id, member), name=f"{group.id}-{member}")
                for member in range(self._samples_per_task)
            ]
        group.trajectories = [attempt.result() for attempt in made]
        self._finished(group)
        verdicts = sum(reward is not None for reward in group.rewards)
        if verdicts < self._min_group:
            self._drop(group, "no verdict")
            self._watch_lost(group)
        else:
            self._lost_in_a_row = 0
            await self.buffer.put(group)

    async def _attempt(self, task: Task, group_id: str, member: int) -> Trajectory:
        for attempt in range(1 + self._retries):
            trajectory_id = f"{group_id}-{member}-{attempt}"
            async with self._slots:
                try:
                    trajectory = await self._runner.run(task, trajectory_id=trajectory_id, group_id=group_id)
                except asyncio.CancelledError:
                    self._attempted(Trajectory(trajectory_id, task.id, group_id, end=EndReason.CANCELLED))
                    raise
            self._attempted(trajectory)
            self._watch_errors(trajectory)
            if trajectory.end not in INFRASTRUCTURE:
                break
        return trajectory

    def _watch_errors(self, trajectory: Trajectory) -> None:
        """A bug in an agent loop or grader costs an attempt; a whole group of them, on more than one task, stops the run."""
        if "traceback" not in trajectory.info:
            self._errors.clear()
            return
        self._errors.append(trajectory.task_id)
        if len(self._errors) >= max(2, self._samples_per_task) and len(set(self._errors)) > 1:
            raise RunFailed(
                f"{len(self._errors)} attempts in a row ended in an error; the last one (task {trajectory.task_id}): "
                f"{trajectory.error}\n{trajectory.info['traceback']}".rstrip()
            )

    def _watch_lost(self, group: Group) -> None:
        """One broken task costs a group; nothing but lost groups stops the run, with the last reason."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= self._max_lost:
            errors = [trajectory.error for trajectory in group.trajectories if trajectory.error]
            raise RunFailed(
                f"{self._lost_in_a_row} groups in a row had fewer than {self._min_group} attempts with a verdict; the last "
                f"reason (task {group.task.id}): {errors[-1] if errors else 'none was given'}"
            )
