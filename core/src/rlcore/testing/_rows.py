"""Rows of plain floats, and the packed micro-batch of tensors that says the same: two sides of every comparison."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from rlcore.protocols import Corrected
from rlcore.types import MicroBatch

__all__ = ["JUNK", "Row", "Token", "capped_exp", "pack", "random_rows", "split", "trained"]

Tensor: TypeAlias = Any

JUNK = (math.nan, math.inf, -math.inf, 1e6)
"""What masked positions may hold without anybody noticing."""

POLICY_VERSION = 7


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token, in plain floats that are exact in float32.

    Attributes:
        logprob: the trainer's current log-prob.
        old: ``old_logprobs``.
        rollout: ``rollout_logprobs``.
        ref: ``ref_logprobs``.
        advantage: of the token.
        entropy: of the distribution it was sampled from.
        weight: the correction's weight.
        token_weight: the aggregation's weight.
        kept: whether the correction keeps it.
        turn: index of its turn.
        gap: ``policy_version`` minus the version that sampled it.
    """

    logprob: float
    old: float
    rollout: float
    ref: float
    advantage: float
    entropy: float = 1.0
    weight: float = 1.0
    token_weight: float = 1.0
    kept: bool = True
    turn: int = 0
    gap: int = 0


@dataclass(slots=True)
class Row:
    """One row; ``None`` stands for a position outside the mask (prompt, observation, padding)."""

    positions: list[Token | None] = field(default_factory=list)
    group: int = 0
    trajectory: int = 0

    @property
    def tokens(self) -> list[Token]:
        """The tokens of the batch's mask."""
        return [token for token in self.positions if token is not None]


def capped_exp(log_ratio: float) -> float:
    """``exp(min(x, 20))``, as every ratio of rlcore."""
    return math.exp(min(log_ratio, 20.0))


def single(value: float) -> float:
    """Rounded to float32, so that both sides compute with the same number."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def trained(rows: Sequence[Row]) -> Iterator[tuple[int, int, Token]]:
    """Row number, position in the row, token: of every kept token."""
    for number, row in enumerate(rows):
        for position, token in enumerate(row.positions):
            if token is not None and token.kept:
                yield number, position, token


def random_rows(
    seed: int,
    lengths: Sequence[int],
    scale: float,
    *,
    by_row: bool = False,
    weights: bool = True,
) -> list[Row]:
    """Ragged rows of up to three turns each.

    Args:
        seed: of every number in them.
        lengths: positions of each row, 0 allowed.
        scale: standard deviation of the log-ratios.
        by_row: one advantage for all tokens of a row.
        weights: draw weights and rejected tokens too; else they are 1 and none is rejected.
    """
    rng = random.Random(seed)
    rows = []
    for number, length in enumerate(lengths):
        row = Row(group=rng.randrange(max(1, len(lengths) // 2)), trajectory=number)
        shared = rng.choice([rng.gauss(0, 1), 0.0, 1.0, -1.0])
        turn, inside = -1, False
        for position in range(length):
            if position == 0 or rng.random() < 0.2:
                inside = position > 0 and rng.random() < 0.8
                turn += inside
            if not inside:
                row.positions.append(None)
                continue
            old = -abs(rng.gauss(0, 2)) if rng.random() < 0.9 else -1e-4 * rng.random()
            row.positions.append(
                Token(
                    logprob=single(min(old + rng.gauss(0, scale), 0.0)),
                    old=single(old),
                    rollout=single(min(old + rng.gauss(0, scale), 0.0)),
                    ref=single(min(old + rng.gauss(0, scale), 0.0)),
                    advantage=single(shared if by_row else rng.choice([shared, rng.gauss(0, 1), 0.0])),
                    entropy=single(abs(rng.gauss(0, 1))),
                    weight=single(rng.random() * 2) if weights else 1.0,
                    token_weight=single(rng.random()) if weights else 1.0,
                    kept=not weights or rng.random() < 0.85,
                    turn=turn,
                    gap=rng.randrange(4),
                )
            )
        rows.append(row)
    return rows


@dataclass(slots=True)
class Packed:
    """What a loss or a correction is called with.

    Attributes:
        logprobs: ``[T]`` current, a leaf with gradient.
        batch: every array of it may require a gradient (``leaves``): none may get one.
        corrected: weights, mask and counted tokens as the rows say.
        token_weights: ``[T]``.
        places: row number and position in the row of each of the T positions.
    """

    logprobs: Tensor
    batch: MicroBatch
    corrected: Corrected
    token_weights: Tensor
    places: list[tuple[int, int]]
    leaves: dict[str, Tensor]


def pack(rows: Sequence[Row], junk: float = math.nan, *, padding: int = 0) -> Packed:
    """The rows as tensors; ``junk`` stands wherever nobody may look, and in ``padding`` positions behind each row."""
    import torch

    places = [(n, p) for n, row in enumerate(rows) for p in range(len(row.positions) + padding)]
    tokens = [rows[n].positions[p] if p < len(rows[n].positions) else None for n, p in places]

    def floats(name: str, *, wants_kept: bool = False) -> Tensor:
        values = [junk if t is None or (wants_kept and not t.kept) else getattr(t, name) for t in tokens]
        return torch.tensor(values, dtype=torch.float32).requires_grad_()

    leaves = {
        "rollout_logprobs": floats("rollout"),
        "old_logprobs": floats("old"),
        "ref_logprobs": floats("ref"),
        "advantages": floats("advantage"),
        "weights": floats("weight", wants_kept=True),
        "token_weights": floats("token_weight", wants_kept=True),
    }
    mask = torch.tensor([t is not None for t in tokens], dtype=torch.bool)
    kept = torch.tensor([t is not None and t.kept for t in tokens], dtype=torch.bool)
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row.positions) + padding)
    batch = MicroBatch(
        token_ids=torch.zeros(len(tokens), dtype=torch.int64),
        mask=mask,
        rollout_logprobs=leaves["rollout_logprobs"],
        advantages=leaves["advantages"],
        turn_ids=torch.tensor([-1 if t is None else t.turn for t in tokens], dtype=torch.int32),
        versions=torch.tensor([-1 if t is None else POLICY_VERSION - t.gap for t in tokens], dtype=torch.int32),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        row_groups=torch.tensor([row.group for row in rows], dtype=torch.int32),
        row_trajectories=torch.tensor([row.trajectory for row in rows], dtype=torch.int32),
        policy_version=POLICY_VERSION,
        old_logprobs=leaves["old_logprobs"],
        ref_logprobs=leaves["ref_logprobs"],
        entropies=floats("entropy"),
    )
    corrected = Corrected(leaves["weights"], kept, mask, {})
    return Packed(floats("logprob"), batch, corrected, leaves["token_weights"], places, leaves)


def split(rows: Sequence[Row], parts: int, seed: int) -> list[list[Row]]:
    """The rows, shuffled, in so many micro-batches (some may be empty)."""
    rng = random.Random(seed)
    shuffled = list(rows)
    rng.shuffle(shuffled)
    found: list[list[Row]] = [[] for _ in range(parts)]
    for row in shuffled:
        found[rng.randrange(parts)].append(row)
    return found


def changed(rows: Sequence[Row], **values: Any) -> list[Row]:
    """The rows with fields of every token set: a number, or a function of the token."""

    def change(token: Token | None) -> Token | None:
        if token is None:
            return None
        return replace(token, **{k: v(token) if callable(v) else v for k, v in values.items()})

    return [Row([change(t) for t in row.positions], row.group, row.trajectory) for row in rows]
