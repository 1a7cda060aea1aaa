"""What ``rlcore plugins new`` writes passes its own test as it is, and its kit notices what is wrong."""

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlcore.errors import ConfigError, PluginError
from rlcore.plugins import Plugin, Plugins
from rlcore.protocols import Episode
from rlcore.testing.agent import AgentLoopConformance
from rlcore.testing.plugin import offer_problems
from rlcore.testing.skeleton import skeleton_kinds, write_skeleton
from rlcore.testing.skeletons.agent import Skeleton as Agent
from rlcore.testing.skeletons.policy import Skeleton as Client
from rlcore.testing.skeletons.sandbox import Skeleton
from rlcore.types import AgentResult, Completion, FinishReason, Message, ModelRequest, SandboxSpec, Task

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_the_kinds_that_people_write_have_a_skeleton() -> None:
    wanted = {"sandbox", "correction", "loss", "advantage", "agent", "policy", "grader", "taskset", "tracker"}
    assert wanted <= set(skeleton_kinds())


def test_every_skeleton_passes_as_written(tmp_path: Path) -> None:
    kinds = skeleton_kinds()
    for kind in kinds:
        written = write_skeleton(f"My-{kind}", kind, tmp_path / kind)
        assert written.offer == f"my-{kind}"
        text = "".join(path.read_text() for path in written.directory.rglob("*") if path.is_file())
        assert "keleton" not in text, kind
    # of the sandbox kit a few behaviours: the whole of it is the slow test below
    few = "not test_behaviour or exit_codes or exact_output or timeout_is_kept or use_after_close or list_by_label"
    done = run_tests(tmp_path, [tmp_path / kind for kind in kinds], "-k", few)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_sandbox_skeleton_keeps_nothing_of_a_sandbox_that_was_closed(tmp_path: Path) -> None:
    """What the skeleton does, every backend made from it does: a run closes thousands."""
    backend = Skeleton(Skeleton.Config(folder=str(tmp_path)))

    async def once() -> weakref.ref[Any]:
        box = await backend.start(SandboxSpec())
        await box.close()
        return weakref.ref(box)

    kept = asyncio.run(once())
    gc.collect()
    assert kept() is None


@pytest.mark.slow
def test_the_sandbox_skeleton_passes_the_whole_kit(tmp_path: Path) -> None:
    write_skeleton("my-sandbox", "sandbox", tmp_path / "new")
    done = run_tests(tmp_path, [tmp_path / "new"])
    assert done.returncode == 0, done.stdout


def run_tests(folder: Path, distributions: list[Path], *options: str) -> subprocess.CompletedProcess[str]:
    sources = os.pathsep.join(str(distribution / "src") for distribution in distributions)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *options, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("kind", skeleton_kinds())
def test_a_skeleton_keeps_the_rules(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_skeleton(f"rule-{kind}", kind, tmp_path / "new")
    monkeypatch.syspath_prepend(str(tmp_path / "new" / "src"))
    plugins = Plugins()
    plugins.register(Plugin(f"rule-{kind}", f"rule_{kind}.plugin", "rule-dist", "1"))
    assert [offer.kind for offer in plugins.offers()] == [kind]
    assert [problem for offer in plugins.offers() for problem in offer_problems(plugins, offer)] == []


def test_what_cannot_be_written_is_refused(tmp_path: Path, rlcore: Command) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        write_skeleton("x", "agent", tmp_path / "full")
    with pytest.raises(ConfigError, match="did you mean 'agent'"):
        write_skeleton("x", "agnet", tmp_path / "a")
    for name in ("2fast", "class"):
        with pytest.raises(ConfigError, match="cannot be a Python package"):
            write_skeleton(name, "agent", tmp_path / "b")
    with pytest.raises(PluginError, match="is not a name"):
        write_skeleton("../up", "agent", tmp_path / "c")
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "site"}
    done = rlcore("plugins", "new", "my-agent", "--kind", "agent", cwd=tmp_path)
    assert done.returncode == 0
    assert "--set agent.name=my-agent" in done.stdout
    assert (tmp_path / "my-agent" / "pyproject.toml").is_file()


