"""One optimizer step: sums, one denominator, three log-prob families, and what never changes the weights."""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlcore.protocols import Corrected
from rlcore.types import Batch, Mean, Sample
from rlcore_losses.aggregations import TokenMean
from rlcore_losses.corrections import NoCorrection, TokenTIS
from rlcore_losses.losses import PPOClip
from rlcore_torch.adamw import MasterAdamW


def assert_same_step(found, expected, tolerance: float = 1e-5) -> None:
    gradients, result = found
    for name, gradient in expected[0].items():
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm(), name
    for key in ("loss", "grad_norm", "k3", "ess", "loss/clip_fraction"):
        assert result.metrics[key] == pytest.approx(expected[1].metrics[key], rel=1e-4, abs=1e-6), key


def of_one_row(tokens: list[int], mask: list[bool], rollout: float, advantage: float) -> Batch:
    row = Sample("t", "g", "k", 0, tokens, mask, [rollout if m else math.nan for m in mask],
                 [advantage if m else 0.0 for m in mask], [0 if m else -1 for m in mask],
                 [0 if m else -1 for m in mask], 1.0)  # fmt: skip
    return Batch([row], policy_version=0)


@pytest.mark.fault("LOSS-06")
@pytest.mark.parametrize("options", [{"micro_batch_tokens": n} for n in (1, 20, 60)] + [{"share_prefixes": False}])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_the_split_into_micro_batches_changes_nothing(gradients, model_folder, make_batch, objective, family, options):
    batch = make_batch()
    expected = gradients(model_folder(family), batch, objective())
    found = gradients(model_folder(family), batch, objective(), **options)
    assert_same_step(found, expected)
    assert expected[1].metrics["micro_batches"] == 1
    if options.get("micro_batch_tokens") == 1:
        assert found[1].metrics["micro_batches"] == len(batch.samples)


@pytest.mark.fault("LOSS-06")
def test_a_token_weighs_the_same_in_a_short_and_in_a_long_micro_batch(gradients, model_folder, objective):
    """Shard A: one token with loss 4; shard B: three tokens with loss 0: the mean is 1, not 2."""

    class Loss:
        needs_old_logprobs = False

        def __call__(self, logprobs, batch, corrected, token_weights):
            from rlcore.protocols import LossOutput

            terms = batch.advantages * token_weights + 0 * logprobs
            return LossOutput(terms.sum(), {})

    one = of_one_row([5, 6, 7], [False, False, True], -1.0, 4.0).samples[0]
    three = of_one_row([9, 8, 7, 6, 5], [False, False, True, True, True], -1.0, 0.0).samples[0]
    batch = Batch([one, dataclasses.replace(three, trajectory_id="u")], policy_version=0)
    _, result = gradients(model_folder(), batch, objective(loss=Loss()), micro_batch_tokens=4)
    assert result.metrics["micro_batches"] == 2
    assert result.metrics["loss"] == pytest.approx(1.0)


@given(seed=st.integers(0, 99), tokens=st.sampled_from([1, 25, 70, 4096]), order=st.randoms(use_true_random=False))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_order_and_packing_change_nothing(gradients, model_folder, make_batch, objective, seed, tokens, order):
    folder = model_folder()
    batch = make_batch(seed=seed)
    expected = gradients(folder, batch, objective())
    rows = list(batch.samples)
    order.shuffle(rows)
    mixed = dataclasses.replace(batch, samples=rows)
    found = gradients(folder, mixed, objective(), micro_batch_tokens=tokens, share_prefixes=seed % 2 == 0)
    assert_same_step(found, expected)
    by_row = {id(row): values for row, values in zip(mixed.samples, found[1].logprobs, strict=True)}
    for row, values in zip(batch.samples, expected[1].logprobs, strict=True):
        torch.testing.assert_close(
            torch.tensor(by_row[id(row)]), torch.tensor(values), atol=3e-5, rtol=0, equal_nan=True
        )


