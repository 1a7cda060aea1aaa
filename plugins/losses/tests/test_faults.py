"""Faults of real systems, each with its own input and right value."""

import itertools
import json
import math
import struct

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rlcore.errors import ConfigError, RlcoreError
from rlcore.learn.rows import batch_of as batch_of_groups
from rlcore.protocols import Corrected
from rlcore.types import Completion, FinishReason, Group, Mean, Task, Trajectory, Turn
from rlcore_losses.advantages import GRPO
from rlcore_losses.aggregations import PromptMean, SequenceMeanTokenMean, SequenceSumFixed, TokenMean
from rlcore_losses.chain import Chain
from rlcore_losses.corrections import GeometricTIS, IcePop, NoCorrection, SequenceTIS, TokenTIS
from rlcore_losses.losses import CISPO, DPPOTV, SAPO, PPOClip, Reinforce
from rlcore_losses.metrics import mismatch_metrics
from rlcore_losses.rejections import TokenMask
from rlcore_losses.row_losses import GMPO, GSPO
from rlcore_losses.units import require_whole

NAN = float("nan")
LOSSES = (PPOClip, CISPO, SAPO, DPPOTV, Reinforce, GSPO, GMPO)


def build(cls, **options):
    return cls(cls.Config(**options))


def objective(logprobs, batch, correction=None, loss=None, aggregation=None):
    """One micro-batch through all three: the loss sum, its part of the denominator, and what was corrected."""
    correction = correction or build(NoCorrection)
    trainer = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    corrected = correction(trainer, batch)
    weights, part = (aggregation or build(TokenMean))(corrected.counted, batch)
    output = (loss or build(PPOClip))(logprobs, batch, corrected, weights)
    return output, part, corrected


@pytest.mark.fault("LOSS-01")
def test_an_unlikely_token_keeps_its_tiny_weight(batch_of):
    batch = batch_of([[-0.5]], old=[[-30.5]])
    logprobs = torch.tensor([-30.5], requires_grad=True)
    output, _, corrected = objective(logprobs, batch, build(TokenTIS, high=2.0))
    assert corrected.weights.item() == pytest.approx(math.exp(-30), rel=1e-6)
    assert corrected.weights.item() == pytest.approx(9.36e-14, rel=1e-3)
    output.loss.backward()
    assert 0 < abs(logprobs.grad.item()) < 1e-12


@pytest.mark.fault("LOSS-01")
def test_a_likely_token_is_capped_exactly(batch_of):
    corrected = build(TokenTIS)(torch.tensor([-0.5]), batch_of([[-30.5]]))
    assert corrected.weights.item() == 2.0


@pytest.mark.fault("LOSS-01")
def test_a_floor_is_used_and_warned_about(batch_of):
    with pytest.warns(UserWarning, match=r"low=0\.5 .*over-weights .*low/ratio .*50 times at ratio 0\.01"):
        floored = build(TokenTIS, low=0.5)
    corrected = floored(torch.tensor([-30.5]), batch_of([[-0.5]]))
    assert corrected.weights.item() == 0.5
    assert corrected.metrics["correction/floor_share"].value() == 1.0
    assert corrected.metrics["correction/floor_mass"].value() == pytest.approx(0.5)


@pytest.mark.fault("LOSS-01")
@pytest.mark.parametrize("cls", [TokenTIS, SequenceTIS, GeometricTIS, IcePop, TokenMask])
def test_a_floor_above_the_ceiling_is_refused_with_both_numbers(cls):
    with pytest.raises(ValidationError, match=r"low=3 is above ceiling high=1\.5"):
        cls.Config(low=3, high=1.5)


