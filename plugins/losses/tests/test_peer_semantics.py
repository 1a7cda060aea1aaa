"""Same name, different formula: the setting for each peer against golden vectors that plain Python computes."""

import math
from importlib import import_module

import pytest
import torch
from rlcore_losses import plugin
from rlcore_losses.aggregations import TokenMean
from rlcore_losses.corrections import NoCorrection
from rlcore_losses.losses import Reinforce
from rlcore_losses.peers import PEERS

ROLLOUT = [[-2.0, -0.1, -1.3, -0.3], [-0.5, -0.7], [-4.0, -1.2, -0.3]]
DELTA = [[0.3, -3.0, 0.9, -0.6], [0.0005, 0.0007], [3.5, -0.2, 0.1]]
ADVANTAGES = [[1.0, 1.0, 1.0, -1.0], [2.0, -2.0], [-0.5, 0.5, 0.5]]
PEER = {peer.key: peer for peer in PEERS}


def build(hook, section):
    """The class behind a section, made with its options."""
    options, targets = dict(section), {}
    hook(lambda name, target: targets.__setitem__(name, target))
    module, _, attribute = targets[options.pop("name")].partition(":")
    cls = getattr(import_module(module), attribute)
    return cls(cls.Config(**options))


def both(batch_of, key):
    """Loss per row of the peer's setting: the weighted sum, the denominator and each token's weight."""
    peer = PEER[key]
    batch = batch_of(ROLLOUT, advantages=ADVANTAGES)
    trainer = torch.tensor(
        [r + d for row, gap in zip(ROLLOUT, DELTA, strict=True) for r, d in zip(row, gap, strict=True)]
    )
    batch.old_logprobs = trainer if peer.correction else batch.rollout_logprobs
    correction = (
        build(plugin.rlcore_register_corrections, peer.correction)
        if peer.correction
        else NoCorrection(NoCorrection.Config())
    )
    loss = build(plugin.rlcore_register_losses, peer.loss) if peer.loss else Reinforce(Reinforce.Config())
    corrected = correction(trainer, batch)
    token_weights, denominator = TokenMean(TokenMean.Config())(corrected.counted, batch)
    logprobs = trainer.clone().requires_grad_()
    value = loss(logprobs, batch, corrected, token_weights).loss
    value.backward()
    weights = corrected.weights.where(corrected.mask, torch.zeros(())).tolist()
    return value.item(), denominator.item(), weights, logprobs.grad.tolist()


def deltas():
    return [d for row in DELTA for d in row]


def clamp(x, lo, hi):
    return min(max(x, lo), hi)


def by_row(f):
    return [f(row) for row in DELTA for _ in row]


def product(row):
    return math.exp(sum(row))


def geometric(row):
    return math.exp(sum(row) / len(row))


KEPT = [0.5 <= math.exp(d) <= 2.0 for d in deltas()]
NEAR = [0.999 <= geometric(row) <= 1.002 for row in DELTA for _ in row]


def moved(i):
    rollout = [r for row in ROLLOUT for r in row][i]
    return math.exp(rollout + deltas()[i]) - math.exp(rollout)


def too_far(i):
    advantage = [a for row in ADVANTAGES for a in row][i]
    return (advantage > 0 and moved(i) > 0.2) or (advantage < 0 and moved(i) < -0.2)


GOLDEN = {
    "clamp": ([clamp(math.exp(d), 0.5, 5.0) for d in deltas()], 9),
    "band": ([math.exp(d) if k else 0.0 for d, k in zip(deltas(), KEPT, strict=True)], 9),
    "ceiling": ([min(math.exp(d), 2.0) for d in deltas()], 9),
    "unit": ([clamp(math.exp(d), 0.0, 1.0) for d in deltas()], 9),
    "product": (by_row(lambda row: min(product(row), 3.0)), 9),
    "geometric": (by_row(lambda row: min(geometric(row), 3.0)), 9),
    "excluded": ([float(k) for k in KEPT], sum(KEPT)),
    "included": ([float(k) for k in KEPT], 9),
    "seq-mask-tis": ([math.exp(d) if k else 0.0 for d, k in zip(deltas(), NEAR, strict=True)], 9),
    "probability": ([0.0 if too_far(i) else math.exp(d) for i, d in enumerate(deltas())], 9),
    "trl-default": (by_row(lambda row: product(row) if product(row) <= 3.0 else 0.0), 9),
    "off": ([1.0] * 9, 9),
}


def test_every_row_of_the_table_has_a_golden_vector():
    assert set(GOLDEN) | {"dppo"} == set(PEER)
    assert 0 < sum(KEPT) < 9, "the vectors must tell the variants apart"
    assert 0 < sum(NEAR) < 9
    assert any(map(too_far, range(9)))
    assert len({tuple(round(w, 6) for w in weights) for weights, _ in GOLDEN.values()}) == len(GOLDEN) - 1


@pytest.mark.parametrize("key", sorted(GOLDEN))
def test_weights_and_denominator_are_the_peers(batch_of, key):
    value, denominator, weights, gradient = both(batch_of, key)
    wanted, count = GOLDEN[key]
    assert weights == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert denominator == count
    flat = list(zip([a for row in ADVANTAGES for a in row], wanted, deltas(), strict=True))
    penalty = 2e-3 if key == "probability" else 0.0  # τ Δ² over kept tokens, its gradient 2 τ Δ
    slopes = [-a * w + (penalty * d if w else 0.0) for a, w, d in flat]
    assert gradient == pytest.approx(slopes, rel=1e-5, abs=1e-7)
    rollout = [r for row in ROLLOUT for r in row]
    terms = [-a * w * (r + d) + (penalty * d * d / 2 if w else 0.0) for (a, w, d), r in zip(flat, rollout, strict=True)]
    assert value == pytest.approx(math.fsum(terms), rel=1e-5)


def test_dppo_masks_by_the_difference_of_probabilities(batch_of):
    _, denominator, _, gradient = both(batch_of, "dppo")
    advantages = [a for row in ADVANTAGES for a in row]
    wanted = [0.0 if too_far(i) else -advantages[i] * min(math.exp(d), 20.0) for i, d in enumerate(deltas())]
    assert gradient == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert denominator == 9


def test_a_floor_over_weights_by_floor_over_ratio(batch_of):
    correction = build(plugin.rlcore_register_corrections, PEER["clamp"].correction)
    for ratio, factor in ((0.1, 5.0), (0.01, 50.0), (0.001, 500.0)):
        corrected = correction(torch.tensor([-9.0 + math.log(ratio)]), batch_of([[-9.0]]))
        assert corrected.weights.item() / ratio == pytest.approx(factor, rel=1e-5)


pytestmark = pytest.mark.filterwarnings("ignore:low=0.5 is a floor")
