"""Policy losses whose ratio belongs to a row.

The gradient is kept local: the term of token t holds the row's ratio as a value and passes its gradient to
``logprobs_t`` alone. Where advantage and weights are the same over a row, sums and gradients are those of the row-level
formula under ``sequence_mean_token_mean``; where they differ by turn, every token keeps its own.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from rlcore.types import Stat

from rlcore_losses import _packed as packed
from rlcore_losses.losses import RatioLoss, Tokens, clipped_surrogate

__all__ = ["GMPO", "GSPO"]

Tensor = Any


def _row_ratio(log_ratios: Tensor, tokens: Tokens) -> Tensor:
    """``[T]`` exp(mean over the row), with the gradient of token t going to its own log-ratio."""
    rows = packed.rows_of(tokens.batch)
    mean = rows.spread(rows.mean(packed.select(log_ratios.detach(), tokens.mask), tokens.mask))
    return packed.capped_exp(mean + (log_ratios - log_ratios.detach()))


class GSPO(RatioLoss):
    """The clipped surrogate on the geometric mean of a row's ratios.

    Formula: s = exp(mean_row(logprobs − q)); term_t = max(−s A_t, −clip(s, 1 − clip_low, 1 + clip_high) A_t)
    Reads: current and old (or rollout) log-probs and advantages, [T]; row boundaries. The mean is over kept tokens.
    Source: Zheng et al. 2025 (GSPO and GSPO-token).
    """

    name = "gspo"
    per_token = False

    class Config(RatioLoss.Config):
        """The trust region of the row's ratio."""

        clip_low: float = Field(3e-4, ge=0, le=1, description="the ratio is clipped below 1 − clip_low")
        clip_high: float = Field(4e-4, ge=0, description="the ratio is clipped above 1 + clip_high")
        dual_clip: float | None = Field(None, gt=1, description="bound of the ratio where the advantage is negative")

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """The clipped surrogate of the row."""
        ratio = _row_ratio(tokens.logprobs - tokens.family(self.config.ratio_to), tokens)
        return clipped_surrogate(ratio, tokens, self.config)


class GMPO(RatioLoss):
    """The geometric mean of token ratios that are clipped one by one.

    Formula: d_t = logprobs_t − q_t, clipped to [−clip_low, clip_high] only where that lowers d_t·sign(A_t);
        term_t = −exp(mean_row d) A_t
    Reads: current and old (or rollout) log-probs and advantages, [T]; row boundaries. The mean is over kept tokens.
    Source: Zhao et al. 2025 (GMPO); verl geo_mean.
    """

    name = "gmpo"
    per_token = False

    class Config(RatioLoss.Config):
        """The trust region, in log space."""

        clip_low: float = Field(0.4, ge=0, description="log-ratios are clipped below −clip_low")
        clip_high: float = Field(0.4, ge=0, description="log-ratios are clipped above clip_high")

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """The geometric surrogate of the row."""
        plain = tokens.logprobs - tokens.family(self.config.ratio_to)
        clipped = plain.clamp(-self.config.clip_low, self.config.clip_high)
        lowered = plain.minimum(clipped).where(tokens.advantages >= 0, plain.maximum(clipped))
        ratio = _row_ratio(lowered, tokens)
        metrics: dict[str, Stat] = {
            "loss/ratio": tokens.measure.mean(ratio),
            "loss/clip_fraction": tokens.measure.share(lowered != plain),
        }
        return -ratio * tokens.advantages, metrics