def test_the_gradient_is_that_of_the_formula(gradients, model_folder, make_batch, objective):
    """Against transformers and autograd, written out: Σ −A w log-prob over the number of tokens."""
    from transformers import AutoModelForCausalLM

    folder, batch = model_folder(), make_batch()
    found, result = gradients(folder, batch, objective(), max_grad_norm=1e9)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    total, count = torch.zeros(()), 0
    for row, values in zip(batch.samples, result.logprobs, strict=True):
        logits = plain(torch.tensor([row.token_ids])).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row.token_ids)[1:, None])[:, 0]
        for t, trained in enumerate(row.mask):
            assert math.isnan(values[t]) != trained
            if trained:
                current = logprobs[t - 1]
                assert values[t] == pytest.approx(current.item(), abs=3e-5)
                weight = math.exp(min(current.item() - row.rollout_logprobs[t], 20))
                total, count = total - min(weight, 2.0) * row.advantages[t] * current, count + 1
    (total / count).backward()
    for name, parameter in plain.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 2.4e-5 * parameter.grad.norm(), name


def test_clipping_acts_on_the_whole_divided_gradient(gradients, model_folder, make_batch, objective):
    free = gradients(model_folder(), make_batch(), objective(), max_grad_norm=1e9)
    clipped = gradients(model_folder(), make_batch(), objective(), max_grad_norm=0.25)
    norm = torch.stack([g.square().sum() for g in free[0].values()]).sum().sqrt().item()
    assert free[1].metrics["grad_norm"] == clipped[1].metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0.25
    norm = torch.stack([g.square().sum() for g in clipped[0].values()]).sum().sqrt().item()
    assert norm == pytest.approx(0.25, rel=1e-5)


