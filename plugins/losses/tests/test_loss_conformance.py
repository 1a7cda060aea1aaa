"""Every policy loss against its formula in plain Python, through the kit that third parties use."""

import math

import pytest
from rlcore.testing import LossConformance, capped_exp
from rlcore_losses.decoupled import Decoupled
from rlcore_losses.losses import CISPO, DPPOKL, DPPOTV, SAPO, CrossEntropy, PPOClip, Reinforce
from rlcore_losses.row_losses import GMPO, GSPO

pytestmark = pytest.mark.filterwarnings("error")


def ratio_of(log_ratio):
    """The ratio and its derivative: none at the cap."""
    return capped_exp(log_ratio), capped_exp(log_ratio) if log_ratio <= 20 else 0.0


def surrogate(ratio, slope, advantage, low, high, dual=None):
    plain, clipped = -ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage
    value, derivative = (plain, -slope * advantage) if plain >= clipped else (clipped, 0.0)
    if dual is not None and advantage < 0 and value > -dual * advantage:
        return -dual * advantage, 0.0
    return value, derivative


class Exact(LossConformance):
    """Within 1e-5 relative or 1e-7 absolute, also where terms cancel."""

    sum_tolerance = 0.0


class TestPPOClip(Exact):
    loss = PPOClip

    def term(self, t):
        return surrogate(*ratio_of(t.logprob - t.old), t.advantage, 0.2, 0.28)


class TestPPODualClip(Exact):
    loss = PPOClip
    options = {"dual_clip": 3.0, "clip_low": 0.1, "clip_high": 0.3}

    def term(self, t):
        return surrogate(*ratio_of(t.logprob - t.old), t.advantage, 0.1, 0.3, 3.0)


class TestPPOToRollout(Exact):
    loss = PPOClip
    options = {"ratio_to": "rollout"}

    def term(self, t):
        return surrogate(*ratio_of(t.logprob - t.rollout), t.advantage, 0.2, 0.28)


class TestCISPO(Exact):
    loss = CISPO
    options = {"clip_low": 0.9, "clip_high": 2.0}

    def term(self, t):
        weight = min(max(capped_exp(t.logprob - t.old), 0.1), 3.0)
        return -weight * t.advantage * t.logprob, -weight * t.advantage


class TestSAPO(Exact):
    loss = SAPO

    def term(self, t):
        ratio, slope = ratio_of(t.logprob - t.old)
        tau = 1.0 if t.advantage > 0 else 1.05
        z = tau * (ratio - 1)
        gate = 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))
        return -gate * 4 / tau * t.advantage, -4 * gate * (1 - gate) * slope * t.advantage


class TestDPPOTV(Exact):
    loss = DPPOTV
    options = {"low": 0.1, "high": 0.15}

    def distance(self, p, q):
        return abs(math.exp(p) - math.exp(q))

    def term(self, t):
        low, high = self.options["low"], self.options["high"]
        distance = self.distance(t.logprob, t.old)
        up = t.advantage > 0 and t.logprob > t.old and distance > high
        down = t.advantage < 0 and t.logprob < t.old and distance > low
        if up or down:
            return 0.0, 0.0
        weight = min(capped_exp(t.logprob - t.old), 20.0)
        return -weight * t.advantage * t.logprob, -weight * t.advantage


class TestDPPOKL(TestDPPOTV):
    loss = DPPOKL
    options = {"low": 0.02, "high": 0.05}

    def distance(self, p, q):
        rest = math.log(-math.expm1(min(q, -1e-12))) - math.log(-math.expm1(min(p, -1e-12)))
        return math.exp(q) * (q - p) + (1 - math.exp(q)) * rest


class TestReinforce(Exact):
    loss = Reinforce

    def term(self, t):
        return -t.advantage * t.logprob, -t.advantage


class TestImportanceWeighted(Exact):
    loss = Reinforce
    options = {"ratio_to": "old"}

    def term(self, t):
        ratio, slope = ratio_of(t.logprob - t.old)
        return -ratio * t.advantage, -slope * t.advantage


class TestCrossEntropy(Exact):
    loss = CrossEntropy
    policy_gradient = False

    def term(self, t):
        return 0.0, 0.0

    def extra(self, t):
        return -t.logprob, -1.0


class TestGSPO(Exact):
    loss = GSPO
    options = {"clip_low": 0.1, "clip_high": 0.2}

    def row(self, tokens):
        mean = math.fsum(t.logprob - t.old for t in tokens) / len(tokens)
        return [surrogate(*ratio_of(mean), t.advantage, 0.1, 0.2) for t in tokens]


class TestGMPO(Exact):
    loss = GMPO

    def row(self, tokens):
        moved, free = [], []
        for t in tokens:
            plain = t.logprob - t.old
            clipped = min(max(plain, -0.4), 0.4)
            moved.append(min(plain, clipped) if t.advantage >= 0 else max(plain, clipped))
            free.append(moved[-1] == plain)
        ratio, slope = ratio_of(math.fsum(moved) / len(moved))
        return [(-ratio * t.advantage, -slope * t.advantage * f) for t, f in zip(tokens, free, strict=True)]


class TestDecoupled(Exact):
    loss = Decoupled

    def term(self, t):
        weight = min(capped_exp(t.old - t.rollout), 5.0)
        value, slope = surrogate(*ratio_of(t.logprob - t.old), t.advantage, 0.2, 0.28)
        return weight * value, weight * slope


class TestDecoupledLogLinear(Exact):
    loss = Decoupled
    options = {"proximal": "loglinear", "above": "drop", "behaviour_high": 1.5}

    def term(self, t):
        proximal = t.rollout + t.gap / (t.gap + 1) * (t.logprob - t.rollout)
        weight = capped_exp(proximal - t.rollout)
        value, slope = surrogate(*ratio_of(t.logprob - proximal), t.advantage, 0.2, 0.28)
        return (weight * value, weight * slope) if weight <= 1.5 else (0.0, 0.0)


class WithKL(Exact):
    """The policy gradient with a KL term; only the estimate differs."""

    loss = Reinforce
    kind = ""

    def term(self, t):
        return -t.advantage * t.logprob, -t.advantage

    def extra(self, t):
        other = t.ref if self.options.get("kl_to", "ref") == "ref" else t.rollout
        d = t.logprob - other
        k3 = math.expm1(min(-d, 20.0)) + d
        k3_slope = 1.0 - (math.exp(-d) if -d <= 20 else 0.0)
        ratio, ratio_slope = ratio_of(t.logprob - t.old)
        value, slope = {
            "k1": (d, 1.0),
            "k2": (d * d / 2, d),
            "k3": (k3, k3_slope),
            "unbiased": (ratio * k3, ratio_slope * k3 + ratio * k3_slope),
        }[self.options["kl"]]
        return 0.1 * value, 0.1 * slope


class TestKL1(WithKL):
    policy_gradient = False
    options = {"kl_coef": 0.1, "kl": "k1"}


class TestKL2(WithKL):
    options = {"kl_coef": 0.1, "kl": "k2"}


class TestKL3ToRollout(WithKL):
    options = {"kl_coef": 0.1, "kl": "k3", "kl_to": "rollout"}


class TestKLUnbiased(WithKL):
    options = {"kl_coef": 0.1, "kl": "unbiased"}


class TestEntropyBonus(Exact):
    loss = Reinforce
    options = {"entropy_coef": 0.01}

    def term(self, t):
        return -t.advantage * t.logprob, -t.advantage

    def extra(self, t):
        return -0.01 * t.entropy, 0.0
