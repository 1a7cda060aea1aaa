"""Arithmetic on packed rows: selection, capped ratios, reductions over rows and turns.

Everything is float64: the arrays are ``[T]`` and small beside the head's ``[T, V]``, and sums of signed terms keep
their digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.errors import RlcoreError
from rlcore.types import Max, Mean, MicroBatch, Min, Stat

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
    """``values`` as float64 where ``mask``, else a constant: what stands elsewhere has no value and no gradient."""
    values = values.double()
    return values.where(mask, values.new_full((), otherwise))


def capped_exp(log_ratios: Tensor) -> Tensor:
    """``exp(min(x, 20))``: finite above, exact below (exp(−30) stays 9.4e-14)."""
    return log_ratios.clamp(max=LOG_RATIO_CAP).exp()


# --- rows, turns, groups ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """A partition of the positions: ``ids [T]`` int64 in ``[0, count)``."""

    ids: Tensor
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """``[count]`` float64 sums of ``values [T]``, with gradient."""
        return values.new_zeros(self.count).double().index_add(0, self.ids, values.double())

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """``[count]`` means of ``values`` (0 outside ``mask``) over the ``mask``; 0 where a segment has none of it."""
        return self.sum(values) / self.sum(mask).clamp(min=1)

    def any(self, condition: Tensor) -> Tensor:
        """``[count]`` whether it holds anywhere in the segment."""
        return self.sum(condition) > 0

    def max(self, values: Tensor, mask: Tensor) -> Tensor:
        """``[count]`` maximum over the ``mask``; −inf where a segment has none of it."""
        low = values.new_full((self.count,), float("-inf"))
        return low.scatter_reduce(0, self.ids, select(values, mask, float("-inf")), "amax")

    def spread(self, per_segment: Tensor) -> Tensor:
        """``[T]``: each position gets its segment's value."""
        return per_segment[self.ids]


def rows_of(batch: MicroBatch) -> Segments:
    """The rows."""
    return _spread_over_rows(batch, None)


def groups_of(batch: MicroBatch) -> Segments:
    """The groups (prompts)."""
    return _spread_over_rows(batch, batch.row_groups)


def trajectories_of(batch: MicroBatch) -> Segments:
    """The trajectories; one may have several rows."""
    return _spread_over_rows(batch, batch.row_trajectories)


def turns_of(batch: MicroBatch) -> Segments:
    """The turns of each row; positions outside the mask form a segment of their own in each row."""
    rows, turns = rows_of(batch), batch.turn_ids.long() + 1
    width = int(turns.max()) + 1 if turns.numel() else 1
    return Segments(rows.ids * width + turns, rows.count * width)


def _spread_over_rows(batch: MicroBatch, label: Tensor | None) -> Segments:
    import torch

    lengths = batch.cu_seqlens.long().diff()
    if label is None:
        labels, count = torch.arange(lengths.numel(), device=lengths.device), lengths.numel()
    else:
        found, labels = torch.unique(label.long(), return_inverse=True)
        count = found.numel()
    return Segments(labels.repeat_interleave(lengths, output_size=batch.mask.numel()), count)


# --- measurements -----------------------------------------------------------------------------------------------------


def mean_of(values: Tensor, mask: Tensor) -> Mean:
    """Mergeable mean of ``values`` where ``mask``; without gradient."""
    return Mean(select(values.detach(), mask).sum(), mask.sum())


def share_of(condition: Tensor, mask: Tensor) -> Mean:
    """Mergeable share of ``mask`` where ``condition`` holds."""
    return Mean((condition & mask).sum().double(), mask.sum())


def max_of(values: Tensor, mask: Tensor) -> Max:
    """Mergeable maximum of ``values`` where ``mask``; of nothing: ``None``."""
    return Max(float(select(values.detach(), mask, float("-inf")).max()) if bool(mask.any()) else None)


def min_of(values: Tensor, mask: Tensor) -> Min:
    """Mergeable minimum of ``values`` where ``mask``; of nothing: ``None``."""
    return Min(float(select(values.detach(), mask, float("inf")).min()) if bool(mask.any()) else None)


def bound_metrics(
    raw: Tensor, weights: Tensor, mask: Tensor, advantages: Tensor, low: float, high: float
) -> Mapping[str, Stat]:
    """What the floor and the ceiling of a weight did: shares of the tokens, and Σ|A|·|weight − raw| over Σ|A|."""
    size = select(advantages.detach(), mask).abs()
    moved, total = size * (weights - raw).abs(), size.sum()
    floor, ceiling = (raw < low) & mask, (raw > high) & mask
    return {
        "correction/ratio": mean_of(raw, mask),
        "correction/ratio_max": max_of(raw, mask),
        "correction/ratio_min": min_of(raw, mask),
        "correction/weight": mean_of(weights, mask),
        "correction/floor_share": share_of(floor, mask),
        "correction/ceiling_share": share_of(ceiling, mask),
        "correction/floor_mass": Mean(select(moved, floor).sum(), total),
        "correction/ceiling_mass": Mean(select(moved, ceiling).sum(), total),
    }
