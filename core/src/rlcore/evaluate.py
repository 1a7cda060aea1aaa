"""An evaluation outside a run: any policy on any tasks, through the same agent loop, sandbox and grader as in training.

Its directory holds ``evaluation.json`` (the manifest), ``attempts.jsonl`` (one record per attempt, with its conversation),
the ledgers ``requests.jsonl`` and ``sandboxes.jsonl``, and in the end ``summary.json``. Killed and begun again with the
same directory, it makes the attempts that are missing: none twice, and the same table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Any

from rlcore.closing import close_part
from rlcore.config import EvaluationConfig, Offered
from rlcore.errors import ConfigError, RunFailed
from rlcore.plugins import Plugins
from rlcore.protocols import Engine, PolicyClient
from rlcore.record.directory import claim, write_json
from rlcore.record.jsonl import JsonlWriter, read_jsonl
from rlcore.record.manifest import manifest
from rlcore.rollout.episode import EpisodeRunner
from rlcore.rollout.evaluate import evaluate
from rlcore.rollout.lease import SandboxLease
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.session import Session
from rlcore.types import Budget, EndReason, RunContext, Sampling, SandboxSpec, Task, Trajectory, Turn

__all__ = ["evaluate_policy"]

log = logging.getLogger(__name__)

PREFIX = "eval"
MADE_AGAIN = (EndReason.POLICY_LOST, EndReason.SANDBOX_LOST, EndReason.ERROR, EndReason.CANCELLED)
"""Endings that say nothing about the policy: the next process makes such an attempt again."""
FREE = {("attempts", "in_flight"), ("attempts", "retries"), ("attempts", "samples_per_task")}
"""What may differ when an evaluation goes on."""


async def evaluate_policy(
    config: EvaluationConfig,
    plugins: Plugins,
    directory: Path,
    *,
    told: Callable[[Trajectory], None] = lambda _: None,
) -> dict[str, Any]:
    """Evaluate, or go on with an evaluation, and return the summary (also in ``summary.json``).

    ``told`` gets each attempt that this process made.

    Raises:
        ConfigError: nothing to evaluate, or the directory is of another evaluation or in use.
        RunFailed: the infrastructure lost one attempt after the other.
    """
    tasks = _tasks(plugins, config)
    with claim(directory):
        _check_manifest(config, plugins, directory)
        made = dict(_made(directory / "attempts.jsonl"))
        started = monotonic()
        async with AsyncExitStack() as stack:
            records = stack.enter_context(JsonlWriter(directory / "attempts.jsonl"))
            watch = _Watch(limit=max(6, 2 * config.attempts.in_flight))

            def attempted(trajectory: Trajectory) -> None:
                records.write(_record(trajectory), flush=True)
                plugins.notify("rlcore_trajectory_finished", trajectory=trajectory)
                told(trajectory)
                watch.see(trajectory)

            evaluation = await evaluate(
                await _runner(stack, config, plugins, directory),
                tasks,
                samples_per_task=config.attempts.samples_per_task,
                in_flight=config.attempts.in_flight,
                prefix=PREFIX,
                attempted=attempted,
                retries=config.attempts.retries,
                made=made,
            )
        summary = {**evaluation.to_dict(), "seconds": monotonic() - started, "directory": str(directory)}
        write_json(directory / "summary.json", summary)
        return summary


def _tasks(plugins: Plugins, config: EvaluationConfig) -> Sequence[Task]:
    tasks: Sequence[Task] = _build(plugins, "taskset", config.taskset).load()
    ids = [task.id for task in tasks]
    if not ids:
        raise ConfigError(f"taskset {config.taskset.name!r} has no tasks")
    if twice := sorted({i for i in ids if ids.count(i) > 1}) if len(set(ids)) < len(ids) else []:
        raise ConfigError(f"taskset {config.taskset.name!r}: {twice[0]!r} stands for more than one task")
    return tasks


async def _runner(stack: AsyncExitStack, config: EvaluationConfig, plugins: Plugins, directory: Path) -> EpisodeRunner:
    """Everything started; the stack closes it in reverse."""
    context = RunContext(directory.name, directory, config.attempts.seed, config.model.model_dump())
    if config.engine is not None:
        engine: Engine = _build(plugins, "engine", config.engine)
        stack.push_async_callback(close_part, engine.aclose, None, log.warning)
        await engine.start(context)
        context = RunContext(context.run_id, context.run_dir, context.seed, context.model, engine)
    policy: PolicyClient = _build(plugins, "policy", config.policy)
    stack.push_async_callback(close_part, policy.aclose, None, log.warning)
    await policy.start(context)
    ledger = RequestLedger(directory / "requests.jsonl")
    stack.callback(ledger.close)
    lease = None
    if config.sandbox is not None:
        lease = SandboxLease(
            _build(plugins, "sandbox", config.sandbox),
            backend_name=config.sandbox.name,
            ledger_path=directory / "sandboxes.jsonl",
            run_id=directory.name,
        )
        stack.push_async_callback(close_part, lease.aclose, lease.close_bound, log.warning)
    attempts = config.attempts
    sampling = Sampling(temperature=attempts.temperature, top_p=attempts.top_p, seed=attempts.seed)

    def open_session(trajectory_id: str, budget: Budget) -> Session:
        return Session(policy, ledger=ledger, session_id=trajectory_id, sampling=sampling, budget=budget)

    def open_sandbox(spec: SandboxSpec, task_id: str) -> Any:
        if lease is None:
            raise ConfigError(f"task {task_id} needs a sandbox: name one with --sandbox")
        return lease.sandbox(spec, task_id=task_id)

    return EpisodeRunner(
        agent=_build(plugins, "agent", config.agent),
        grader=_build(plugins, "grader", config.grader) if config.grader else None,
        open_session=open_session,
        open_sandbox=open_sandbox,
        budget=Budget(**config.budget.model_dump()),
    )


def _build(plugins: Plugins, kind: str, section: Offered) -> Any:
    return plugins.load(kind, section.name)(section.options)


class _Watch:
    """Ends an evaluation that only loses attempts: a wrong URL must not cost a night."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lost = 0

    def see(self, trajectory: Trajectory) -> None:
        self._lost = self._lost + 1 if trajectory.end in MADE_AGAIN else 0
        if self._lost >= self._limit:
            raise RunFailed(
                f"{self._lost} attempts in a row were lost; the last one: {trajectory.error}. "
                "The same command goes on where this ended"
            )


