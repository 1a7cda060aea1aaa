"""Every correction against its formula in plain Python, through the kit that third parties use."""

import math

from rlcore.testing import CorrectionConformance, capped_exp
from rlcore_losses.chain import Chain
from rlcore_losses.corrections import GeometricTIS, IcePop, NoCorrection, SequenceTIS, TokenTIS, TurnTIS
from rlcore_losses.rejections import (
    OPSM,
    GeometricMask,
    KLReject,
    ProbDiffMask,
    SequenceMask,
    TokenMask,
    TurnMask,
    Veto,
)


def clamp(value, low, high):
    return min(max(value, low), high)


def delta(token):
    return token.old - token.rollout


def total(tokens):
    return math.fsum(delta(t) for t in tokens)


def average(tokens):
    return total(tokens) / len(tokens) if tokens else 0.0


class TestNone(CorrectionConformance):
    correction = NoCorrection

    def token(self, t):
        return 1.0, True


class TestTokenTIS(CorrectionConformance):
    correction = TokenTIS

    def token(self, t):
        return clamp(capped_exp(delta(t)), 0.0, 2.0), True


class TestSequenceTIS(CorrectionConformance):
    correction = SequenceTIS
    options = {"high": 3.0}

    def row(self, tokens):
        return [(clamp(capped_exp(total(tokens)), 0.0, 3.0), True)] * len(tokens)


class TestGeometricTIS(CorrectionConformance):
    correction = GeometricTIS
    options = {"high": 1.1}

    def row(self, tokens):
        return [(clamp(capped_exp(average(tokens)), 0.0, 1.1), True)] * len(tokens)


def by_turn(tokens, join):
    turns = {}
    for t in tokens:
        turns.setdefault(t.turn, []).append(t)
    joined = {turn: join(inside) for turn, inside in turns.items()}
    return [joined[t.turn] for t in tokens]


class TestTurnTIS(CorrectionConformance):
    correction = TurnTIS

    def row(self, tokens):
        return [(clamp(capped_exp(x), 0.0, 2.0), True) for x in by_turn(tokens, average)]


class TestTurnTISProduct(CorrectionConformance):
    correction = TurnTIS
    options = {"mean": "product"}

    def row(self, tokens):
        return [(clamp(capped_exp(x), 0.0, 2.0), True) for x in by_turn(tokens, total)]


class TestNormalizedByTokens(CorrectionConformance):
    correction = TokenTIS
    options = {"normalize": "tokens"}

    def step(self, rows):
        weights = [[clamp(capped_exp(delta(t)), 0.0, 2.0) for t in tokens] for tokens in rows]
        flat = [w for row in weights for w in row]
        mean = math.fsum(flat) / len(flat) if flat else 1.0
        return [[(w / mean if mean > 0 else w, True) for w in row] for row in weights]


class TestNormalizedByRows(CorrectionConformance):
    correction = TokenTIS
    options = {"normalize": "rows"}

    def step(self, rows):
        weights = [[clamp(capped_exp(delta(t)), 0.0, 2.0) for t in tokens] for tokens in rows]
        means = [math.fsum(row) / len(row) for row in weights if row]
        mean = math.fsum(means) / len(means) if means else 1.0
        return [[(w / mean if mean > 0 else w, True) for w in row] for row in weights]


class TestIcePop(CorrectionConformance):
    correction = IcePop

    def token(self, t):
        ratio = capped_exp(delta(t))
        return ratio, 0.5 <= ratio <= 5.0


class TestIcePopKeepingDenominator(TestIcePop):
    options = {"denominator": "all"}
    rejected_stay_counted = True


class TestTokenMask(CorrectionConformance):
    correction = TokenMask

    def token(self, t):
        return 1.0, 0.5 <= capped_exp(delta(t)) <= 2.0


class TestSequenceMask(CorrectionConformance):
    correction = SequenceMask

    def row(self, tokens):
        return [(1.0, 0.5 <= capped_exp(total(tokens)) <= 2.0)] * len(tokens)


class TestGeometricMask(CorrectionConformance):
    correction = GeometricMask
    options = {"low": 0.9, "high": 1.1, "denominator": "all"}
    rejected_stay_counted = True

    def row(self, tokens):
        return [(1.0, 0.9 <= capped_exp(average(tokens)) <= 1.1)] * len(tokens)


