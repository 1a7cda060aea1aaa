"""A real session over a scripted client, the local sandbox, and folders to order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rlcore.errors import PolicyUnavailable
from rlcore.rollout.episode import EpisodeRunner
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.session import Session
from rlcore.types import Budget, Completion, FinishReason, ModelRequest, RunContext, Sampling, Task, Trajectory
from rlcore_local.backend import LocalBackend
from rlcore_tbench2.agent import TerminalAgent
from rlcore_tbench2.grader import TaskGrader
from rlcore_tbench2.taskset import TaskFolders

BUDGET = Budget(tokens_per_turn=1000, tokens_per_session=100_000, turns=30, seconds=60.0)


@dataclass
class ScriptedClient:
    """A policy client that takes messages and says what it was told to say."""

    replies: Sequence[str | tuple[str, str]]
    requests: list[ModelRequest] = field(default_factory=list)

    renderer = None

    async def start(self, context: RunContext) -> None: ...

    async def complete(self, request: ModelRequest) -> Completion:
        turn = sum(one.session_id == request.session_id for one in self.requests)
        self.requests.append(request)
        if turn >= len(self.replies):
            raise PolicyUnavailable("the script is over")
        reply = self.replies[turn]
        text, finish = (reply, "stop") if isinstance(reply, str) else reply
        if finish == "hang":
            await asyncio.sleep(60)
        return Completion((), (), FinishReason(finish), text=text, completion_tokens=max(len(text) // 4, 1))

    async def abort(self, request_id: str) -> None: ...

    async def running(self) -> frozenset[str]:
        return frozenset()

    async def aclose(self) -> None: ...


@dataclass
class Played:
    """An attempt, and everything that the policy was asked."""

    trajectory: Trajectory
    requests: list[ModelRequest]

    @property
    def observations(self) -> list[str]:
        """The last message of every request after the first."""
        return [request.messages[-1].content for request in self.requests[1:]]


@pytest.fixture
async def backend(anyio_backend, tmp_path):
    backend = LocalBackend(LocalBackend.Config(state_dir=str(tmp_path / "sandboxes")))
    yield backend
    await backend.aclose()


@pytest.fixture
def open_sandbox(backend):
    @asynccontextmanager
    async def opened(spec, task_id):
        sandbox = await backend.start(spec)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    return opened


@pytest.fixture
def play(open_sandbox) -> Callable[..., object]:
    """Plays one attempt with the real runner, session, agent, sandbox and grader over a scripted policy."""

    async def run(
        task: Task,
        replies: Sequence[str | tuple[str, str]],
        *,
        budget: Budget = BUDGET,
        agent: Mapping[str, object] | None = None,
        grader: Mapping[str, object] | None = None,
        client: ScriptedClient | None = None,
    ) -> Played:
        client = client or ScriptedClient(replies)

        runner = EpisodeRunner(
            agent=TerminalAgent(TerminalAgent.Config(**(agent or {}))),
            grader=TaskGrader(TaskGrader.Config(**(grader or {}))),
            open_session=lambda name, left: Session(
                client, ledger=RequestLedger(), session_id=name, sampling=Sampling(), budget=left
            ),
            open_sandbox=open_sandbox,
            budget=budget,
        )
        trajectory = await runner.run(task, trajectory_id=f"t{len(client.requests)}", group_id="g")
        return Played(trajectory, client.requests)

    return run


PASSING = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
TOML = """\
schema_version = "1.3"
[metadata.rlcore]
image_optional = true
[verifier]
timeout_sec = 10
[environment]
workdir = "/workspace"
network_mode = "no-network"
"""


@pytest.fixture
def make_folder(tmp_path) -> Callable[..., Path]:
    """Writes a task folder: good by default, ``None`` leaves a file out, bytes are written as they are."""

    def make(name: str = "set/one", files: Mapping[str, str | bytes | None] | None = None, toml: str = TOML) -> Path:
        folder = tmp_path / name
        content = {"task.toml": toml, "instruction.md": "Do it.\n", "tests/test.sh": PASSING, **(files or {})}
        for path, text in content.items():
            if text is not None:
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder

    return make


@pytest.fixture
def make_task(make_folder) -> Callable[..., Task]:
    """A task of one folder."""

    def make(test: str = PASSING, *, files: Mapping[str, str] | None = None, toml: str = TOML, **options) -> Task:
        folder = make_folder(files={"tests/test.sh": test, **(files or {})}, toml=toml)
        (task,) = TaskFolders(TaskFolders.Config(path=str(folder), **options)).load()
        return task

    return make
