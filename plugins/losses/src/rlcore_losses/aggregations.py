"""Aggregations: masks and boundaries to per-token weights and this micro-batch's part of the global denominator.

The loss of a step is ``Σ weight_t · term_t`` over all micro-batches and ranks, divided once by the sum of the
denominators. ``counted`` are the tokens that the correction left in the denominator. What ``unit`` names must lie whole
in one call: a caller that cannot promise it calls the rule once over the whole step, or refuses
(:func:`rlcore_losses.units.require_whole`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from rlcore.types import MicroBatch

from rlcore_losses import _packed as packed
from rlcore_losses._options import Options

__all__ = ["PromptMean", "SequenceMeanTokenMean", "SequenceSumFixed", "TokenMean"]

Tensor = Any


class TokenMean:
    """Every counted token weighs the same, whichever row it is in.

    Formula: weight_t = 1
    Denominator: number of counted tokens.
    Source: Yu et al. 2025 (DAPO); verl token-mean.
    """

    name = "token_mean"
    unit: Literal["token", "row", "group"] = "token"

    class Config(Options):
        """No options."""

    def __init__(self, config: Config) -> None:
        """Nothing to keep."""

    def __call__(self, counted: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See :class:`rlcore.protocols.Aggregation`."""
        packed.require_length(self.name, batch, counted=counted)
        return counted.float(), counted.sum().double()


class _BySequence:
    name: str
    unit: Literal["token", "row", "group"] = "row"

    class Config(Options):
        """What a sequence is."""

        by: Literal["row", "trajectory"] = Field(
            "row", description="a sequence is a row, or all rows of a trajectory (then groups must lie whole)"
        )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.unit = "row" if config.by == "row" else "group"

    def sequences(self, batch: MicroBatch) -> packed.Segments:
        return packed.rows_of(batch) if self.config.by == "row" else packed.trajectories_of(batch)


class SequenceMeanTokenMean(_BySequence):
    """Every sequence weighs the same, and every counted token of it.

    Formula: weight_t = 1 / counted tokens of its sequence
    Denominator: number of sequences with a counted token.
    Source: Shao et al. 2024 (GRPO); verl seq-mean-token-mean.
    """

    name = "sequence_mean_token_mean"

    def __call__(self, counted: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See :class:`rlcore.protocols.Aggregation`."""
        packed.require_length(self.name, batch, counted=counted)
        return _mean_within(self.sequences(batch), counted)


class SequenceSumFixed(_BySequence):
    """Tokens are summed and divided by a fixed length, so that long rows are not discounted.

    Formula: weight_t = 1 / length
    Denominator: number of sequences with a counted token.
    Source: Liu et al. 2025 (Dr. GRPO); verl seq-mean-token-sum-norm.
    """

    name = "sequence_sum_fixed"

    class Config(_BySequence.Config):
        """The fixed length."""

        length: int = Field(..., ge=1, description="tokens that a sum is divided by: the longest completion")

    def __call__(self, counted: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See :class:`rlcore.protocols.Aggregation`."""
        packed.require_length(self.name, batch, counted=counted)
        return counted.float() / self.config.length, self.sequences(batch).any(counted).sum().double()


class PromptMean:
    """Every prompt weighs the same, and every counted token of its group.

    Formula: weight_t = 1 / counted tokens of its group
    Denominator: number of groups with a counted token.
    Source: Khatri et al. 2025 (ScaleRL, prompt average).
    """

    name = "prompt_mean"
    unit: Literal["token", "row", "group"] = "group"

    class Config(Options):
        """No options."""

    def __init__(self, config: Config) -> None:
        """Nothing to keep."""

    def __call__(self, counted: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See :class:`rlcore.protocols.Aggregation`."""
        packed.require_length(self.name, batch, counted=counted)
        return _mean_within(packed.groups_of(batch), counted)


def _mean_within(segments: packed.Segments, counted: Tensor) -> tuple[Tensor, Tensor]:
    sizes = segments.sum(counted)
    weights = counted.double() / segments.spread(sizes.clamp(min=1))
    return weights.float(), (sizes > 0).sum().double()
