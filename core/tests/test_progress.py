"""What a person sees of a run: lines or a live table, whatever the model or the world wrote."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from rich.console import Console
from rlcore.cli._progress import _Live, _Plain
from rlcore.rollout.evaluate import Evaluation
from rlcore.types import Trajectory

HOSTILE = ["[/bold]", "%s %d", "{x}", "\x1b[2J\x1b[H", "a\x00b", "x" * 5_000_000, "\ud800", "[red]not markup"]
METRICS = {"reward": 0.5, "success": 0.25, "seconds/rollout": 1.25, "k3": None}


def shown(live: _Live) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=True, legacy_windows=False)
    console.print(live.render())
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.fault("OBS-10")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_breaks_the_display_or_steers_the_terminal(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    plain, live = _Plain(10, stream), _Live(10)
    for display in (plain, live):
        display.phase(f"evaluating {text}")
        display.alarm({"message": text})
    out = stream.getvalue() + capsys.readouterr().err
    picture = shown(live)
    assert len(out) < 20_000
    assert len(picture) < 20_000
    assert "\x1b" not in out
    assert "\x1b[2J" not in picture
    assert "\x00" not in out + picture
    if len(text) < 100 and text.isprintable():
        assert text in out
        assert text in picture


def test_a_step_is_one_line_and_what_was_not_measured_is_a_dash() -> None:
    stream = io.StringIO()
    _Plain(10, stream).step(3, METRICS)
    assert "step 3/10 reward=0.500 success=0.25 k3=- clip=- " in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_the_table_keeps_the_last_steps_and_the_reward_so_far() -> None:
    live = _Live(40)
    for step in range(1, 31):
        live.step(step, {"reward": step / 30})
        live.attempt(Trajectory("t", "task", "g"))
    live.evaluated("before", Evaluation(0.25, (0.1, 0.4), 0.25, 16, 1))
    picture = shown(live)
    assert "30/40" in picture
    assert " 1/40" not in picture
    assert "▁" in picture
    assert "█" in picture
    assert "success 0.250 [0.100, 0.400] in 16 attempts, 1 without a verdict" in picture


def test_an_evaluation_without_a_verdict_says_so() -> None:
    stream = io.StringIO()
    _Plain(1, stream).evaluated("after", Evaluation(None, (0.0, 1.0), None, 4, 4))
    assert "held-out (after): no verdict in 4 attempts" in stream.getvalue()


def test_lines_go_to_stderr_where_stdout_is_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    from rlcore.cli._progress import progress

    with progress(3, quiet=True) as display:
        display.step(1, METRICS)
    captured: Any = capsys.readouterr()
    assert captured.out == ""
    assert "step 1/3" in captured.err
    assert sys.stdout.isatty() is False
