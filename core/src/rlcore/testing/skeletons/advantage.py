"""An advantage estimator: which attempts were better than their siblings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from rlcore.types import Group


class Skeleton:
    """The reward minus the mean of the group."""

    class Config(BaseModel):
        """Options of this estimator."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        scale: float = Field(1.0, gt=0, description="factor of every advantage")

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, groups: Sequence[Group]) -> Mapping[str, float | Sequence[float]]:
        """See :class:`rlcore.protocols.AdvantageEstimator`."""
        names = [trajectory.id for group in groups for trajectory in group.trajectories]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"attempts that are there twice: {', '.join(sorted(twice))}")
        advantages: dict[str, float | Sequence[float]] = {}
        for group in groups:
            # no verdict is not 0: such an attempt gets no advantage and does not touch the mean
            rewards = {t.id: t.reward for t in group.trajectories if t.reward is not None}
            for name, reward in rewards.items():
                if not math.isfinite(reward):
                    raise ValueError(f"attempt {name} of group {group.id} has the reward {reward}")
            mean = sum(rewards.values()) / max(len(rewards), 1)
            advantages |= {name: self.config.scale * (reward - mean) for name, reward in rewards.items()}
        return advantages
