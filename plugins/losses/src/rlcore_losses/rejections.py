"""Corrections that reject tokens or rows and weigh nothing.

``Δ`` and ``exp`` as in :mod:`rlcore_losses.corrections`. A rejected token gives no gradient; with
``denominator = "kept"`` it is not counted either, with ``"all"`` it is.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlcore_losses import _packed as packed
from rlcore_losses.corrections import Decision, Gap, PackedCorrection

__all__ = ["OPSM", "GeometricMask", "KLReject", "ProbDiffMask", "SequenceMask", "TokenMask", "TurnMask", "Veto"]

Tensor = Any


class _Rejection(PackedCorrection):
    class Config(PackedCorrection.Config):
        """Whether rejected tokens stay in the denominator."""

        denominator: Literal["kept", "all"] = Field("kept", description="whether rejected tokens stay counted")

    statistic = ""
    """What it rejects by, in words."""

    @property
    def rejects(self) -> frozenset[str]:
        """The statistic."""
        return frozenset({self.statistic})

    def keep(self, gap: Gap) -> Tensor:
        """``[T]`` bool."""
        raise NotImplementedError

    def decide(self, gap: Gap, remaining: Tensor) -> Decision:
        """Reject."""
        return Decision(None, self.keep(gap), {})


class _Band(_Rejection):
    class Config(_Rejection.Config):
        """The band of ratios that are kept."""

        low: float = Field(0.5, ge=0, description="ratios below are rejected")
        high: float = Field(2.0, gt=0, description="ratios above are rejected")

        @model_validator(mode="after")
        def _bounds(self) -> _Band.Config:
            if self.low > self.high:
                raise ValueError(f"floor low={self.low:g} is above ceiling high={self.high:g}")
            return self

    def log_ratio(self, gap: Gap) -> Tensor:
        raise NotImplementedError

    def keep(self, gap: Gap) -> Tensor:
        ratio = packed.capped_exp(self.log_ratio(gap))
        return (ratio >= self.config.low) & (ratio <= self.config.high)


class TokenMask(_Band):
    """Rejects tokens whose ratio lies outside a band; the others weigh 1.

    Formula: keep t if low ≤ exp(Δ_t) ≤ high
    Reads: trainer (old or current) and rollout log-probs, [T].
    Source: masked importance sampling (MIS), token level.
    """

    name = "token_mask"
    statistic = "token ratio"

    def log_ratio(self, gap: Gap) -> Tensor:
        """Δ_t."""
        return gap.delta


class SequenceMask(_Band):
    """Rejects rows whose product of ratios lies outside a band.

    Formula: keep a row if low ≤ exp(Σ_row Δ) ≤ high
    Reads: trainer (old or current) and rollout log-probs, [T]; row boundaries.
    Source: masked importance sampling (MIS), sequence level; TRL sequence_mask.
    """

    name = "sequence_mask"
    unit = "row"
    statistic = "product of a row's ratios"

    def log_ratio(self, gap: Gap) -> Tensor:
        """Σ_row Δ."""
        rows = packed.rows_of(gap.batch)
        return rows.spread(rows.sum(gap.delta))


class GeometricMask(_Band):
    """Rejects rows whose geometric mean of ratios lies outside a band.

    Formula: keep a row if low ≤ exp(mean_row Δ) ≤ high
    Reads: trainer (old or current) and rollout log-probs, [T]; row boundaries.
    Source: seq-mask-tis of NeMo-RL and OpenRLHF (there with raw token weights).
    """

    name = "geometric_mask"
    unit = "row"
    statistic = "geometric mean of a row's ratios"

    class Config(_Band.Config):
        """The band of geometric means that are kept."""

        low: float = Field(0.999, ge=0, description="geometric means below are rejected")
        high: float = Field(1.002, gt=0, description="geometric means above are rejected")

    def log_ratio(self, gap: Gap) -> Tensor:
        """mean_row Δ."""
        rows = packed.rows_of(gap.batch)
        return rows.spread(rows.mean(gap.delta, gap.mask))


class TurnMask(_Band):
    """Rejects turns whose geometric mean of ratios lies outside a band.

    Formula: keep a turn if low ≤ exp(mean_turn Δ) ≤ high
    Reads: trainer (old or current) and rollout log-probs, [T]; row boundaries and turns.
    Source: ROLL's segment filter.
    """

    name = "turn_mask"
    unit = "row"
    statistic = "geometric mean of a turn's ratios"

    def log_ratio(self, gap: Gap) -> Tensor:
        """mean_turn Δ."""
        turns = packed.turns_of(gap.batch)
        return turns.spread(turns.mean(gap.delta, gap.mask))


class ProbDiffMask(_Rejection):
    """Rejects tokens whose probability already moved too far in the direction that the advantage pushes.

    Formula: d_t = exp(trainer_t) − exp(rollout_t); reject t if A_t > 0 and d_t > high, or A_t < 0 and d_t < −low;
        two_sided: reject t if d_t > high or d_t < −low
    Reads: trainer (old or current) and rollout log-probs and advantages, [T].
    Source: prime-rl (one-sided default, two-sided IPO variant); DPPO's total variation.
    """

    name = "prob_diff_mask"
    statistic = "difference of probabilities"

    class Config(_Rejection.Config):
        """The largest differences that are kept."""

        low: float = Field(0.2, ge=0, le=1, description="largest loss of probability")
        high: float = Field(0.2, ge=0, le=1, description="largest gain of probability")
        two_sided: bool = Field(False, description="whatever the sign of the advantage")

    def keep(self, gap: Gap) -> Tensor:
        """Small enough differences."""
        config = self.config
        difference = gap.trainer.exp() - gap.rollout.exp()
        gained, lost = difference > config.high, difference < -config.low
        if config.two_sided:
            return ~(gained | lost)
        return ~((gained & (gap.advantages > 0)) | (lost & (gap.advantages < 0)))


class KLReject(_Rejection):
    """Rejects tokens or rows by a KL estimate of the gap.

    Formula: k1_t = −Δ_t, k2_t = Δ_t²/2, k3_t = exp(Δ_t) − 1 − Δ_t; keep if low ≤ (sum, mean, max over the row, or the
        token's own) ≤ high; low defaults to −high for k1, else to none
    Reads: trainer (old or current) and rollout log-probs, [T]; row boundaries.
    Source: Schulman 2020 (k1, k2, k3); verl's rejection modes, AReaL's metrics and aggregations.
    """

    name = "kl_reject"

    class Config(_Rejection.Config):
        """The estimate, its reduction and its bounds."""

        estimator: Literal["k1", "k2", "k3"] = Field("k3", description="KL estimate of a token")
        over: Literal["sum", "mean", "max", "token"] = Field("mean", description="how a row is judged, or the token")
        low: float | None = Field(None, description="estimates below are rejected")
        high: float = Field(0.01, description="estimates above are rejected")

        @model_validator(mode="after")
        def _bounds(self) -> KLReject.Config:
            if self.low is not None and self.low > self.high:
                raise ValueError(f"floor low={self.low:g} is above ceiling high={self.high:g}")
            return self

    def __init__(self, config: Config) -> None:
        """Rows must lie whole unless tokens are judged."""
        super().__init__(config)
        self.unit = "token" if config.over == "token" else "row"

    @property
    def rejects(self) -> frozenset[str]:
        """k1 over a row is the row's ratio in other words, over a token the token's."""
        config = self.config
        if config.estimator == "k1":
            same = {
                "sum": SequenceMask.statistic,
                "mean": GeometricMask.statistic,
                "token": TokenMask.statistic,
                "max": Veto.statistic,
            }
            return frozenset({same[config.over]})
        return frozenset({f"{config.over} of {config.estimator}"})

    def keep(self, gap: Gap) -> Tensor:
        """Estimates within the bounds."""
        config = self.config
        if config.estimator == "k1":
            estimate = -gap.delta
        elif config.estimator == "k2":
            estimate = gap.delta.square() / 2
        else:
            estimate = gap.delta.clamp(max=packed.LOG_RATIO_CAP).expm1() - gap.delta
        if config.over != "token":
            rows = packed.rows_of(gap.batch)
            joined = rows.sum(estimate) if config.over == "sum" else getattr(rows, config.over)(estimate, gap.mask)
            estimate = rows.spread(joined)
        low = -config.high if config.low is None and config.estimator == "k1" else config.low
        keep = estimate <= config.high
        return keep if low is None else keep & (estimate >= low)


class Veto(_Rejection):
    """Rejects a row with one catastrophic token.

    Formula: keep a row if exp(Δ_t) ≥ low for all its tokens (and ≤ high, if set)
    Reads: trainer (old or current) and rollout log-probs, [T]; row boundaries.
    Source: token veto of verl and of the MIS example of miles.
    """

    name = "veto"
    unit = "row"
    statistic = "extreme token of a row"

    class Config(_Rejection.Config):
        """What is catastrophic."""

        low: float = Field(1e-4, ge=0, description="a token with a ratio below rejects its row")
        high: float | None = Field(None, gt=0, description="a token with a ratio above rejects its row")

        @model_validator(mode="after")
        def _bounds(self) -> Veto.Config:
            if self.high is not None and self.low > self.high:
                raise ValueError(f"floor low={self.low:g} is above ceiling high={self.high:g}")
            return self

    def keep(self, gap: Gap) -> Tensor:
        """Rows without such a token."""
        ratio = packed.capped_exp(gap.delta)
        catastrophic = ratio < self.config.low
        if self.config.high is not None:
            catastrophic = catastrophic | (ratio > self.config.high)
        rows = packed.rows_of(gap.batch)
        return ~rows.spread(rows.any(catastrophic & gap.mask))


class OPSM(_Rejection):
    """Off-policy sequence masking: rejects what pushes down in a row that has left the policy.

    Formula: reject t if A_t < 0 and mean_row(−Δ) > delta
    Reads: trainer (old or current) and rollout log-probs and advantages, [T]; row boundaries.
    Source: DeepSeek-V3.2 (2025); miles and slime OPSM, TRL off_policy_mask_threshold.
    """

    name = "opsm"
    unit = "row"
    statistic = "off-policy rows with a negative advantage"

    class Config(_Rejection.Config):
        """How far is too far."""

        delta: float = Field(1e-4, description="largest mean k1 of a row whose negative tokens are kept")

    def keep(self, gap: Gap) -> Tensor:
        """All but the negative tokens of distant rows."""
        rows = packed.rows_of(gap.batch)
        distant = rows.spread(rows.mean(-gap.delta, gap.mask)) > self.config.delta
        return ~(distant & (gap.advantages < 0))
