"""What a piece does to one token, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.protocols import Corrected
from rlcore.types import MicroBatch

__all__ = ["Curve", "curves", "draw", "plot_text"]

_REFERENCE = -1.2
"""Log-prob that the ratio is to: probability 0.3."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: ``y`` against the log-ratio ``x``."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def curves(kind: str, piece: Any, points: int = 161) -> list[Curve]:
    """Rows of one token over a range of log-ratios; nothing for estimators and aggregations.

    A correction gives its weight (0 where it rejects), for both signs of the advantage if they differ; a loss gives
    the factor by which a token's policy gradient is multiplied, for both signs.
    """
    reach = 4.0 if kind == "correction" else 1.5
    x = tuple(-reach + 2 * reach * i / (points - 1) for i in range(points))
    if kind == "correction":
        found = [Curve(f"weight (advantage {a:+g})", x, _weights(piece, x, a)) for a in (1.0, -1.0)]
        return [Curve("weight", x, found[0].y)] if found[0].y == found[1].y else found
    if kind == "loss":
        found = [Curve(f"gradient / policy gradient (advantage {a:+g})", x, _pull(piece, x, a)) for a in (1.0, -1.0)]
        return found[:1] if found[0].y == found[1].y else found
    return []


def _batch(x: Sequence[float], advantage: float) -> MicroBatch:
    import torch

    count = len(x)
    reference = torch.full((count,), _REFERENCE)
    zeros = torch.zeros(count, dtype=torch.int32)
    rows = torch.arange(count, dtype=torch.int32)
    return MicroBatch(
        token_ids=zeros.long(),
        mask=torch.ones(count, dtype=torch.bool),
        rollout_logprobs=reference,
        advantages=torch.full((count,), advantage),
        turn_ids=zeros,
        versions=zeros,
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
        row_groups=rows,
        row_trajectories=rows,
        old_logprobs=reference,
        ref_logprobs=reference,
        entropies=torch.ones(count),
    )


def _weights(piece: Any, x: Sequence[float], advantage: float) -> tuple[float, ...]:
    import torch

    corrected = piece(torch.tensor(x) + _REFERENCE, _batch(x, advantage))
    return tuple(corrected.weights.where(corrected.mask, torch.zeros(())).tolist())


def _pull(piece: Any, x: Sequence[float], advantage: float) -> tuple[float, ...]:
    import torch

    batch = _batch(x, advantage)
    logprobs = (torch.tensor(x) + _REFERENCE).requires_grad_()
    ones = torch.ones(len(x))
    piece(logprobs, batch, Corrected(ones, batch.mask, batch.mask, {}), ones).loss.backward()
    gradient = torch.zeros(len(x)) if logprobs.grad is None else logprobs.grad
    return tuple((gradient / -advantage).tolist())


def plot_text(lines: Sequence[Curve], width: int = 61, height: int = 12) -> str:
    """The lines as characters, ``*`` the first and ``o`` the second."""
    top = min(max((max(line.y) for line in lines), default=1.0), 1e3)
    bottom = min(0.0, max(min((min(line.y) for line in lines), default=0.0), -1e3))
    top = top if top > bottom else bottom + 1.0
    grid = [[" "] * width for _ in range(height)]
    for mark, line in reversed(list(zip("*o", lines, strict=False))):
        for column in range(width):
            value = line.y[round(column * (len(line.y) - 1) / (width - 1))]
            row = round((min(max(value, bottom), top) - bottom) / (top - bottom) * (height - 1))
            grid[height - 1 - row][column] = mark
    left, right = lines[0].x[0], lines[0].x[-1]
    rows = [
        f"{top if i == 0 else bottom:8.3g} |{''.join(row).rstrip()}"
        if i in (0, height - 1)
        else f"         |{''.join(row).rstrip()}"
        for i, row in enumerate(grid)
    ]
    axis = f"{left:<+6g}{'log-ratio':^{width - 12}}{right:>+6g}"
    legend = [f"          {mark} {line.label}" for mark, line in zip("*o", lines, strict=False)]
    return "\n".join([*rows, "         +" + "-" * width, "          " + axis, *legend])


def draw(lines: Sequence[Curve], title: str, path: Path) -> None:
    """The lines as a picture; the ending of ``path`` says which kind.

    Raises:
        ConfigError: matplotlib is missing, or there is nothing to draw, or the file cannot be written.
    """
    if not lines:
        raise ConfigError(f"{title} has no curve to draw: only corrections and losses have")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'rlcore[plot]'") from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for line in lines:
        axes.plot(line.x, line.y, label=line.label)
    axes.set(xlabel="log-ratio", ylabel="factor", title=title)
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
