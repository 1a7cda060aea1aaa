"""Measurements of the gap between trainer and engine log-probs over a whole step, in numpy.

``Δ_t = trainer_t − rollout_t`` and ``ratio_t = exp(min(Δ_t, 20))``, before any truncation; only tokens of the mask
count. The corrections report mergeable measurements of their own; what needs all tokens at once is here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["mismatch_metrics"]

Array = Any

_CATASTROPHIC = np.log(1e4)
_DETERMINISTIC = np.log(0.99)
_TURN_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 7), (8, 15), (16, None))
_GAP_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))


def mismatch_metrics(
    trainer_logprobs: Array,
    rollout_logprobs: Array,
    mask: Array,
    *,
    advantages: Array | None = None,
    weights: Array | None = None,
    kept: Array | None = None,
    versions: Array | None = None,
    policy_version: int | None = None,
    turn_ids: Array | None = None,
    cu_seqlens: Array | None = None,
    splits: bool = True,
) -> dict[str, float]:
    """All measurements of one step as plain floats; what cannot be measured (no token, no row) is missing, not 0.

    Args:
        trainer_logprobs: ``[T]`` ``old_logprobs``, or the current ones, detached.
        rollout_logprobs: ``[T]`` engine log-probs; anything outside ``mask``.
        mask: ``[T]`` bool: the batch's mask, before any rejection.
        advantages: ``[T]``; without them each token weighs 1 in the masses.
        weights: ``[T]`` the correction's weights.
        kept: ``[T]`` bool: the correction's mask.
        versions: ``[T]`` policy version of each token; with ``policy_version`` the metrics are split by the gap.
        policy_version: version of the weights that are trained.
        turn_ids: ``[T]`` turn of each token; the metrics are split by it.
        cu_seqlens: ``[N+1]`` row boundaries, for ``chi2_row``.
        splits: also ``gap_*/…``, ``turn_*/…`` and ``deterministic/…`` (rollout probability > 0.99), ``undecided/…``.

    Returns:
        ``tokens``; ``k1`` (mean −Δ), ``k3`` (mean ratio − 1 − Δ), ``k3_p999``, ``abs_diff`` (mean and ``_max`` of |Δ|);
        ``ratio`` (mean, ``_min``, ``_max``); ``ess`` = (Σ ratio)² / (n Σ ratio²) and ``ess_weights`` of what trains;
        ``chi2_token`` = mean ratio² − 1, ``chi2_row`` of the row's product; ``catastrophic_share`` (ratio < 1e-4 or
        > 1e4); ``weight`` (mean); ``rejected_share``; ``floor_share``/``ceiling_share``: tokens whose weight is above /
        below their ratio; ``floor_mass``/``ceiling_mass``: their Σ|A|·|weight − ratio| over Σ|A|; ``…_mass_share``:
        over that of all tokens; ``top1_mass``: share of Σ|A|·weight that the top 1 % of the tokens hold.
    """
    mask = np.asarray(mask, dtype=bool)
    if not mask.any():
        return {}

    def chosen(values: Array | None) -> Array | None:
        if values is None:
            return None
        array = np.asarray(values)
        if array.shape != mask.shape:
            raise ValueError(f"mismatch_metrics: shapes do not fit: {list(array.shape)} but mask {list(mask.shape)}")
        return array[mask]

    rollout = chosen(rollout_logprobs).astype(np.float64)
    delta = chosen(trainer_logprobs).astype(np.float64) - rollout
    size = np.ones_like(delta) if advantages is None else np.abs(chosen(advantages).astype(np.float64))
    weight = None if weights is None else chosen(weights).astype(np.float64)
    keep = None if kept is None else chosen(kept).astype(bool)
    metrics = _summary(delta, size, weight, keep)
    if cu_seqlens is not None:
        metrics["chi2_row"] = _chi2_row(delta, mask, np.asarray(cu_seqlens))
    if splits:
        parts = {"deterministic": rollout > _DETERMINISTIC, "undecided": rollout <= _DETERMINISTIC}
        if versions is not None and policy_version is not None:
            parts |= _buckets("gap", policy_version - chosen(versions), _GAP_BUCKETS)
        if turn_ids is not None:
            parts |= _buckets("turn", chosen(turn_ids), _TURN_BUCKETS)
        for name, part in parts.items():
            if part.any():
                inside = _summary(
                    delta[part],
                    size[part],
                    None if weight is None else weight[part],
                    None if keep is None else keep[part],
                )
                metrics |= {f"{name}/{key}": value for key, value in inside.items()}
    return metrics


def _buckets(name: str, values: Array, bounds: tuple[tuple[int, int | None], ...]) -> dict[str, Array]:
    parts = {}
    for low, high in bounds:
        label = f"{name}_{low}" if low == high else f"{name}_{low}_{high}" if high is not None else f"{name}_{low}_up"
        parts[label] = (values >= low) & (values <= (np.inf if high is None else high))
    return parts


def _summary(delta: Array, size: Array, weight: Array | None, keep: Array | None) -> dict[str, float]:
    capped = np.minimum(delta, 20.0)
    ratio = np.exp(capped)
    k3 = np.expm1(capped) - delta
    metrics = {
        "tokens": delta.size,
        "k1": -delta.mean(),
        "k3": k3.mean(),
        "k3_p999": np.quantile(k3, 0.999),
        "abs_diff": np.abs(delta).mean(),
        "abs_diff_max": np.abs(delta).max(),
        "ratio": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ess": _ess(ratio),
        "chi2_token": np.square(ratio).mean() - 1.0,
        "catastrophic_share": (np.abs(delta) > _CATASTROPHIC).mean(),
    }
    if keep is not None:
        metrics["rejected_share"] = 1.0 - keep.mean()
    if weight is not None:
        kept = np.ones(delta.shape, dtype=bool) if keep is None else keep
        trained = np.where(kept, weight, 0.0)
        moved = size * np.abs(weight - ratio) * kept
        for name, bound in (("floor", weight > ratio * (1 + 1e-5)), ("ceiling", weight < ratio * (1 - 1e-5))):
            bound = bound & kept
            metrics[f"{name}_share"] = bound.mean()
            if size.sum() > 0:
                metrics[f"{name}_mass"] = moved[bound].sum() / size.sum()
            metrics[f"{name}_mass_share"] = moved[bound].sum() / moved.sum() if bound.any() and moved.sum() > 0 else 0.0
        metrics["weight"] = trained.mean()
        if trained.any():
            metrics["ess_weights"] = _ess(trained)
        mass = size * trained
        if mass.sum() > 0:
            top = max(1, -(-mass.size // 100))
            metrics["top1_mass"] = np.partition(mass, mass.size - top)[mass.size - top :].sum() / mass.sum()
    return {key: float(value) for key, value in metrics.items()}


def _ess(weight: Array) -> float:
    """Effective sample size over the number of tokens; the scale is taken out first so that squares stay finite."""
    scaled = weight / weight.max() if weight.max() > 0 else weight
    return float(scaled.sum() ** 2 / (scaled.size * np.square(scaled).sum())) if scaled.any() else 0.0


def _chi2_row(delta: Array, mask: Array, cu_seqlens: Array) -> float:
    rows = np.repeat(np.arange(cu_seqlens.size - 1), np.diff(cu_seqlens))[mask]
    present, index = np.unique(rows, return_inverse=True)
    totals = np.bincount(index, weights=delta, minlength=present.size)
    return float(np.square(np.exp(np.minimum(totals, 20.0))).mean() - 1.0)
