"""Shows a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rlcore.record.picture import sparkline
from rlcore.types import Trajectory

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlcore.loop import Progress
    from rlcore.rollout.evaluate import Evaluation

__all__ = ["progress"]

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward", ".3f"),
    ("success", "success", ".2f"),
    ("k3", "k3", ".4f"),
    ("clip", "loss/clip_fraction", ".3f"),
    ("ESS", "ess", ".3f"),
    ("tokens", "tokens_per_attempt", ".1f"),
    ("cut", "truncated", ".2f"),
    ("rollout s", "seconds/rollout", ".1f"),
    ("train s", "seconds/train", ".1f"),
    ("sync s", "seconds/sync", ".2f"),
)
"""Heading, metric, format."""

ROWS = 12


@contextmanager
def progress(steps: int, *, quiet: bool = False) -> Iterator[Progress]:
    """The display that fits where stdout goes (stderr if `quiet`: stdout is for JSON); closed on the way out."""
    if quiet or not sys.stdout.isatty():
        yield _Plain(steps, sys.stderr if quiet else sys.stdout)
        return
    from rich.live import Live

    live = _Live(steps)
    with Live(get_renderable=live.render, refresh_per_second=4, transient=False):
        yield live


class _Plain:
    """One line per event."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._steps = steps
        self._stream = stream

    def phase(self, text: str) -> None:
        if not text.startswith("step "):
            self._say(text)

    def attempt(self, trajectory: Trajectory) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        cells = " ".join(f"{name.replace(' ', '_')}={value}" for name, value in _cells(metrics))
        skipped = " (nothing to train)" if metrics.get("skipped") else ""
        self._say(f"step {step}/{self._steps} {cells}{skipped}")

    def evaluated(self, when: str, evaluation: Evaluation) -> None:
        self._say(_evaluated(when, evaluation))

    def alarm(self, alarm: Mapping[str, Any]) -> None:
        self._say(f"alarm: {alarm['message']}", sys.stderr)

    def _say(self, text: str, stream: TextIO | None = None) -> None:
        print(time.strftime("%H:%M:%S"), _printable(text), file=stream or self._stream, flush=True)


class _Live:
    """A table of the last steps, the reward so far as a line of blocks, and what is going on now."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._phase = "starting"
        self._rows: deque[tuple[int, list[str]]] = deque(maxlen=ROWS)
        self._rewards: list[float | None] = []
        self._notes: deque[str] = deque(maxlen=5)
        self._attempts = 0
        self._since = time.monotonic()

    def phase(self, text: str) -> None:
        self._phase, self._attempts, self._since = text, 0, time.monotonic()

    def attempt(self, trajectory: Trajectory) -> None:
        self._attempts += 1

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._rows.append((step, [value for _, value in _cells(metrics)]))
        self._rewards.append(metrics.get("reward"))

    def evaluated(self, when: str, evaluation: Evaluation) -> None:
        self._notes.append(_evaluated(when, evaluation))

    def alarm(self, alarm: Mapping[str, Any]) -> None:
        self._notes.append(f"alarm: {alarm['message']}")

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=False)
        table.add_column("step", justify="right")
        for heading, *_ in COLUMNS:
            table.add_column(heading, justify="right")
        for step, cells in self._rows:
            table.add_row(f"{step}/{self._steps}", *cells)
        attempts = f", {self._attempts} attempts" if self._attempts else ""
        now = f"{self._phase} ({time.monotonic() - self._since:.0f} s{attempts})"
        return Group(
            table,
            Text(f"reward {sparkline(self._rewards)}"),
            *(Text(_printable(note)) for note in self._notes),
            Spinner("dots", text=Text(_printable(now))),
        )


def _cells(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    values = [(heading, metrics.get(key), form) for heading, key, form in COLUMNS]
    return [(heading, "-" if value is None else format(value, form)) for heading, value, form in values]


def _evaluated(when: str, evaluation: Evaluation) -> str:
    low, high = evaluation.interval
    if evaluation.success is None:
        return f"held-out ({when}): no verdict in {evaluation.attempts} attempts"
    return (
        f"held-out ({when}): success {evaluation.success:.3f} [{low:.3f}, {high:.3f}] in {evaluation.attempts} attempts"
        + (f", {evaluation.no_verdict} without a verdict" if evaluation.no_verdict else "")
    )


def _printable(text: str) -> str:
    """Model text must not steer the terminal: control characters become visible, long texts are cut."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:2000])
