"""One attempt: whose fault its ending is decides what it is worth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rlcore.errors import InfraError, PolicyUnavailable, SandboxLost, TaskError, VerifierUnavailable
from rlcore.protocols import Episode, Sandbox
from rlcore.rollout.episode import EpisodeRunner
from rlcore.rollout.evaluate import evaluate, summarize, wilson
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.session import Session
from rlcore.types import (
    AgentResult,
    Budget,
    Completion,
    EndReason,
    FinishReason,
    Message,
    ModelRequest,
    RunContext,
    Sampling,
    SandboxSpec,
    Task,
    Trajectory,
    Verdict,
)

pytestmark = pytest.mark.anyio

TASK = Task("task", (Message("user", "do it"),), sandbox=SandboxSpec(), metadata={"kind": "write"})


class Client:
    """A policy that says ``hello``, or raises."""

    renderer = None

    def __init__(self, error: Exception | None = None, delay: float = 0.0) -> None:
        self.error, self.delay = error, delay
        self.requests: list[ModelRequest] = []

    async def start(self, context: RunContext) -> None: ...

    async def complete(self, request: ModelRequest) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        if self.error:
            raise self.error
        return Completion((), (), FinishReason.STOP, text="hello", completion_tokens=1, prompt_tokens=3)

    async def abort(self, request_id: str) -> None: ...

    async def running(self) -> None:
        return None

    async def aclose(self) -> None: ...


Script = Callable[[Task, Episode], Any]


class Agent:
    """Asks once and then does what the script says."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script

    async def run(self, task: Task, episode: Episode) -> AgentResult:
        await episode.session.ask(task.messages)
        result = await self.script(task, episode) if self.script else None
        return result or AgentResult(EndReason.TASK_COMPLETE)


class Grader:
    def __init__(self, verdict: Any) -> None:
        self.verdict = verdict
        self.asked = 0

    async def grade(self, task: Task, sandbox: Sandbox | None, trajectory: Trajectory) -> Verdict:
        self.asked += 1
        if isinstance(self.verdict, Exception):
            raise self.verdict
        if callable(self.verdict):
            await self.verdict()
        return Verdict(self.verdict)


def runner(
    agent: Any, grader: Any = None, client: Any = None, sandbox: Exception | None = None, **budget: Any
) -> tuple[EpisodeRunner, list[str]]:
    log: list[str] = []

    @asynccontextmanager
    async def open_sandbox(spec: SandboxSpec, task_id: str) -> AsyncIterator[Any]:
        if sandbox:
            raise sandbox
        log.append("open")
        try:
            yield object()
        finally:
            log.append("close")

    limits = Budget(**({"tokens_per_turn": 10, "tokens_per_session": 100, "turns": 3, "seconds": 5.0} | budget))

    def open_session(session_id: str, budget: Budget) -> Session:
        return Session(
            client or Client(), ledger=RequestLedger(), session_id=session_id, sampling=Sampling(), budget=budget
        )

    return EpisodeRunner(agent, grader, open_session, open_sandbox, limits), log


async def play(made: EpisodeRunner, task: Task = TASK) -> Trajectory:
    return await made.run(task, trajectory_id="t", group_id="g")


async def sleep(task: Task, episode: Episode) -> None:
    await asyncio.sleep(30)


def raises(error: BaseException) -> Script:
    async def script(task: Task, episode: Episode) -> None:
        raise error

    return script


async def test_a_finished_attempt_has_its_verdict_and_its_clock() -> None:
    made, log = runner(Agent(), Grader(1.0))
    trajectory = await play(made)
    assert (trajectory.end, trajectory.reward, trajectory.error) == (EndReason.TASK_COMPLETE, 1.0, None)
    assert len(trajectory.turns) == 1
    assert set(trajectory.seconds) == {"reset", "agent", "verify", "close"}
    assert log == ["open", "close"]


