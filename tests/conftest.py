"""A run that trains the tiny model on an environment of the test's own, through the real command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rlcore_quickstart import tiny_model_path

ENVIRONMENT = '''
"""Say as many different letters as you can: an agent loop with a reward of its own and no sandbox."""
import asyncio
import os
import time

from pydantic import BaseModel
from rlcore import hookimpl
from rlcore.types import AgentResult, Message, Task


class Tasks:
    class Config(BaseModel, extra="forbid"):
        count: int = 16

    def __init__(self, config):
        self.count = config.count

    def load(self):
        return [Task(f"say-{n}", (Message("user", f"say {n}"),)) for n in range(self.count)]


class Say:
    class Config(BaseModel, extra="forbid"):
        seconds: float = 0.0
        reward: float | None = None

    def __init__(self, config):
        self.config = config

    async def run(self, task, episode):
        reply = await episode.session.ask(task.messages)
        await asyncio.sleep(self.config.seconds)
        reward = len(set(reply.text)) / 12 if self.config.reward is None else self.config.reward
        return AgentResult("done", reward=reward)


@hookimpl
def rlcore_register_tasksets(register):
    register("say", Tasks)


@hookimpl
def rlcore_register_agent_loops(register):
    register("say", Say)


@hookimpl
def rlcore_register_losses(register):
    from rlcore_losses.losses import PPOClip

    class Broken(PPOClip):
        """A loss of the user's own that is not finite."""

        def __call__(self, *arguments):
            output = super().__call__(*arguments)
            return output._replace(loss=output.loss * float("nan"))

    register("broken", Broken)
'''

RUN = """
[run]
id = "run"
steps = 3
checkpoint_every = 1
[model]
path = {model!r}
[taskset]
name = "say"
[agent]
name = "say"
[policy]
name = "embedded"
[engine]
name = "embedded"
[trainer]
name = "torch"
lr = 1e-3
[advantage]
name = "grpo"
[correction]
name = "token_tis"
[loss]
name = "ppo_clip"
[aggregation]
name = "token_mean"
[rollout]
tasks_per_step = 2
samples_per_task = 4
[budget]
tokens_per_turn = 12
tokens_per_session = 128
turns = 2
seconds = 30.0
"""


class Folder:
    """A working folder with the environment as a plugin in development and its ``run.toml``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "runs" / "run"
        (path / "say_env.py").write_text(ENVIRONMENT)
        (path / "run.toml").write_text(RUN.format(model=str(tiny_model_path())))

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "rlcore", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}

    def rlcore(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end."""
        return subprocess.run(
            self.command(arguments),
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command line; the test ends it."""
        return subprocess.Popen(
            self.command(arguments),
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def train(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """``rlcore train`` on ``run.toml``."""
        return self.rlcore("train", "-p", "say_env", "--config", "run.toml", *arguments, timeout=timeout)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Folder]:
    return lambda: Folder(tmp_path_factory.mktemp("folder"))
