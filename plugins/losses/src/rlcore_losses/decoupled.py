"""The decoupled objective: behaviour, proximal and current policy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from rlcore.errors import RlcoreError
from rlcore.types import Stat

from rlcore_losses import _packed as packed
from rlcore_losses.losses import PolicyLoss, Tokens, clipped_surrogate

__all__ = ["Decoupled"]

Tensor = Any


class Decoupled(PolicyLoss):
    """Clips against the proximal policy and weighs the gap from the proximal to the behaviour policy.

    Formula: term_t = b_t · surrogate(exp(logprobs_t − prox_t)), surrogate as ppo_clip,
        b_t = exp(prox_t − rollout_t), above behaviour_high truncated to it or dropped; prox = old_logprobs, or with
        proximal = "loglinear": rollout_t + g/(g + 1) (sg(logprobs_t) − rollout_t), g = policy_version − version_t
    Reads: current, old and rollout log-probs and advantages, [T]; versions for loglinear, which needs no forward
        pass before the step.
    Source: Hilton et al. 2022 (decoupled PPO); AReaL (2025) for both forms of the proximal policy.
    """

    name = "decoupled"
    corrects = True

    class Config(PolicyLoss.Config):
        """The trust region and the behaviour weight."""

        clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped below 1 − clip_low")
        clip_high: float = Field(0.28, ge=0, description="the ratio is clipped above 1 + clip_high")
        dual_clip: float | None = Field(None, gt=1, description="bound of the ratio where the advantage is negative")
        proximal: Literal["recompute", "loglinear"] = Field(
            "recompute", description="old log-probs by a forward pass, or interpolated by version"
        )
        behaviour_high: float = Field(5.0, gt=0, description="largest behaviour weight")
        above: Literal["truncate", "drop"] = Field("truncate", description="what happens to larger behaviour weights")

    def __init__(self, config: Config) -> None:
        """Recomputing needs old log-probs."""
        super().__init__(config)
        self.needs_old_logprobs = config.proximal == "recompute"

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """The decoupled surrogate."""
        config, batch = self.config, tokens.batch
        rollout = tokens.family("rollout")
        if config.proximal == "recompute":
            if batch.old_logprobs is None:
                raise RlcoreError("decoupled: batch.old_logprobs is needed, or set loss.proximal = 'loglinear'")
            proximal = tokens.family("old")
        else:
            gap = packed.select((batch.policy_version - batch.versions).clamp(min=0), tokens.mask)
            proximal = rollout + gap / (gap + 1) * (tokens.logprobs.detach() - rollout)
        behaviour = packed.capped_exp(proximal - rollout)
        weights = behaviour.clamp(max=config.behaviour_high)
        above = behaviour > config.behaviour_high
        if config.above == "drop":
            weights = weights.where(~above, weights.new_zeros(()))
        terms, metrics = clipped_surrogate(packed.capped_exp(tokens.logprobs - proximal), tokens, config)
        metrics["loss/behaviour_weight"] = tokens.measure.mean(weights)
        metrics["loss/behaviour_above_share"] = tokens.measure.share(above)
        return terms * weights, metrics
