"""A loss of the configuration, fused with the log-prob head: no logits are computed twice."""

from __future__ import annotations

import torch
from rlcore.errors import RlcoreError
from rlcore.protocols import Corrected, Loss, LossOutput
from rlcore.types import MicroBatch, Stat

from rlcore_losses import _packed as packed
from rlcore_losses.logprob_head import VocabShard, fused_loss

__all__ = ["can_fuse", "fused_objective"]

Tensor = torch.Tensor


def can_fuse(loss: Loss) -> bool:
    """Whether the term of a token depends on that token's log-prob alone; a loss says so as ``per_token``."""
    return bool(getattr(loss, "per_token", False)) and not getattr(loss, "needs_entropies", False)


def fused_objective(
    hidden: Tensor,
    weight: Tensor | None,
    loss: Loss,
    batch: MicroBatch,
    corrected: Corrected,
    token_weights: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    shard: VocabShard | None = None,
) -> tuple[LossOutput, Tensor]:
    """What ``loss(selective_logprobs(…), batch, corrected, token_weights)`` gives, and ``logprobs [T]`` detached.

    The correction must be known before: from ``old_logprobs``, or from none. ``hidden [T, D]`` at position t predicts
    ``batch.token_ids[t]``; a caller that leaves positions out of ``hidden`` leaves them out of the batch too.

    Raises:
        RlcoreError: the loss joins tokens, or needs entropies.
    """
    if not can_fuse(loss):
        raise RlcoreError(
            f"{type(loss).__name__} cannot be fused with the head: its terms need more than one log-prob each"
        )
    metrics: dict[str, Stat] = {}

    def loss_of(logprobs: Tensor, part: slice) -> Tensor:
        decided = Corrected(corrected.weights[part], corrected.mask[part], corrected.counted[part], {})
        output = loss(logprobs, packed.part_of(batch, part), decided, token_weights[part])
        packed.merge_into(metrics, output.metrics)
        total: Tensor = output.loss
        return total

    value, logprobs = fused_loss(hidden, weight, batch.token_ids, loss_of, temperature, chunk, shard)
    return LossOutput(value, metrics), logprobs