@pytest.mark.fault("LOSS-03")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("junk", [NAN, math.inf, 1e6])
def test_what_masked_positions_hold_does_not_leak(batch_of, loss, junk):
    options = {"kl_coef": 0.1, "kl_to": "rollout"}
    alone = torch.tensor([-1.0], requires_grad=True)
    short, _, _ = objective(alone, batch_of([[-1.0]], old=[[-1.0]]), build(TokenTIS), build(loss, **options))
    short.loss.backward()
    logprobs = torch.tensor([-1.0, junk], requires_grad=True)
    batch = batch_of([[-1.0, junk]], old=[[-1.0, -2.0]], mask=[[1, 0]], advantages=[[1.0, junk]])
    output, part, corrected = objective(logprobs, batch, build(TokenTIS), build(loss, **options))
    output.loss.backward()
    assert output.loss.item() == short.loss.item()
    assert logprobs.grad.tolist() == [alone.grad.item(), 0.0]
    assert part.item() == 1
    for name, stat in {**output.metrics, **corrected.metrics}.items():
        assert math.isfinite(stat.value()), name
    measured = mismatch_metrics(*(t.detach().numpy() for t in (logprobs, batch.rollout_logprobs, batch.mask)))
    assert all(map(math.isfinite, measured.values()))


@pytest.mark.fault("LOSS-04")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", [build(TokenMean), build(SequenceMeanTokenMean), build(PromptMean)])
def test_a_batch_without_trainable_tokens_is_zero_and_finite(batch_of, loss, aggregation):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = batch_of([[-1.0, -2.0]], mask=[[0, 0]])
    output, part, corrected = objective(logprobs, batch, build(TokenTIS), build(loss), aggregation)
    output.loss.backward()
    assert output.loss.item() == part.item() == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]
    assert all(stat.value() is None for stat in {**output.metrics, **corrected.metrics}.values())
    assert mismatch_metrics(logprobs.detach().numpy(), np.zeros(2), np.zeros(2, bool)) == {}


@pytest.mark.fault("LOSS-04")
def test_an_empty_micro_batch_beside_a_normal_one_changes_nothing(batch_of):
    normal, empty = batch_of([[-1.0, -0.5]]), batch_of([[-1.0, -2.0]], mask=[[0, 0]])
    parts = [objective(torch.full((2,), -1.0), batch) for batch in (normal, empty)]
    assert sum(p.item() for _, p, _ in parts) == 2
    assert sum(o.loss.item() for o, _, _ in parts) == parts[0][0].loss.item()
    merged = parts[0][0].metrics["loss/ratio"].merge(parts[1][0].metrics["loss/ratio"])
    assert merged.value() == parts[0][0].metrics["loss/ratio"].value()


@pytest.mark.fault("LOSS-06")
def test_shards_of_one_and_three_tokens_have_one_denominator(batch_of):
    shards = [(batch_of([[-1.0]], advantages=[[-4.0]]), 1), (batch_of([[-1.0] * 3], advantages=[[0.0] * 3]), 3)]
    parts = [objective(torch.full((n,), -1.0), batch) for batch, n in shards]
    assert sum(o.loss.item() for o, _, _ in parts) / sum(p.item() for _, p, _ in parts) == 1.0


@pytest.mark.fault("LOSS-06")
@pytest.mark.parametrize(
    "aggregation",
    [
        build(TokenMean),
        build(SequenceMeanTokenMean),
        build(SequenceMeanTokenMean, by="trajectory"),
        build(SequenceSumFixed, length=7),
        build(SequenceSumFixed, length=7, by="trajectory"),
        build(PromptMean),
    ],
)
def test_the_gradient_is_the_same_for_every_split_and_order(batch_of, aggregation):
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 9, 1, 5, 7, 2, 4, 6]
    groups, trajectories = [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 2, 3, 4, 5, 5]
    draw = [[torch.randn(n, generator=generator).tolist() for n in lengths] for _ in range(4)]
    table = torch.randn(sum(lengths), generator=generator) - 3
    starts = [0, *itertools.accumulate(lengths)]

    def gradient(split):
        current = table.clone().requires_grad_()
        total, denominator = 0.0, 0.0
        for rows in split:
            batch = batch_of(
                [draw[0][r] for r in rows],
                old=[draw[1][r] for r in rows],
                mask=[[x > -0.8 for x in draw[2][r]] for r in rows],
                advantages=[draw[3][r] for r in rows],
                groups=[groups[r] for r in rows],
                trajectories=[trajectories[r] for r in rows],
            )
            logprobs = torch.cat([current[starts[r] : starts[r + 1]] for r in rows])
            output, part, _ = objective(logprobs, batch, build(IcePop), build(PPOClip), aggregation)
            total, denominator = total + output.loss, denominator + part
        (total / denominator).backward()
        return current.grad

    units = [[0, 1], [2, 3], [4, 5], [6, 7]] if aggregation.unit == "group" else [[r] for r in range(8)]
    whole = gradient([list(range(8))])
    assert whole.abs().sum() > 0
    for size in (1, 2, 4, 8):
        for order in (units, units[::-1], [*units[1::2], *units[::2]]):
            split = [list(itertools.chain(*order[i : i + size])) for i in range(0, len(order), size)]
            torch.testing.assert_close(gradient(split), whole, rtol=1e-5, atol=1e-8)


