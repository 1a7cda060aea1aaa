"""``rlcore eval`` as people type it: against a real server and in this process, killed, interrupted and gone on with."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from rlcore.cli import main
from rlcore.record.jsonl import read_jsonl
from rlcore_engine.testing import tiny_llama
from starlette.requests import Request
from starlette.responses import Response

pytestmark = pytest.mark.fault("DAT-06")
TASKS = 6


class Expert:
    """An OpenAI-compatible server, in a thread of its own, that solves every task whose number is even."""

    def __init__(self, tasks: Path) -> None:
        self.solutions = {
            (folder / "instruction.md").read_text().strip(): (
                (folder / "solution" / "solve.sh").read_text() if int(folder.name[-1]) % 2 == 0 else "true"
            )
            for folder in tasks.iterdir()
            if folder.is_dir()
        }
        self.sessions: Counter[str] = Counter()
        self.seconds = 0.0
        self.broken = False
        self.live = 0
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = json.loads(await request.body())
        self.sessions[request.headers["x-session-id"]] += 1
        self.live += 1
        try:
            gone = asyncio.ensure_future(_gone(request))
            await asyncio.wait({gone}, timeout=self.seconds)
            left = not gone.cancel()
        finally:
            self.live -= 1
        if left:
            return
        if self.broken:
            await Response("out of memory", 500)(scope, receive, send)
            return
        said = [message["content"] for message in body["messages"]]
        command = next((c for text, c in self.solutions.items() if text in said[-1]), None)
        text = f"```bash\n{command}\n```" if command else "TASK_COMPLETE"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        answer = {"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 5}}
        await Response(json.dumps(answer), media_type="application/json")(scope, receive, send)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task folders of the bundled kind ``write``."""
    folder = tmp_path_factory.mktemp("eval") / "tasks"
    made = rlcore("tasks", "make", str(folder), "--kinds", "write", "--per-kind", str(TASKS))
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture
def expert(tasks: Path) -> Iterator[Expert]:
    """A server that knows half of the solutions."""
    app = Expert(tasks)
    config = uvicorn.Config(app, port=0, lifespan="off", ws="none", log_level="critical")
    sock = config.bind_socket()
    server = uvicorn.Server(config)
    app.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    yield app
    server.force_exit = server.should_exit = True
    thread.join()
    sock.close()


class Done(NamedTuple):
    """What a command came to."""

    returncode: int | str | None
    stdout: str
    stderr: str


