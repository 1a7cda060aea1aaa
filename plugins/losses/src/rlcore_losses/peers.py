"""Same name, different formula: what other systems call their corrections, and the setting here that computes it.

``ρ = π_trainer / π_rollout``. Each row is checked on golden vectors that plain Python computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PEERS", "Peer"]

_UNBOUNDED = 1e9
"""A ceiling that no capped ratio reaches."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One meaning.

    Attributes:
        key: short name.
        called: what the systems call it.
        systems: who.
        formula: what their code computes.
        correction: the ``correction`` section that computes the same.
        loss: the ``loss`` section, where the meaning is in the loss.
        note: what else to know.
    """

    key: str
    called: str
    systems: str
    formula: str
    correction: Mapping[str, Any] | None = None
    loss: Mapping[str, Any] | None = None
    note: str = ""


PEERS: tuple[Peer, ...] = (
    Peer(
        "clamp",
        "TIS low/high",
        "miles, slime, NeMo-RL, OpenRLHF, AReaL (clamp), TRL (truncate with C_min)",
        "w = clamp(ρ, lo, hi): the floor raises tiny ratios",
        correction={"name": "token_tis", "low": 0.5, "high": 5.0},
        note="low 0.5, high 5.0 is OpenRLHF's default; miles and slime have 0 and 2",
    ),
    Peer(
        "band",
        'threshold "lo_hi", IcePop',
        "verl (a string), slime and miles (by custom function), NeMo-RL, OpenRLHF",
        "w = ρ if lo ≤ ρ ≤ hi else 0; zeroed tokens stay counted",
        correction={"name": "icepop", "low": 0.5, "high": 2.0, "denominator": "all"},
    ),
    Peer(
        "ceiling",
        "TIS",
        "verl (a number), SkyRL, ROLL (ub)",
        "w = min(ρ, C), no floor",
        correction={"name": "token_tis", "high": 2.0},
    ),
    Peer(
        "unit",
        "TIS as a pg_variant",
        "ROLL",
        "w = ρ limited to [0, 1]",
        correction={"name": "token_tis", "high": 1.0},
    ),
    Peer(
        "product",
        "sequence",
        "miles MIS, verl, SkyRL, TRL",
        "w = min(exp(Σ Δ), C): the product of the row's ratios",
        correction={"name": "sequence_tis", "high": 3.0},
    ),
    Peer(
        "geometric",
        "sequence",
        "AReaL; OpenRLHF and NeMo-RL in their sequence masks; GSPO everywhere",
        "w = min(exp(mean Δ), C): the geometric mean of the row's ratios",
        correction={"name": "geometric_tis", "high": 3.0},
        note="the same mean is the ratio of the loss gspo",
    ),
    Peer(
        "excluded",
        "rejection",
        "verl",
        "rejected tokens leave mask and denominator",
        correction={"name": "token_mask", "low": 0.5, "high": 2.0},
    ),
    Peer(
        "included",
        "rejection",
        "AReaL, miles MIS",
        "rejected tokens leave the numerator, the denominator is the count before",
        correction={"name": "token_mask", "low": 0.5, "high": 2.0, "denominator": "all"},
    ),
    Peer(
        "seq-mask-tis",
        "seq-mask-tis",
        "OpenRLHF, NeMo-RL",
        "rows outside a band of the geometric mean are masked, the others weigh ρ token by token, unbounded",
        correction={
            "name": "chain",
            "steps": [
                {"name": "geometric_mask", "low": 0.999, "high": 1.002, "denominator": "all"},
                {"name": "token_tis", "high": _UNBOUNDED},
            ],
        },
        note="a ratio ends at exp(20) here",
    ),
    Peer(
        "probability",
        "default mask",
        "prime-rl",
        "masked if A > 0 and Δp > 0.2, or A < 0 and Δp < −0.2; the others weigh the raw ρ; plus τ·Δ²",
        correction={
            "name": "chain",
            "steps": [
                {"name": "prob_diff_mask", "low": 0.2, "high": 0.2, "denominator": "all", "logprobs": "current"},
                {"name": "token_tis", "high": _UNBOUNDED, "logprobs": "current"},
            ],
        },
        loss={"name": "reinforce", "kl_coef": 2e-3, "kl": "k2", "kl_to": "rollout"},
        note="k2 is Δ²/2: kl_coef is 2τ; its KL term is over kept tokens only",
    ),
    Peer(
        "dppo",
        "dppo_tv",
        "verl, SkyRL (dppo), ROLL (diff filter, as prob_diff_mask)",
        "the loss masks by Δp instead of clipping; the ratio is truncated at 20",
        loss={"name": "dppo_tv", "low": 0.2, "high": 0.2, "ratio_cap": 20.0},
    ),
    Peer(
        "trl-default",
        "on by default",
        "TRL (vllm_importance_sampling, sequence_mask, C_max 3.0)",
        "w = exp(Σ Δ) if at most 3, else 0; zeroed rows stay counted",
        correction={
            "name": "chain",
            "steps": [
                {"name": "sequence_mask", "low": 0.0, "high": 3.0, "denominator": "all"},
                {"name": "sequence_tis", "high": 3.0},
            ],
        },
    ),
    Peer(
        "off",
        "off by default",
        "miles, slime, verl, SkyRL, NeMo-RL, OpenRLHF, ROLL",
        "w = 1",
        correction={"name": "none"},
    ),
)
