"""A correction: how much each sampled token may still count."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlcore.protocols import Corrected
from rlcore.types import MicroBatch

Tensor = Any


class Skeleton:
    """Truncated importance sampling: ``weight = min(exp(old − rollout), high)``, detached.

    Compares ``old_logprobs`` (trainer, before the step) with ``rollout_logprobs`` (engine, at sampling), all ``[T]``.
    """

    class Config(BaseModel):
        """Options of this correction."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        high: float = Field(2.0, gt=0, description="ceiling of the weight")

    logprobs: Literal["old", "current"] = "old"
    unit: Literal["token", "row", "group", "batch"] = "token"

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, trainer_logprobs: Tensor, batch: MicroBatch) -> Corrected:
        """See :class:`rlcore.protocols.Correction`."""
        if trainer_logprobs.shape != batch.mask.shape:
            raise ValueError(f"{trainer_logprobs.numel()} log-probs for a batch of {batch.mask.numel()} tokens")
        # selected, not multiplied: positions outside the mask may hold NaN
        gap = (trainer_logprobs - batch.rollout_logprobs).detach().where(batch.mask, 0.0)
        weights = gap.clamp(max=20.0).exp().clamp(max=self.config.high)
        return Corrected(weights, batch.mask, batch.mask, {})
