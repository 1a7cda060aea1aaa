"""Log-probs of the targets from hidden states, without ever holding a full ``[T, V]`` float32 tensor."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["selective_logprobs"]

Tensor = torch.Tensor

_CHUNK_ELEMENTS = 1 << 24
"""Logits that are held at once (64 MiB of float32), unless the caller says how many rows."""

_KEPT_ELEMENTS = 1 << 26
"""Up to so many probabilities (256 MiB) are kept for the backward; beyond, the logits are computed again."""


def selective_logprobs(
    hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
) -> Any:
    """Log-probability of each target under ``softmax(logits / temperature)``.

    The logits are float32, whatever the inputs are, and are divided by ``temperature`` as the engine does before it
    samples. The backward computes the logits of a chunk again, unless all of them are few enough to be kept.

    Args:
        hidden: ``[T, D]`` hidden states, or ``[T, V]`` logits if ``weight`` is ``None``.
        weight: ``[V, D]`` output embedding, or ``None``.
        targets: ``[T]`` int64 token ids.
        temperature: the sampling temperature, > 0.
        chunk: rows at a time; default: as many as make 16 M logits.
        entropy: also return the entropy in nats of each distribution, with its gradient.

    Returns:
        ``[T]`` float32 log-probs (``logprobs`` with gradient), or ``(logprobs, entropy)``.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {list(hidden.shape)} and targets {list(targets.shape)}: expected [T, D] and [T]")
    if weight is not None and (weight.ndim != 2 or weight.shape[1] != hidden.shape[1]):
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [T, D] and [V, D]")
    vocabulary = hidden.shape[1] if weight is None else weight.shape[0]
    rows = chunk or max(16, _CHUNK_ELEMENTS // vocabulary)
    logprobs, entropies = _SelectiveLogprobs.apply(hidden, weight, targets, float(temperature), rows, entropy)
    return (logprobs, entropies) if entropy else logprobs


def _wide(weight: Tensor | None) -> Tensor | None:
    """The weight as the logits need it; a GPU multiplies narrow factors into a float32 product by itself."""
    return weight if weight is None or weight.is_cuda else weight.float()


def _logits(hidden: Tensor, weight: Tensor | None, temperature: float) -> Tensor:
    """A chunk's float32 logits in a buffer of its own (it is changed in place)."""
    if weight is None:
        logits = hidden.to(torch.float32, copy=True)
    elif hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _SelectiveLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, targets: Tensor, temperature: float, rows: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        total, wide = hidden.shape[0], _wide(weight)
        vocabulary = hidden.shape[1] if weight is None else weight.shape[0]
        logprobs = hidden.new_empty(total, dtype=torch.float32)
        log_z = hidden.new_empty(total, dtype=torch.float32)
        entropies = hidden.new_zeros(total if entropy else 0, dtype=torch.float32)
        keep = any(ctx.needs_input_grad[:2]) and not entropy and total * vocabulary <= _KEPT_ELEMENTS
        kept: list[Tensor] = []
        for start in range(0, total, rows):
            part = slice(start, min(start + rows, total))
            logits = _logits(hidden[part], wide, temperature)
            target_logits = logits.gather(1, targets[part, None]).squeeze(1)
            top = logits.amax(1, keepdim=True)
            if entropy:
                probabilities = torch.exp(logits.sub_(top))
                mass = probabilities.sum(1)
                log_mass = mass.log()
                entropies[part] = log_mass - probabilities.mul_(logits).sum(1) / mass
            else:
                masses = logits.sub_(top).exp_()
                mass = masses.sum(1)
                log_mass = mass.log()
                if keep:
                    kept += (masses, mass)
            log_z[part] = log_mass + top.squeeze(1)
            # around the maximum, where the difference is exact
            logprobs[part] = (target_logits - top.squeeze(1)) - log_mass
        ctx.save_for_backward(hidden, weight, targets, log_z, entropies, *kept)
        ctx.temperature, ctx.rows, ctx.entropy = temperature, rows, entropy
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_z, entropies, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        wide = None if kept else _wide(weight)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: Tensor | None = None
        starts = range(0, hidden.shape[0], ctx.rows)
        for number, start in enumerate(starts):
            part = slice(start, min(start + ctx.rows, hidden.shape[0]))
            scale = grad_logprobs[part, None] / ctx.temperature
            if kept:
                masses, mass = kept[2 * number : 2 * number + 2]
                gradient = masses * (-scale / mass[:, None])
                gradient.scatter_add_(1, targets[part, None], scale)
            else:
                logits = _logits(hidden[part], wide, ctx.temperature).sub_(log_z[part, None])
                if ctx.entropy:
                    # d entropy / d logit = −p (log p + H);  d logprob / d logit = 1[target] − p
                    outer = (
                        logits.add(entropies[part, None]).mul_(grad_entropy[part, None] / ctx.temperature).add_(scale)
                    )
                    gradient = logits.exp_().mul_(outer).neg_()
                    del outer
                else:
                    gradient = logits.exp_().mul_(-scale)
                gradient.scatter_add_(1, targets[part, None], scale)
            if weight is None:
                if grad_hidden is not None:
                    grad_hidden[part] = gradient
                continue
            # like any layer's: the factors in the weight's dtype, the sum over the rows of a chunk in float32
            gradient = gradient.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ weight
            if needs_weight:
                product = gradient.t() @ hidden[part].to(weight.dtype)
                if len(starts) == 1:
                    grad_weight = product
                elif grad_weight is None:
                    grad_weight = product.float()
                else:
                    grad_weight.add_(product)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None
