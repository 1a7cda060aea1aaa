"""The square root of the ratio of trainer and engine probabilities, capped."""

from pydantic import BaseModel, Field
from rlcore.protocols import Corrected
from rlcore.types import Mean


class RootTIS:
    """``weight = min(exp((old − rollout) / 2), high)``, detached; ``old_logprobs`` against ``rollout_logprobs``."""

    class Config(BaseModel, extra="forbid"):
        high: float = Field(1.5, gt=0, description="ceiling of the weight")

    logprobs = "old"
    unit = "token"

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, trainer_logprobs, batch):
        if trainer_logprobs.shape != batch.mask.shape:
            raise ValueError(f"{trainer_logprobs.numel()} log-probs for a batch of {batch.mask.numel()} tokens")
        gap = (trainer_logprobs - batch.rollout_logprobs).detach().where(batch.mask, 0.0)
        weights = (gap.clamp(max=20.0) / 2).exp().clamp(max=self.config.high)
        kept = weights[batch.mask]
        return Corrected(weights, batch.mask, batch.mask, {"root_tis_weight": Mean(kept.sum(), kept.numel())})
