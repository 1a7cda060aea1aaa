"""Corrections of the gap between trainer and engine log-probs, token by token."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rlcore.protocols import Corrected
from rlcore.types import MicroBatch

from rlcore_losses import _packed as packed

__all__ = ["NoCorrection", "TokenTIS"]

Tensor = Any


class NoCorrection:
    """No correction: ``w_t = 1`` for every token of the mask."""

    unit: Literal["token"] = "token"

    class Config(BaseModel):
        """No options but the log-probs that the metrics compare."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        logprobs: Literal["old", "current"] = Field("old", description="trainer log-probs that are compared")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.logprobs = config.logprobs

    def __call__(self, trainer_logprobs: Tensor, batch: MicroBatch) -> Corrected:
        """See :class:`rlcore.protocols.Correction`."""
        packed.require_length("none", batch, trainer_logprobs=trainer_logprobs)
        return Corrected(trainer_logprobs.new_ones(trainer_logprobs.shape), batch.mask, batch.mask, {})


class TokenTIS:
    """Truncated importance sampling per token: ``w_t = min(exp(trainer_t − rollout_t), high)``.

    With ``low`` > 0 the weight is also raised to ``low``: a floor over-weights every token whose ratio is below it by
    ``low / ratio``. Source: Espeholt et al. 2018 (V-trace); Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training".
    """

    unit: Literal["token"] = "token"

    class Config(BaseModel):
        """Bounds of the weight."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        low: float = Field(0.0, ge=0, description="floor of the weight; 0: none, a tiny ratio stays tiny")
        high: float = Field(2.0, gt=0, description="ceiling of the weight")
        logprobs: Literal["old", "current"] = Field("old", description="trainer log-probs in the ratio")

        @model_validator(mode="after")
        def _bounds(self) -> TokenTIS.Config:
            if self.low > self.high:
                raise ValueError(f"floor low={self.low:g} is above ceiling high={self.high:g}")
            if self.low > 0:
                warnings.warn(
                    f"token_tis: low={self.low:g} over-weights every token with a ratio below it by low/ratio "
                    f"({self.low / 0.01:g} times at ratio 0.01); 0 keeps tiny ratios tiny",
                    stacklevel=2,
                )
            return self

    def __init__(self, config: Config) -> None:
        self.config = config
        self.logprobs = config.logprobs

    def __call__(self, trainer_logprobs: Tensor, batch: MicroBatch) -> Corrected:
        """See :class:`rlcore.protocols.Correction`."""
        packed.require_length(
            "token_tis", batch, trainer_logprobs=trainer_logprobs, rollout_logprobs=batch.rollout_logprobs
        )
        mask, config = batch.mask, self.config
        ratio = packed.capped_exp(packed.log_ratio(trainer_logprobs.detach(), batch.rollout_logprobs, mask))
        weights = ratio.clamp(min=config.low, max=config.high)
        metrics = {
            "correction/ratio": packed.mean_of(ratio, mask),
            "correction/weight": packed.mean_of(weights, mask),
            "correction/ceiling_share": packed.share_of(ratio > config.high, mask),
            "correction/floor_share": packed.share_of(ratio < config.low, mask),
        }
        return Corrected(weights, mask, mask, metrics)
