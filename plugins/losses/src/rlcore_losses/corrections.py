"""Corrections of the gap between trainer and engine log-probs that give weights.

Here ``Δ_t = trainer_t − rollout_t`` (``trainer``: ``old_logprobs``, or the current ones, detached, as ``logprobs``
says) and ``exp`` means ``exp(min(·, 20))``. A row's or turn's statistics are over all its tokens of the batch's mask.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator
from rlcore.protocols import Corrected
from rlcore.types import MicroBatch

from rlcore_losses import _packed as packed
from rlcore_losses._options import Options

__all__ = ["Gap", "GeometricTIS", "IcePop", "NoCorrection", "PackedCorrection", "SequenceTIS", "TokenTIS", "TurnTIS"]

Tensor = Any


class Gap:
    """The two log-prob families of a batch, compared; ``[T]``, float64, selected by the batch's mask."""

    def __init__(self, trainer_logprobs: Tensor, batch: MicroBatch) -> None:
        self.batch = batch
        self.mask = batch.mask
        self.measure = packed.Measure(batch.mask)
        self.trainer = packed.select(trainer_logprobs.detach(), batch.mask)
        self.rollout = packed.select(batch.rollout_logprobs.detach(), batch.mask)
        self.delta = self.trainer - self.rollout
        self.advantages = packed.select(batch.advantages.detach(), batch.mask)


class Decision(NamedTuple):
    """Weights (``None``: 1), kept tokens (``None``: all) and measurements."""

    weights: Tensor | None
    keep: Tensor | None
    metrics: dict[str, Any]


class PackedCorrection:
    """What every correction here shares: selection, the denominator, detached results.

    Attributes:
        name: as registered.
        weighs: gives weights other than 1.
        rejects: the statistics that it rejects by; two that reject by the same one correct the same thing.
    """

    name: ClassVar[str]
    weighs: ClassVar[bool] = False
    unit: Literal["token", "row", "group", "batch"] = "token"

    class Config(Options):
        """Which log-probs are compared, and where rejected tokens are counted."""

        logprobs: Literal["old", "current"] = Field(
            "old", description="trainer log-probs that are compared with those of the engine"
        )

    config: Any

    def __init__(self, config: Config) -> None:
        """Keep the options."""
        self.config = config
        self.logprobs: Literal["old", "current"] = config.logprobs

    @property
    def rejects(self) -> frozenset[str]:
        """See the class."""
        return frozenset()

    def decide(self, gap: Gap, remaining: Tensor) -> Decision:
        """The correction itself; ``remaining``: tokens that earlier corrections of a chain left."""
        raise NotImplementedError

    def __call__(self, trainer_logprobs: Tensor, batch: MicroBatch, remaining: Tensor | None = None) -> Corrected:
        """See :class:`rlcore.protocols.Correction`."""
        packed.require_length(
            self.name,
            batch,
            trainer_logprobs=trainer_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
        )
        remaining = batch.mask if remaining is None else remaining & batch.mask
        parts = packed.blocks(batch) if self.unit == "token" else [slice(0, batch.mask.numel())]
        if len(parts) == 1:
            return self._corrected(trainer_logprobs, batch, remaining)
        found = [self._corrected(trainer_logprobs[p], packed.part_of(batch, p), remaining[p]) for p in parts]
        metrics: dict[str, Any] = {}
        for one in found:
            packed.merge_into(metrics, one.metrics)
        weights, mask, counted = (packed.joined([one[i] for one in found]) for i in range(3))
        return Corrected(weights, mask, counted, metrics)

    def _corrected(self, trainer_logprobs: Tensor, batch: MicroBatch, remaining: Tensor) -> Corrected:
        gap = Gap(trainer_logprobs, batch)
        weights, keep, metrics = self.decide(gap, remaining)
        weights = gap.delta.new_ones(gap.delta.shape) if weights is None else weights
        mask = counted = batch.mask
        if keep is not None:
            mask = batch.mask & keep
            counted = batch.mask if self.config.denominator == "all" else mask
            rejected = gap.measure.share(~keep)
            metrics |= {"correction/rejected_share": rejected, f"correction/{self.name}_rejected_share": rejected}
        return Corrected(weights.float(), mask, counted, metrics)


class NoCorrection(PackedCorrection):
    """Nothing is corrected.

    Formula: w_t = 1
    Reads: nothing but the mask.
    """

    name = "none"

    def decide(self, gap: Gap, remaining: Tensor) -> Decision:
        """Nothing."""
        return Decision(None, None, {})


class _Weighted(PackedCorrection):
    """Weights that are truncated ratios of some level."""

    weighs = True

    class Config(PackedCorrection.Config):
        """Bounds of the weight."""

        low: float = Field(0.0, ge=0, description="floor of the weight; 0: none, a tiny ratio stays tiny")
        high: float = Field(2.0, gt=0, description="ceiling of the weight")
        normalize: Literal["none", "tokens", "rows"] = Field(
            "none",
            description="divide the weights by their mean over the step's tokens, or over its rows' means; "
            "needs the whole step in one call",
        )

        @model_validator(mode="after")
        def _bounds(self) -> _Weighted.Config:
            if self.low > self.high:
                raise ValueError(f"floor low={self.low:g} is above ceiling high={self.high:g}")
            if self.low > 0:
                warnings.warn(
                    f"low={self.low:g} is a floor of the weight: it over-weights everything whose ratio lies below it "
                    f"by low/ratio ({self.low / 0.01:g} times at ratio 0.01); 0 keeps tiny ratios tiny",
                    stacklevel=2,
                )
            return self

    def __init__(self, config: Config) -> None:
        """Keep the options; normalised weights need the whole step."""
        super().__init__(config)
        if config.normalize != "none":
            self.unit = "batch"

    def log_ratio(self, gap: Gap) -> Tensor:
        """``[T]`` the log-ratio of the level, spread over its tokens."""
        raise NotImplementedError

    def decide(self, gap: Gap, remaining: Tensor) -> Decision:
        """Truncate, then normalise."""
        config = self.config
        raw = packed.capped_exp(self.log_ratio(gap))
        weights = raw.clamp(min=config.low, max=config.high)
        metrics = gap.measure.bounds(raw, weights, gap.advantages, config.low, config.high)
        return Decision(_normalized(weights, config.normalize, remaining, gap.batch), None, metrics)