@pytest.mark.fault("LOSS-25")
@pytest.mark.anyio
async def test_old_logprobs_are_those_before_the_first_update_and_the_ratio_moves(
    start, model_folder, make_batch, objective
):
    """A second update has a ratio other than 1, and the correction compares with the rollout of any age."""
    batch = make_batch()
    trainer = await start(model_folder(), lr=1e-3, epochs=2)
    first = await trainer.step(batch, objective())
    assert first.old_logprobs == first.logprobs
    assert first.metrics["loss/ratio"] != pytest.approx(1.0, abs=1e-6)
    weights = [
        min(math.exp(old - rollout), 2.0)
        for row, values in zip(batch.samples, first.old_logprobs, strict=True)
        for old, rollout, mask in zip(values, row.rollout_logprobs, row.mask, strict=True)
        if mask
    ]
    assert first.metrics["weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)


@pytest.mark.anyio
async def test_old_logprobs_are_not_kept_when_nobody_asks(start, model_folder, make_batch, objective):
    trainer = await start(model_folder())
    current = TokenTIS(TokenTIS.Config(logprobs="current"))
    result = await trainer.step(make_batch(), objective(correction=current))
    assert result.old_logprobs is None
    assert result.metrics["loss/ratio"] == pytest.approx(1.0)


@pytest.mark.fault("LOSS-19")
@pytest.mark.anyio
async def test_equal_logprobs_give_a_weight_of_one(start, model_folder, make_batch, objective):
    """Rollout log-probs keep float32 on the whole way: −12.34 gives a weight of 1, not 0.973."""
    batch = make_batch()
    trainer = await start(model_folder(), lr=0.0)
    measured = (await trainer.step(batch, objective())).logprobs
    same = [dataclasses.replace(row, rollout_logprobs=v) for row, v in zip(batch.samples, measured, strict=True)]
    assert min(v for values in measured for v in values if v == v) < -4
    metrics = (await trainer.step(dataclasses.replace(batch, samples=same), objective())).metrics
    assert metrics["weight"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["abs_diff_max"] < 1e-6
    assert metrics["ess"] == pytest.approx(1.0)


@pytest.mark.anyio
async def test_logprobs_are_of_the_distribution_at_the_rollouts_temperature(start, model_folder, make_batch, objective):
    from transformers import AutoModelForCausalLM

    batch = dataclasses.replace(make_batch(), temperature=0.5)
    trainer = await start(model_folder())
    found = (await trainer.step(batch, objective())).logprobs[0]
    row = batch.samples[0]
    logits = AutoModelForCausalLM.from_pretrained(model_folder())(torch.tensor([row.token_ids])).logits[0, :-1] / 0.5
    expected = logits.log_softmax(-1).gather(1, torch.tensor(row.token_ids)[1:, None])[:, 0].tolist()
    for t, trained in enumerate(row.mask):
        assert not trained or found[t] == pytest.approx(expected[t - 1], abs=3e-5)


@pytest.mark.parametrize("wrong", ["advantage", "rollout"])
@pytest.mark.anyio
async def test_a_gradient_that_is_not_finite_changes_nothing(start, model_folder, make_batch, objective, wrong):
    batch = make_batch()
    trainer = await start(model_folder())
    await trainer.step(batch, objective())
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    moments = {name: m.clone() for name, m in trainer._worker.optimizer.state_dict().items()}
    bad = batch.samples[0]
    field = {"advantage": "advantages", "rollout": "rollout_logprobs"}[wrong]
    values = [math.nan if m else v for v, m in zip(getattr(bad, field), bad.mask, strict=True)]
    broken = dataclasses.replace(batch, samples=[dataclasses.replace(bad, **{field: values}), *batch.samples[1:]])
    result = await trainer.step(broken, objective())
    assert (result.metrics["nonfinite"], result.metrics["skipped"]) == (1, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())
    assert all(torch.equal(m, moments[n]) for n, m in trainer._worker.optimizer.state_dict().items())
    again = await trainer.step(batch, objective())
    assert (again.metrics["nonfinite"], again.metrics["skipped"]) == (0, 0)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.weights())


@pytest.mark.anyio
async def test_nothing_to_train_is_a_skipped_step(start, model_folder, make_batch, objective):
    class Reject(NoCorrection):
        def __call__(self, trainer_logprobs, batch):
            none = torch.zeros_like(batch.mask)
            return Corrected(torch.ones_like(trainer_logprobs), none, none, {})

    trainer = await start(model_folder())
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    rejected = await trainer.step(make_batch(), objective(correction=Reject(NoCorrection.Config())))
    empty = await trainer.step(Batch([], policy_version=0), objective())
    assert rejected.metrics["skipped"] == empty.metrics["skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())


def test_a_correction_that_needs_the_whole_batch_sees_it(gradients, model_folder, make_batch, objective):
    """Its weight depends on the mean over all tokens, which no micro-batch has."""

    class Centred:
        logprobs, unit = "old", "batch"

        def __init__(self):
            self.seen = []

        def __call__(self, trainer_logprobs, batch):
            self.seen.append(int(batch.mask.sum()))
            assert torch.equal(trainer_logprobs[batch.mask], batch.old_logprobs[batch.mask])
            ratio = (trainer_logprobs - batch.rollout_logprobs)[batch.mask]
            weights = torch.where(batch.mask, (trainer_logprobs - batch.rollout_logprobs) - ratio.mean(), 0.0)
            return Corrected(weights.tanh().abs(), batch.mask, batch.mask, {"seen": Mean(1.0, 1)})

    batch, split, whole = make_batch(), Centred(), Centred()
    expected = gradients(model_folder(), batch, objective(correction=whole))
    found = gradients(model_folder(), batch, objective(correction=split), micro_batch_tokens=25)
    assert found[1].metrics["micro_batches"] > 2
    assert split.seen == whole.seen == [batch.tokens]
    assert_same_step(found, expected)


def test_rows_of_a_group_stay_together_where_the_aggregation_asks_for_it(
    gradients, model_folder, make_batch, objective
):
    class ByGroup(TokenMean):
        unit = "group"

        def __call__(self, counted, batch):
            self.groups = [*getattr(self, "groups", []), *set(batch.row_groups.tolist())]
            return super().__call__(counted, batch)

    aggregation = ByGroup(TokenMean.Config())
    gradients(model_folder(), make_batch(groups=3), objective(aggregation=aggregation), micro_batch_tokens=30)
    assert sorted(aggregation.groups) == [0, 1, 2]


@pytest.mark.anyio
async def test_a_loss_gets_entropies_and_reference_logprobs(start, model_folder, make_batch, objective):
    class Curious(PPOClip):
        def __call__(self, logprobs, batch, corrected, token_weights):
            assert batch.entropies.requires_grad
            assert not batch.ref_logprobs.requires_grad
            self.seen = batch
            return super().__call__(logprobs, batch, corrected, token_weights)

    loss, batch = Curious(PPOClip.Config()), make_batch()
    loss.needs_entropies = loss.needs_ref_logprobs = True
    trainer = await start(model_folder(), lr=1e-2)
    first = (await trainer.step(batch, objective(loss=loss))).logprobs
    second = (await trainer.step(batch, objective(loss=loss))).logprobs
    mask = loss.seen.mask
    reference = loss.seen.ref_logprobs[mask].tolist()
    assert reference != pytest.approx([v for row in second for v in row if v == v], abs=1e-3)
    by_row = sorted(v for row in first for v in row if v == v)
    assert sorted(reference) == pytest.approx(by_row, abs=3e-5)
    assert 0 < loss.seen.entropies[mask].min().item() < math.log(259)


@pytest.mark.anyio
async def test_warmup_raises_the_learning_rate(start, model_folder, make_batch, objective):
    trainer = await start(model_folder(), lr=1e-3, warmup_steps=4)
    rates = [(await trainer.step(make_batch(), objective())).metrics["lr"] for _ in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


@pytest.mark.anyio
async def test_steps_raise_the_probability_of_what_was_better(start, model_folder, make_batch, objective):
    batch = make_batch(groups=1, siblings=2)
    good, bad = batch.samples
    good.advantages = [1.0 if m else 0.0 for m in good.mask]
    bad.advantages = [-1.0 if m else 0.0 for m in bad.mask]
    trainer = await start(model_folder(), lr=1e-3)
    results = [await trainer.step(batch, objective(correction=NoCorrection(NoCorrection.Config()))) for _ in range(8)]

    def total(result, row: int) -> float:
        return sum(v for v in result.logprobs[row] if v == v)

    assert total(results[-1], 0) > total(results[0], 0) + 1
    assert total(results[-1], 1) < total(results[0], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_is_adamw_on_float32_masters(dtype, monkeypatch):
    monkeypatch.setattr("rlcore_torch.adamw._CHUNK", 7)
    draw = torch.Generator().manual_seed(0)
    initial = {"matrix": torch.randn(5, 6, generator=draw), "vector": torch.randn(5, generator=draw)}
    mine = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
    optimizer = MasterAdamW(mine, dict.fromkeys(mine, dtype), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.1},
        {"params": [theirs["vector"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(5):
        for name in initial:
            parts = [torch.randn(initial[name].shape, generator=draw).to(dtype) for _ in range(2)]
            theirs[name].grad = (parts[0].float() + parts[1].float()) * 0.5
            mine[name].grad = parts[0]
            optimizer.accumulate()
            mine[name].grad = parts[1]
        norm = optimizer.grad_norm() * 0.5
        assert norm == pytest.approx(float(torch.cat([p.grad.flatten() for p in theirs.values()]).norm()), rel=1e-6)
        optimizer.step(1e-2, 0.5)
        reference.step()
    for name in initial:
        torch.testing.assert_close(optimizer.masters[name], theirs[name].data, rtol=1e-6, atol=1e-7)
        assert torch.equal(mine[name].data, optimizer.masters[name].to(dtype))
