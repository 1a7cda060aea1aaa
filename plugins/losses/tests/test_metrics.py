"""The measurements of a whole step against their definitions in plain Python."""

import itertools
import math
import statistics

import numpy as np
import pytest
from rlcore_losses.metrics import mismatch_metrics

NAN = float("nan")


@pytest.fixture
def step():
    """A random step of 300 tokens in ragged rows, with masked positions that hold NaN."""
    rng = np.random.default_rng(0)
    lengths = [40, 1, 0, 99, 160]
    count = sum(lengths)
    mask = rng.random(count) < 0.7
    rollout = np.where(rng.random(count) < 0.3, -1e-3, -rng.exponential(2, count))
    found = {
        "trainer_logprobs": rollout + rng.normal(0, 0.5, count),
        "rollout_logprobs": rollout,
        "mask": mask,
        "advantages": rng.normal(0, 1, count),
        "versions": rng.integers(3, 6, count),
        "policy_version": 5,
        "turn_ids": rng.integers(0, 6, count),
        "cu_seqlens": np.cumsum([0, *lengths]),
    }
    ratio = np.exp(found["trainer_logprobs"] - rollout)
    found["weights"] = np.clip(ratio, 0.4, 2.0).astype(np.float32)
    found["kept"] = mask & (ratio < 3.0)
    for name in ("trainer_logprobs", "rollout_logprobs", "advantages", "weights"):
        found[name] = np.where(mask, found[name], NAN)
    return found


def by_hand(step, tokens):
    """The definitions, token by token."""
    delta = [step["trainer_logprobs"][t] - step["rollout_logprobs"][t] for t in tokens]
    ratio = [math.exp(d) for d in delta]
    size = [abs(step["advantages"][t]) for t in tokens]
    weight = [float(step["weights"][t]) for t in tokens]
    kept = [bool(step["kept"][t]) for t in tokens]
    trained = [w if k else 0.0 for w, k in zip(weight, kept, strict=True)]
    floor = [k and w > r * 1.00001 for w, r, k in zip(weight, ratio, kept, strict=True)]
    ceiling = [k and w < r * 0.99999 for w, r, k in zip(weight, ratio, kept, strict=True)]
    moved = [s * abs(w - r) * k for s, w, r, k in zip(size, weight, ratio, kept, strict=True)]
    n = len(tokens)
    mass = sorted((s * w for s, w in zip(size, trained, strict=True)), reverse=True)
    return {
        "tokens": n,
        "k1": -statistics.fmean(delta),
        "k3": statistics.fmean(r - 1 - d for r, d in zip(ratio, delta, strict=True)),
        "abs_diff": statistics.fmean(map(abs, delta)),
        "ratio": statistics.fmean(ratio),
        "ratio_max": max(ratio),
        "ess": sum(ratio) ** 2 / (n * sum(r * r for r in ratio)),
        "ess_weights": sum(trained) ** 2 / (n * sum(w * w for w in trained)),
        "chi2_token": statistics.fmean(r * r for r in ratio) - 1,
        "rejected_share": 1 - sum(kept) / n,
        "floor_share": sum(floor) / n,
        "ceiling_share": sum(ceiling) / n,
        "floor_mass": sum(m for m, f in zip(moved, floor, strict=True) if f) / sum(size),
        "ceiling_mass": sum(m for m, c in zip(moved, ceiling, strict=True) if c) / sum(size),
        "floor_mass_share": sum(m for m, f in zip(moved, floor, strict=True) if f) / sum(moved),
        "ceiling_mass_share": sum(m for m, c in zip(moved, ceiling, strict=True) if c) / sum(moved),
        "top1_mass": sum(mass[: max(1, math.ceil(n / 100))]) / sum(mass),
        "weight": statistics.fmean(trained),
    }


def test_every_measurement_is_its_definition(step):
    found = mismatch_metrics(**step)
    tokens = np.flatnonzero(step["mask"])
    for name, value in by_hand(step, tokens).items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
    delta = (step["trainer_logprobs"] - step["rollout_logprobs"])[tokens]
    assert found["k3_p999"] == pytest.approx(np.quantile(np.exp(delta) - 1 - delta, 0.999))
    gap = np.where(step["mask"], step["trainer_logprobs"] - step["rollout_logprobs"], 0.0)
    rows = [slice(*bounds) for bounds in itertools.pairwise(step["cu_seqlens"])]
    sums = [math.fsum(gap[row]) for row in rows if step["mask"][row].any()]
    assert found["chi2_row"] == pytest.approx(statistics.fmean(math.exp(2 * min(s, 20)) for s in sums) - 1)


def test_splits_are_the_same_measurements_of_a_part(step):
    found = mismatch_metrics(**step)
    mask, gap = step["mask"], 5 - step["versions"]
    sure = np.exp(np.where(mask, step["rollout_logprobs"], -1)) > 0.99
    parts = {
        "gap_0": gap == 0,
        "gap_2": gap == 2,
        "turn_0": step["turn_ids"] == 0,
        "turn_4_7": step["turn_ids"] >= 4,
        "deterministic": sure,
        "undecided": ~sure,
    }
    for label, part in parts.items():
        for name, value in by_hand(step, np.flatnonzero(mask & part)).items():
            assert found[f"{label}/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-12), f"{label}/{name}"
    for kind in ("gap", "turn"):
        counts = [value for key, value in found.items() if key.startswith(f"{kind}_") and key.endswith("/tokens")]
        assert sum(counts) == found["tokens"]
    assert not any("/" in key for key in mismatch_metrics(**step, splits=False))


def test_catastrophic_tokens_are_counted_and_extremes_stay_finite():
    trainer, rollout = np.array([-200.0, 0.0, -5.0, -1.0]), np.array([0.0, -200.0, -5.0, -1.0])
    found = mismatch_metrics(trainer, rollout, np.ones(4, bool), cu_seqlens=np.array([0, 2, 4]))
    assert found["catastrophic_share"] == 0.5
    assert all(map(math.isfinite, found.values()))
    assert found["ratio_max"] == pytest.approx(math.exp(20))
    assert found["ratio_min"] == pytest.approx(math.exp(-200), abs=1e-300)


def test_nothing_is_measured_over_nothing_and_shapes_are_checked():
    assert mismatch_metrics(np.zeros(0), np.zeros(0), np.zeros(0, bool), cu_seqlens=np.array([0])) == {}
    assert mismatch_metrics(np.full(3, NAN), np.full(3, NAN), np.zeros(3, bool)) == {}
    rejected = mismatch_metrics(np.zeros(2), np.zeros(2), np.ones(2, bool), weights=np.ones(2), kept=np.zeros(2, bool))
    assert rejected["rejected_share"] == 1.0
    assert "ess_weights" not in rejected
    assert "top1_mass" not in rejected
    with pytest.raises(ValueError, match=r"\[4\] but mask \[3\]"):
        mismatch_metrics(np.zeros(4), np.zeros(3), np.ones(3, bool))
