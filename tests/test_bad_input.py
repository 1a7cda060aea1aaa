"""What a user gets wrong: one clear error that names file and key, or plugin and distribution, and exit 2."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from typing import Any

import pytest
from rlcore_tbench2.bundled import write_tasks

BROKEN = 'raise ImportError("libmissing.so: cannot open shared object file")\n'


def broken_plugin(folder: Any) -> list[str]:
    package = folder.path / "broken_plugin"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN)
    metadata = folder.path / "broken_dist-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-dist\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text("[rlcore]\nbroken = broken_plugin\n")
    return ["train", "-p", "broken", "--config", "run.toml"]


def settings(*sets: str) -> Callable[[Any], list[str]]:
    return lambda folder: ["train", "-p", "say_env", "--config", "run.toml", *(x for s in sets for x in ("--set", s))]


def no_task_file(folder: Any) -> list[str]:
    write_tasks(folder.path / "tasks", split="train", kinds=("write",), per_kind=2, seed=0)
    for file in (folder.path / "tasks").rglob("task.toml"):
        file.unlink()
    return settings("taskset.name=tbench2", "taskset.path=tasks")(folder)


def unreadable_model(folder: Any) -> list[str]:
    (folder.path / "model").mkdir()
    (folder.path / "model" / "config.json").write_text("{not json")
    return settings("model.path=model")(folder)


CASES: dict[str, tuple[Callable[[Any], list[str]], list[str]]] = {
    "unknown plugin": (lambda f: ["train", "-p", "glm25"], ["glm25"]),
    "broken plugin asked for by name": (broken_plugin, ["broken", "broken-dist 1.2", "libmissing.so"]),
    "unknown recipe": (lambda f: ["train", "quikstart"], ["quikstart", "quickstart"]),
    "unknown section": (settings("rollot.max_age=1"), ["rollot", "rollout", "--set rollot.max_age"]),
    "unknown key": (settings("rollout.max_agee=1"), ["rollout.max_agee", "'max_age'"]),
    "unknown option of a class": (settings("trainer.learning_rate=1"), ["trainer.learning_rate", "unknown key"]),
    "unknown name": (settings("loss.name=ppo_clipp"), ["loss.name", "ppo_clipp", "'ppo_clip'"]),
    "wrong type": (settings("run.steps=many"), ["run.steps", "many"]),
    "floor above ceiling": (settings("correction.low=3", "correction.high=2"), ["correction", "3", "2"]),
    "negative eval interval": (settings("eval.every=-1"), ["eval.every", "-1"]),
    "turn longer than session": (settings("budget.tokens_per_turn=999"), ["tokens_per_turn", "999", "128"]),
    "task folder without task.toml": (no_task_file, ["task.toml"]),
    "no task folder": (settings("taskset.name=tbench2", "taskset.path=nowhere"), ["nowhere"]),
    "unreadable model": (unreadable_model, ["model", "config.json"]),
    "no model": (settings("model.path=nowhere"), ["nowhere"]),
    "unknown command": (lambda f: ["trian"], ["trian", "'train'"]),
    "unknown flag": (lambda f: ["train", "--resme", "x"], ["--resme", "--resume"]),
    "not a run directory": (lambda f: ["train", "--resume", "nowhere"], ["nowhere", "manifest.json"]),
    "not TOML": (lambda f: ["train", "--config", "say_env.py"], ["say_env.py", "line"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_error_and_exit_2(folder: Any, case: str) -> None:
    arrange, says = CASES[case]
    done = folder.rlcore(*arrange(folder))
    assert done.returncode == 2, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    error = done.stderr[done.stderr.index("rlcore: error") :] if "rlcore: error" in done.stderr else done.stdout
    for word in says:
        assert word in error, f"{word!r} is not in: {error}"
    assert "Traceback" not in done.stderr
    assert not (folder.path / "runs").exists() or case in ("unreadable model", "no model"), "a run was begun"


def test_a_port_in_use_is_named(folder: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        from rlcore_quickstart import tiny_model_path

        done = folder.rlcore("serve", str(tiny_model_path()), "--port", str(port))
    assert done.returncode == 2, done.stderr
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


def test_no_bubblewrap_is_refused_with_the_remedy(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH without bwrap: the run is refused before it starts, and says what to install."""
    tools = folder.path / "bin"
    tools.mkdir()
    for tool in ("sh", "bash", "python3", "git", "uname"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    done = folder.rlcore("train", "quickstart", "--model", "tiny", "--set", "run.dir=runs")
    assert done.returncode == 2, f"{done.stdout}{done.stderr}"
    assert "bubblewrap" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_tests_that_give_no_reward_are_named(folder: Any) -> None:
    """``rlcore tasks oracle`` on a task whose verifier writes no reward: named, exit not 0."""
    write_tasks(folder.path / "tasks", split="train", kinds=("write",), per_kind=1, seed=0)
    (script,) = (folder.path / "tasks").rglob("tests/test.sh")
    script.write_text("#!/bin/sh\nexit 0\n")
    done = folder.rlcore("tasks", "oracle", "tasks", "--sandbox", "local")
    assert done.returncode != 0
    assert "reward" in done.stdout + done.stderr
    assert script.parent.parent.name in done.stdout + done.stderr


@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["plugins"], ["config"], ["tasks"], ["serve"], ["export"],
                                     ["losses"], ["check"], ["sandboxes"]], ids=lambda c: " ".join(c) or "rlcore")  # fmt: skip
@pytest.mark.fault("CFG-10")
def test_help_of_every_command_fits_80_columns_without_a_terminal(folder: Any, command: list[str]) -> None:
    done = folder.rlcore(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
