"""Every advantage estimator against its formula in plain Python, through the kit that third parties use."""

import math
from statistics import mean, stdev

import pytest
from rlcore.errors import RlcoreError
from rlcore.testing import AdvantageConformance
from rlcore.types import Group, Task
from rlcore_losses.advantages import (
    GDPO,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    MaxRL,
    ReinforceAdvantage,
    ReinforcePP,
    ReinforcePPBaseline,
)
from rlcore_losses.turn_advantages import GAE, GiGPO

EPSILON = 1e-6


def rewards_of(members):
    return [m.reward for m in members]


def spread(values):
    return stdev(values) if len(set(values)) > 1 else 0.0


def centred(values):
    return [v - mean(values) for v in values] if len(set(values)) > 1 else [0.0] * len(values)


class TestGRPO(AdvantageConformance):
    estimator = GRPO

    def group(self, members):
        values = rewards_of(members)
        return [c / (spread(values) + EPSILON) for c in centred(values)]


class TestGRPOByBatch(AdvantageConformance):
    estimator = GRPO
    options = {"normalize": "batch"}

    def step(self, groups):
        scale = spread([r for g in groups for r in rewards_of(g)]) + EPSILON
        return [[c / scale for c in centred(rewards_of(g))] for g in groups]


class TestDrGRPO(AdvantageConformance):
    estimator = DrGRPO

    def group(self, members):
        return centred(rewards_of(members))


class TestRLOO(AdvantageConformance):
    estimator = RLOO

    def group(self, members):
        values = rewards_of(members)
        if len(set(values)) < 2:
            return [0.0] * len(values)
        return [v - mean(values[:i] + values[i + 1 :]) for i, v in enumerate(values)]


class TestReinforce(AdvantageConformance):
    estimator = ReinforceAdvantage
    options = {"baseline": 0.25}
    needs_contrast = False

    def group(self, members):
        return [r - 0.25 for r in rewards_of(members)]


class TestReinforcePP(AdvantageConformance):
    estimator = ReinforcePP
    needs_contrast = False

    def step(self, groups):
        flat = [r for g in groups for r in rewards_of(g)]
        if len(set(flat)) < 2:
            return [[0.0] * len(g) for g in groups]
        return [[(r - mean(flat)) / (stdev(flat) + EPSILON) for r in rewards_of(g)] for g in groups]


class TestReinforcePPBaseline(AdvantageConformance):
    estimator = ReinforcePPBaseline

    def step(self, groups):
        by_group = [centred(rewards_of(g)) if len(set(rewards_of(g))) > 1 else None for g in groups]
        flat = [c for g in by_group if g for c in g]
        scale = spread(flat) + EPSILON
        centre = mean(flat) if flat else 0.0
        return [
            [(c - centre) / scale for c in found] if found else [0.0] * len(g)
            for g, found in zip(groups, by_group, strict=True)
        ]


class TestOPO(AdvantageConformance):
    estimator = OPO

    def group(self, members):
        if len(set(rewards_of(members))) < 2:
            return [0.0] * len(members)
        lengths = [m.sampled_tokens for m in members]
        baseline = sum(n * m.reward for n, m in zip(lengths, members, strict=True)) / sum(lengths)
        return [m.reward - baseline for m in members]


class TestMaxRL(AdvantageConformance):
    estimator = MaxRL
    rewards = (0.0, 1.0, 0.5)

    def group(self, members):
        values = rewards_of(members)
        return [c / mean(values) for c in centred(values)] if any(values) else [0.0] * len(values)


