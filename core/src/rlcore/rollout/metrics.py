"""What the attempts of one step say; a measurement of nothing is ``None``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rlcore.types import FinishReason, Group, Trajectory

__all__ = ["rollout_metrics"]


def rollout_metrics(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Rewards, lengths (tokens, turns), ages (policy versions behind ``version``), ends and seconds of a step's attempts."""
    attempts = [t for group in groups for t in group.trajectories]
    scored = [t.reward for t in attempts if t.reward is not None]
    lengths = [t.sampled_tokens for t in attempts]
    ages = [version - t.min_policy_version for t in attempts if t.min_policy_version is not None]
    ends = Counter(t.end for t in attempts)
    return {
        "reward": _mean(scored),
        "success": _mean([float(reward >= 1) for reward in scored]),
        "no_verdict": 1 - len(scored) / len(attempts),
        "zero_variance": _mean([float(len({r for r in g.rewards if r is not None}) < 2) for g in groups]),
        "truncated": _mean([float(_truncated(t)) for t in attempts]),
        "tokens_per_attempt": _mean(lengths),
        "tokens_per_attempt/max": max(lengths),
        "turns": _mean([len(t.turns) for t in attempts]),
        "age": _mean(ages),
        "age/max": max(ages, default=None),
        **{f"end/{end}": count / len(attempts) for end, count in sorted(ends.items())},
        **{f"seconds/{part}": seconds for part, seconds in _part_means(attempts)},
    }


def _truncated(trajectory: Trajectory) -> bool:
    return any(turn.completion.finish_reason is FinishReason.LENGTH for turn in trajectory.turns)


def _part_means(attempts: Sequence[Trajectory]) -> Iterator[tuple[str, float | None]]:
    for part in ("reset", "agent", "verify", "close"):
        yield f"attempt/{part}", _mean([t.seconds[part] for t in attempts if part in t.seconds])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
