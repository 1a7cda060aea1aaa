"""``rlcore train``: check, prepare, run, and say what it came to."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore.cli._run_options import ConfigOption, RecipeArgument, SetOption, resolve_run, resolve_saved
from rlcore.cli._tables import print_table
from rlcore.errors import ConfigError, RunFailed
from rlcore.resolve import absent
from rlcore.types import Problem

if TYPE_CHECKING:
    from rlcore.plugins import Plugins
    from rlcore.resolve import Resolved

__all__ = ["train"]

EVALUATIONS = {
    "heldout": "held-out",
    "greedy": "greedy",
    "unseen": "unseen kinds",
    "unseen_greedy": "unseen, greedy",
}
"""Evaluations as the summary names them, and as people read them."""


def train(
    context: typer.Context,
    recipe: RecipeArgument = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run directory from its last complete checkpoint.")
    ] = None,
    preflight: Annotated[bool, typer.Option("--preflight", help="Only check whether the run can start.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show every value with its origin, and what would run, node by node.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary (or the problems) as JSON.")] = False,
) -> int:
    """Train a model as a recipe says."""
    plugins: Plugins = context.obj.plugins
    if resume is None:
        resolved = resolve_run(context, recipe, config, sets)
    elif recipe or config:
        raise ConfigError("--resume takes the run's own recipe and configuration: leave out the recipe and --config")
    else:
        resolved = resolve_saved(context, resume, sets)
    if dry_run:
        from rlcore.cli._dry_run import print_dry_run

        print_dry_run(resolved, as_json)
        return 0
    problems = _problems(plugins, resolved)
    if preflight or any(problem.fatal for problem in problems):
        return _report_problems(problems, as_json)
    for problem in problems:
        print(f"warning: {problem.message}; {problem.remedy}", file=sys.stderr)
    if resolved.recipe is not None:
        resolved.recipe.prepare(resolved.config)
    return _run(plugins, resolved, resume, as_json)


def _problems(plugins: Plugins, resolved: Resolved) -> list[Problem]:
    found = list(resolved.recipe.preflight(resolved.config)) if resolved.recipe is not None else []
    return [*absent(plugins, resolved.config), *found, *plugins.preflight(resolved.config)]


def _report_problems(problems: Sequence[Problem], as_json: bool) -> int:
    if as_json:
        print(
            json.dumps(
                [{k: getattr(p, k) for k in ("check", "message", "remedy", "fatal")} for p in problems], indent=2
            )
        )
    elif problems and sys.stdout.isatty():
        rows = [["problem" if p.fatal else "warning", p.check, p.message, p.remedy] for p in problems]
        print_table("preflight", ["", "check", "what is wrong", "what to do"], rows)
    else:
        for p in problems:
            print(f"{'problem' if p.fatal else 'warning'} [{p.check}]: {p.message}\n  what to do: {p.remedy}")
        if not problems:
            print("preflight: nothing found that would stop this run")
    return 2 if any(problem.fatal for problem in problems) else 0


def _run(plugins: Plugins, resolved: Resolved, resume: Path | None, as_json: bool) -> int:
    from rlcore.cli._progress import progress
    from rlcore.record.directory import RunDirectory
    from rlcore.record.manifest import manifest

    config = resolved.config
    recipe = config.recipe.name if config.recipe is not None else None
    facts = manifest(recipe, config.model_dump(mode="json"), plugins.provenance())
    if resume is not None:
        directory = RunDirectory.reopen(resume, facts)
    else:
        name = config.run.id if config.run.id is not None else f"{recipe or 'run'}-{strftime('%Y%m%d-%H%M%S')}"
        if Path(name).name != name or name in ("", ".", ".."):
            raise ConfigError(f"run.id: {name!r} is not a plain directory name")
        directory = RunDirectory.create(Path(config.run.dir) / name, facts)
    with progress(config.run.steps, quiet=as_json) as display:
        status, summary = asyncio.run(_train(plugins, resolved, directory, display, resume is not None))
    _report(directory.path, summary, as_json)
    return status


async def _train(
    plugins: Plugins, resolved: Resolved, directory: Any, display: Any, resume: bool
) -> tuple[int, dict[str, Any]]:
    """Run until the end or a signal; SIGTERM and Ctrl-C end it the same way."""
    from rlcore.loop import train as train_loop
    from rlcore.record.directory import read_json

    run = asyncio.ensure_future(train_loop(resolved.config, plugins, directory, display, resume=resume))
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        run.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return 0, await run
    except asyncio.CancelledError:
        if not received:
            raise
        try:
            return 128 + received[0], read_json(directory.path / "summary.json")
        except (OSError, ValueError) as error:
            raise RunFailed(f"interrupted, and without a summary in {directory.path}: {error}") from error
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _report(path: Path, summary: Mapping[str, Any], as_json: bool) -> None:
    """The summary for a person (or a program), and the picture."""
    from rlcore.learn.checkpoints import complete
    from rlcore.record.picture import reward_png, sparkline

    drawn = reward_png(path / "reward.png", summary)
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    print(f"\nrun {summary['run']}: {summary['end']} after {summary['steps']} steps")
    if summary["steps"]:
        print(f"  reward           {sparkline(summary['reward_by_step'])}")
        print(f"  training         {summary['seconds']:.0f} s, {summary['seconds_per_step']:.2f} s per step")
    for name, label in EVALUATIONS.items():
        for when in ("before", "after"):
            found = summary.get(f"{name}_{when}")
            if found and found["success"] is not None:
                low, high = found["interval"]
                print(
                    f"  {label:16} {found['success']:.3f} [{low:.3f}, {high:.3f}] {when}, {found['attempts']} attempts"
                )
    print(f"  memory           {summary['peak_rss_gib']:.1f} GiB at most, all processes")
    if drawn:
        print(f"  picture          {path / 'reward.png'}")
    print(f"  everything       {path}")
    if summary["end"] != "finished" and complete(path / "checkpoints"):
        print(f"  to go on         rlcore train --resume {path}")
