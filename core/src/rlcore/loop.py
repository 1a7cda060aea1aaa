"""The run: the one place that knows both the producer (rollout) and the consumer (learn).

Everything that a configuration names is looked up once, here, and then called plainly. Whatever ends a run (its last
step, Ctrl-C, an error anywhere), it ends once: producers are cancelled, sandboxes and requests closed, the summary
written.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, TypeVar

from rlcore.closing import close_part
from rlcore.config import Offered, RunConfig
from rlcore.errors import RunFailed
from rlcore.learn import checkpoints
from rlcore.learn.rows import batch_of
from rlcore.plugins import Plugins
from rlcore.protocols import AdvantageEstimator, Engine, Objective, PolicyClient, StepResult, Trainer
from rlcore.record.directory import RunDirectory
from rlcore.record.memory import PeakMemory
from rlcore.record.trackers import Trackers
from rlcore.rollout.episode import EpisodeRunner
from rlcore.rollout.evaluate import Evaluation, evaluate
from rlcore.rollout.lease import SandboxLease
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.metrics import rollout_metrics
from rlcore.rollout.order import TaskOrder
from rlcore.rollout.publish import publish
from rlcore.rollout.scheduler import Scheduler
from rlcore.rollout.session import Session
from rlcore.types import Budget, RunContext, Sampling, Task, Trajectory

__all__ = ["Progress", "train"]

T = TypeVar("T")


class Progress(Protocol):
    """Shows a run to a person."""

    def phase(self, text: str) -> None:
        """What the run is doing now."""

    def attempt(self, trajectory: Trajectory) -> None:
        """An attempt ended."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step ended."""

    def evaluated(self, when: str, evaluation: Evaluation) -> None:
        """An evaluation ended; ``when`` is ``before``, ``after`` or the step."""

    def alarm(self, alarm: Mapping[str, Any]) -> None:
        """Something is wrong."""


@dataclass(slots=True)
class _Parts:
    """What a configuration names, built."""

    engine: Engine
    policy: PolicyClient
    trainer: Trainer
    advantage: AdvantageEstimator
    objective: Objective
    runner: EpisodeRunner
    lease: SandboxLease | None
    ledger: RequestLedger
    tasks: Sequence[Task]
    heldout: Sequence[Task]
    unseen: Sequence[Task]


@dataclass(slots=True)
class _State:
    """Where a run stands; what a checkpoint keeps beside the trainer's own files."""

    step: int = 0
    version: int = 0
    empty: int = 0
    seconds: float = 0.0
    rewards: list[float | None] = field(default_factory=list)
    before: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)


async def train(
    config: RunConfig, plugins: Plugins, directory: RunDirectory, progress: Progress, *, resume: bool = False
) -> dict[str, Any]:
    """Run to the end and return the summary (also in ``summary.json``).

    Raises:
        RunFailed: it could not go on; the summary is written all the same.
        CancelledError: it was interrupted; the same.
    """
    run = _Run(config, plugins, directory, progress)
    try:
        await run.go(resume)
    except asyncio.CancelledError:
        run.end = "interrupted"
        raise
    except Exception as error:
        failure = _first(error)
        run.end = f"failed: {failure}"
        if failure is error:
            raise
        raise failure from error
    finally:
        run.finish()
    return run.summary()


