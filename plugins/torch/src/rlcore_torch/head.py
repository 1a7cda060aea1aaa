"""The output embedding and the log-probs of the targets.

U distinct hidden states, S scores (a hidden state and a target), V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from rlcore_losses.logprob_head import selective_logprobs

__all__ = ["target_logprobs"]

Tensor = torch.Tensor

_KEPT_ELEMENTS = 1 << 26
"""Up to so many probabilities (256 MiB) are kept from the forward to the backward."""

_CACHED_ELEMENTS = 1 << 18
"""Logits that stay in a core's cache between the passes of a softmax."""


def target_logprobs(
    states: Tensor, weight: Tensor | None, sources: Tensor, targets: Tensor, temperature: float, chunk: int | None
) -> Tensor:
    """``[S]`` float32 log-probs of ``targets`` behind ``states[sources]``, with gradient.

    A state that several targets follow is multiplied once. On the CPU, probabilities that fit into a bounded memory are
    kept, and the gradient is multiplied in the dtype of the weight, as that of any layer; the logits themselves are
    float32 in every case. Otherwise as :func:`rlcore_losses.logprob_head.selective_logprobs`.

    Args:
        states: ``[K, D]`` hidden states, or ``[K, V]`` logits if ``weight`` is ``None``.
        weight: ``[V, D]`` output embedding, or ``None``.
        sources: ``[S]`` int64.
        targets: ``[S]`` int64.
        temperature: of the distribution, > 0.
        chunk: rows of logits that are held at once where nothing is kept.
    """
    distinct, rows = torch.unique(sources, return_inverse=True)
    if weight is None or states.is_cuda or len(distinct) * weight.shape[0] > _KEPT_ELEMENTS:
        result: Tensor = selective_logprobs(states[sources], weight, targets, temperature, chunk)
        return result
    return _Kept.apply(states[distinct], weight, rows, targets, temperature)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logits = states.float() @ weight.float().t()
        if temperature != 1.0:
            logits.div_(temperature)
        chosen = logits[rows, targets]
        top, mass = logits.new_empty(len(logits)), logits.new_empty(len(logits))
        for part in _blocks(logits):
            torch.amax(logits[part], 1, out=top[part])
            torch.sum(logits[part].sub_(top[part, None]).exp_(), 1, out=mass[part])
        ctx.save_for_backward(states, weight, rows, targets, logits, mass)
        ctx.temperature = temperature
        return (chosen - top[rows]) - mass.log()[rows]  # around the maximum, where the difference is exact

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, rows, targets, exponentials, mass = ctx.saved_tensors
        grad = grad / ctx.temperature
        scale = -torch.zeros_like(mass).index_add_(0, rows, grad) / mass
        by_logit = torch.empty(exponentials.shape, dtype=weight.dtype)
        at = torch.stack([rows, targets])
        for part in _blocks(exponentials):
            block = exponentials[part] * scale[part, None]
            inside = (rows >= part.start) & (rows < part.stop)
            block.index_put_((at[0, inside] - part.start, at[1, inside]), grad[inside], accumulate=True)
            by_logit[part] = block
        return by_logit @ weight, by_logit.t() @ states, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    step = max(1, _CACHED_ELEMENTS // logits.shape[1])
    return [slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step)]