class TestGDPO(AdvantageConformance):
    estimator = GDPO
    options = {"weights": {"format": 0.5}}

    def info(self, rng, turns):
        return {"rewards": {"format": rng.choice([0.0, 1.0]), "tests": rng.choice([0.0, 0.5, 1.0])}}

    needs_contrast = False

    def step(self, groups):
        summed = []
        for members in groups:
            totals = [0.0] * len(members)
            for name, weight in (("format", 0.5), ("tests", 1.0)):
                values = [m.info["rewards"][name] for m in members]
                totals = [
                    t + weight * c / (spread(values) + EPSILON) for t, c in zip(totals, centred(values), strict=True)
                ]
            silent = all(len({m.info["rewards"][n] for m in members}) < 2 for n in ("format", "tests"))
            summed.append(None if silent else totals)
        flat = [t for totals in summed if totals for t in totals]
        if len(set(flat)) < 2:
            return [totals or [0.0] * len(g) for g, totals in zip(groups, summed, strict=True)]
        return [
            [(t - mean(flat)) / (stdev(flat) + EPSILON) for t in totals] if totals else [0.0] * len(g)
            for g, totals in zip(groups, summed, strict=True)
        ]


class TestGDPOWithOneReward(AdvantageConformance):
    estimator = GDPO
    options = {"normalize": "none"}

    def group(self, members):
        return TestGRPO.group(self, members)


class TestGiGPO(AdvantageConformance):
    estimator = GiGPO
    options = {"turn_weight": 0.5, "discount": 0.9}

    def group(self, members):
        if len(set(rewards_of(members))) < 2:
            return [0.0] * len(members)
        returns, alike = {}, {}
        for m, shared in zip(members, TestGRPO.group(self, members), strict=True):
            for k in range(len(m.turns)):
                value = 0.9 ** (len(m.turns) - 1 - k) * m.reward
                state = m.turns[k - 1].observation[0].content if k else None
                returns[m.id, k] = (shared, value, state)
                alike.setdefault(state, []).append(value)
        found = []
        for m in members:
            found.append([])
            for k in range(len(m.turns)):
                shared, value, state = returns[m.id, k]
                values = alike[state]
                turn = (value - mean(values)) / (spread(values) + EPSILON) if len(set(values)) > 1 else 0.0
                found[-1].append(shared + 0.5 * turn)
        return found


class TestGAE(AdvantageConformance):
    estimator = GAE
    options = {"discount": 0.9, "decay": 0.8}
    needs_contrast = False

    def info(self, rng, turns):
        return {"values": [rng.gauss(0, 1) for _ in range(turns)]}

    def group(self, members):
        found = []
        for m in members:
            values = [*m.info["values"], 0.0]
            last = len(m.turns) - 1
            errors = [(m.reward if k == last else 0.0) + 0.9 * values[k + 1] - values[k] for k in range(last + 1)]
            found.append(
                [math.fsum((0.9 * 0.8) ** (j - k) * errors[j] for j in range(k, last + 1)) for k in range(last + 1)]
            )
        return found


# --- faults of real systems -------------------------------------------------------------------------------------------


def advantages(group_of, rewards, **options):
    groups = [group_of(r, f"g{i}") for i, r in enumerate(rewards)]
    return GRPO(GRPO.Config(**options))(groups)


@pytest.mark.fault("LOSS-14")
def test_no_verdict_is_not_a_reward_of_zero(group_of):
    found = advantages(group_of, [[1, None, 0, 0]], normalize="none")
    assert found == pytest.approx({"g0/0": 2 / 3, "g0/2": -1 / 3, "g0/3": -1 / 3})
    for options in ({}, {"normalize": "none"}, {"normalize": "batch"}):
        bare = advantages(group_of, [[1, 0, 0]], **options)
        assert list(advantages(group_of, [[1, None, 0, 0]], **options).values()) == list(bare.values())
    assert advantages(group_of, [[None] * 4], keep_equal=True) == {}


@pytest.mark.fault("LOSS-12")
@pytest.mark.parametrize("rewards", [[0.7], [1.0, None, None, None]])
def test_a_group_of_one_has_advantage_zero(group_of, rewards):
    assert advantages(group_of, [rewards], keep_equal=True) == {"g0/0": 0.0}
    assert advantages(group_of, [rewards]) == {}