@pytest.mark.fault("DAT-01")
@pytest.mark.parametrize(
    ("script", "verdict", "end", "reward"),
    [
        (sleep, 1.0, EndReason.TIMEOUT, 1.0),
        (sleep, 0.0, EndReason.TIMEOUT, 0.0),
        (sleep, VerifierUnavailable("wrote nothing"), EndReason.TIMEOUT, None),
        (None, VerifierUnavailable("timed out"), EndReason.TASK_COMPLETE, None),
        (None, SandboxLost("gone"), EndReason.SANDBOX_LOST, None),
        (None, PolicyUnavailable("the judge is gone"), EndReason.POLICY_LOST, None),
        (None, TimeoutError("a socket"), EndReason.ERROR, None),
        (raises(InfraError("a proxy failed")), 1.0, EndReason.SANDBOX_LOST, None),
        (raises(TimeoutError("a socket")), 1.0, EndReason.ERROR, None),
        (raises(SandboxLost("gone")), 1.0, EndReason.SANDBOX_LOST, None),
        (raises(PolicyUnavailable("dead")), 1.0, EndReason.POLICY_LOST, None),
        (raises(KeyError("bug")), 1.0, EndReason.ERROR, None),
    ],
)
async def test_a_timeout_is_graded_and_a_fault_of_the_infrastructure_is_no_verdict(
    script: Script | None, verdict: Any, end: str, reward: float | None
) -> None:
    made, log = runner(Agent(script), Grader(verdict), seconds=0.2)
    trajectory = await play(made)
    assert (trajectory.end, trajectory.reward) == (end, reward)
    assert (trajectory.error is None) == (reward is not None)
    assert log == ["open", "close"]


async def test_a_verifier_that_hangs_is_bounded_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.rollout.episode.VERIFIER_GRACE", 0.05)
    made, log = runner(Agent(), Grader(lambda: asyncio.sleep(30)))
    trajectory = await play(made, Task("task", TASK.messages, SandboxSpec(), verifier_seconds=0.05))
    assert trajectory.reward is None
    assert "no verdict within 0.05 s" in str(trajectory.error)
    assert log == ["open", "close"]


async def test_the_tasks_own_clock_can_only_shorten_the_runs() -> None:
    made, _ = runner(Agent(sleep), Grader(0.0), seconds=60)
    trajectory = await play(made, Task("task", TASK.messages, agent_seconds=0.1))
    assert trajectory.end == EndReason.TIMEOUT


@pytest.mark.parametrize(
    ("budget", "end"),
    [({"turns": 1}, EndReason.MAX_TURNS), ({"tokens_per_session": 4}, EndReason.BUDGET)],
)
async def test_a_budget_that_is_used_up_ends_the_attempt_and_it_is_graded(budget: dict[str, Any], end: str) -> None:
    async def again(task: Task, episode: Episode) -> None:
        await episode.session.ask([Message("user", "and now? " * 20)])

    made, _ = runner(Agent(again), Grader(0.5), **budget)
    trajectory = await play(made)
    assert (trajectory.end, trajectory.reward) == (end, 0.5)


async def test_a_sandbox_that_never_started_is_no_verdict() -> None:
    made, log = runner(Agent(), Grader(1.0), sandbox=SandboxLost("no capacity"))
    trajectory = await play(made)
    assert (trajectory.end, trajectory.reward) == (EndReason.SANDBOX_LOST, None)
    assert "no capacity" in str(trajectory.error)
    assert log == []


@pytest.mark.fault("LOOP-05")
async def test_an_attempt_without_a_turn_is_rejected() -> None:
    class Silent:
        async def run(self, task: Task, episode: Episode) -> AgentResult:
            return AgentResult("done", reward=1.0)

    made, _ = runner(Silent())
    trajectory = await play(made)
    assert (trajectory.reward, trajectory.error) == (None, "nothing was sampled")


@pytest.mark.fault("PLG-07")
@pytest.mark.parametrize("reward", ["1", {"reward": 1}, (1, {}), float("nan"), float("inf")])
async def test_an_odd_reward_is_an_error_that_names_the_task(reward: Any) -> None:
    async def odd(task: Task, episode: Episode) -> AgentResult:
        return AgentResult("done", reward=reward)

    made, _ = runner(Agent(odd))
    trajectory = await play(made)
    assert (trajectory.end, trajectory.reward) == (EndReason.ERROR, None)
    assert "agent loop Agent of core, task task" in str(trajectory.error)


async def test_an_agents_bug_is_kept_with_its_traceback() -> None:
    made, _ = runner(Agent(raises(ZeroDivisionError("oops"))), Grader(1.0))
    trajectory = await play(made)
    assert trajectory.error == "ZeroDivisionError: oops"
    assert "test_episode.py" in trajectory.info["traceback"]


