"""Aggregations by hand, the fused objective, and that nothing is offered which the kits have not seen."""

import re
from pathlib import Path

import pytest
import torch
from rlcore.errors import RlcoreError
from rlcore_losses import plugin
from rlcore_losses.aggregations import PromptMean, SequenceMeanTokenMean, SequenceSumFixed, TokenMean
from rlcore_losses.corrections import IcePop
from rlcore_losses.fused import can_fuse, fused_objective
from rlcore_losses.logprob_head import selective_logprobs
from rlcore_losses.losses import CISPO, DPPOTV, SAPO, PPOClip, Reinforce
from rlcore_losses.row_losses import GSPO


def build(cls, **options):
    return cls(cls.Config(**options))


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [
        (build(TokenMean), [1, 1, 0, 1, 0, 1, 1, 1], 6),
        (build(SequenceMeanTokenMean), [1 / 2, 1 / 2, 0, 1, 0, 1 / 3, 1 / 3, 1 / 3], 3),
        (build(SequenceMeanTokenMean, by="trajectory"), [1 / 3, 1 / 3, 0, 1 / 3, 0, 1 / 3, 1 / 3, 1 / 3], 2),
        (build(SequenceSumFixed, length=10), [0.1, 0.1, 0, 0.1, 0, 0.1, 0.1, 0.1], 3),
        (build(SequenceSumFixed, length=10, by="trajectory"), [0.1, 0.1, 0, 0.1, 0, 0.1, 0.1, 0.1], 2),
        (build(PromptMean), [1 / 3, 1 / 3, 0, 1 / 3, 0, 1 / 3, 1 / 3, 1 / 3], 2),
    ],
)
def test_weights_and_denominators_by_hand(batch_of, aggregation, weights, denominator):
    """Four rows; the third has no counted token and is in no denominator; the first two are one trajectory."""
    batch = batch_of([[0.0] * 3, [0.0], [0.0], [0.0] * 3], groups=[4, 4, 4, 9], trajectories=[0, 0, 1, 2])
    counted = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    found, part = aggregation(counted, batch)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(weights)
    assert part.item() == denominator


@pytest.mark.parametrize("loss", [PPOClip, CISPO, SAPO, DPPOTV, Reinforce])
@pytest.mark.parametrize("old", [True, False])
def test_the_fused_objective_is_the_general_one(batch_of, loss, old):
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = [7, 12, 5], 33
    count = sum(rows)

    def ragged(scale=1.0, shift=-3.0):
        return [(torch.randn(n, generator=generator) * scale + shift).tolist() for n in rows]

    batch = batch_of(ragged(), old=ragged() if old else None, mask=[[x > -1 for x in r] for r in ragged(shift=0.0)])
    batch.advantages = torch.randn(count, generator=generator)
    batch.ref_logprobs = torch.randn(count, generator=generator) - 3
    batch.token_ids = torch.randint(0, vocabulary, (count,), generator=generator)
    hidden = torch.randn(count, 8, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 8, generator=generator, requires_grad=True)
    made = build(loss, kl_coef=0.1)
    corrected = build(IcePop)(batch.old_logprobs if old else batch.rollout_logprobs, batch)
    token_weights, _ = build(SequenceMeanTokenMean)(corrected.counted, batch)
    general = made(selective_logprobs(hidden, weight, batch.token_ids, 0.8), batch, corrected, token_weights)
    right = torch.autograd.grad(general.loss, [hidden, weight])
    output, logprobs = fused_objective(hidden, weight, made, batch, corrected, token_weights, 0.8, chunk=5)
    assert output.loss.item() == pytest.approx(general.loss.item(), rel=1e-5)
    assert logprobs.equal(selective_logprobs(hidden, weight, batch.token_ids, 0.8).detach())
    assert {k: s.value() for k, s in output.metrics.items()} == pytest.approx(
        {k: s.value() for k, s in general.metrics.items()}
    )
    for a, b in zip(torch.autograd.grad(output.loss, [hidden, weight]), right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_losses_that_join_tokens_are_not_fused(batch_of):
    assert not can_fuse(build(GSPO))
    assert not can_fuse(build(PPOClip, entropy_coef=0.1))
    assert can_fuse(build(PPOClip))
    batch = batch_of([[0.0]])
    with pytest.raises(RlcoreError, match="GSPO cannot be fused"):
        fused_objective(torch.zeros(1, 2), torch.zeros(3, 2), build(GSPO), batch, None, torch.ones(1))


def test_every_offered_piece_runs_through_the_kit_of_its_kind():
    here = Path(__file__).parent
    for hook, module, attribute in (
        (plugin.rlcore_register_corrections, "test_correction_conformance.py", "correction"),
        (plugin.rlcore_register_losses, "test_loss_conformance.py", "loss"),
        (plugin.rlcore_register_advantages, "test_advantage_conformance.py", "estimator"),
    ):
        offered = set()
        hook(lambda name, target, offered=offered: offered.add(target.partition(":")[2]))
        seen = set(re.findall(rf"^    {attribute} = (\w+)$", (here / module).read_text(), re.MULTILINE))
        assert offered <= seen, f"no conformance class for {sorted(offered - seen)}"


@pytest.mark.parametrize("loss", [PPOClip, CISPO, SAPO, DPPOTV, Reinforce, GSPO])
def test_a_long_batch_taken_in_parts_gives_the_same(batch_of, loss, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    rows = [70, 1, 0, 90, 40]
    count = sum(rows)

    def draw(shift=-3.0):
        return [(torch.randn(n, generator=generator) + shift).tolist() for n in rows]

    def run():
        logprobs = current.clone().requires_grad_()
        batch.entropies = entropies.clone().requires_grad_()
        corrected = build(IcePop)(batch.old_logprobs, batch)
        token_weights, _ = build(SequenceMeanTokenMean)(corrected.counted, batch)
        output = build(loss, kl_coef=0.1, entropy_coef=0.1)(logprobs, batch, corrected, token_weights)
        (2 * output.loss).backward()
        metrics = {k: s.value() for k, s in {**corrected.metrics, **output.metrics}.items()}
        return output.loss.item(), logprobs.grad, batch.entropies.grad, corrected, metrics

    batch = batch_of(draw(), old=draw(), mask=[[x > -1 for x in row] for row in draw(0.0)])
    batch.advantages = torch.randn(count, generator=generator)
    batch.ref_logprobs = torch.randn(count, generator=generator) - 3
    batch.rollout_logprobs[~batch.mask] = float("nan")
    current, entropies = (torch.randn(count, generator=generator) - s for s in (3.0, 0.0))
    whole = run()
    monkeypatch.setattr("rlcore_losses._packed._BLOCK", 16)
    parts = run()
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    for a, b in zip(parts[1:3], whole[1:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert all(a.equal(b) for a, b in zip(parts[3][:3], whole[3][:3], strict=True))
    assert parts[4] == pytest.approx(whole[4], rel=1e-12)
