"""The producer: order of tasks, scheduler and buffer, with real tasks of asyncio and a scripted runner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rlcore.errors import ConfigError, RunFailed
from rlcore.rollout.order import TaskOrder
from rlcore.rollout.scheduler import Scheduler
from rlcore.types import Completion, EndReason, FinishReason, Group, Task, Trajectory, Turn

pytestmark = pytest.mark.anyio

TASKS = [Task(f"task-{n}") for n in range(5)]


class Runner:
    """Plays attempts as ``script`` says; counts what runs at once."""

    def __init__(self, script: Callable[[Task, Trajectory], Awaitable[None]] | None = None) -> None:
        self.version = 0
        self.running = self.most = 0
        self.script = script

    async def run(self, task: Task, *, trajectory_id: str, group_id: str) -> Trajectory:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            trajectory = Trajectory(trajectory_id, task.id, group_id, end="done", reward=1.0)
            completion = Completion((1,), (-0.5,), FinishReason.STOP, policy_version=self.version)
            trajectory.turns = [Turn((0,), completion)]
            await asyncio.sleep(0)
            if self.script:
                await self.script(task, trajectory)
            return trajectory
        finally:
            self.running -= 1


def scheduler(
    runner: Any, order: TaskOrder | None = None, **settings: Any
) -> tuple[Scheduler, list[Trajectory], list[Group]]:
    attempts: list[Trajectory] = []
    groups: list[Group] = []
    options: dict[str, Any] = {
        "tasks_per_step": 2,
        "samples_per_task": 3,
        "in_flight": 4,
        "max_age": 0,
        "steps": 100,
        "attempt_retries": 1,
        "min_group": 2,
        "max_lost": 100,
        "life": 0,
    } | settings
    order = order or TaskOrder(TASKS, seed=0)
    return Scheduler(runner, order, attempted=attempts.append, finished=groups.append, **options), attempts, groups


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.fault("CKP-04")
@pytest.mark.parametrize("stop_at", [5, 10, 12])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_resumed_order_repeats_and_skips_nothing(stop_at: int, ahead: int) -> None:
    """Stopped anywhere, look-ahead included, the positions that follow are those of an uninterrupted run."""
    whole = TaskOrder(TASKS, seed=1)
    expected = [whole.take()[1].id for _ in range(25)]
    first = TaskOrder(TASKS, seed=1)
    done = []
    for _ in range(stop_at):
        position, task = first.take()
        done.append(task.id)
        first.finish(position)
    for _ in range(ahead):
        first.take()
    second = TaskOrder(TASKS, seed=1)
    second.restore(first.state())
    assert done + [second.take()[1].id for _ in range(25 - stop_at)] == expected


def test_every_epoch_has_every_task_once_in_an_order_of_its_own() -> None:
    order = TaskOrder(TASKS, seed=3)
    epochs = [[order.take()[1].id for _ in TASKS] for _ in range(4)]
    assert all(sorted(epoch) == sorted(task.id for task in TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.fault("CKP-09")
@pytest.mark.parametrize(("tasks", "seed"), [(TASKS[:-1], 0), (TASKS[::-1], 0), (TASKS, 1)])
def test_a_position_of_other_tasks_is_refused(tasks: list[Task], seed: int) -> None:
    with pytest.raises(ConfigError, match="the tasks or the seed differ"):
        TaskOrder(tasks, seed).restore(TaskOrder(TASKS, 0).state())


@pytest.mark.fault("DAT-09")
@pytest.mark.parametrize(("tasks", "message"), [([], "no tasks"), ([*TASKS, TASKS[0]], "'task-0' stands for more")])
def test_no_tasks_and_doubled_ids_are_errors(tasks: list[Task], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskOrder(tasks, 0)


@pytest.mark.fault("CLI-18")
async def test_a_step_makes_exactly_its_attempts_and_waits() -> None:
    """2 tasks × 3 samples: exactly 6 attempts, none for the next step until this one is done."""
    runner = Runner()
    producer, attempts, groups = scheduler(runner)
    task = asyncio.create_task(producer.run())
    taken = await producer.take(0)
    await asyncio.sleep(0.05)
    assert len(attempts) == 6
    assert [len(group.trajectories) for group in taken] == [3, 3]
    assert runner.most <= 4
    assert len(groups) == 2
    producer.step_done(taken)
    runner.version = 1
    assert len(await producer.take(1)) == 2
    await stop(task)
    assert runner.running == 0


@pytest.mark.fault("ASY-05")
@pytest.mark.parametrize("max_age", [0, 1, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
async def test_any_number_of_steps_ends(steps: int, max_age: int) -> None:
    runner = Runner()
    producer, attempts, _ = scheduler(runner, max_age=max_age, steps=steps)
    task = asyncio.create_task(producer.run())
    async with asyncio.timeout(5):
        for version in range(steps):
            taken = await producer.take(version)
            assert all(producer.buffer.age(group, version) <= max_age for group in taken)
            runner.version = version + 1
            producer.step_done(taken)
        await asyncio.sleep(0.01)
    await stop(task)
    assert runner.running == 0
    assert len(attempts) == steps * 2 * 3, "attempts were made that no step takes"


@pytest.mark.fault("ASY-04")
async def test_age_is_a_bound_at_the_moment_of_training() -> None:
    """max age 1: a group of version 4 is trained at version 5, and thrown away and replaced at version 6."""
    runner = Runner()
    runner.version = 4
    producer, *_ = scheduler(runner, max_age=1, tasks_per_step=1)
    task = asyncio.create_task(producer.run())
    async with asyncio.timeout(5):
        while len(producer.buffer) < 2:
            await asyncio.sleep(0)
        (young,) = await producer.take(5)
        assert producer.buffer.age(young, 5) == 1
        runner.version = 6
        producer.step_done([young])
        (fresh,) = await producer.take(6)
    assert producer.buffer.age(fresh, 6) == 0
    assert producer.dropped == {"age": 1}
    await stop(task)


@pytest.mark.fault("ASY-09")
async def test_an_error_in_the_machinery_ends_the_producer_with_it() -> None:
    async def fail(task: Task, trajectory: Trajectory) -> None:
        if trajectory.id.startswith("g1-"):
            raise ZeroDivisionError("the third attempt")

    producer, *_ = scheduler(Runner(fail))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(5):
            await producer.run()
    assert caught.group_contains(ZeroDivisionError, match="the third attempt")


@pytest.mark.fault("ASY-06")
@pytest.mark.parametrize("end", [EndReason.POLICY_LOST, EndReason.SANDBOX_LOST])
async def test_what_the_infrastructure_ended_is_made_again_once_and_then_dropped(end: EndReason) -> None:
    """One member of the first group is always lost: made again once, its group trained on the others."""

    async def lose(task: Task, trajectory: Trajectory) -> None:
        if trajectory.id.startswith("g0-1-"):
            trajectory.end, trajectory.reward = end, None

    producer, attempts, _ = scheduler(Runner(lose), attempt_retries=1)
    task = asyncio.create_task(producer.run())
    taken = await producer.take(0)
    assert [a.id for a in attempts if a.id.startswith("g0-1-")] == ["g0-1-0", "g0-1-1"]
    assert taken[0].rewards == [1.0, None, 1.0]
    await stop(task)


async def test_a_group_without_verdicts_is_dropped_and_another_takes_its_place() -> None:
    async def lose(task: Task, trajectory: Trajectory) -> None:
        if trajectory.group_id == "g0":
            trajectory.end, trajectory.reward = EndReason.TIMEOUT, None

    producer, _, groups = scheduler(Runner(lose))
    task = asyncio.create_task(producer.run())
    taken = await producer.take(0)
    assert [group.id for group in taken] == ["g1", "g2"]
    assert producer.dropped == {"no verdict": 1}
    assert len(groups) == 3
    await stop(task)


async def test_a_row_of_errors_stops_the_run_with_the_traceback() -> None:
    async def crash(task: Task, trajectory: Trajectory) -> None:
        trajectory.end, trajectory.reward = EndReason.ERROR, None
        trajectory.error, trajectory.info["traceback"] = "KeyError: 'x'", "File agent.py, line 3"

    producer, *_ = scheduler(Runner(crash))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(5):
            await producer.run()
    assert caught.group_contains(RunFailed, match=r"(?s)KeyError: 'x'.*agent\.py, line 3")


async def test_one_task_that_crashes_its_agent_does_not_stop_the_run() -> None:
    """All members of its group fail in a row: the group is dropped, the others are trained."""

    async def crash(task: Task, trajectory: Trajectory) -> None:
        if task.id == broken:
            trajectory.end, trajectory.reward = EndReason.ERROR, None
            trajectory.error, trajectory.info["traceback"] = "KeyError: 'x'", "File agent.py, line 3"

    order = TaskOrder(TASKS, seed=0)
    broken = TaskOrder(TASKS, seed=0).take()[1].id
    producer, *_ = scheduler(Runner(crash), order, samples_per_task=4, in_flight=4)
    task = asyncio.create_task(producer.run())
    async with asyncio.timeout(5):
        taken = await producer.take(0)
    assert [group.id for group in taken] == ["g1", "g2"]
    await stop(task)


async def test_a_run_that_only_loses_groups_ends_with_the_last_reason() -> None:
    """It made group after group for ever: no step came, so no bound on steps could end it."""

    async def lose(task: Task, trajectory: Trajectory) -> None:
        trajectory.end, trajectory.reward, trajectory.error = "done", None, "the verifier wrote no reward"

    producer, _, groups = scheduler(Runner(lose), max_lost=7)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(5):
            await producer.run()
    assert caught.group_contains(RunFailed, match="7 groups in a row had fewer than 2 .*the verifier wrote no reward")
    assert len(groups) <= 8


@pytest.mark.fault("ASY-12")
async def test_two_attempts_at_one_task_land_in_their_own_groups() -> None:
    """One task only, the second group finishes first: every attempt is in the group that asked for it."""

    async def slow_first(task: Task, trajectory: Trajectory) -> None:
        if trajectory.group_id == "g0":
            await asyncio.sleep(0.05)

    producer, *_ = scheduler(Runner(slow_first), TaskOrder(TASKS[:1], 0), in_flight=6)
    task = asyncio.create_task(producer.run())
    taken = await producer.take(0)
    assert [group.id for group in taken] == ["g0", "g1"]
    assert all(t.group_id == group.id for group in taken for t in group.trajectories)
    await stop(task)


@pytest.mark.fault("ASY-07")
async def test_in_flight_is_full_again_at_once_after_a_gate_opens() -> None:
    release = asyncio.Event()

    async def wait(task: Task, trajectory: Trajectory) -> None:
        await release.wait()

    runner = Runner(wait)
    producer, *_ = scheduler(runner, tasks_per_step=8, samples_per_task=4, in_flight=32)
    task = asyncio.create_task(producer.run())
    for _ in range(3):
        await asyncio.sleep(0)
    while runner.running < 32:
        await asyncio.sleep(0)
    release.set()
    taken = await producer.take(0)
    release.clear()
    producer.step_done(taken)
    for _ in range(5):
        await asyncio.sleep(0)
    assert runner.running == 32
    await stop(task)


@pytest.mark.fault("LOOP-14")
async def test_a_cancelled_attempt_has_exactly_one_terminal_record() -> None:
    async def hang(task: Task, trajectory: Trajectory) -> None:
        await asyncio.sleep(60)

    producer, attempts, _ = scheduler(Runner(hang))
    task = asyncio.create_task(producer.run())
    await asyncio.sleep(0.02)
    await stop(task)
    started = Counter(attempt.id for attempt in attempts)
    assert set(started.values()) == {1}
    assert {attempt.end for attempt in attempts} == {EndReason.CANCELLED}
    assert len(started) == 4


@pytest.mark.fault("ASY-11")
async def test_slow_tasks_are_trained_as_long_as_they_fit_the_bound_and_lost_visibly_beyond_it() -> None:
    """Every odd task takes two versions: with a bound of 2 its groups are trained; with a bound of 0 none is asked to
    wait, and what a bound throws away is counted."""

    async def slow(task: Task, trajectory: Trajectory) -> None:
        if int(task.id[-1]) % 2:
            began = runner.version
            while runner.version < min(began + 2, 20):
                await asyncio.sleep(0)

    runner = Runner(slow)
    producer, *_ = scheduler(runner, tasks_per_step=1, max_age=3, in_flight=100, steps=30)
    task = asyncio.create_task(producer.run())
    trained: Counter[int] = Counter()
    async with asyncio.timeout(10):
        for version in range(20):
            for group in (taken := await producer.take(version)):
                trained[int(group.task.id[-1]) % 2] += 1
                assert producer.buffer.age(group, version) <= 3
            runner.version = version + 1
            producer.step_done(taken)
            for _ in range(20):
                await asyncio.sleep(0)
    assert trained[1] > 0
    assert trained[0] + trained[1] == 20
    await stop(task)
