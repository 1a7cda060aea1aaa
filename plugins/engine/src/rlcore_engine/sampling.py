"""From logits to tokens: in float32, each row by its own rules and its own random numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rule", "sample"]


@dataclass(slots=True)
class Rule:
    """How one request samples. ``random`` gives one number a token, so the batch around a request changes nothing."""

    temperature: float
    top_p: float
    top_k: int
    random: random.Random


def sample(logits: Tensor, rules: Sequence[Rule]) -> tuple[list[int], list[float]]:
    """Sample one token a row by the inverse of the cumulative distribution.

    Args:
        logits: ``[N, V]`` float32; may be written to.
        rules: N rules.

    Returns:
        N token ids and their log-probs (``rollout_logprobs``, nats) under the distribution that was sampled from: after
        temperature, top-k and top-p, renormalised. At temperature 0 the token is the most likely one and its log-prob
        that of the model's own distribution. A row whose logits are not finite gives NaN.
    """
    temperatures = [rule.temperature or 1.0 for rule in rules]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures)[:, None]
    for row, rule in enumerate(rules):
        if rule.temperature and (rule.top_p < 1.0 or 0 < rule.top_k < logits.shape[1]):
            logits[row] = _truncate(logits[row], rule.top_p, rule.top_k)
    top = logits.amax(-1, keepdim=True)
    cumulative = (logits - top).exp_().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    points = torch.tensor([rule.random.random() if rule.temperature else 0.0 for rule in rules], dtype=torch.float64)
    # NaN logits are found nowhere; the caller sees them by the log-prob
    tokens = torch.searchsorted(cumulative, points[:, None] * total, right=True).clamp_(max=logits.shape[1] - 1)
    for row in [row for row, rule in enumerate(rules) if not rule.temperature]:
        tokens[row] = logits[row].argmax()
    chosen = logits.gather(1, tokens) - top - total.log()
    return tokens[:, 0].tolist(), chosen[:, 0].clamp_(max=0.0).tolist()


def _truncate(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """``[V]`` logits with −inf outside the ``top_k`` most likely and then the smallest set of mass ``top_p``."""
    values, order = logits.sort(descending=True, stable=True)
    if 0 < top_k < len(values):
        values = values[:top_k]
    if top_p < 1.0:
        mass = values.softmax(-1).cumsum(-1)
        inside = mass - values.softmax(-1) < top_p
        inside[0] = True
        values = values[: int(inside.sum())]
    kept = torch.full_like(logits, -torch.inf)
    return kept.index_copy_(0, order[: len(values)], values)
