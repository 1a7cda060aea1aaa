"""The ratio of current and old probabilities, bent towards 1 ± width."""

from pydantic import BaseModel, Field
from rlcore.protocols import LossOutput
from rlcore.types import Mean


class SoftClip:
    """``term = −A · (1 + width · tanh((ratio − 1) / width))``; ``logprobs`` against ``old_logprobs``, all ``[T]``."""

    needs_old_logprobs = True

    class Config(BaseModel, extra="forbid"):
        width: float = Field(0.3, gt=0, description="how far from 1 the ratio can get")

    def __init__(self, config: Config):
        self.width = config.width

    def __call__(self, logprobs, batch, corrected, token_weights):
        if logprobs.shape != batch.mask.shape:
            raise ValueError(f"{logprobs.numel()} log-probs for a batch of {batch.mask.numel()} tokens")
        kept = corrected.mask
        ratio = (logprobs[kept] - batch.old_logprobs[kept].detach()).double().clamp(max=20.0).exp()
        # in float64: where tanh is flat, its slope is a difference of nearly equal numbers
        bent = 1 + self.width * ((ratio - 1) / self.width).tanh()
        weights = (corrected.weights[kept] * token_weights[kept]).detach()
        metrics = {"soft_clip_bend": Mean((ratio - bent).detach().abs().sum(), kept.sum())}
        return LossOutput(-(bent * batch.advantages[kept].detach() * weights).sum().float(), metrics)
