"""Validation of the whole: what no single section can see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlcore.errors import ConfigError
from rlcore.plan.hardware import gpu_named
from rlcore.plan.serving import serving_problems
from rlcore.plan.steps import fits
from rlcore.plan.training import Layout, problems, stages

from glm52_plugin.engine import SglangEngines
from glm52_plugin.model import shapes_of
from glm52_plugin.planning import layout_of, serving_of
from glm52_plugin.trainer import MegatronTrainer

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["check", "contradictions"]


def check(run: RunConfig) -> None:
    """Raise ``ConfigError`` with everything that contradicts something else."""
    found = list(contradictions(run))
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} contradictions in the configuration:\n  " + "\n  ".join(found))


def contradictions(run: RunConfig) -> Iterator[str]:
    """Each in a line that begins with the key to change."""
    assert run.recipe is not None
    own = run.recipe.options
    yield from _nodes(own, run)
    yield from _rollout(run)
    yield from _clocks(run)
    if not isinstance(run.trainer.options, MegatronTrainer.Config):
        return
    if own.train_nodes <= own.all_nodes:
        layout = layout_of(own, run)
        wrong = list(problems(shapes_of(own.layers), layout, own.gpus_per_node))
        for problem in wrong:
            yield f"trainer: {problem}"
        if not wrong:
            yield from _memory(own, run, layout)
        tokens = layout.micro_tokens * layout.cp
        if tokens * 8 < run.budget.tokens_per_session:
            yield (
                f"trainer.micro_tokens: {layout.micro_tokens} × CP {layout.cp} = {tokens} tokens are far fewer than a row "
                f"of {run.budget.tokens_per_session}"
            )
    serving = serving_of(own, run) if isinstance(run.engine.options, SglangEngines.Config) else None
    if serving is not None:
        gpu = gpu_named(own.gpu)
        for problem in serving_problems(shapes_of(own.layers), serving, gpu, run.budget.tokens_per_session):
            yield f"engine: {problem}"


def _memory(own: Any, run: RunConfig, layout: Layout) -> Iterator[str]:
    gpu = gpu_named(own.gpu)
    found = stages(shapes_of(own.layers), layout)
    state = fits(found, gpu)
    streamed = run.trainer.options.optimizer_state == "stream"
    if state == "no" or (state == "streamed" and not streamed):
        needed = max(stage.resident if streamed else stage.total for stage in found) / 2**30
        yield (
            f"trainer.optimizer_state: {run.trainer.options.optimizer_state!r} needs {needed:.0f} GiB on the fullest rank, "
            f"a {gpu.name} has {gpu.memory_gib} GiB" + ("" if streamed else ": stream it")
        )


def _nodes(own: Any, run: RunConfig) -> Iterator[str]:
    gpu_named(own.gpu)
    if own.train_nodes > own.all_nodes:
        yield f"recipe.training_nodes: {own.train_nodes} of {own.all_nodes} nodes"
        return
    if own.replay and own.serving_nodes:
        yield f"recipe.nodes: a replay needs no engine; set recipe.nodes={own.train_nodes}, not {own.all_nodes}"
    if own.replay or not isinstance(run.engine.options, SglangEngines.Config):
        return
    gpus, engine = own.serving_nodes * own.gpus_per_node, run.engine.options.gpus
    if not gpus:
        yield (
            f"recipe.nodes: {own.all_nodes} nodes leave none to serve beside {own.train_nodes} that train: at least "
            f"{own.train_nodes + -(-engine // own.gpus_per_node)} are needed, or recipe.replay"
        )
    elif gpus % engine:
        yield f"engine.gpus: engines of {engine} GPUs do not divide {gpus} GPUs of {own.serving_nodes} serving nodes"
    if engine > own.gpus_per_node and engine % own.gpus_per_node:
        yield f"engine.gpus: {engine} GPUs are no whole number of nodes of {own.gpus_per_node}"


def _rollout(run: RunConfig) -> Iterator[str]:
    rollout, engine = run.rollout, run.engine.options
    batch = rollout.tasks_per_step * rollout.samples_per_task
    if rollout.in_flight < batch:
        yield (
            f"rollout.in_flight: {rollout.in_flight} attempts in flight never fill a batch of "
            f"{rollout.tasks_per_step} × {rollout.samples_per_task} = {batch} at once"
        )
    elif rollout.max_age == 0 and rollout.in_flight > batch:
        yield (
            f"rollout.max_age: 0 trains nothing older than the current weights, so {rollout.in_flight} in flight over a "
            f"batch of {batch} are thrown away: allow an age, or set rollout.in_flight={batch}"
        )
    elif rollout.max_age and rollout.max_age < -(-rollout.in_flight // batch):
        yield (
            f"rollout.max_age: {rollout.in_flight} in flight over batches of {batch} are already "
            f"{-(-rollout.in_flight // batch)} steps old; {rollout.max_age} would drop what finishes in time"
        )
    own: Any = run.recipe.options if run.recipe else None
    running = getattr(engine, "max_running", None)
    if running is not None and own is not None and not own.replay:
        engines = max(1, own.serving_nodes * own.gpus_per_node // engine.gpus)
        if running * engines < rollout.in_flight:
            yield (
                f"engine.max_running: {engines} engines × {running} requests are fewer than rollout.in_flight "
                f"{rollout.in_flight}"
            )


def _clocks(run: RunConfig) -> Iterator[str]:
    budget, agent, sandbox = run.budget, run.agent.options, run.sandbox and run.sandbox.options
    timeout = getattr(agent, "command_timeout", None)
    if timeout is not None and timeout > budget.seconds:
        yield f"agent.command_timeout: {timeout:.0f} s are more than the attempt's clock, budget.seconds {budget.seconds:.0f}"
    for name, unit in (("auto_delete_min", 60.0), ("lifetime_seconds", 1.0), ("timeout_seconds", 1.0)):
        life = getattr(sandbox, name, None)
        if isinstance(life, (int, float)) and life * unit <= budget.seconds:
            yield (
                f"sandbox.{name}: a sandbox lives {life * unit:.0f} s, the attempt's clock is {budget.seconds:.0f} s: it "
                "must live longer"
            )
    stop = getattr(sandbox, "auto_stop_min", None)
    if stop is not None and timeout is not None and stop * 60 <= timeout:
        yield (
            f"sandbox.auto_stop_min: a sandbox stops after {stop * 60} s without a call, one command may take "
            f"{timeout:.0f} s"
        )