@pytest.mark.fault("LOSS-06")
def test_a_split_that_would_change_the_result_is_refused(batch_of):
    first, second = batch_of([[-1.0], [-1.0]], groups=[0, 1]), batch_of([[-1.0]], groups=[1])
    for rule in (PromptMean, SequenceMeanTokenMean):
        made = build(rule) if rule is PromptMean else build(rule, by="trajectory")
        with pytest.raises(ConfigError, match=r"group 1 is split.*micro-batch size"):
            require_whole(made.name, made.unit, [first, second])
    with pytest.raises(ConfigError, match="whole step in one call, but it is split into 2"):
        require_whole("token_tis", build(TokenTIS, normalize="tokens").unit, [first, second])
    require_whole("token_mean", build(TokenMean).unit, [first, second])
    require_whole("prompt_mean", build(PromptMean).unit, [first])


@pytest.mark.fault("LOSS-09")
def test_rejected_tokens_leave_the_denominator(batch_of):
    log_ratios = [0.1, -1.5, 0.8, -10, 0.3]
    batch = batch_of([[-20.0] * 5], advantages=[[-1.0] * 5])
    trainer = torch.tensor([-20.0 + d for d in log_ratios])
    logprobs = trainer.clone().requires_grad_()

    def mean(correction):
        corrected = correction(trainer, batch)
        weights, part = build(TokenMean)(corrected.counted, batch)
        return build(PPOClip)(logprobs, batch, corrected, weights).loss.item() / max(part.item(), 1)

    assert mean(build(IcePop, low=0.5, high=2.0)) == pytest.approx((math.exp(0.1) + math.exp(0.3)) / 2, rel=1e-6)
    assert mean(build(IcePop, low=0.5, high=2.0)) == pytest.approx(1.2275, rel=1e-3)
    assert mean(build(TokenMask, low=0.5, high=2.0)) == pytest.approx(1.0)
    assert mean(build(TokenMask, low=0.5, high=2.0, denominator="all")) == pytest.approx(2 / 5)
    assert mean(build(TokenMask, low=100.0, high=200.0)) == 0.0


@pytest.mark.fault("LOSS-10")
@pytest.mark.parametrize("padding", [0, 4])
def test_a_row_level_loss_with_weights_is_computed_row_by_row(batch_of, padding):
    rows, pad = [[0.2, 0.2, -0.4], [0.1, 0.1, 0.1], [-0.3, 0.0, 0.0]], [0.0] * padding
    old = [[-1.0] * 3 + pad for _ in rows]
    batch = batch_of(
        [[-1.0 - d for d in row] + pad for row in rows],  # trainer − rollout = d
        old=old,
        mask=[[1] * 3 + [0] * padding for _ in rows],
    )
    logprobs = torch.tensor([x for row in old for x in row], requires_grad=True)
    geometric = build(GeometricTIS)(batch.old_logprobs, batch)
    width = 3 + padding
    assert geometric.weights[:3].tolist() == pytest.approx([1.0] * 3)
    assert geometric.weights[width : width + 3].tolist() == pytest.approx([math.exp(0.1)] * 3)
    product = build(SequenceTIS, high=9.0)(batch.old_logprobs, batch)
    assert product.weights[width : width + 3].tolist() == pytest.approx([math.exp(0.3)] * 3)
    tokens = build(TokenTIS)(batch.old_logprobs, batch)
    weights, part = build(SequenceMeanTokenMean)(tokens.counted, batch)
    loss = build(GSPO)(logprobs, batch, tokens, weights).loss / part
    by_hand = -sum(sum(min(math.exp(d), 2.0) for d in row) / 3 for row in rows) / 3
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)
    assert geometric.weights.shape == logprobs.shape


