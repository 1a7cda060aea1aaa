"""From an attempt to the rows that are trained.

A row is a sequence of tokens in which every trained token was sampled after exactly the tokens before it. The rows
follow from the turns alone: a turn whose prompt begins with the previous prompt and completion continues the row, any other
begins a new one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlcore.types import Batch, Group, Sample, Trajectory

__all__ = ["batch_of", "rows_of"]


def rows_of(trajectory: Trajectory, advantage: float | Sequence[float]) -> list[Sample]:
    """The rows of one attempt with a verdict.

    Args:
        trajectory: has a reward; every completion has as many log-probs as ids.
        advantage: one number for all sampled tokens, or one per turn.

    Raises:
        ValueError: no reward, or another number of advantages than turns, or one that is not finite.
    """
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.id} has no verdict and cannot be trained")
    turns = trajectory.turns
    per_turn = [float(advantage)] * len(turns) if isinstance(advantage, int | float) else [float(a) for a in advantage]
    if len(per_turn) != len(turns):
        raise ValueError(f"trajectory {trajectory.id}: {len(per_turn)} advantages for {len(turns)} turns")
    if not all(map(math.isfinite, per_turn)):
        raise ValueError(f"trajectory {trajectory.id}: the advantage is not finite")
    rows: list[Sample] = []
    for index, turn in enumerate(turns):
        completion = turn.completion
        if len(completion.logprobs) != len(completion.token_ids):
            raise ValueError(
                f"trajectory {trajectory.id}, turn {index}: {len(completion.token_ids)} ids but "
                f"{len(completion.logprobs)} log-probs"
            )
        row = rows[-1] if rows else None
        if row is None or list(turn.prompt_ids[: len(row.token_ids)]) != row.token_ids:
            row = Sample(
                trajectory_id=trajectory.id,
                group_id=trajectory.group_id,
                task_id=trajectory.task_id,
                row=len(rows),
                token_ids=[],
                mask=[],
                rollout_logprobs=[],
                advantages=[],
                turn_ids=[],
                versions=[],
                reward=trajectory.reward,
            )
            rows.append(row)
        _append(row, turn.prompt_ids[len(row.token_ids) :])
        versions = _versions(len(completion.token_ids), completion.policy_version, completion.min_policy_version)
        _append(row, completion.token_ids, completion.logprobs, per_turn[index], index, versions)
    return [row for row in rows if any(row.mask)]


def _append(
    row: Sample,
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    advantage: float = 0.0,
    turn: int = -1,
    versions: Sequence[int] | None = None,
) -> None:
    count = len(token_ids)
    row.token_ids.extend(token_ids)
    row.mask.extend([logprobs is not None] * count)
    row.rollout_logprobs.extend([math.nan] * count if logprobs is None else logprobs)
    row.advantages.extend([advantage] * count)
    row.turn_ids.extend([turn] * count)
    row.versions.extend([-1] * count if versions is None else versions)


def _versions(count: int, newest: int, oldest: int | None) -> list[int]:
    """Versions of a completion's tokens. Where an update fell into it, only the first token is known to be older, and
    every token counts as old as the oldest: age is a bound, not an estimate."""
    return [newest if oldest is None else oldest] * count


def batch_of(
    groups: Sequence[Group],
    advantages: Mapping[str, float | Sequence[float]],
    policy_version: int,
    temperature: float = 1.0,
) -> Batch:
    """The rows of every attempt that has an advantage, in the order of the groups."""
    return Batch(
        samples=[
            row
            for group in groups
            for trajectory in group.trajectories
            if trajectory.id in advantages and trajectory.reward is not None
            for row in rows_of(trajectory, advantages[trajectory.id])
        ],
        policy_version=policy_version,
        temperature=temperature,
    )