class TestTurnMask(CorrectionConformance):
    correction = TurnMask

    def row(self, tokens):
        return [(1.0, 0.5 <= capped_exp(x) <= 2.0) for x in by_turn(tokens, average)]


class TestProbDiffMask(CorrectionConformance):
    correction = ProbDiffMask
    options = {"low": 0.1, "high": 0.15}

    def token(self, t):
        d = math.exp(t.old) - math.exp(t.rollout)
        return 1.0, not ((t.advantage > 0 and d > 0.15) or (t.advantage < 0 and d < -0.1))


class TestProbDiffMaskTwoSided(CorrectionConformance):
    correction = ProbDiffMask
    options = {"two_sided": True}

    def token(self, t):
        return 1.0, abs(math.exp(t.old) - math.exp(t.rollout)) <= 0.2


class KL(CorrectionConformance):
    correction = KLReject

    def estimate(self, t):
        d = delta(t)
        return {"k1": -d, "k2": d * d / 2, "k3": math.expm1(min(d, 20.0)) - d}[self.options["estimator"]]

    def row(self, tokens):
        found = [self.estimate(t) for t in tokens]
        if not found:
            return []
        joined = {
            "sum": [math.fsum(found)] * len(found),
            "mean": [math.fsum(found) / len(found)] * len(found),
            "max": [max(found)] * len(found),
            "token": found,
        }[self.options["over"]]
        high = self.options["high"]
        low = self.options.get("low", -high if self.options["estimator"] == "k1" else -math.inf)
        return [(1.0, low <= value <= high) for value in joined]


class TestK1Sum(KL):
    options = {"estimator": "k1", "over": "sum", "high": 0.5}


class TestK1MeanOneSided(KL):
    options = {"estimator": "k1", "over": "mean", "high": 0.1, "low": -5.0}


class TestK2Max(KL):
    options = {"estimator": "k2", "over": "max", "high": 0.2}


class TestK3Mean(KL):
    options = {"estimator": "k3", "over": "mean", "high": 0.02}


class TestK3Token(KL):
    options = {"estimator": "k3", "over": "token", "high": 0.02}


class TestVeto(CorrectionConformance):
    correction = Veto
    options = {"low": 0.01, "high": 50.0}

    def row(self, tokens):
        return [(1.0, all(0.01 <= capped_exp(delta(t)) <= 50.0 for t in tokens))] * len(tokens)


class TestOPSM(CorrectionConformance):
    correction = OPSM
    options = {"delta": 0.01}

    def row(self, tokens):
        far = -average(tokens) > 0.01
        return [(1.0, not (far and t.advantage < 0)) for t in tokens]


class TestChain(CorrectionConformance):
    """A veto and a filter of differences reject, then the token's ratio weighs."""

    correction = Chain
    options = {"steps": [{"name": "token_tis", "high": 3.0}, {"name": "veto", "low": 0.01}, {"name": "prob_diff_mask"}]}

    def row(self, tokens):
        alive = all(capped_exp(delta(t)) >= 0.01 for t in tokens)
        decided = []
        for t in tokens:
            d = math.exp(t.old) - math.exp(t.rollout)
            near = not ((t.advantage > 0 and d > 0.2) or (t.advantage < 0 and d < -0.2))
            decided.append((clamp(capped_exp(delta(t)), 0.0, 3.0), alive and near))
        return decided


class TestChainNormalized(CorrectionConformance):
    """The normalised weight takes its mean over what the rejection left."""

    correction = Chain
    options = {"steps": [{"name": "token_tis", "normalize": "tokens"}, {"name": "veto", "low": 0.5}]}

    def step(self, rows):
        kept = [all(capped_exp(delta(t)) >= 0.5 for t in tokens) for tokens in rows]
        weights = [[clamp(capped_exp(delta(t)), 0.0, 2.0) for t in tokens] for tokens in rows]
        left = [w for row, keep in zip(weights, kept, strict=True) for w in row if keep]
        mean = math.fsum(left) / len(left) if left else 1.0
        return [[(w / mean, keep) for w in row] for row, keep in zip(weights, kept, strict=True)]
