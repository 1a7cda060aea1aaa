"""A long sum over tokens, part by part: each part's gradient is taken while its arrays are in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["summed"]

Tensor = torch.Tensor


def summed(
    term: Callable[[Tensor, Tensor | None, slice], Tensor],
    logprobs: Tensor,
    entropies: Tensor | None,
    parts: Sequence[slice],
) -> Tensor:
    """``Σ term(logprobs[part], entropies[part], part)``, whose terms depend on their own positions alone."""
    total: Tensor = _Summed.apply(logprobs, entropies, term, parts)
    return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, entropies: Tensor | None, term: Any, parts: Sequence[slice]) -> Tensor:
        inputs = (logprobs, entropies)
        wanted = [x is not None and needed for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)]
        gradients = [torch.zeros_like(x) if w and x is not None else None for x, w in zip(inputs, wanted, strict=True)]
        total = logprobs.new_zeros((), dtype=torch.float64)
        for part in parts:
            with torch.enable_grad():
                leaves = [
                    None if x is None else x[part].detach().requires_grad_(w)
                    for x, w in zip(inputs, wanted, strict=True)
                ]
                value = term(leaves[0], leaves[1], part)  # type: ignore[arg-type]
            total += value.detach()
            if value.requires_grad:
                asked = [(g, leaf) for g, leaf in zip(gradients, leaves, strict=True) if g is not None]
                found = torch.autograd.grad(value, [leaf for _, leaf in asked], allow_unused=True)
                for (gradient, _), slope in zip(asked, found, strict=True):
                    if slope is not None:
                        gradient[part] = slope
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g * grad_total.to(g.dtype) for g in ctx.saved_tensors]
        return *scaled, None, None
