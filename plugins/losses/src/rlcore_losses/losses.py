"""Policy losses: terms per token, weighted and summed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rlcore.protocols import Corrected, LossOutput
from rlcore.types import MicroBatch

from rlcore_losses import _packed as packed

__all__ = ["PPOClip"]

Tensor = Any


class PPOClip:
    """The clipped surrogate, asymmetric, with an optional dual clip.

    ``r_t = exp(logprobs_t − old_logprobs_t)``;
    ``term_t = −min(r_t A_t, clip(r_t, 1 − clip_low, 1 + clip_high) A_t)``, and for ``A_t < 0`` with ``dual_clip = c``:
    ``term_t = min(term_t, −c A_t)``. Without ``old_logprobs`` the ratio is to the detached current log-probs: 1, with
    the policy gradient. Source: Schulman et al. 2017; Ye et al. 2020 (dual clip); Yu et al. 2025 (DAPO, clip-higher).
    """

    needs_old_logprobs = False

    class Config(BaseModel):
        """The trust region."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped below 1 − clip_low")
        clip_high: float = Field(0.28, ge=0, description="the ratio is clipped above 1 + clip_high")
        dual_clip: float | None = Field(None, gt=1, description="bound of the ratio where the advantage is negative")

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, logprobs: Tensor, batch: MicroBatch, corrected: Corrected, token_weights: Tensor) -> LossOutput:
        """See :class:`rlcore.protocols.Loss`."""
        packed.require_length(
            "ppo_clip",
            batch,
            logprobs=logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=batch.advantages,
            weights=corrected.weights,
            token_weights=token_weights,
        )
        config, mask = self.config, corrected.mask
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs.detach()
        advantages = packed.select(batch.advantages.float(), mask)
        ratio = packed.capped_exp(packed.log_ratio(logprobs, old, mask))
        plain = -ratio * advantages
        clipped = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
        terms = plain.maximum(clipped)
        metrics = {
            "loss/clip_fraction": packed.share_of(clipped > plain, mask),
            "loss/ratio": packed.mean_of(ratio, mask),
        }
        if config.dual_clip is not None:
            bound = -config.dual_clip * advantages
            metrics["loss/dual_clip_fraction"] = packed.share_of((advantages < 0) & (terms > bound), mask)
            terms = terms.minimum(bound).where(advantages < 0, terms)
        weights = packed.select(corrected.weights.detach() * token_weights.detach(), mask)
        return LossOutput((terms * weights).sum(), metrics)