@pytest.mark.fault("LOSS-19")
def test_equal_logprobs_weigh_one_after_the_whole_path(batch_of):
    recorded = json.loads(json.dumps([-12.34, -7.77]))
    assert recorded == [-12.34, -7.77]
    packed = struct.unpack("2f", struct.pack("2f", *recorded))
    corrected = build(TokenTIS)(torch.tensor(packed), batch_of([list(recorded)]))
    assert corrected.weights.tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.fault("LOSS-22")
@pytest.mark.parametrize("loss", [GSPO, GMPO])
def test_padding_does_not_change_a_row_level_loss(batch_of, loss):
    def run(padding):
        logprobs = torch.tensor([-1.0, -2.0, padding, padding], requires_grad=True)
        batch = batch_of(
            [[-1.1, -1.9, padding, padding]],
            old=[[-1.1, -1.9, padding, padding]],
            mask=[[1, 1, 0, 0]],
            advantages=[[1.0, 1.0, padding, padding]],
        )
        output, _, _ = objective(logprobs, batch, build(SequenceTIS), build(loss), build(SequenceMeanTokenMean))
        output.loss.backward()
        return output.loss.item(), logprobs.grad.tolist()

    assert run(0.0) == run(10.0) == run(1e6) == run(NAN)


@pytest.mark.fault("LOSS-24")
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_kl_penalty_pulls_the_policy_and_nothing_else(batch_of, kind, loss):
    batch = batch_of([[-1.0, -1.0]], old=[[-1.2, -1.2]], advantages=[[0.0, 0.0]])
    batch.ref_logprobs = torch.tensor([-2.0, -0.5])
    leaves = [batch.rollout_logprobs, batch.old_logprobs, batch.ref_logprobs]
    for leaf in leaves:
        leaf.requires_grad_()
    logprobs = torch.tensor([-1.2, -1.2], requires_grad=True)
    output, _, corrected = objective(logprobs, batch, build(TokenTIS), build(loss, kl_coef=0.1, kl=kind))
    output.loss.backward()
    assert (logprobs.grad != 0).all()
    if kind in ("k2", "k3"):
        assert logprobs.grad[0] > 0 > logprobs.grad[1], (
            "towards the reference: descent lowers the first, raises the second"
        )
    assert all(leaf.grad is None for leaf in leaves)
    assert not corrected.weights.requires_grad
    assert output.metrics["loss/kl"].value() != 0


@pytest.mark.fault("LOSS-24")
def test_a_loss_that_needs_a_reference_says_so(batch_of):
    batch = batch_of([[-1.0]])
    with pytest.raises(RlcoreError, match="ref_logprobs is needed"):
        objective(torch.tensor([-1.0]), batch, loss=build(PPOClip, kl_coef=0.1))
    assert build(PPOClip, kl_coef=0.1).needs_ref_logprobs
    with pytest.raises(RlcoreError, match="entropies is needed"):
        objective(torch.tensor([-1.0]), batch, loss=build(PPOClip, entropy_coef=0.1))


@pytest.mark.fault("LOSS-25")
def test_staleness_is_seen_by_the_ratio_to_the_engine(batch_of):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    output, _, _ = objective(logprobs, batch_of([[-2.0]]), loss=build(PPOClip, ratio_to="rollout", clip_high=0.2))
    assert output.metrics["loss/ratio"].value() == pytest.approx(math.e)
    assert output.loss.item() == pytest.approx(-1.2)
    corrected = build(TokenTIS, high=5.0)(torch.tensor([-1.0]), batch_of([[-2.0]]))
    assert corrected.weights.item() == pytest.approx(math.e)
    assert build(TokenTIS)(torch.tensor([-1.0]), batch_of([[-2.0]])).weights.item() == 2.0


