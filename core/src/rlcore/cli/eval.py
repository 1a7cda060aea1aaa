"""``rlcore eval``: measure a policy on tasks, and say what the number is worth."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore.cli import Globals
from rlcore.cli._run_options import ConfigOption, SetOption, recipe_of_plugin
from rlcore.errors import ConfigError
from rlcore.plugins import nearest

if TYPE_CHECKING:
    from rlcore.config import EvaluationConfig
    from rlcore.plugins import Plugins
    from rlcore.types import Trajectory

__all__ = ["evaluate"]

DEFAULTS = {
    "taskset": {"name": "tbench2"},
    "agent": {"name": "terminal"},
    "grader": {"name": "tbench2"},
    "sandbox": {"name": "local"},
}
"""For a folder of tasks and no recipe."""


def evaluate(
    context: typer.Context,
    tasks: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR|RECIPE",
            help="Folder of task folders (or one of them), or a recipe; without it, --config or --set names the tasks.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="openai, sglang, any other policy client, or engine: --model DIR in this process."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="engine and sglang: the model's folder; openai: the model's name.")
    ] = None,
    base_url: Annotated[
        list[str] | None, typer.Option("--base-url", help="URL of the server; sglang: may be given several times.")
    ] = None,
    sandbox: Annotated[str | None, typer.Option(help="Sandbox backend. [default for a DIR: local]")] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-k", min=1, help="Attempts at each task. [default: 1]")
    ] = None,
    in_flight: Annotated[int | None, typer.Option(min=1, help="Attempts at the same time. [default: 8]")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Temperature. [default: 1]")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the results; one that exists is gone on with.")] = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Measure a policy on tasks: success with a 95 % interval, pass@k, how attempts ended, each task.

    Interrupted or killed, the same command goes on where it ended.
    """
    line = {
        **_policy(policy, model, base_url or []),
        **({"sandbox": {"name": sandbox}} if sandbox else {}),
        "attempts": {
            key: value
            for key, value in (("samples_per_task", samples), ("in_flight", in_flight), ("temperature", temperature))
            if value is not None
        },
    }
    resolved = _resolve(context.obj, tasks, config or (), line, sets or ())
    what = Path(tasks).resolve().name if tasks is not None else resolved.taskset.name
    which = model or policy or resolved.model.path or resolved.policy.name
    directory = out or Path("evals") / f"{_word(what)}-{_word(Path(which).name)}"
    status, summary = asyncio.run(_evaluate(resolved, context.obj.plugins, directory))
    if summary is None:
        print(f"interrupted; the same command goes on: {directory}", file=sys.stderr)
        return status
    print(json.dumps(summary, indent=2) if as_json else _table(summary))
    return status


def _resolve(
    known: Globals, tasks: str | None, config: Sequence[Path], line: dict[str, Any], sets: Sequence[str]
) -> EvaluationConfig:
    """The configuration of the evaluation; what its recipe makes (a model, tasks) is there afterwards."""
    from rlcore.resolve import Layer, evaluation_layer, file_layer, resolve, resolve_evaluation, set_layer

    plugins, files, last = known.plugins, [file_layer(path) for path in config], set_layer(sets)
    recipe = tasks if tasks in plugins.names("recipe") and not Path(tasks).is_dir() else None
    of_recipe = [
        replace(layer, values={"recipe": layer.values["recipe"]})
        for layer in [*files, last]
        if "recipe" in layer.values
    ]
    if tasks is None and not of_recipe:
        recipe = recipe_of_plugin(known)
    run = resolve(plugins, of_recipe, recipe) if recipe or of_recipe else None
    layers = [evaluation_layer(layer) for layer in files]
    if run is not None:
        layers.insert(0, evaluation_layer(Layer(f"recipe {run.name}", run.config.model_dump(mode="json"))))
    elif tasks is not None:
        layers.insert(0, Layer("defaults of eval", DEFAULTS))
    if tasks is not None and recipe is None:
        line["taskset"] = {"path": tasks}
    last = replace(last, values={name: inner for name, inner in last.values.items() if name != "recipe"})
    layers += [Layer("command line", line), last]
    for section, ways in (("taskset", "a folder of tasks, a recipe"), ("policy", "--model DIR, --policy NAME")):
        if not any(layer.get(section, "name") for layer in layers):
            there = nearest("", plugins.names(section))
            raise ConfigError(f"name the {section}: {ways}, --config FILE or --set {section}.name=NAME{there}")
    resolved = resolve_evaluation(plugins, layers)
    if run is not None and run.recipe is not None:
        run.recipe.prepare(run.config)
    return resolved


