"""``rlcore launch``: render a run for a launcher, and start it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rlcore.cli._run_options import ConfigOption, RecipeArgument, SetOption, resolve_run
from rlcore.protocols import ClusterRecipe
from rlcore.resolve import absent
from rlcore.types import Cluster, Problem

__all__ = ["launch"]


def launch(
    context: typer.Context,
    recipe: RecipeArgument = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    launcher: Annotated[str, typer.Option(metavar="NAME", help="inline, slurm, ray, or a plugin's.")] = "inline",
    submit: Annotated[bool, typer.Option("--submit", help="Start it; without this it is only printed.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to a file.")] = None,
) -> int:
    """Render a run for a cluster, and start it.

    What a launcher needs to know is in its section: --set launcher.partition=gpu. --submit runs the preflight first.
    """
    given = [*(sets or ()), f"launcher.name={launcher}"]
    resolved = resolve_run(context, recipe, config, given)
    plugins: Any = context.obj.plugins
    run, made = resolved.config, resolved.recipe
    words = _driver(context.obj.named, resolved.name, config or (), given)
    cluster = made.cluster(run) if isinstance(made, ClusterRecipe) else Cluster(1, 0, (), {}, words)
    cluster = replace(cluster, driver=words)
    assert run.launcher is not None
    start = plugins.load("launcher", run.launcher.name)(run.launcher.options)
    if output is not None:
        output.write_text(start.render(run, cluster), encoding="utf-8")
    elif not submit:
        print(start.render(run, cluster), end="")
    if not submit:
        return 0
    problems = [*absent(plugins, run), *(made.preflight(run) if made is not None else ()), *plugins.preflight(run)]
    here = [problem for problem in problems if problem.check not in getattr(start, "elsewhere", ())]
    for problem in here:
        _say(problem)
    if any(problem.fatal for problem in here):
        return 2
    return int(start.launch(run, cluster))


def _driver(named: Sequence[str], recipe: str | None, config: Sequence[Path], sets: Sequence[str]) -> tuple[str, ...]:
    """The command that is the run: what was said on this line, said to ``rlcore train``."""
    words = ["rlcore", "train", *(word for name in named for word in ("--plugin", name))]
    words += [recipe] if recipe is not None else []
    words += [word for path in config for word in ("--config", str(path.absolute()))]
    return (*words, *(word for setting in sets for word in ("--set", setting)))


def _say(problem: Problem) -> None:
    kind = "problem" if problem.fatal else "warning"
    print(f"{kind} [{problem.check}]: {problem.message}\n  what to do: {problem.remedy}", file=sys.stderr)
