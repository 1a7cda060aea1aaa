"""Arithmetic on packed rows: selection, capped ratios, reductions per row and per turn."""

from __future__ import annotations

from typing import Any

from rlcore.errors import RlcoreError
from rlcore.types import Max, Mean, MicroBatch, Min

LOG_RATIO_CAP = 20.0
"""Log-ratios are capped here before ``exp`` and never from below."""

Tensor = Any
"""``torch.Tensor``; torch is imported where it is used."""


def require_length(who: str, batch: MicroBatch, **arrays: Tensor | None) -> None:
    """Every array must be ``[T]`` like ``batch.mask``; otherwise one error that names all that do not fit.

    Raises:
        RlcoreError: a shape differs; broadcasting would give a number and no error.
    """
    expected = tuple(batch.mask.shape)
    wrong = [f"{name} {list(a.shape)}" for name, a in arrays.items() if a is not None and tuple(a.shape) != expected]
    if wrong:
        raise RlcoreError(f"{who}: shapes do not fit: {', '.join(wrong)} but batch.mask {list(expected)}")


def select(values: Tensor, mask: Tensor, otherwise: float = 0.0) -> Tensor:
    """``values`` where ``mask``, else a constant: what stands elsewhere (NaN too) has no value and no gradient."""
    return values.where(mask, values.new_full((), otherwise))


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """``[T]`` float32 ``numerator − denominator`` where ``mask``, else 0."""
    return select(numerator.float(), mask) - select(denominator.float(), mask)


def capped_exp(log_ratios: Tensor) -> Tensor:
    """``exp(min(x, 20))``: finite above, exact below (exp(−30) stays 9.4e-14)."""
    return log_ratios.clamp(max=LOG_RATIO_CAP).exp()


def row_ids(batch: MicroBatch) -> Tensor:
    """``[T]`` int64: the row of each position."""
    import torch

    lengths = batch.cu_seqlens.long().diff()
    rows = torch.arange(lengths.numel(), device=lengths.device)
    return rows.repeat_interleave(lengths, output_size=batch.mask.numel())


def mean_of(values: Tensor, mask: Tensor) -> Mean:
    """Mergeable mean of ``values`` where ``mask``; without gradient."""
    return Mean(select(values.detach(), mask).double().sum(), mask.sum())


def share_of(condition: Tensor, mask: Tensor) -> Mean:
    """Mergeable share of ``mask`` where ``condition`` holds."""
    return Mean((condition & mask).sum().double(), mask.sum())


def max_of(values: Tensor, mask: Tensor) -> Max:
    """Mergeable maximum of ``values`` where ``mask``; of nothing: ``None``."""
    return Max(select(values.detach(), mask, float("-inf")).max().item() if bool(mask.any()) else None)


def min_of(values: Tensor, mask: Tensor) -> Min:
    """Mergeable minimum of ``values`` where ``mask``; of nothing: ``None``."""
    return Min(select(values.detach(), mask, float("inf")).min().item() if bool(mask.any()) else None)