def rlcore(*arguments: str) -> Done:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stdout(out), redirect_stderr(err):
        main(arguments)
    return Done(ended.value.code, out.getvalue(), err.getvalue())


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    line = [sys.executable, "-m", "rlcore", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def line(tasks: Path, expert: Expert, tmp_path: Path) -> list[str]:
    """The command line of an evaluation into ``tmp_path/out``."""
    where = ["--policy", "openai", "--base-url", expert.url, "--model", "m", "--out", str(tmp_path / "out")]
    return ["eval", str(tasks), *where]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it never came true"
        time.sleep(0.02)


def records(out: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(out / "attempts.jsonl"))


def check_summary(summary: dict[str, Any], samples: int) -> None:
    assert summary["attempts"] == TASKS * samples
    assert summary["success"] == 0.5
    low, high = summary["interval"]
    assert 0 < low < 0.5 < high < 1
    assert {task: sum(rewards) / samples for task, rewards in summary["by_task"].items()} == {
        f"write-{n:04d}": float(n % 2 == 0) for n in range(TASKS)
    }
    assert summary["no_verdict"] == 0
    assert summary["pass_at_k"] == {str(k): 0.5 for k in range(1, samples + 1)}
    assert sum(summary["ends"].values()) == TASKS * samples


def test_success_interval_ends_and_tasks(line: Sequence[str], expert: Expert, tmp_path: Path) -> None:
    done = rlcore(*line, "--samples", "2", "--json")
    assert done.returncode == 0, done.stderr
    check_summary(json.loads(done.stdout), 2)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == json.loads(done.stdout)
    assert Counter((r["task"], r["sample"]) for r in records(tmp_path / "out")) == Counter(
        {(f"write-{n:04d}", k): 1 for n in range(TASKS) for k in range(2)}
    )
    turn = records(tmp_path / "out")[0]["turns"][0]
    assert turn["said"]["content"].startswith("```bash")
    assert turn["completion_tokens"] == 5
    requests = list(read_jsonl(tmp_path / "out" / "requests.jsonl"))
    events = Counter(r["event"] for r in requests)
    assert events["intent"] == events["open"] == events["answered"] == sum(expert.sessions.values())
    # once more: everything was made, nothing is asked, the table is the same; more samples add only what is missing
    asked = sum(expert.sessions.values())
    again = rlcore(*line, "--samples", "2")
    assert again.returncode == 0
    assert sum(expert.sessions.values()) == asked
    assert "success     0.500, 95 %" in again.stdout
    assert "write-0001     0/2   0.000" in again.stdout
    more = rlcore(*line, "--samples", "3", "--json")
    check_summary(json.loads(more.stdout), 3)
    assert len(records(tmp_path / "out")) == TASKS * 3


@pytest.mark.fault("CKP-08")
def test_killed_and_begun_again_gives_the_same_table(line: Sequence[str], expert: Expert, tmp_path: Path) -> None:
    expert.seconds = 0.3
    process = start(*line, "--in-flight", "2")
    out = tmp_path / "out"
    wait_for(lambda: (out / "attempts.jsonl").exists() and len(records(out)) >= 2)
    process.kill()
    process.communicate()
    before = records(out)
    assert len(before) < TASKS
    with (out / "attempts.jsonl").open("a") as file:
        file.write('{"task": "write-0000", "sample": 0, "rew')  # what a kill in the middle of a write leaves
    expert.seconds = 0.0
    done = rlcore(*line, "--json")
    assert done.returncode == 0, done.stderr
    check_summary(json.loads(done.stdout), 1)
    after = records(out)
    assert after[: len(before)] == before
    assert Counter((r["task"], r["sample"]) for r in after) == Counter({(f"write-{n:04d}", 0): 1 for n in range(TASKS)})


@pytest.mark.fault("CLI-01")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_cleanly(line: Sequence[str], expert: Expert, tmp_path: Path, number: int) -> None:
    expert.seconds = 60.0
    process = start(*line)
    wait_for(lambda: expert.live == TASKS)
    started = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - started < 5
    assert process.returncode == 128 + number
    assert errors.strip().splitlines()[-1].startswith("interrupted; the same command goes on")
    wait_for(lambda: expert.live == 0, 2)
    assert not records(tmp_path / "out"), "attempts that were cut short are no attempts"
    events = Counter(r["event"] for r in read_jsonl(tmp_path / "out" / "requests.jsonl"))
    assert events["intent"] == events["cancelled"] == TASKS
    sandboxes = list(read_jsonl(tmp_path / "out" / "sandboxes.jsonl"))
    states = {r["lease"]: r["state"] for r in sandboxes}
    assert set(states.values()) == {"closed"}, "every sandbox is gone"


def test_two_processes_do_not_share_a_directory(line: Sequence[str], expert: Expert) -> None:
    expert.seconds = 60.0
    process = start(*line)
    wait_for(lambda: expert.live > 0)
    second = rlcore(*line)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert second.returncode == 2
    assert "another process works in" in second.stderr


def test_a_policy_that_is_not_there_is_said_soon(line: Sequence[str], tmp_path: Path) -> None:
    done = rlcore(*line, "--base-url", "http://127.0.0.1:9/v1", "--in-flight", "3")
    assert done.returncode == 2, "one of two URLs is one too many"
    wrong = [a if not a.startswith("http") else "http://127.0.0.1:9/v1" for a in line]
    done = rlcore(*wrong, "--in-flight", "3", "--json")
    assert done.returncode == 1
    (error,) = [text for text in done.stderr.splitlines() if text.startswith("rlcore: error")]
    assert "attempts in a row were lost" in error
    assert "http://127.0.0.1:9/v1" in error
    assert not done.stdout
    assert {r["end"] for r in records(tmp_path / "out")} == {"policy_lost"}
    assert all(r["reward"] is None for r in records(tmp_path / "out"))


def test_what_was_lost_is_made_again_when_the_server_is_back(
    line: Sequence[str], expert: Expert, tmp_path: Path
) -> None:
    expert.broken = True
    lost = rlcore(*line, "--in-flight", "2")
    assert lost.returncode == 1
    assert "status 500: out of memory" in lost.stderr
    expert.broken = False
    done = rlcore(*line, "--json")
    assert done.returncode == 0, done.stderr
    check_summary(json.loads(done.stdout), 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "engine"], "--policy engine wants --model DIR"),
        (["--policy", "engine", "--model", "missing"], "missing"),
        (["--policy", "engine", "--model", "m", "--base-url", "http://x"], "--base-url is for servers"),
        (["--policy", "opnai"], "did you mean 'openai'"),
        (["--policy", "openai", "--base-url", "nonsense"], "is not a URL such as"),
        (
            ["--policy", "openai", "--base-url", "http://127.0.0.1:9/v1", "--set", "policy.modle=x"],
            "policy.modle: unknown key",
        ),
        (["--policy", "openai", "--set", "attempts.samples_per_task=0"], "attempts.samples_per_task"),
        (["--policy", "openai", "--set", "trainer.name=torch"], "trainer: unknown key"),
        (["--policy", "openai", "--set", "budget.turns=x"], "budget.turns"),
        (["--policy", "openai", "--set", "policy.api_key=sk-123"], "a secret is not written down"),
        (
            ["--policy", "openai", "--model", "m", "--set", 'policy.api_key={env = "NOT_THERE"}'],
            "environment variable NOT_THERE",
        ),
        (["--policy", "sglang"], "policy.base_urls: name an engine"),
        (["--policy", "openai", "--sandbox", "lokal"], "did you mean 'local'"),
        (
            [],
            "name the policy: --model DIR, --policy NAME, --config FILE or --set policy.name=NAME; there is: embedded",
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(tasks: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    done = rlcore("eval", str(tasks), "--out", str(tmp_path / "out"), *arguments)
    assert done.returncode == 2, done.stderr
    (error,) = done.stderr.splitlines()
    assert words in error
    assert "sk-123" not in error
    assert not done.stdout


def test_without_tasks_it_says_how_to_name_them(tmp_path: Path) -> None:
    for more in ([], ["--set", "taskset=3"], ["--set", "agent.name=terminal"]):
        done = rlcore("eval", "--model", "m", "--out", str(tmp_path / "out"), *more)
        assert done.returncode == 2
        (error,) = done.stderr.splitlines()
        assert error.startswith(
            "rlcore: error: name the taskset: a folder of tasks, a recipe, --config FILE or --set tas"
        )


def test_a_recipe_brings_its_heldout_tasks_and_its_agent(
    expert: Expert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training, but for the policy that is named here: the recipe's own engine is not started for a server."""
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run.toml").write_text("agent.max_output = 77\ntrainer.lr = 1.0\nrollout.in_flight = 3\n")
    few = [
        "--set",
        "recipe.model=tiny",
        "--set",
        "recipe.heldout_per_kind=1",
        "--set",
        "recipe.kinds=['write', 'copy']",
    ]
    server = ["--policy", "openai", "--base-url", expert.url, "--model", "m", "--out", str(tmp_path / "out")]
    done = rlcore("eval", "quickstart", *few, *server, "--config", str(tmp_path / "run.toml"), "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["by_task"]) == {"copy-0000", "write-0000"}
    config = json.loads((tmp_path / "out" / "evaluation.json").read_text())["config"]
    assert config["engine"] is None
    assert Path(config["taskset"]["path"]).name.startswith("heldout-")
    assert (config["agent"]["command_timeout"], config["agent"]["max_output"]) == (5.0, 77)
    assert config["attempts"]["in_flight"] == 3


def test_a_directory_of_something_else_is_refused(line: Sequence[str], tasks: Path, tmp_path: Path) -> None:
    assert rlcore(*line).returncode == 0
    other = rlcore(*line, "--temperature", "0.5")
    assert other.returncode == 2
    assert "another attempts.temperature" in other.stderr
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    other = rlcore(*line[:-1], str(tmp_path / "run"))
    assert other.returncode == 2
    assert "not the directory of an evaluation" in other.stderr
    missing = rlcore("eval", str(tasks / "none"), *line[2:-1], str(tmp_path / "new"))
    assert missing.returncode == 2
    assert str(tasks / "none") in missing.stderr


def test_a_model_in_this_process(tasks: Path, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", max_position_embeddings=1024)
    limits = ["--set", "budget.tokens_per_turn=8", "--set", "budget.turns=2", "--set", "engine.threads=1"]
    done = rlcore("eval", str(tasks), "--model", str(model), "--out", str(tmp_path / "out"), "--json", *limits)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["attempts"], summary["no_verdict"]) == (TASKS, 0)
    assert set(summary["ends"]) <= {"length", "task_complete", "max_turns", "no_command", "budget"}
    assert all(turn["completion_tokens"] <= 8 for record in records(tmp_path / "out") for turn in record["turns"])