# --- the directory ----------------------------------------------------------------------------------------------------


def _check_manifest(config: EvaluationConfig, plugins: Plugins, directory: Path) -> None:
    path, now = directory / "evaluation.json", config.model_dump(mode="json")
    if not path.exists():
        if (directory / "attempts.jsonl").exists() or (directory / "manifest.json").exists():
            raise ConfigError(f"{directory} is not the directory of an evaluation: choose another --out")
        write_json(path, manifest(None, now, plugins.provenance()))
        return
    before = dict(_leaves(json.loads(path.read_text("utf-8"))["config"]))
    changed = [key for key, value in _leaves(now) if key not in FREE and before.get(key) != value]
    if changed:
        keys = ", ".join(".".join(key) for key in changed)
        raise ConfigError(f"{directory} holds an evaluation with another {keys}: choose another --out")


def _leaves(values: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*at, key))
        else:
            yield (*at, key), value


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "task": trajectory.task_id,
        "sample": _sample(trajectory),
        "id": trajectory.id,
        "end": trajectory.end,
        "reward": trajectory.reward,
        "error": trajectory.error,
        "tokens": trajectory.sampled_tokens,
        "seconds": trajectory.seconds,
        "info": trajectory.info,
        "turns": [_turn(turn) for turn in trajectory.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "said": (completion.message.to_dict() if completion.message else completion.text),
        "finish": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "observation": [message.to_dict() for message in turn.observation],
        "generation_seconds": turn.generation_seconds,
        "tool_seconds": turn.tool_seconds,
    }


def _sample(trajectory: Trajectory) -> int:
    return int(trajectory.id.removeprefix(f"{trajectory.group_id}-").partition("-")[0])


def _made(path: Path) -> Iterator[tuple[tuple[str, int], Trajectory]]:
    """The attempts that count, of the processes before."""
    for record in read_jsonl(path):
        if record["end"] not in MADE_AGAIN:
            found = Trajectory(record["id"], record["task"], "", end=record["end"], reward=record["reward"])
            yield (record["task"], record["sample"]), found
