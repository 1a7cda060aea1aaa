"""A run as a picture: the reward by step, as PNG and as a line of block characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["reward_png", "sparkline"]

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """Values as block characters between their least and their largest; a missing one is a space.

    More than ``width`` values are averaged into ``width`` bins.
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [_mean(values[a:b]) for a, b in pairwise(edges)]
    present = [v for v in values if v is not None]
    if not present:
        return ""
    low, span = min(present), max(present) - min(present)
    top = len(BLOCKS) - 1
    return "".join(" " if v is None else BLOCKS[round((v - low) / span * top) if span else 0] for v in values)


def reward_png(path: Path, summary: Mapping[str, Any], window: int = 5) -> bool:
    """Draw the reward of each step, its moving mean, and held-out success before and after, if there are any.

    Returns False, and draws nothing, where matplotlib is not installed or no step was taken.
    """
    rewards: Sequence[float | None] = summary["reward_by_step"]
    if not any(r is not None for r in rewards):
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps = range(1, len(rewards) + 1)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    nan = float("nan")
    axes.plot(steps, [nan if r is None else r for r in rewards], "o", color="0.7", ms=4, label="mean reward of a step")
    means = [_mean(rewards[max(0, i - window + 1) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, [nan if m is None else m for m in means], color="C0", lw=2, label=f"mean of {window} steps")
    for key, step, label in (
        ("heldout_success_before", 0, "held-out success before"),
        ("heldout_success_after", len(rewards), "held-out success after"),
    ):
        if (value := summary.get(key)) is not None:
            axes.plot([step], [value], "D", color="C3" if step == 0 else "C2", ms=9, label=f"{label}: {value:.2f}")
    axes.set(xlabel="optimizer step", ylabel="reward", title=f"{summary['run']}: {summary['end']}")
    top = max(1.0, *(r for r in rewards if r is not None))
    axes.set_ylim(min(0.0, *(r for r in rewards if r is not None)) - 0.03 * top, 1.05 * top)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    part = path.with_suffix(".part.png")
    figure.savefig(part)
    part.replace(path)
    return True


def _mean(values: Sequence[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None
