"""Advantage estimators: the rewards of groups to one advantage per trajectory. Plain Python on floats.

Each works on the attempts of a group that have a verdict; one without (``None``) has no entry and no influence, except
that ``salvage`` counts it. A trajectory counts once, however many rows it gives. Groups are the objects that are
passed: two groups of one task stay two groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from rlcore.errors import RlcoreError
from rlcore.types import Group, Trajectory

from rlcore_losses._options import Options

__all__ = [
    "GDPO",
    "GRPO",
    "OPO",
    "RLOO",
    "DrGRPO",
    "GroupEstimator",
    "MaxRL",
    "Member",
    "ReinforceAdvantage",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "equal",
    "mean",
    "members",
    "std",
]

_RELATIVE_NOISE = 5e-7
"""Rewards that differ by less than this share of the largest one are equal: four float32 roundings."""


@dataclass(frozen=True, slots=True)
class Member:
    """An attempt with a verdict.

    Attributes:
        reward: finite.
        tokens: number of sampled tokens.
        trajectory: the attempt itself.
    """

    id: str
    reward: float
    tokens: int
    trajectory: Trajectory


def members(group: Group) -> list[Member]:
    """The attempts of a group that have a verdict, each once.

    Raises:
        RlcoreError: a reward is not finite, or one trajectory id carries two different rewards.
    """
    found: dict[str, Member] = {}
    for trajectory in group.trajectories:
        if trajectory.reward is None:
            continue
        reward = float(trajectory.reward)
        if not math.isfinite(reward):
            raise RlcoreError(f"trajectory {trajectory.id} of group {group.id}: reward {reward} is not finite")
        member = found.setdefault(trajectory.id, Member(trajectory.id, reward, trajectory.sampled_tokens, trajectory))
        if member.reward != reward:
            raise RlcoreError(
                f"trajectory {trajectory.id} of group {group.id} carries two rewards: {member.reward:g} and {reward:g}"
            )
    return list(found.values())


def equal(values: Sequence[float]) -> bool:
    """Whether the values are the same up to rounding; one value is, and none."""
    spread = max(values, default=0.0) - min(values, default=0.0)
    return spread <= _RELATIVE_NOISE * max((abs(value) for value in values), default=0.0)


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return math.fsum(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    """Sample standard deviation (n − 1); 0 for values that are equal and for one value."""
    if len(values) < 2 or equal(values):
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


class GroupEstimator:
    """What the estimators share: verdicts, equal rewards, scaling, salvage.

    Attributes:
        needs_contrast: a group whose rewards are equal has nothing to say.
        leave_one_out: the baseline of a member does not contain its own reward.
    """

    name: ClassVar[str]
    needs_contrast: ClassVar[bool] = True
    leave_one_out: ClassVar[bool] = False

    class Config(Options):
        """Scaling, and what becomes of groups that lost members or have nothing to say."""

        normalize: Literal["group", "batch", "none"] = Field(
            "none",
            description="divide by the standard deviation of the group's rewards, of all rewards of the step, or not "
            "at all; true and false mean group and none",
        )
        epsilon: float = Field(1e-6, ge=0, description="added to the standard deviation")
        keep_equal: bool = Field(
            False, description="keep groups without contrast: advantage 0, but their tokens are counted"
        )
        min_survivors: int = Field(1, ge=1, description="attempts with a verdict that a group needs")
        salvage: Literal["none", "sum", "mean"] = Field(
            "none",
            description="scale the survivors of a group that lost members so that its expected pull is that of the "
            "whole group: sum for aggregations that sum over a group's tokens or rows, mean for prompt_mean",
        )

        @field_validator("normalize", mode="before")
        @classmethod
        def _aliases(cls, value: object) -> object:
            if isinstance(value, bool):
                return "group" if value else "none"
            return value

    config: Any

    def __init__(self, config: Config) -> None:
        """Keep the options."""
        self.config = config

    def raw(self, group: Sequence[Member]) -> list[float]:
        """The advantages of one group before scaling."""
        raise NotImplementedError

    def contrast(self, group: Sequence[Member]) -> bool:
        """Whether the group has something to say."""
        return not self.needs_contrast or not equal([member.reward for member in group])

    def __call__(self, groups: Sequence[Group]) -> Mapping[str, float | Sequence[float]]:
        """See :class:`rlcore.protocols.AdvantageEstimator`."""
        found = [(group, members(group)) for group in groups]
        _require_distinct(found)
        batch = std([member.reward for _, inside in found for member in inside])
        advantages: dict[str, float] = {}
        for group, inside in found:
            if not inside or len(inside) < self.config.min_survivors:
                continue
            if self.contrast(inside):
                factor = self._scale(inside, batch) * self.salvaged(len(inside), _size(group))
                advantages |= {m.id: a * factor for m, a in zip(inside, self.raw(inside), strict=True)}
            elif self.config.keep_equal:
                advantages |= {member.id: 0.0 for member in inside}
        return advantages

    def _scale(self, group: Sequence[Member], batch: float) -> float:
        if self.config.normalize == "none":
            return 1.0
        spread = std([member.reward for member in group]) if self.config.normalize == "group" else batch
        divisor = spread + self.config.epsilon
        return 1.0 / divisor if divisor > 0 else 0.0

    def salvaged(self, survivors: int, size: int) -> float:
        """The factor that gives ``survivors`` of ``size`` attempts the expected pull of all.

        Let g be the gradient of the task's expected reward. A member whose own reward is in its baseline (the mean)
        gives (n − 1)/n · g in expectation, one with a leave-one-out or constant baseline gives g. So n members sum to
        (n − 1) g, or n g. The factor is the ratio of these expectations at ``size`` and at ``survivors``, and is exact
        if losing a member does not depend on its reward given the task and ``normalize`` is not ``group``.
        """
        if self.config.salvage == "none" or survivors == size:
            return 1.0
        if self.leave_one_out:
            share = 1.0
        elif survivors < 2:
            return 1.0
        else:
            share = (1 - 1 / size) / (1 - 1 / survivors)
        return share if self.config.salvage == "mean" else share * size / survivors


def _size(group: Group) -> int:
    return len({trajectory.id for trajectory in group.trajectories})


def _require_distinct(found: Sequence[tuple[Group, Sequence[Member]]]) -> None:
    owner: dict[str, Group] = {}
    for group, inside in found:
        for member in inside:
            if owner.setdefault(member.id, group) is not group:
                raise RlcoreError(f"trajectory {member.id} is in two groups: {owner[member.id].id} and {group.id}")


class GRPO(GroupEstimator):
    """Group-relative advantage.

    Formula: A_i = (r_i − mean(r)) / (std(r) + epsilon), std with n − 1
    Reads: rewards of the group, [G].
    Source: Shao et al. 2024 (DeepSeekMath); the standard deviation as in verl, TRL and slime.
    """

    name = "grpo"

    class Config(GroupEstimator.Config):
        """Scaled by the group."""

        normalize: Literal["group", "batch", "none"] = Field(
            "group",
            description="divide by the standard deviation of the group's rewards, of all rewards of the step, or not "
            "at all; true and false mean group and none",
        )

    def raw(self, group: Sequence[Member]) -> list[float]:
        """r − mean."""
        centre = mean([member.reward for member in group])
        return [member.reward - centre for member in group]


class DrGRPO(GRPO):
    """Group-relative advantage without the standard deviation, which favours tasks of extreme difficulty.

    Formula: A_i = r_i − mean(r)
    Reads: rewards of the group, [G].
    Source: Liu et al. 2025 (Dr. GRPO).
    """

    name = "dr_grpo"

    class Config(GroupEstimator.Config):
        """Not scaled."""


class RLOO(GroupEstimator):
    """Leave-one-out baseline: unbiased for every group size.

    Formula: A_i = r_i − mean(r_j, j ≠ i)
    Reads: rewards of the group, [G].
    Source: Kool et al. 2019; Ahmadian et al. 2024.
    """

    name = "rloo"
    leave_one_out = True

    def raw(self, group: Sequence[Member]) -> list[float]:
        """r − mean of the others."""
        total, others = math.fsum(member.reward for member in group), len(group) - 1
        return [member.reward - (total - member.reward) / others for member in group]


class ReinforceAdvantage(GroupEstimator):
    """The reward against a constant; groups do not matter.

    Formula: A_i = r_i − baseline
    Reads: rewards, [G].
    Source: Williams 1992.
    """

    name = "reinforce"
    needs_contrast = False
    leave_one_out = True

    class Config(GroupEstimator.Config):
        """The constant."""

        baseline: float = Field(0.0, description="what is taken off every reward")

    def raw(self, group: Sequence[Member]) -> list[float]:
        """r − baseline."""
        return [member.reward - self.config.baseline for member in group]


class ReinforcePP(GroupEstimator):
    """Advantages of the whole step, whitened.

    Formula: A_i = (x_i − mean(x)) / (std(x) + epsilon) over all verdicts of the step, with x = r, or for
        group_baseline x = r − mean of its group
    Reads: rewards of all groups.
    Source: Hu 2025 (REINFORCE++ and its baseline form); statistics over trajectories, not tokens.
    """

    name = "reinforce_pp"
    needs_contrast = False
    leave_one_out = True

    class Config(GroupEstimator.Config):
        """Whether groups have a baseline of their own."""

        normalize: Literal["batch"] = Field("batch", description="always over the step")
        group_baseline: bool = Field(False, description="take off the group's mean first")

    def raw(self, group: Sequence[Member]) -> list[float]:
        """r or r − mean."""
        centre = mean([member.reward for member in group]) if self.config.group_baseline else 0.0
        return [member.reward - centre for member in group]

    def contrast(self, group: Sequence[Member]) -> bool:
        """With a group's baseline, equal rewards say nothing."""
        return not self.config.group_baseline or not equal([member.reward for member in group])

    def __call__(self, groups: Sequence[Group]) -> Mapping[str, float | Sequence[float]]:
        """See :class:`rlcore.protocols.AdvantageEstimator`."""
        found = [(group, members(group)) for group in groups]
        _require_distinct(found)
        values: dict[str, float] = {}
        factors: dict[str, float] = {}
        for group, inside in found:
            if not inside or len(inside) < self.config.min_survivors:
                continue
            if self.contrast(inside):
                values |= {m.id: a for m, a in zip(inside, self.raw(inside), strict=True)}
            elif self.config.keep_equal:
                values |= {member.id: 0.0 for member in inside}
            factors |= dict.fromkeys((m.id for m in inside), self.salvaged(len(inside), _size(group)))
        numbers = list(values.values())
        if equal(numbers):
            return dict.fromkeys(values, 0.0) if self.config.keep_equal else {}
        centre, divisor = mean(numbers), std(numbers) + self.config.epsilon
        return {name: (value - centre) / divisor * factors[name] for name, value in values.items()}


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ with the group's mean as baseline.

    Formula: A_i = (x_i − mean(x)) / (std(x) + epsilon) over the step, x = r − mean of its group
    Reads: rewards of all groups.
    Source: Hu 2025 (REINFORCE++-baseline).
    """

    name = "reinforce_pp_baseline"
    leave_one_out = False

    class Config(ReinforcePP.Config):
        """With the group's baseline."""

        group_baseline: bool = Field(True, description="take off the group's mean first")


