"""A policy loss: what each token pulls at."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlcore.protocols import Corrected, LossOutput
from rlcore.types import MicroBatch

Tensor = Any


class Skeleton:
    """The plain policy gradient, ``−strength · advantage · logprob``, weighed and summed.

    Uses ``logprobs`` (trainer, now, with gradient), ``[T]``.
    """

    class Config(BaseModel):
        """Options of this loss."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        strength: float = Field(1.0, gt=0, description="factor of the whole loss")

    needs_old_logprobs = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, logprobs: Tensor, batch: MicroBatch, corrected: Corrected, token_weights: Tensor) -> LossOutput:
        """See :class:`rlcore.protocols.Loss`."""
        if logprobs.shape != batch.mask.shape:
            raise ValueError(f"{logprobs.numel()} log-probs for a batch of {batch.mask.numel()} tokens")
        kept = corrected.mask
        # selected, not multiplied: positions outside the mask may hold NaN, and their gradient is exactly 0
        factors = (batch.advantages * corrected.weights * token_weights)[kept].detach()
        return LossOutput(-self.config.strength * (factors * logprobs[kept]).sum(), {})