class Kit(AgentLoopConformance):
    """The kit, on an agent loop with one fault."""

    __test__ = False
    replies = ("41", "42")

    def task(self) -> Task:
        return Task(id="t", messages=(Message("user", "6 x 7?"),), data={"answer": "42"})


class GoesOnAfterACut(Agent):
    async def run(self, task: Task, episode: Episode) -> AgentResult:
        for _ in range(2):
            await episode.session.ask(task.messages)
        return AgentResult("done", reward=0.0)


class GivesText(Agent):
    async def run(self, task: Task, episode: Episode) -> AgentResult:
        await super().run(task, episode)
        return AgentResult("done", reward="1")  # type: ignore[arg-type]


class HidesALostPolicy(Agent):
    async def run(self, task: Task, episode: Episode) -> AgentResult:
        try:
            return await super().run(task, episode)
        except Exception:
            return AgentResult("error", reward=0.0)


class KeepsState(Agent):
    played = 0

    async def run(self, task: Task, episode: Episode) -> AgentResult:
        self.played += 1
        await super().run(task, episode)
        return AgentResult("done", reward=float(self.played))


class ForgetsTheTask(Agent):
    async def run(self, task: Task, episode: Episode) -> AgentResult:
        await episode.session.ask([Message("user", "hello")])
        return AgentResult("done", reward=0.0)


class ChangesTheTask(Agent):
    async def run(self, task: Task, episode: Episode) -> AgentResult:
        task.data["seen"] = True  # type: ignore[index]
        return await super().run(task, episode)


class CannotBeCancelled(Agent):
    async def run(self, task: Task, episode: Episode) -> AgentResult:
        try:
            return await super().run(task, episode)
        except BaseException:
            return AgentResult("done", reward=0.0)


@pytest.mark.parametrize(
    ("faulty", "test"),
    [
        (GoesOnAfterACut, "test_a_reply_that_was_cut_is_not_executed"),
        (GivesText, "test_the_reward_is_a_finite_number_or_none"),
        (HidesALostPolicy, "test_a_lost_policy_is_left_to_the_caller"),
        (KeepsState, "test_one_instance_plays_many_attempts_at_once"),
        (ForgetsTheTask, "test_the_policy_sees_the_task"),
        (ChangesTheTask, "test_the_task_stays_as_it_is"),
        (CannotBeCancelled, "test_it_can_be_cancelled"),
    ],
)
def test_the_agent_kit_notices(faulty: type, test: str) -> None:
    kit = type("Faulty", (Kit,), {"agent": faulty})()
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the kit says
        getattr(kit, test)()
    good = type("Good", (Kit,), {"agent": Agent})()
    getattr(good, test)()


class SendsTwice(Client):
    async def complete(self, request: ModelRequest) -> Completion:
        try:
            return await super().complete(request)
        except Exception:
            return await super().complete(request)


class BelievesErrors(Client):
    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await super()._post(body)
        return answer if "text" in answer else {"text": str(answer), "finish_reason": "stop"}


class LeavesConnectionsOpen(Client):
    async def complete(self, request: ModelRequest) -> Completion:
        import asyncio

        return await asyncio.shield(super().complete(request))


class InventsIds(Client):
    async def complete(self, request: ModelRequest) -> Completion:
        await super().complete(request)
        return Completion((1, 2), (0.5,), FinishReason.STOP, message=Message("assistant", "x"))


@pytest.mark.parametrize(
    ("faulty", "test"),
    [
        (SendsTwice, "test_a_failing_server_is_not_asked_again"),
        (BelievesErrors, "test_an_error_with_status_200_is_no_answer"),
        (LeavesConnectionsOpen, "test_a_cancelled_generation_is_ended_at_the_server"),
        (InventsIds, "test_a_completion_is_complete"),
    ],
)
def test_the_policy_kit_notices(faulty: type, test: str) -> None:
    from rlcore.testing.skeletons.check_policy import TestSkeleton

    getattr(TestSkeleton(), test)()
    kit = type("Faulty", (TestSkeleton,), {"client": faulty})()
    with pytest.raises((AssertionError, TimeoutError)):
        getattr(kit, test)()
