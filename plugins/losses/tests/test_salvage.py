"""Groups that lost members: what the naive way does, what salvage repairs, and what no weight can repair.

Two tasks of one policy with one parameter each; the policy gradient of a task is known in closed form, so the pull of each
task, averaged over many steps, is compared with that of whole groups.
"""

import math
import random

import pytest
from rlcore.types import Group, Task, Trajectory
from rlcore_losses.advantages import RLOO, DrGRPO

SIZE = 8
STEPS = 5_000
SUCCESS = {"easy": 0.6, "hard": 0.3}


def pull(estimator, lost, seed=0):
    """Mean over the steps of Σ_i A_i · d log π_i / dθ by task, for attempts that succeed with probability σ(θ).

    ``lost(task, reward)`` is the probability that an attempt is lost.
    """
    rng = random.Random(seed)
    total = dict.fromkeys(SUCCESS, 0.0)
    for step in range(STEPS):
        groups = []
        for task, success in SUCCESS.items():
            attempts = []
            for i in range(SIZE):
                reward = float(rng.random() < success)
                gone = rng.random() < lost(task, reward)
                attempts.append(
                    Trajectory(f"{step}/{task}/{i}", task, task, reward=None if gone else reward, info={"was": reward})
                )
            groups.append(Group(task, Task(task), attempts))
        advantages = estimator(groups)
        for group in groups:
            for attempt in group.trajectories:
                score = attempt.info["was"] - SUCCESS[group.id]  # d log π / dθ of a Bernoulli with p = σ(θ)
                total[group.id] += advantages.get(attempt.id, 0.0) * score
    return {task: value / STEPS for task, value in total.items()}


def whole(per_member):
    """The expected pull of a whole group: p (1 − p) is the gradient of the success rate."""
    return {task: SIZE * per_member * p * (1 - p) for task, p in SUCCESS.items()}


def nothing(task, reward):
    return 0.0


def hard_tasks_lose_half(task, reward):
    return 0.5 if task == "hard" else 0.0


def failures_are_lost(task, reward):
    return 0.5 if task == "hard" and reward == 0 else 0.0


@pytest.mark.parametrize(
    ("cls", "per_member"), [(DrGRPO, (SIZE - 1) / SIZE), (RLOO, 1.0)], ids=["mean baseline", "leave one out"]
)
def test_salvage_keeps_the_pull_of_a_task_that_loses_attempts(cls, per_member):
    wanted = whole(per_member)
    assert pull(cls(cls.Config()), nothing) == pytest.approx(wanted, rel=0.02)
    naive = pull(cls(cls.Config()), hard_tasks_lose_half)
    assert naive["easy"] == pytest.approx(wanted["easy"], rel=0.02)
    assert naive["hard"] < 0.6 * wanted["hard"], "the naive way trains the task that loses attempts about half as much"
    saved = pull(cls(cls.Config(salvage="sum")), hard_tasks_lose_half)
    # groups of fewer than two survivors cannot be repaired: (0.5)^8 · (1 + 8) of them
    assert saved == pytest.approx(wanted, rel=0.05)
    assert saved["easy"] == naive["easy"]


def test_salvage_by_mean_keeps_the_pull_of_groups_that_weigh_alike():
    def mean_pull(estimator, lost):
        rng = random.Random(1)
        total = 0.0
        for step in range(STEPS):
            rewards = [float(rng.random() < 0.3) for _ in range(SIZE)]
            kept = [rng.random() >= lost for _ in rewards]
            if sum(kept) < 2:
                continue
            attempts = [
                Trajectory(f"{step}/{i}", "t", "g", reward=r if k else None)
                for i, (r, k) in enumerate(zip(rewards, kept, strict=True))
            ]
            found = estimator([Group("g", Task("t"), attempts)])
            scores = (found.get(a.id, 0.0) * (r - 0.3) for a, r in zip(attempts, rewards, strict=True))
            total += math.fsum(scores) / sum(kept)  # prompt_mean: the mean over the group's survivors
        return total / STEPS

    wanted = (SIZE - 1) / SIZE * 0.3 * 0.7
    assert mean_pull(DrGRPO(DrGRPO.Config(salvage="mean")), 0.4) == pytest.approx(wanted, rel=0.05)
    assert mean_pull(DrGRPO(DrGRPO.Config()), 0.4) < 0.93 * wanted


def test_a_bias_remains_where_failures_are_lost():
    wanted = whole(1.0)
    saved = pull(RLOO(RLOO.Config(salvage="sum")), failures_are_lost)
    assert saved["easy"] == pytest.approx(wanted["easy"], rel=0.02)
    assert abs(saved["hard"] / wanted["hard"] - 1) > 0.05, "documented: no weight removes this"


def test_whole_groups_are_left_alone():
    attempts = [Trajectory(str(i), "t", "g", reward=float(i)) for i in range(4)]
    group = [Group("g", Task("t"), attempts)]
    assert DrGRPO(DrGRPO.Config(salvage="sum"))(group) == DrGRPO(DrGRPO.Config())(group)
    attempts[3].reward = None
    assert DrGRPO(DrGRPO.Config(salvage="sum"))(group)["0"] == pytest.approx(-1.0 * (4 - 1) / (3 - 1))
    assert RLOO(RLOO.Config(salvage="sum"))(group)["0"] == pytest.approx(-1.5 * 4 / 3)
    assert RLOO(RLOO.Config(salvage="mean"))(group)["0"] == pytest.approx(-1.5)
