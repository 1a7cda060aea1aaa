"""Arithmetic on packed rows: selection, capped ratios, reductions over rows and turns.

Everything is float64: the arrays are ``[T]`` and small beside the head's ``[T, V]``, and sums of signed terms keep
their digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    import torch

    return torch.where(mask, values, otherwise).double()


def capped_exp(log_ratios: Tensor) -> Tensor:
    """``exp(min(x, 20))``: finite above, exact below (exp(−30) stays 9.4e-14)."""
    return log_ratios.clamp(max=LOG_RATIO_CAP).exp()


# --- parts of a batch, for what goes token by token -------------------------------------------------------------------

_BLOCK = 1 << 15
"""Tokens whose arrays stay in a core's cache."""

_PER_TOKEN = (
    "token_ids",
    "mask",
    "rollout_logprobs",
    "advantages",
    "turn_ids",
    "versions",
    "old_logprobs",
    "ref_logprobs",
    "entropies",
)


def blocks(batch: MicroBatch) -> list[slice]:
    """Parts of a long batch that a core can hold in its cache; one part of a short one, or on an accelerator."""
    total = batch.mask.numel()
    step = total if batch.mask.is_cuda or total <= 2 * _BLOCK else _BLOCK
    return [slice(start, min(start + step, total)) for start in range(0, total, max(step, 1))] or [slice(0, 0)]


def part_of(batch: MicroBatch, part: slice) -> MicroBatch:
    """These positions as one row: for what looks at every token alone."""
    arrays = {name: value[part] for name in _PER_TOKEN if (value := getattr(batch, name)) is not None}
    return replace(
        batch,
        **arrays,
        cu_seqlens=batch.cu_seqlens.new_tensor([0, arrays["mask"].numel()]),
        row_groups=batch.row_groups[:1],
        row_trajectories=batch.row_trajectories[:1],
    )


def joined(parts: list[Tensor]) -> Tensor:
    """The parts, one behind the other."""
    import torch

    return torch.cat(parts)


def merge_into(metrics: dict[str, Stat], other: Mapping[str, Stat]) -> None:
    """Merge the measurements of a part."""
    for name, stat in other.items():
        metrics[name] = metrics[name].merge(stat) if name in metrics else stat  # type: ignore[arg-type]


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
        low = values.new_full((self.count,), float("-inf")).double()
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


class Measure:
    """Mergeable measurements over a mask, of float64 arrays that are finite outside it too (selected ones are)."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._inside = mask.double()
        self._count = self._inside.sum()

    def mean(self, values: Tensor) -> Mean:
        """The mean, without gradient."""
        return Mean(values.detach().dot(self._inside), self._count)

    def share(self, condition: Tensor) -> Mean:
        """The share of the mask where ``condition`` holds."""
        return Mean((condition & self.mask).count_nonzero().double(), self._count)

    def extremes(self, ratios: Tensor) -> tuple[Min, Max]:
        """Minimum and maximum of numbers that are not negative; of nothing: ``None``."""
        if not bool(self._count):
            return Min(None), Max(None)
        inside = ratios.detach() * self._inside
        return Min(float((inside + (1 - self._inside) * 1e300).min())), Max(float(inside.max()))

    def bounds(self, raw: Tensor, weights: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Stat]:
        """What the floor and the ceiling of a weight did: shares of the tokens, and Σ|A|·|weight − raw| over Σ|A|.

        ``advantages`` are 0 outside the mask.
        """
        size = advantages.abs()
        moved, total = size * (weights - raw).abs(), size.sum()
        ceiling = raw > high
        smallest, largest = self.extremes(raw)
        floor_share, floor_mass = Mean(0.0, self._count), Mean(0.0, total)
        if low > 0:
            floor = raw < low
            floor_share, floor_mass = self.share(floor), Mean(moved.dot(floor.double()), total)
        return {
            "correction/ratio": self.mean(raw),
            "correction/ratio_max": largest,
            "correction/ratio_min": smallest,
            "correction/weight": self.mean(weights),
            "correction/floor_share": floor_share,
            "correction/ceiling_share": self.share(ceiling),
            "correction/floor_mass": floor_mass,
            "correction/ceiling_mass": Mean(moved.dot(ceiling.double()), total),
        }
