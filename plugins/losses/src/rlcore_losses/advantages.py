"""Advantage estimators: the rewards of groups to one advantage per trajectory. Plain Python on floats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from rlcore.errors import RlcoreError
from rlcore.types import Group

__all__ = ["GRPO", "equal", "verdicts"]

_RELATIVE_NOISE = 5e-7
"""Rewards that differ by less than this share of the largest one are equal: four float32 roundings."""


def verdicts(group: Group) -> dict[str, float]:
    """Reward by trajectory id, of the trajectories that have one; a trajectory counts once however many rows it gives.

    Raises:
        RlcoreError: a reward is not finite, or one trajectory id carries two different rewards.
    """
    found: dict[str, float] = {}
    for trajectory in group.trajectories:
        if trajectory.reward is None:
            continue
        reward = float(trajectory.reward)
        if not math.isfinite(reward):
            raise RlcoreError(f"trajectory {trajectory.id} of group {group.id}: reward {reward} is not finite")
        if found.setdefault(trajectory.id, reward) != reward:
            raise RlcoreError(
                f"trajectory {trajectory.id} of group {group.id} carries two rewards: "
                f"{found[trajectory.id]:g} and {reward:g}"
            )
    return found


def equal(values: Sequence[float]) -> bool:
    """Whether the values are the same up to rounding; a group of one is."""
    spread = max(values, default=0.0) - min(values, default=0.0)
    return spread <= _RELATIVE_NOISE * max((abs(value) for value in values), default=0.0)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation (n − 1), 0 for equal values and for one value."""
    if len(values) < 2 or equal(values):
        return 0.0
    centre = _mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


class GRPO:
    """Group-relative advantage: ``A_i = (r_i − mean(r)) / (std + epsilon)`` over the group's verdicts.

    ``std`` is the sample standard deviation (n − 1) of the group, of all verdicts of the step (``batch``) or absent
    (``none``). Source: Shao et al. 2024 (DeepSeekMath).
    """

    class Config(BaseModel):
        """How advantages are scaled."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        normalize: Literal["group", "batch", "none"] = Field(
            "group", description="divide by the standard deviation of the group, of the whole step, or not at all"
        )
        epsilon: float = Field(1e-6, ge=0, description="added to the standard deviation")
        keep_equal: bool = Field(
            False, description="keep groups whose rewards are equal: no gradient, but their tokens are counted"
        )

        @field_validator("normalize", mode="before")
        @classmethod
        def _aliases(cls, value: object) -> object:
            if isinstance(value, bool):
                return "group" if value else "none"
            return value

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, groups: Sequence[Group]) -> Mapping[str, float | Sequence[float]]:
        """See :class:`rlcore.protocols.AdvantageEstimator`."""
        config = self.config
        rewards = [verdicts(group) for group in groups]
        batch_std = _std([reward for group in rewards for reward in group.values()])
        advantages: dict[str, float] = {}
        for group in rewards:
            values = list(group.values())
            if not values or (equal(values) and not config.keep_equal):
                continue
            if equal(values):
                advantages.update(dict.fromkeys(group, 0.0))
                continue
            scale = {"group": _std(values), "batch": batch_std, "none": 1.0}[config.normalize]
            divisor = scale + (config.epsilon if config.normalize != "none" else 0.0)
            centre = _mean(values)
            advantages.update({name: (reward - centre) / divisor for name, reward in group.items()})
        return advantages