class OPO(GroupEstimator):
    """The baseline of least variance: rewards weighted by length.

    Formula: A_i = r_i − Σ_j l_j r_j / Σ_j l_j, l = sampled tokens
    Reads: rewards and numbers of sampled tokens of the group, [G].
    Source: Hao et al. 2025 (OPO).
    """

    name = "opo"

    def raw(self, group: Sequence[Member]) -> list[float]:
        """r − length-weighted mean."""
        total = sum(member.tokens for member in group)
        if total == 0:
            centre = mean([member.reward for member in group])
        else:
            centre = math.fsum(member.tokens * member.reward for member in group) / total
        return [member.reward - centre for member in group]


class MaxRL(GroupEstimator):
    """Divided by the mean reward: the gradient of the log of the success rate, to the group's order.

    Formula: A_i = (r_i − mean(r)) / mean(r); nothing where no attempt succeeded
    Reads: rewards of the group, [G], none negative.
    Source: Tajwar et al. 2026 (MaxRL); SkyRL and prime-rl max_rl.
    """

    name = "maxrl"

    def raw(self, group: Sequence[Member]) -> list[float]:
        """(r − mean) / mean."""
        rewards = [member.reward for member in group]
        if min(rewards) < 0:
            raise RlcoreError(
                f"maxrl: rewards must not be negative, trajectory {group[0].id}'s group has {min(rewards):g}"
            )
        centre = mean(rewards)
        return [(reward - centre) / centre for reward in rewards]