class _Run:
    def __init__(self, config: RunConfig, plugins: Plugins, directory: RunDirectory, progress: Progress) -> None:
        self.config = config
        self.plugins = plugins
        self.directory = directory
        self.progress = progress
        self.state = _State()
        self.end = "running"
        self.after: dict[str, Any] | None = None
        self.memory = PeakMemory()
        self.lease: SandboxLease | None = None
        self.trackers = Trackers([self._build("tracker", section) for section in config.trackers], self._alarm)

    # --- from start to end

    async def go(self, resume: bool) -> None:
        """Everything between the run directory and the summary."""
        checkpoint, saved = (
            checkpoints.latest(self.directory.path / "checkpoints") if resume else (None, dict[str, Any]())
        )
        async with AsyncExitStack() as stack:
            stack.enter_context(self.memory)
            parts = await self._start(stack, checkpoint)
            order = TaskOrder(parts.tasks, self.config.run.seed)
            if checkpoint is not None:
                self._restore(saved, order)
            if self.state.version:
                await publish(parts.engine, self.state.version, parts.trainer.weights())
            self.plugins.notify("rlcore_run_started", run_id=self.directory.path.name, config=self.config)
            await self._evaluate_before(parts)
            await self._steps(parts, order)
            await self._evaluate_after(parts)
            self.end = "finished"

    async def _start(self, stack: AsyncExitStack, checkpoint: Path | None) -> _Parts:
        """Build and start every part; the stack closes them in reverse."""
        config, directory = self.config, self.directory
        context = RunContext(
            run_id=directory.path.name,
            run_dir=directory.path,
            seed=config.run.seed,
            model=config.model.model_dump(),
        )
        self.progress.phase("loading tasks")
        tasks = self._build("taskset", config.taskset).load()
        heldout = self._build("taskset", config.eval.taskset).load() if config.eval.taskset else ()
        unseen = self._build("taskset", config.eval.unseen.taskset).load() if config.eval.unseen else ()
        self.progress.phase("starting the engine")
        engine: Engine = self._build("engine", config.engine)
        stack.push_async_callback(self._close, engine.aclose)
        await engine.start(context)
        context = RunContext(context.run_id, context.run_dir, context.seed, context.model, engine)
        policy: PolicyClient = self._build("policy", config.policy)
        stack.push_async_callback(self._close, policy.aclose)
        await policy.start(context)
        self.progress.phase("loading the trainer")
        trainer: Trainer = self._build("trainer", config.trainer)
        stack.push_async_callback(self._close, trainer.aclose)
        await trainer.start(context)
        if checkpoint is not None:
            await trainer.load(checkpoint)
        ledger = RequestLedger(directory.path / "requests.jsonl")
        stack.callback(ledger.close)
        lease = await self._lease(stack)
        self.trackers.start(context, self.config.model_dump(mode="json"))
        return _Parts(
            engine=engine,
            policy=policy,
            trainer=trainer,
            advantage=self._build("advantage", config.advantage),
            objective=Objective(
                correction=self._build("correction", config.correction),
                loss=self._build("loss", config.loss),
                aggregation=self._build("aggregation", config.aggregation),
            ),
            runner=self._runner(policy, lease, ledger, config.rollout.temperature),
            lease=lease,
            ledger=ledger,
            tasks=tasks,
            heldout=heldout,
            unseen=unseen,
        )

    async def _close(self, close: Callable[[], Awaitable[None]], seconds: float | None = None) -> None:
        """Close one part of the run; one that hangs or fails is an alarm."""
        await close_part(close, seconds, lambda message: self._alarm({"kind": "close", "message": message}))

    async def _lease(self, stack: AsyncExitStack) -> SandboxLease | None:
        if self.config.sandbox is None:
            return None
        backend = self._build("sandbox", self.config.sandbox)
        lease = self.lease = SandboxLease(
            backend,
            backend_name=self.config.sandbox.name,
            ledger_path=self.directory.path / "sandboxes.jsonl",
            run_id=self.directory.path.name,
            creates_in_flight=self.config.rollout.sandbox_creates,
            pool=self.config.rollout.sandbox_pool,
        )
        stack.push_async_callback(self._close, lease.aclose, lease.close_bound)
        return lease

    def _runner(
        self, policy: PolicyClient, lease: SandboxLease | None, ledger: RequestLedger, temperature: float
    ) -> EpisodeRunner:
        config = self.config

        def open_session(trajectory_id: str, budget: Budget) -> Session:
            digest = hashlib.sha256(f"{config.run.seed}:{trajectory_id}".encode()).digest()
            sampling = Sampling(
                temperature=temperature, top_p=config.rollout.top_p, seed=int.from_bytes(digest[:6], "big")
            )
            return Session(policy, ledger=ledger, session_id=trajectory_id, sampling=sampling, budget=budget)

        def open_sandbox(spec: Any, task_id: str) -> Any:
            if lease is None:
                raise RunFailed(f"task {task_id} needs a sandbox, and the configuration has no [sandbox] section")
            return lease.sandbox(spec, task_id=task_id)

        return EpisodeRunner(
            agent=self._build("agent", config.agent),
            grader=self._build("grader", config.grader) if config.grader else None,
            open_session=open_session,
            open_sandbox=open_sandbox,
            budget=Budget(**config.budget.model_dump()),
        )

    def _build(self, kind: str, section: Offered) -> Any:
        return self.plugins.load(kind, section.name)(section.options)

    # --- steps

    async def _steps(self, parts: _Parts, order: TaskOrder) -> None:
        rollout = self.config.rollout
        scheduler = Scheduler(
            parts.runner,
            order,
            tasks_per_step=rollout.tasks_per_step,
            samples_per_task=rollout.samples_per_task,
            in_flight=rollout.in_flight,
            max_age=rollout.max_age,
            steps=self.config.run.steps - self.state.step,
            attempt_retries=rollout.attempt_retries,
            min_group=rollout.min_group,
            max_lost=self.config.run.max_empty_steps * rollout.tasks_per_step,
            life=self.directory.life,
            attempted=self._attempted,
            finished=lambda group: self.plugins.notify("rlcore_group_finished", group=group),
        )
        producer = asyncio.create_task(scheduler.run(), name="scheduler")
        try:
            while self.state.step < self.config.run.steps and not self._good_enough():
                await _beside(producer, self._step(parts, scheduler, order))
        finally:
            producer.cancel()
            await asyncio.wait([producer])
            if not producer.cancelled() and (error := producer.exception()) is not None:
                self._alarm({"kind": "scheduler", "message": f"the scheduler failed: {_first(error)}"})
        if self.state.step and not self._saved(self.state.step):
            await self._save(parts, order)

    async def _step(self, parts: _Parts, scheduler: Scheduler, order: TaskOrder) -> None:
        state, step = self.state, self.state.step + 1
        started = monotonic()
        self.progress.phase(f"step {step}: rollout")
        groups = await scheduler.take(state.version)
        rolled = monotonic()
        batch = batch_of(groups, parts.advantage(groups), state.version, self.config.rollout.temperature)
        metrics: dict[str, Any] = rollout_metrics(groups, state.version)
        metrics |= {f"dropped/{cause}": count for cause, count in scheduler.dropped.items()}
        result: StepResult | None = None
        trained = rolled
        if batch.tokens:
            self.progress.phase(f"step {step}: training")
            result = await parts.trainer.step(batch, parts.objective)
            metrics |= result.metrics
            trained = monotonic()
            self._check_finite(step, metrics)
        else:
            metrics["skipped"] = 1
        if metrics.get("skipped"):
            state.empty += 1
        else:
            state.empty = 0
            state.version += 1
            self.progress.phase(f"step {step}: publishing weights")
            await publish(parts.engine, state.version, parts.trainer.weights())
            self.plugins.notify("rlcore_weights_published", version=state.version)
        synced = monotonic()
        metrics |= await self._requests(parts)
        state.step = step
        state.seconds += synced - started
        state.rewards.append(metrics["reward"])
        metrics |= {
            "policy_version": state.version,
            "seconds": synced - started,
            "seconds/rollout": rolled - started,
            "seconds/train": trained - rolled,
            "seconds/sync": synced - trained,
            "rss_gib": self.memory.current_gib(),
        }
        scheduler.step_done(groups)
        if result is not None:
            self.directory.samples(step, batch.samples, groups, result.logprobs, result.old_logprobs)
        self.directory.step(step, metrics)
        self.trackers.log(step, metrics)
        self.plugins.notify("rlcore_step_finished", step=step, metrics=metrics)
        self.progress.step(step, metrics)
        if state.empty >= self.config.run.max_empty_steps:
            raise RunFailed(
                f"{state.empty} steps in a row changed nothing: every group had equal rewards or no verdict (dropped so far: "
                f"{dict(scheduler.dropped) or 'none'}), or no gradient was finite; see attempts.jsonl and alarms.jsonl in "
                f"{self.directory.path}"
            )
        every = self.config.eval.every
        if every and step % every == 0 and step < self.config.run.steps:
            await self._evaluate(parts, str(step))
        every = self.config.run.checkpoint_every
        if every and step % every == 0:
            await self._save(parts, order)

    def _check_finite(self, step: int, metrics: Mapping[str, Any]) -> None:
        bad = sorted(k for k, v in metrics.items() if isinstance(v, float) and (v != v or v in (_INF, -_INF)))
        if bad or metrics.get("nonfinite"):
            self._alarm(
                {"kind": "nonfinite", "step": step, "metrics": bad, "message": f"step {step}: not finite: {bad}"}
            )

    async def _requests(self, parts: _Parts) -> dict[str, int]:
        """The request ledger's figures, after ending what the engine still works on for nobody."""
        zombies = await parts.ledger.sweep(parts.policy)
        if zombies:
            self._alarm({"kind": "zombie_requests", "requests": sorted(zombies), "message": f"{len(zombies)} zombies"})
        return parts.ledger.metrics()

    def _good_enough(self, window: int = 5) -> bool:
        """Whether the moving mean of the reward has reached ``run.stop_at_reward``."""
        bound, recent = self.config.run.stop_at_reward, self.state.rewards[-window:]
        scored = [reward for reward in recent if reward is not None]
        return bound is not None and len(scored) == window and sum(scored) / window >= bound

    def _attempted(self, trajectory: Trajectory) -> None:
        self.directory.attempt(trajectory)
        self.progress.attempt(trajectory)
        if "traceback" in trajectory.info:
            self._alarm(
                {
                    "kind": "attempt_error",
                    "attempt": trajectory.id,
                    "task": trajectory.task_id,
                    "message": f"attempt {trajectory.id}: {trajectory.error}",
                    "traceback": trajectory.info["traceback"],
                }
            )
        self.plugins.notify("rlcore_trajectory_finished", trajectory=trajectory)

    def _alarm(self, alarm: Mapping[str, Any]) -> None:
        self.directory.alarm(alarm)
        self.progress.alarm(alarm)
        self.plugins.notify("rlcore_alarm_raised", alarm=alarm)

    # --- checkpoints

    def _restore(self, saved: Mapping[str, Any], order: TaskOrder) -> None:
        if saved["plugins"] != self.plugins.hash:
            self._alarm(
                {"kind": "plugins_changed", "message": "the plugin set differs from the one that wrote the checkpoint"}
            )
        order.restore(saved["order"])
        self.state = _State(
            step=saved["step"],
            version=saved["version"],
            seconds=saved["seconds"],
            rewards=list(saved["rewards"]),
            before=saved["before"],
            evaluations=list(saved["evaluations"]),
        )

    def _saved(self, step: int) -> bool:
        found = checkpoints.complete(self.directory.path / "checkpoints")
        return bool(found) and found[-1].name == f"step-{step:06d}"

    async def _save(self, parts: _Parts, order: TaskOrder) -> None:
        state = self.state
        self.progress.phase(f"step {state.step}: saving")
        await checkpoints.save(
            self.directory.path / "checkpoints",
            state.step,
            {
                "version": state.version,
                "seconds": state.seconds,
                "rewards": state.rewards,
                "before": state.before,
                "evaluations": state.evaluations,
                "order": order.state(),
                "plugins": self.plugins.hash,
            },
            parts.trainer.save,
            self.config.run.keep_checkpoints,
        )

    # --- evaluation

    async def _evaluate_before(self, parts: _Parts) -> None:
        if self.config.eval.before_and_after and self.state.step == 0:
            self.state.before = await self._evaluate_all(parts, "before")

    async def _evaluate_after(self, parts: _Parts) -> None:
        if self.config.eval.before_and_after:
            self.after = await self._evaluate_all(parts, "after")

    async def _evaluate_all(self, parts: _Parts, when: str) -> dict[str, Any]:
        """Held-out tasks, and beside them what the configuration asks for: greedy decoding, kinds never trained."""
        section = self.config.eval
        found = {"heldout": await self._evaluate(parts, when)}
        if section.greedy:
            found["greedy"] = await self._evaluate(parts, f"{when}, greedy", temperature=0.0)
        if section.unseen:
            found["unseen"] = await self._evaluate(parts, f"{when}, unseen kinds", parts.unseen)
            if section.greedy:
                found["unseen_greedy"] = await self._evaluate(
                    parts, f"{when}, unseen kinds, greedy", parts.unseen, temperature=0.0
                )
        return {name: evaluation.to_dict() for name, evaluation in found.items()}

    async def _evaluate(
        self, parts: _Parts, when: str, tasks: Sequence[Task] | None = None, temperature: float | None = None
    ) -> Evaluation:
        section = self.config.eval
        tasks = parts.heldout if tasks is None else tasks
        temperature = section.temperature if temperature is None else temperature
        self.progress.phase(f"evaluating ({when}): {len(tasks)} tasks")
        evaluation = await evaluate(
            self._runner(parts.policy, parts.lease, parts.ledger, temperature),
            tasks,
            samples_per_task=section.samples_per_task,
            in_flight=self.config.rollout.in_flight,
            prefix=f"eval-{self.directory.life}-{when.replace(', ', '-').replace(' ', '-')}",
            attempted=self._attempted,
            retries=self.config.rollout.attempt_retries,
        )
        self.state.evaluations.append({"when": when, "step": self.state.step, **evaluation.to_dict()})
        self.progress.evaluated(when, evaluation)
        return evaluation

    # --- the end

    def summary(self) -> dict[str, Any]:
        """What a run came to; the content of ``summary.json``."""
        state = self.state
        heldout: dict[str, Any] = {}
        for when, found in (("before", state.before), ("after", self.after)):
            for name in ("heldout", *(found or {})):
                evaluation = (found or {}).get(name)
                heldout[f"{name}_success_{when}"] = evaluation and evaluation["success"]
                heldout[f"{name}_{when}"] = evaluation
        return {
            "run": self.directory.path.name,
            "end": self.end,
            "steps": state.step,
            "seconds": state.seconds,
            "seconds_per_step": state.seconds / state.step if state.step else None,
            "peak_rss_gib": self.memory.peak_gib,
            "reward_by_step": state.rewards,
            **heldout,
            "evaluations": state.evaluations,
            "sandboxes": asdict(self.lease.stats) if self.lease is not None else None,
        }

    def finish(self) -> None:
        """Write the summary and tell everyone; whatever happened before."""
        summary = self.summary()
        try:
            self.directory.summary(summary)
        except OSError as error:
            if self.end == "finished":  # else the reason is on its way up already
                raise RunFailed(f"the summary could not be written to {self.directory.path}: {error}") from error
        finally:
            self.trackers.finish(summary)
            self.plugins.notify("rlcore_run_finished", run_id=self.directory.path.name, summary=summary)
            self.directory.close()


_INF = float("inf")


async def _beside(producer: asyncio.Task[None], work: Awaitable[T]) -> T:
    """``work``, unless the producer ends before it: then its error."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, producer}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _first(producer.exception()) if producer.exception() else RunFailed("the scheduler ended early")
        return task.result()
    finally:
        if task.done():
            _ = task.cancelled() or task.exception()  # seen, where this one is cancelled in the moment of a failure
        else:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _first(error: BaseException | None) -> BaseException:
    """The first real error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if error is not None else RunFailed("ended without a reason")