@pytest.mark.fault("LOSS-13")
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("size", range(3, 11))
def test_rounding_in_the_deviation_is_no_contrast(group_of, value, size):
    assert advantages(group_of, [[value] * size]) == {}
    kept = advantages(group_of, [[value] * size], keep_equal=True, epsilon=0.0)
    assert all(abs(a) < 1e-6 for a in kept.values())
    noisy = [value * (1 + 1.2e-7 * (i % 2)) for i in range(size)]  # float32 neighbours
    assert advantages(group_of, [noisy], epsilon=0.0) == {}


@pytest.mark.fault("LOSS-15")
def test_a_trajectory_counts_once_however_many_rows_it_gives(group_of, trajectory_of):
    several = trajectory_of("g0/0", 1.0, turns=3)
    group = group_of([1, 0], "g0")
    group.trajectories[0] = several
    assert GRPO(GRPO.Config(normalize="none"))([group]) == {"g0/0": 0.5, "g0/1": -0.5}
    group.trajectories += [several, several]  # the same attempt, listed once for each of its rows
    assert GRPO(GRPO.Config(normalize="none"))([group]) == {"g0/0": 0.5, "g0/1": -0.5}


@pytest.mark.fault("LOSS-16")
def test_one_trajectory_with_two_rewards_is_an_error_that_names_it(group_of):
    group = group_of([1.0, 0.0], "g0")
    group.trajectories[0].id = group.trajectories[1].id = "rollout 7"
    with pytest.raises(RlcoreError, match=r"rollout 7.*1 and 0"):
        GRPO(GRPO.Config())([group])


@pytest.mark.fault("LOSS-18")
def test_group_batch_and_none_scale_by_what_they_say(group_of):
    pairs = [[0, 1], [0, 10]]
    group = advantages(group_of, pairs, normalize="group")
    assert group["g0/1"] == pytest.approx(group["g1/1"], rel=1e-5)
    batch = advantages(group_of, pairs, normalize="batch")
    assert batch["g1/1"] == pytest.approx(10 * batch["g0/1"])
    assert list(advantages(group_of, pairs, normalize="none").values()) == [-0.5, 0.5, -5, 5]
    assert advantages(group_of, pairs, normalize=True) == group
    assert advantages(group_of, pairs, normalize=False) == advantages(group_of, pairs, normalize="none")


def test_two_groups_of_one_task_stay_two_groups(group_of):
    task = Task("same")
    first, second = group_of([0, 1], "a"), group_of([0, 10], "b")
    groups = [Group("a", task, first.trajectories), Group("b", task, second.trajectories)]
    assert list(GRPO(GRPO.Config(normalize="none"))(groups).values()) == [-0.5, 0.5, -5, 5]


def test_one_attempt_in_two_groups_is_refused(group_of):
    with pytest.raises(RlcoreError, match="g0/0 is in two groups"):
        GRPO(GRPO.Config())([group_of([0, 1], "g0"), group_of([1, 0], "g0")])


def test_too_few_survivors_leave_the_group_out(group_of):
    assert advantages(group_of, [[1, 0, None, None]], min_survivors=3) == {}
    assert len(advantages(group_of, [[1, 0, 0, None]], min_survivors=3)) == 3


def test_maxrl_refuses_negative_rewards_and_gae_missing_values(group_of):
    with pytest.raises(RlcoreError, match="must not be negative"):
        MaxRL(MaxRL.Config())([group_of([-1, 1], "g0")])
    with pytest.raises(RlcoreError, match=r"needs info\['values'\]"):
        GAE(GAE.Config())([group_of([0, 1], "g0")])


def test_turn_rewards_add_to_the_verdict(group_of, trajectory_of):
    attempts = [trajectory_of(f"g0/{i}", 1.0, turns=2) for i in range(2)]
    for i, attempt in enumerate(attempts):
        attempt.info["turn_rewards"] = [float(i), 0.0]
    group = Group("g0", Task("t"), attempts)
    found = GiGPO(GiGPO.Config(normalize="none", discount=1.0, keep_equal=True))([group])
    assert found["g0/1"][0] - found["g0/0"][0] == pytest.approx(1.0)
    attempts[0].info["turn_rewards"] = [1.0]
    with pytest.raises(RlcoreError, match="turn_rewards"):
        GiGPO(GiGPO.Config())([group])