@pytest.mark.fault("OBS-04")
def test_mismatch_is_measured_before_truncation_and_without_masked_tokens(batch_of):
    raw = np.array([0.606531, 12.182494, 0.818731])
    batch = batch_of([[-20.0] * 3 + [0.0]], mask=[[1, 1, 1, 0]])
    trainer = torch.tensor([*(np.log(raw) - 20.0), 0.0], dtype=torch.float32)
    corrected = build(TokenTIS, high=5.0)(trainer, batch)
    metrics = {name: stat.value() for name, stat in corrected.metrics.items()}
    assert metrics["correction/ratio"] == pytest.approx(4.5359, rel=1e-4)
    assert metrics["correction/weight"] == pytest.approx(2.1418, rel=1e-4)
    assert metrics["correction/ceiling_share"] == pytest.approx(1 / 3)
    whole = mismatch_metrics(
        trainer.numpy(), batch.rollout_logprobs.numpy(), batch.mask.numpy(), weights=corrected.weights.numpy()
    )
    assert whole["ratio"] == pytest.approx(4.5359, rel=1e-4)
    assert whole["weight"] == pytest.approx(2.1418, rel=1e-4)
    assert whole["ceiling_share"] == pytest.approx(1 / 3)
    assert whole["tokens"] == 3
    same = mismatch_metrics(np.full(3, -1.0), np.full(3, -1.0), np.ones(3, bool))
    assert same["k1"] == same["k3"] == same["abs_diff"] == same["chi2_token"] == 0.0
    assert same["ess"] == 1.0


@pytest.mark.fault("OBS-02")
def test_measurements_of_ranks_merge_by_their_meaning(batch_of):
    parts = [
        build(TokenTIS, high=1000.0)(torch.tensor([math.log(v) - 9 for v in values]), batch_of([[-9.0] * len(values)]))
        for values in ([10.0], [100.0] * 3)
    ]
    found = {}
    for name in ("ratio", "ratio_max", "ratio_min"):
        first, second = (part.metrics[f"correction/{name}"] for part in parts)
        found[name] = first.merge(second).value()
    assert found == pytest.approx({"ratio": 77.5, "ratio_max": 100.0, "ratio_min": 10.0}, rel=1e-5)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [TokenTIS, IcePop, PPOClip, GSPO, TokenMean, SequenceSumFixed])
def test_unknown_options_and_wrong_types_are_refused(cls):
    with pytest.raises(ValidationError, match="nonsense"):
        cls.Config(nonsense=1)
    for name in cls.Config.model_fields:
        with pytest.raises(ValidationError, match=name):
            cls.Config(**{name: [None]})


@pytest.mark.parametrize("steps", [[], ["token_tis", "token_tis"], ["token_tis", "icepop"], ["token_mask", "icepop"]])
def test_a_chain_that_corrects_twice_is_refused(steps):
    with pytest.raises(ValidationError, match=r"correct the same thing|at least one step"):
        Chain.Config(steps=steps)


def test_k1_over_a_row_and_the_rows_ratio_are_the_same_thing():
    with pytest.raises(ValidationError, match="kl_reject and geometric_mask correct the same thing"):
        Chain.Config(steps=[{"name": "kl_reject", "estimator": "k1", "over": "mean"}, {"name": "geometric_mask"}])
    Chain.Config(steps=[{"name": "kl_reject", "estimator": "k3"}, {"name": "geometric_mask"}, {"name": "sequence_tis"}])