def _normalized(weights: Tensor, how: str, mask: Tensor, batch: MicroBatch) -> Tensor:
    if how == "none" or not bool(mask.any()):
        return weights
    inside = packed.select(weights, mask)
    if how == "tokens":
        mean = inside.sum() / mask.sum()
    else:
        rows = packed.rows_of(batch)
        mean = rows.mean(inside, mask).sum() / rows.any(mask).sum()
    return weights / mean if float(mean) > 0 else weights


class TokenTIS(_Weighted):
    """Truncated importance sampling, token by token.

    Formula: w_t = clamp(exp(Δ_t), low, high)
    Reads: trainer (old or current) and rollout log-probs, [T].
    Source: Espeholt et al. 2018 (V-trace); Yao et al. 2025 (TIS for rollout mismatch).
    """

    name = "token_tis"

    def log_ratio(self, gap: Gap) -> Tensor:
        """Δ_t."""
        return gap.delta


class SequenceTIS(_Weighted):
    """One truncated weight per row: the product of its ratios.

    Formula: w_t = clamp(exp(Σ_row Δ), low, high)
    Reads: trainer (old or current) and rollout log-probs, [T]; row boundaries.
    Source: sequence-level importance sampling; verl, SkyRL, TRL "sequence".
    """

    name = "sequence_tis"
    unit = "row"

    def log_ratio(self, gap: Gap) -> Tensor:
        """Σ_row Δ."""
        rows = packed.rows_of(gap.batch)
        return rows.spread(rows.sum(gap.delta))


class GeometricTIS(_Weighted):
    """One truncated weight per row: the geometric mean of its ratios.

    Formula: w_t = clamp(exp(mean_row Δ), low, high)
    Reads: trainer (old or current) and rollout log-probs, [T]; row boundaries.
    Source: AReaL "sequence"; Zheng et al. 2025 (GSPO's ratio).
    """

    name = "geometric_tis"
    unit = "row"

    def log_ratio(self, gap: Gap) -> Tensor:
        """mean_row Δ."""
        rows = packed.rows_of(gap.batch)
        return rows.spread(rows.mean(gap.delta, gap.mask))


class TurnTIS(_Weighted):
    """One truncated weight per turn (segment) of a row.

    Formula: w_t = clamp(exp(mean_turn Δ), low, high), or with the sum over the turn for mean = "product"
    Reads: trainer (old or current) and rollout log-probs, [T]; row boundaries and turns.
    Source: ROLL "segment".
    """

    name = "turn_tis"
    unit = "row"

    class Config(_Weighted.Config):
        """Bounds, and how a turn's ratios are joined."""

        mean: Literal["geometric", "product"] = Field("geometric", description="how the ratios of a turn are joined")

    def log_ratio(self, gap: Gap) -> Tensor:
        """mean_turn Δ or Σ_turn Δ."""
        turns = packed.turns_of(gap.batch)
        joined = turns.mean(gap.delta, gap.mask) if self.config.mean == "geometric" else turns.sum(gap.delta)
        return turns.spread(joined)


class IcePop(PackedCorrection):
    """The ratio as it is inside a band, nothing outside.

    Formula: w_t = exp(Δ_t) if low ≤ exp(Δ_t) ≤ high, else the token is rejected
    Reads: trainer (old or current) and rollout log-probs, [T].
    Source: Ling Team 2025 (IcePop); verl's "lo_hi" thresholds with denominator = "all".
    """

    name = "icepop"
    weighs = True

    class Config(PackedCorrection.Config):
        """The band."""

        low: float = Field(0.5, ge=0, description="ratios below are rejected")
        high: float = Field(5.0, gt=0, description="ratios above are rejected")
        denominator: Literal["kept", "all"] = Field("kept", description="whether rejected tokens stay counted")

        @model_validator(mode="after")
        def _bounds(self) -> IcePop.Config:
            if self.low > self.high:
                raise ValueError(f"floor low={self.low:g} is above ceiling high={self.high:g}")
            return self

    @property
    def rejects(self) -> frozenset[str]:
        """The token's ratio."""
        return frozenset({"token ratio"})

    def decide(self, gap: Gap, remaining: Tensor) -> Decision:
        """The band."""
        config = self.config
        raw = packed.capped_exp(gap.delta)
        metrics = gap.measure.bounds(raw, raw, gap.advantages, config.low, config.high)
        # a rejected token is neither raised nor lowered: only the shares of what lies outside say something
        kept = {key: value for key, value in metrics.items() if not key.endswith("_mass")}
        return Decision(raw, (raw >= config.low) & (raw <= config.high), kept)
