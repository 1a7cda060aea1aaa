"""A loss of the configuration, fused with the log-prob head: no logits are computed twice."""

from __future__ import annotations

from dataclasses import replace

import torch
from rlcore.errors import RlcoreError
from rlcore.protocols import Corrected, Loss, LossOutput
from rlcore.types import MicroBatch, Stat

from rlcore_losses.logprob_head import VocabShard, fused_loss

__all__ = ["can_fuse", "fused_objective"]

Tensor = torch.Tensor

_PER_TOKEN = (
    "token_ids",
    "mask",
    "rollout_logprobs",
    "advantages",
    "turn_ids",
    "versions",
    "old_logprobs",
    "ref_logprobs",
)


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
        arrays = {name: value[part] for name in _PER_TOKEN if (value := getattr(batch, name)) is not None}
        bounds = batch.cu_seqlens.new_tensor([0, logprobs.numel()])
        piece = replace(
            batch,
            **arrays,
            cu_seqlens=bounds,
            row_groups=batch.row_groups[:1],
            row_trajectories=batch.row_trajectories[:1],
            entropies=None,
        )
        decided = Corrected(corrected.weights[part], corrected.mask[part], corrected.counted[part], {})
        output = loss(logprobs, piece, decided, token_weights[part])
        for name, stat in output.metrics.items():
            metrics[name] = metrics[name].merge(stat) if name in metrics else stat  # type: ignore[arg-type]
        total: Tensor = output.loss
        return total

    value, logprobs = fused_loss(hidden, weight, batch.token_ids, loss_of, temperature, chunk, shard)
    return LossOutput(value, metrics), logprobs
