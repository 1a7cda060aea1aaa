"""Sampling: the log-prob that comes back is of the distribution that was sampled from, and the samples follow it."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcore_engine.sampling import Rule, sample

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -30.0]


def rule(temperature=1.0, top_p=1.0, top_k=-1, seed=0):
    return Rule(temperature, top_p, top_k, random.Random(seed))


def distribution(logits, temperature=1.0, top_p=1.0, top_k=-1):
    """By the definition, in plain Python."""
    weights = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k if top_k > 0 else None]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    scale = sum(weights[i] for i in kept)
    return {i: weights[i] / scale for i in kept}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_p": 0.8},
        {"top_k": 2},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 4},
    ],
)
def test_samples_follow_the_distribution_and_carry_its_logprobs(options):
    expected = distribution(LOGITS, **options)
    count = 4000
    tokens, logprobs = sample(torch.tensor([LOGITS] * count), [rule(**options, seed=i) for i in range(count)])
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)
    for token, hits in Counter(tokens).items():
        p = expected[token]
        assert abs(hits / count - p) < 5 * math.sqrt(p * (1 - p) / count) + 1e-9


def test_greedy_takes_the_likeliest_and_gives_the_models_own_logprob():
    tokens, logprobs = sample(torch.tensor([LOGITS]), [rule(temperature=0.0, top_k=1)])
    assert tokens == [0]
    assert logprobs == pytest.approx([math.log(distribution(LOGITS)[0])])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7), min_size=2, max_size=6), st.data())
def test_a_row_is_sampled_as_if_it_were_alone(rows, data):
    rules = [
        (
            data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
            data.draw(st.sampled_from([0.3, 0.9, 1.0])),
            data.draw(st.sampled_from([-1, 2])),
        )
        for _ in rows
    ]
    together = sample(torch.tensor(rows), [rule(*r, seed=i) for i, r in enumerate(rules)])
    for index, row in enumerate(rows):
        alone = sample(torch.tensor([row]), [rule(*rules[index], seed=index)])
        assert alone[0] == [together[0][index]]
        assert alone[1] == pytest.approx([together[1][index]], abs=1e-6)


def test_a_token_of_probability_zero_is_never_sampled():
    logits = torch.full((500, 4), -torch.inf)
    logits[:, 2] = 0.0
    tokens, logprobs = sample(logits, [rule(seed=i) for i in range(500)])
    assert set(tokens) == {2}
    assert set(logprobs) == {0.0}


@pytest.mark.fault("MASK-17")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_nan_and_not_a_guess(bad, temperature):
    rows = torch.tensor([[1.0, bad, 0.0], [1.0, 2.0, 0.0]])
    _, logprobs = sample(rows, [rule(temperature), rule(temperature)])
    assert math.isnan(logprobs[0])
    assert math.isfinite(logprobs[1])
