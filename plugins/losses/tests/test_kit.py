"""The kits find what they are for: each wrong piece fails the check that is named."""

import math

import pytest
import torch
from pydantic import BaseModel
from rlcore.protocols import Corrected, LossOutput
from rlcore.testing import AdvantageConformance, CorrectionConformance, LossConformance, capped_exp
from rlcore.types import Mean


class Plain(BaseModel, extra="forbid"):
    pass


class Loss:
    """A right loss; each mutant changes one thing."""

    Config = Plain
    needs_old_logprobs = False

    def __init__(self, config):
        pass

    def select(self, values, mask):
        return values.where(mask, values.new_zeros(()))

    def ratio(self, logprobs, batch, mask):
        return (self.select(logprobs, mask) - self.select(batch.old_logprobs.detach(), mask)).clamp(max=20.0).exp()

    def total(self, terms, weights, mask):
        return (terms * weights).sum()

    def metrics(self, ratio, mask):
        return {"ratio": Mean((ratio.detach() * mask).sum(), mask.sum())}

    def check(self, logprobs, batch):
        if logprobs.shape != batch.mask.shape:
            raise ValueError(f"{list(logprobs.shape)} against {list(batch.mask.shape)}")

    def __call__(self, logprobs, batch, corrected, token_weights):
        self.check(logprobs, batch)
        mask = corrected.mask
        ratio = self.ratio(logprobs, batch, mask)
        weights = self.select((corrected.weights * token_weights).detach(), mask)
        terms = -ratio * self.select(batch.advantages.detach(), mask)
        return LossOutput(self.total(terms, weights, mask), self.metrics(ratio, mask))


class LossKit(LossConformance):
    __test__ = False
    loss = Loss

    def term(self, t):
        ratio = capped_exp(t.logprob - t.old)
        return -t.advantage * ratio, -t.advantage * ratio * (t.logprob - t.old <= 20)


class MultipliesByTheMask(Loss):
    def select(self, values, mask):
        return values * mask


class TakesTheMean(Loss):
    def total(self, terms, weights, mask):
        return (terms * weights).sum() / mask.sum().clamp(min=1)


class DividesByNothing(Loss):
    def metrics(self, ratio, mask):
        return {"ratio": Mean((ratio.detach() * mask).mean() if mask.any() else torch.tensor(0.0), 1)}


class IgnoresWeights(Loss):
    def total(self, terms, weights, mask):
        return terms.sum()


class HasNoCap(Loss):
    def ratio(self, logprobs, batch, mask):
        return (self.select(logprobs, mask) - self.select(batch.old_logprobs.detach(), mask)).exp()


class CapsFromBelow(Loss):
    def ratio(self, logprobs, batch, mask):
        gap = self.select(logprobs, mask) - self.select(batch.old_logprobs.detach(), mask)
        return gap.clamp(-5.0, 20.0).exp()


class FlowsIntoOld(Loss):
    def ratio(self, logprobs, batch, mask):
        return (self.select(logprobs, mask) - self.select(batch.old_logprobs, mask)).clamp(max=20.0).exp()


class KeepsTheGraphInMetrics(Loss):
    def metrics(self, ratio, mask):
        return {"ratio": Mean((ratio * mask).sum(), mask.sum())}


class PushesTheWrongWay(Loss):
    def total(self, terms, weights, mask):
        return -(terms * weights).sum()


class Broadcasts(Loss):
    def check(self, logprobs, batch):
        pass

    def __call__(self, logprobs, batch, corrected, token_weights):
        if logprobs.shape != batch.mask.shape:
            return LossOutput(logprobs.sum(), {})
        return super().__call__(logprobs, batch, corrected, token_weights)


def fails(kit, check):
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - hypothesis may wrap what the kit raised in a group
        getattr(kit, check)()
    assert not isinstance(caught.value, KeyboardInterrupt)


CHECKS = [name for name in dir(LossConformance) if name.startswith("test_")]


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_loss_passes(check):
    getattr(LossKit(), check)()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (MultipliesByTheMask, "test_masked_positions_have_no_influence"),
        (TakesTheMean, "test_packing_does_not_matter"),
        (TakesTheMean, "test_agrees_with_the_scalar_reference"),
        (DividesByNothing, "test_packing_does_not_matter"),
        (DividesByNothing, "test_nothing_to_train_is_zero"),
        (IgnoresWeights, "test_agrees_with_the_scalar_reference"),
        (HasNoCap, "test_extreme_ratios_stay_finite"),
        (CapsFromBelow, "test_extreme_ratios_stay_finite"),
        (FlowsIntoOld, "test_only_current_logprobs_get_a_gradient"),
        (KeepsTheGraphInMetrics, "test_only_current_logprobs_get_a_gradient"),
        (PushesTheWrongWay, "test_gradient_at_ratio_one_is_the_policy_gradient"),
        (Broadcasts, "test_shapes_that_do_not_fit_are_one_error"),
    ],
)
def test_a_wrong_loss_is_found(mutant, check):
    kit = LossKit()
    kit.loss = mutant
    fails(kit, check)


class Correction:
    """A right correction; each mutant changes one thing."""

    Config = Plain
    logprobs = "old"
    unit = "token"

    def __init__(self, config):
        pass

    def ratio(self, trainer, batch):
        gap = trainer.detach() - batch.rollout_logprobs.detach()
        return gap.where(batch.mask, gap.new_zeros(())).clamp(max=20.0).exp()

    def __call__(self, trainer_logprobs, batch):
        if trainer_logprobs.shape != batch.mask.shape:
            raise ValueError(f"{list(trainer_logprobs.shape)} against {list(batch.mask.shape)}")
        weights = self.ratio(trainer_logprobs, batch).clamp(max=2.0)
        return self.decided(weights, batch)

    def decided(self, weights, batch):
        return Corrected(
            weights, batch.mask, batch.mask, {"weight": Mean((weights * batch.mask).sum(), batch.mask.sum())}
        )