def _policy(policy: str | None, model: str | None, urls: list[str]) -> dict[str, Any]:
    """The sections that the options ``--policy``, ``--model`` and ``--base-url`` stand for."""
    if policy in (None, "engine", "embedded"):
        if urls:
            raise ConfigError("--base-url is for servers: say which kind, --policy openai or --policy sglang")
        if model is None and policy is None:
            return {}
        if model is None:
            raise ConfigError("--policy engine wants --model DIR, a model in Hugging Face format")
        return {"policy": {"name": "embedded"}, "engine": {"name": "embedded"}, "model": {"path": model}}
    served: dict[str, Any] = {"engine": None} if urls or policy == "openai" else {}
    if policy == "sglang":
        at = {"base_urls": urls} if urls else {}
        return {"policy": {"name": policy, **at}, **({"model": {"path": model}} if model else {}), **served}
    if len(urls) > 1:
        raise ConfigError(f"--base-url: --policy {policy} takes one")
    options = {"base_url": urls[0] if urls else None, "model": model}
    return {"policy": {"name": policy, **{k: value for k, value in options.items() if value is not None}}, **served}


async def _evaluate(config: EvaluationConfig, plugins: Plugins, directory: Path) -> tuple[int, dict[str, Any] | None]:
    """Evaluate until the end or a signal; SIGTERM and Ctrl-C end it the same way, and everything is closed."""
    from rlcore.evaluate import evaluate_policy

    work = asyncio.ensure_future(evaluate_policy(config, plugins, directory, told=_tell))
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        summary = await work
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0], None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return (1 if summary["success"] is None else 0), summary


def _tell(trajectory: Trajectory) -> None:
    said = "no verdict" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    error = f" ({_line(trajectory.error)})" if trajectory.error else ""
    print(f"{trajectory.id}: {said}, {trajectory.end}, {len(trajectory.turns)} turns{error}", file=sys.stderr)


def _table(summary: Mapping[str, Any]) -> str:
    """For a person: each task, then the figures over all."""
    by_task: Mapping[str, list[float | None]] = summary["by_task"]
    width = max(4, *map(len, by_task))
    lines = [f"{'task'.ljust(width)}  solved  reward"]
    for task, rewards in by_task.items():
        scored = [reward for reward in rewards if reward is not None]
        solved = f"{sum(reward >= 1 for reward in scored)}/{len(scored)}"
        mean = f"{sum(scored) / len(scored):.3f}" if scored else "no verdict"
        lines.append(f"{task.ljust(width)}  {solved:>6}  {mean:>6}")
    lines.append("")
    for kind, success in summary["by_kind"].items():
        lines.append(f"  kind {kind}: {'no verdict' if success is None else f'{success:.3f}'}")
    low, high = summary["interval"]
    if summary["success"] is None:
        lines.append("success     no attempt has a verdict")
    else:
        lines.append(f"success     {summary['success']:.3f}, 95 % [{low:.3f}, {high:.3f}]")
        lines.append(f"reward      {summary['reward']:.3f}")
    lines += [f"pass@{k}".ljust(12) + f"{value:.3f}" for k, value in summary["pass_at_k"].items() if k != "1"]
    lines.append(f"attempts    {summary['attempts']}, of which {summary['no_verdict']} without a verdict")
    lines.append("ended       " + ", ".join(f"{end} {count}" for end, count in summary["ends"].items()))
    lines.append(f"everything  {summary['directory']}")
    return "\n".join(lines)


def _word(text: str) -> str:
    """A part of a directory's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


def _line(text: str) -> str:
    """A message on one line, without what could move a terminal's cursor."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(shown.split())[:300]