def test_a_chain_says_which_step_is_wrong():
    with pytest.raises(RlcoreError, match="no correction named 'tokn_tis'; did you mean 'token_tis'"):
        Chain.Config(steps=["tokn_tis"])
    with pytest.raises(ValidationError, match=r"token_tis\.hihg: unknown key; did you mean 'high'"):
        Chain.Config(steps=[{"name": "token_tis", "hihg": 3}])
    with pytest.raises(ValidationError, match=r"token_tis\.high: should be a valid number"):
        Chain.Config(steps=[{"name": "token_tis", "high": "3"}])
    with pytest.raises(ValidationError, match="different log-probs"):
        Chain.Config(steps=[{"name": "token_tis", "logprobs": "current"}, "veto"])
    with pytest.raises(ValidationError, match="cannot be a step"):
        Chain.Config(steps=[{"name": "chain", "steps": ["veto"]}])
    with pytest.raises(ValidationError, match="has a name"):
        Chain.Config(steps=[{"high": 3}])


def test_a_chain_survives_a_round_trip_through_the_manifest():
    config = Chain.Config(steps=["veto", {"name": "token_tis", "high": 3.0}])
    again = Chain.Config.model_validate(json.loads(config.model_dump_json()))
    assert again == config


def test_every_array_of_another_length_is_named(batch_of):
    batch = batch_of([[-1.0, -2.0]])
    corrected = Corrected(torch.ones(3), batch.mask, batch.mask, {})
    with pytest.raises(RlcoreError, match=r"ppo_clip: shapes do not fit: weights \[3\] but batch.mask \[2\]"):
        build(PPOClip)(torch.zeros(2), batch, corrected, torch.ones(2))
    with pytest.raises(RlcoreError, match=r"logprobs \[2, 1\], token_weights \[3\] but batch.mask \[2\]"):
        build(PPOClip)(torch.zeros(2, 1), batch, build(NoCorrection)(torch.zeros(2), batch), torch.ones(3))
    with pytest.raises(RlcoreError, match=r"token_mean: shapes do not fit: counted \[3\]"):
        build(TokenMean)(torch.ones(3, dtype=torch.bool), batch)


@pytest.mark.fault("LOSS-21")
def test_every_turn_of_an_attempt_carries_its_advantage():
    def attempt(name, reward, lengths):
        prompt, turns = (1, 2, 3), []
        for length in lengths:
            turns.append(Turn(prompt, Completion((7,) * length, (-1.0,) * length, FinishReason.STOP)))
            prompt = (*prompt, *turns[-1].completion.token_ids, 4, 5)
        return Trajectory(name, "t", "g", turns=turns, reward=reward)

    group = Group("g", Task("t"), [attempt("a", 1.0, (2, 5)), attempt("b", 0.0, (3,))])
    batch = batch_of_groups([group], build(GRPO)([group]), policy_version=0)
    first, second = batch.samples
    trained = [a for a, m in zip(first.advantages, first.mask, strict=True) if m]
    assert len(trained) == 7
    assert set(trained) == {trained[0]}
    assert trained[0] > 0 > second.advantages[second.mask.index(True)]


@pytest.mark.fault("LOSS-27")
@pytest.mark.parametrize("correction", [TokenTIS, SequenceTIS, IcePop])
@pytest.mark.parametrize("aggregation", [TokenMean, SequenceMeanTokenMean, PromptMean])
def test_a_rank_without_tokens_has_the_same_things_to_reduce(batch_of, correction, aggregation):
    """What a trainer sums over ranks is the same list, in the same order, whatever a rank holds."""

    def reduced(batch, count):
        made = build(correction), build(PPOClip), build(aggregation)
        output, part, corrected = objective(torch.full((count,), -1.0), batch, *made)
        calls = []
        for name, stat in {**corrected.metrics, **output.metrics}.items():
            if isinstance(stat, Mean):
                calls.append((name, float(stat.total), float(stat.count)))
        return [("loss", float(output.loss)), ("denominator", float(part)), *calls]

    full = reduced(batch_of([[-1.0, -2.0]]), 2)
    for empty in (reduced(batch_of([]), 0), reduced(batch_of([[-1.0]], mask=[[0]]), 1)):
        assert [call[0] for call in empty] == [call[0] for call in full]
        assert all(value == 0.0 for call in empty for value in call[1:]), "an empty rank adds zeros"