class CorrectionKit(CorrectionConformance):
    __test__ = False
    correction = Correction

    def token(self, t):
        return min(capped_exp(t.old - t.rollout), 2.0), True


class HasAFloor(Correction):
    def ratio(self, trainer, batch):
        return super().ratio(trainer, batch).clamp(min=0.1)


class IsNotDetached(Correction):
    def ratio(self, trainer, batch):
        gap = trainer - batch.rollout_logprobs
        return gap.where(batch.mask, gap.new_zeros(())).clamp(max=20.0).exp()


class KeepsPadding(Correction):
    def decided(self, weights, batch):
        everything = torch.ones_like(batch.mask)
        return Corrected(weights, everything, everything, {})


class ReadsPadding(Correction):
    def ratio(self, trainer, batch):
        return (trainer.detach() - batch.rollout_logprobs.detach()).clamp(max=20.0).exp()


class NormalizesWhatItSees(Correction):
    """And claims that tokens are enough."""

    def decided(self, weights, batch):
        inside = weights * batch.mask
        return super().decided(weights / (inside.sum() / batch.mask.sum().clamp(min=1)).clamp(min=1e-9), batch)


class ShiftsByOne(Correction):
    def ratio(self, trainer, batch):
        return super().ratio(trainer, batch).roll(1)


class WritesIntoTheBatch(Correction):
    def decided(self, weights, batch):
        batch.mask[:1] = ~batch.mask[:1]
        return super().decided(weights, batch)


class CountsNothingAsZero(Correction):
    def decided(self, weights, batch):
        return Corrected(
            weights,
            batch.mask,
            batch.mask,
            {"weight": Mean((weights * batch.mask).sum(), max(1, int(batch.mask.sum())))},
        )


@pytest.mark.parametrize("check", [name for name in dir(CorrectionConformance) if name.startswith("test_")])
def test_a_right_correction_passes(check):
    getattr(CorrectionKit(), check)()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (HasAFloor, "test_extreme_ratios_stay_finite"),
        (HasAFloor, "test_agrees_with_the_scalar_reference"),
        (IsNotDetached, "test_results_are_detached"),
        (KeepsPadding, "test_agrees_with_the_scalar_reference"),
        (ReadsPadding, "test_masked_positions_have_no_influence"),
        (NormalizesWhatItSees, "test_agrees_with_the_scalar_reference"),
        (ShiftsByOne, "test_agrees_with_the_scalar_reference"),
        (WritesIntoTheBatch, "test_the_batch_is_left_as_it_was"),
        (CountsNothingAsZero, "test_nothing_to_correct_is_nothing"),
    ],
)
def test_a_wrong_correction_is_found(mutant, check):
    kit = CorrectionKit()
    kit.correction = mutant
    fails(kit, check)


class Estimator:
    """A right estimator; each mutant changes one thing."""

    Config = Plain

    def __init__(self, config):
        pass

    def rewards(self, group):
        found = {}
        for t in group.trajectories:
            if t.reward is not None:
                if not math.isfinite(t.reward) or found.get(t.id, t.reward) != t.reward:
                    raise ValueError(f"{t.id}: {t.reward}")
                found[t.id] = t.reward
        return found

    def __call__(self, groups):
        advantages = {}
        for group in groups:
            found = self.rewards(group)
            advantages |= dict(zip(found, self.group(list(found.values())), strict=True))
        return advantages

    def group(self, rewards):
        return [r - math.fsum(rewards) / len(rewards) for r in rewards]


class EstimatorKit(AdvantageConformance):
    __test__ = False
    estimator = Estimator

    def group(self, members):
        rewards = [m.reward for m in members]
        return [r - sum(rewards) / len(rewards) for r in rewards]


class NoVerdictIsZero(Estimator):
    def rewards(self, group):
        return {t.id: t.reward or 0.0 for t in group.trajectories}


class DividesByTinyDeviations(Estimator):
    def group(self, rewards):
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        return [(r - mean) / deviation if deviation > 0 else 0.0 for r in rewards]


class LetsNanThrough(Estimator):
    def rewards(self, group):
        return {t.id: t.reward for t in group.trajectories if t.reward is not None}


class DependsOnOrder(Estimator):
    def group(self, rewards):
        return [r - rewards[0] for r in rewards]


class ChangesItsInput(Estimator):
    def rewards(self, group):
        group.trajectories.sort(key=lambda t: -len(t.id))
        group.trajectories[:] = group.trajectories[::-1]
        return super().rewards(group)


@pytest.mark.parametrize("check", [name for name in dir(AdvantageConformance) if name.startswith("test_")])
def test_a_right_estimator_passes(check):
    getattr(EstimatorKit(), check)()


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (NoVerdictIsZero, "test_no_verdict_is_not_zero"),
        (NoVerdictIsZero, "test_agrees_with_the_scalar_reference"),
        (DividesByTinyDeviations, "test_groups_of_one_and_equal_rewards"),
        (LetsNanThrough, "test_rewards_that_are_not_numbers_are_refused"),
        (LetsNanThrough, "test_one_attempt_with_two_rewards_is_refused"),
        (DependsOnOrder, "test_order_does_not_matter"),
        (ChangesItsInput, "test_input_is_left_as_it_was"),
    ],
)
def test_a_wrong_estimator_is_found(mutant, check):
    kit = EstimatorKit()
    kit.estimator = mutant
    fails(kit, check)