async def test_a_bad_task_is_an_error_of_the_attempt() -> None:
    made, _ = runner(Agent(raises(TaskError("task.toml: x"))), Grader(1.0))
    assert (await play(made)).error == "TaskError: task.toml: x"


@pytest.mark.fault("LOOP-14")
@pytest.mark.parametrize("where", ["policy", "agent", "verify"])
async def test_a_cancel_anywhere_closes_the_sandbox_and_stays_a_cancel(where: str) -> None:
    client = Client(delay=30 if where == "policy" else 0)
    agent = Agent(sleep if where == "agent" else None)
    grader = Grader((lambda: asyncio.sleep(30)) if where == "verify" else 1.0)
    made, log = runner(agent, grader, client)
    task = asyncio.create_task(play(made))
    await asyncio.sleep(0.05)
    task.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log == ["open", "close"]


@pytest.mark.fault("LOOP-11")
async def test_the_same_task_gives_the_same_first_request_however_often_it_runs() -> None:
    client = Client()
    before = repr(TASK)

    async def append(task: Task, episode: Episode) -> None:
        await episode.session.ask([Message("user", "more")])

    made, _ = runner(Agent(append), Grader(1.0), client)
    await play(made)
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(play(made))
    first = [request.messages for request in client.requests if len(request.messages) == 1]
    assert len(first) == 5
    assert all(messages == first[0] for messages in first)
    assert repr(TASK) == before


@pytest.mark.fault("DAT-06")
@pytest.mark.parametrize(("count", "samples", "in_flight"), [(10, 1, 4), (10, 3, 8), (1, 1, 8)])
async def test_every_task_is_evaluated_exactly_once_per_sample(count: int, samples: int, in_flight: int) -> None:
    tasks = [Task(f"task-{n}", TASK.messages, metadata={"kind": "odd" if n % 2 else "even"}) for n in range(count)]

    async def judge(task: Task, episode: Episode) -> AgentResult:
        return AgentResult("done", reward=float(int(task.id[5:]) % 2))

    made, _ = runner(Agent(judge))
    seen: list[str] = []
    result = await evaluate(
        made, tasks, samples_per_task=samples, in_flight=in_flight, prefix="e", attempted=lambda t: seen.append(t.id)
    )
    assert len(seen) == len(set(seen)) == count * samples == result.attempts
    assert result.success == (count // 2) / count
    assert {kind: result.by_kind[kind] for kind in result.by_kind} == {
        kind: value for kind, value in {"even": 0.0, "odd": 1.0}.items() if kind == "even" or count > 1
    }


@pytest.mark.fault("OBS-03")
def test_attempts_without_a_verdict_are_counted_and_in_no_mean() -> None:
    tasks = [Task("a"), Task("b")]
    attempts = [Trajectory(str(n), task, "g", end="done", reward=r) for n, (task, r) in enumerate(
        [("a", 1.0), ("a", None), ("b", 0.0), ("b", 1.0)]
    )]  # fmt: skip
    result = summarize(tasks, attempts)
    assert result.success == pytest.approx(2 / 3)
    assert (result.attempts, result.no_verdict) == (4, 1)
    assert result.pass_at_k == {1: pytest.approx(0.75)}


def test_nothing_to_evaluate_is_no_number() -> None:
    result = summarize([Task("a")], [Trajectory("t", "a", "g", reward=None)])
    assert result.success is None
    assert result.interval == (0.0, 1.0)


@pytest.mark.parametrize(
    ("wins", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (8, 16, 0.28, 0.72)]
)
def test_the_interval_is_wilsons(wins: int, trials: int, low: float, high: float) -> None:
    assert wilson(wins, trials) == pytest.approx((low, high), abs=1e-3)


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    rewards: Mapping[str, Sequence[float]] = {"a": [1, 0, 0, 0], "b": [1, 1, 0, 0]}
    attempts = [Trajectory("t", task, "g", reward=r) for task, values in rewards.items() for r in values]
    result = summarize([Task("a"), Task("b")], attempts)
    assert result.pass_at_k[1] == pytest.approx((0.25 + 0.5) / 2)
    assert result.pass_at_k[2] == pytest.approx((0.5 + (1 - 1 / 6)) / 2)
    assert result.pass_at_k[4] == 1.0