class GDPO(GroupEstimator):
    """Several rewards, each scaled within its group before they are added, then whitened over the step.

    Formula: a_i = Σ_k weight_k (r_ik − mean(r_k)) / (std(r_k) + epsilon); A_i = (a_i − mean(a)) / (std(a) + epsilon)
        over the step
    Reads: rewards by name, [G, K], from trajectory.info["rewards"]; the verdict alone where there are none.
    Source: Liu et al. 2026 (GDPO).
    """

    name = "gdpo"

    class Config(GroupEstimator.Config):
        """The rewards and their weights."""

        normalize: Literal["batch", "none"] = Field("batch", description="whiten the sums over the step, or not")
        weights: dict[str, float] = Field(
            default_factory=dict, description="weight of each named reward, 1 where it is not named"
        )

    def parts(self, member: Member) -> dict[str, float]:
        """A member's rewards by name."""
        named = member.trajectory.info.get("rewards")
        found = {"reward": member.reward} if not named else {str(k): float(v) for k, v in named.items()}
        for name, value in found.items():
            if not math.isfinite(value):
                raise RlcoreError(f"trajectory {member.id}: reward {name!r} is {value}, which is not finite")
        return found

    def contrast(self, group: Sequence[Member]) -> bool:
        """Whether any of the rewards differs."""
        parts = [self.parts(member) for member in group]
        if len({tuple(sorted(part)) for part in parts}) > 1:
            names = sorted({name for part in parts for name in part})
            raise RlcoreError(f"gdpo: the attempts of trajectory {group[0].id}'s group name different rewards: {names}")
        return any(not equal([part[name] for part in parts]) for name in parts[0])

    def raw(self, group: Sequence[Member]) -> list[float]:
        """The weighted sum of scaled rewards."""
        parts = [self.parts(member) for member in group]
        totals = [0.0] * len(group)
        for name in parts[0]:
            values = [part[name] for part in parts]
            if equal(values):
                continue
            centre, divisor = mean(values), std(values) + self.config.epsilon
            weight = self.config.weights.get(name, 1.0)
            totals = [total + weight * (v - centre) / divisor for total, v in zip(totals, values, strict=True)]
        return totals

    def _scale(self, group: Sequence[Member], batch: float) -> float:
        return 1.0

    def __call__(self, groups: Sequence[Group]) -> Mapping[str, float | Sequence[float]]:
        """See :class:`rlcore.protocols.AdvantageEstimator`."""
        summed = dict(super().__call__(groups))
        numbers = [float(value) for value in summed.values()]  # type: ignore[arg-type]
        if self.config.normalize == "none" or equal(numbers):
            return summed
        centre, divisor = mean(numbers), std(numbers) + self.config.epsilon
        return {name: (float(value) - centre) / divisor for name, value in summed.items()}  # type: ignore[arg-type]
