"""Advantage estimators that give every turn its own number."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from pydantic import Field
from rlcore.errors import RlcoreError
from rlcore.types import Group, Trajectory

from rlcore_losses._options import Options
from rlcore_losses.advantages import GRPO, Member, equal, mean, members, std

__all__ = ["GAE", "GiGPO"]


def turn_rewards(member: Member) -> list[float]:
    """``[turns]`` what each turn earned: ``info["turn_rewards"]`` if the agent loop gives it, and the verdict at the end.

    Raises:
        RlcoreError: another number of rewards than turns, or one that is not finite.
    """
    turns = len(member.trajectory.turns)
    given = member.trajectory.info.get("turn_rewards")
    rewards = [0.0] * turns if given is None else [float(value) for value in given]
    if len(rewards) != turns or not all(map(math.isfinite, rewards)):
        raise RlcoreError(
            f"trajectory {member.id}: info['turn_rewards'] is not one finite number for each of {turns} turns"
        )
    if rewards:
        rewards[-1] += member.reward
    return rewards


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    total, found = 0.0, []
    for reward in reversed(rewards):
        total = reward + discount * total
        found.append(total)
    return found[::-1]


def _state(trajectory: Trajectory, turn: int) -> Hashable:
    """What the policy saw last before this turn: turns of one group that saw the same can be compared."""
    if turn == 0:
        return "start"
    return tuple((message.role, message.content) for message in trajectory.turns[turn - 1].observation)


class GiGPO(GRPO):
    """Group in group: the episode's advantage, and that of the turn among turns of the group in the same state.

    Formula: A_ik = A_i + turn_weight · (R_ik − mean(R)) / (std(R) + epsilon) over the turns of the group whose last
        observation is the same; A_i as grpo; R_ik the return from turn k, discounted by turn; normalize scales both
    Reads: rewards of the group, [G]; observations and, if given, info["turn_rewards"], per turn.
    Source: Feng et al. 2025 (GiGPO); states are compared by the last observation.
    """

    name = "gigpo"

    class Config(GRPO.Config):
        """The turn's part."""

        turn_weight: float = Field(1.0, ge=0, description="weight of the turn's advantage beside the episode's")
        discount: float = Field(0.95, ge=0, le=1, description="factor of what is earned one turn later")

    def contrast(self, group: Sequence[Member]) -> bool:
        """Turn rewards can differ where verdicts do not."""
        return super().contrast(group) or any(member.trajectory.info.get("turn_rewards") for member in group)

    def __call__(self, groups: Sequence[Group]) -> Mapping[str, float | Sequence[float]]:
        """See :class:`rlcore.protocols.AdvantageEstimator`."""
        episode = super().__call__(groups)
        batch = std([member.reward for group in groups for member in members(group)])
        advantages: dict[str, Sequence[float]] = {}
        for group in groups:
            inside = [member for member in members(group) if member.id in episode]
            if not inside:
                continue
            returns = {m.id: _returns(turn_rewards(m), self.config.discount) for m in inside}
            alike: dict[Hashable, list[float]] = {}
            for member in inside:
                for turn, value in enumerate(returns[member.id]):
                    alike.setdefault(_state(member.trajectory, turn), []).append(value)
            for member in inside:
                shared = float(episode[member.id])  # type: ignore[arg-type]
                advantages[member.id] = [
                    shared + self.config.turn_weight * self._among(value, alike[_state(member.trajectory, turn)], batch)
                    for turn, value in enumerate(returns[member.id])
                ]
        return advantages

    def _among(self, value: float, others: Sequence[float], batch: float) -> float:
        if equal(others):
            return 0.0
        spread = {"group": std(others), "batch": batch, "none": 1.0}[self.config.normalize]
        epsilon = 0.0 if self.config.normalize == "none" else self.config.epsilon
        return (value - mean(others)) / (spread + epsilon) if spread + epsilon > 0 else 0.0


class GAE:
    """Generalised advantage estimation over turns, for recipes that bring values.

    Formula: δ_k = r_k + discount · v_{k+1} − v_k, A_k = Σ_l (discount · decay)^l δ_{k+l}, v after the last turn 0
    Reads: trajectory.info["values"], one per turn; the verdict at the last turn; info["turn_rewards"] if given.
    Source: Schulman et al. 2016.
    """

    name = "gae"

    class Config(Options):
        """Discounts by turn."""

        discount: float = Field(1.0, ge=0, le=1, description="factor of what is earned one turn later (γ)")
        decay: float = Field(0.95, ge=0, le=1, description="how far ahead errors of the values are felt (λ)")

    def __init__(self, config: Config) -> None:
        """Keep the options."""
        self.config = config

    def __call__(self, groups: Sequence[Group]) -> Mapping[str, float | Sequence[float]]:
        """See :class:`rlcore.protocols.AdvantageEstimator`."""
        return {member.id: self._turns(member) for group in groups for member in members(group)}

    def _turns(self, member: Member) -> list[float]:
        rewards = turn_rewards(member)
        values: Any = member.trajectory.info.get("values")
        if values is None or len(values) != len(rewards) or not all(math.isfinite(float(v)) for v in values):
            raise RlcoreError(
                f"gae: trajectory {member.id} needs info['values'], one finite number for each of {len(rewards)} turns"
            )
        ahead = [*(float(value) for value in values), 0.0]
        errors = [r + self.config.discount * ahead[k + 1] - ahead[k] for k, r in enumerate(rewards)]
        return _returns(errors, self.config.discount * self.config.decay)
