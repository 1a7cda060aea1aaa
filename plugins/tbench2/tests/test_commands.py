"""``rlcore tasks``: the real command line, in process."""

from __future__ import annotations

import json
import sys

import pytest
from rlcore.cli import main
from rlcore_tbench2.bundled import write_tasks

IMAGE = '[environment]\ndocker_image = "debian:12"\n'


@pytest.fixture
def rlcore(capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["tasks", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def mixed(make_folder, tmp_path):
    make_folder("set/good", toml=IMAGE)
    make_folder("set/warned", toml=IMAGE + "memory_gb = 8\n")
    make_folder("set/gpu", toml=IMAGE + "gpus = 1\n")
    make_folder("set/broken", toml=IMAGE, files={"tests/test.sh": None})
    make_folder("set/.old", toml=IMAGE)
    return tmp_path / "set"


def test_check_says_one_line_for_each_problem_and_exits_with_2(rlcore, mixed):
    status, out, _ = rlcore("check", mixed)
    lines = out.splitlines()
    assert status == 2
    assert [line.split()[0] for line in lines[:3]] == ["broken", "unsupported", "warning"]
    assert f"{mixed}/broken: {mixed}/broken/tests/test.sh: missing" in lines[0]
    assert "needs 1 GPU" in lines[1]
    assert "environment.memory_gb: value not used (memory_mb?)" in lines[2]
    assert lines[3] == "2 tasks can run, 1 not supported, 1 broken, 1 hidden or archived folders not entered"
    status, out, _ = rlcore("check", mixed, "--json", "--strict")
    found = json.loads(out)
    assert (status, found["ok"], found["tasks"]) == (2, False, 1)
    assert [row["level"] for row in found["problems"]] == ["broken", "broken", "unsupported"]


def test_check_of_a_good_set_exits_with_0_and_of_none_with_2(rlcore, make_folder, tmp_path):
    make_folder("set/good", toml=IMAGE)
    assert rlcore("check", tmp_path / "set")[0] == 0
    (tmp_path / "empty").mkdir()
    status, out, _ = rlcore("check", tmp_path / "empty")
    assert status == 2
    assert "no task below" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "/nowhere"], "/nowhere: no such folder of tasks"),
        (
            ["list", "SET", "--set", "taskset.slcie=[:1]"],
            "taskset.slcie: unknown key; did you mean 'slice'? (--set taskset.slcie)",
        ),
        (["list", "SET", "--set", "loss.x=1"], "loss: unknown key; there is: taskset (--set loss.x)"),
        (["list", "SET", "--set", "taskset=x"], "taskset: should be a table of keys, as in taskset.KEY=VALUE"),
        (
            ["oracle", "SET", "--set", "sandbox.memory_md=1"],
            "sandbox.memory_md: unknown key; did you mean 'memory_mb'?",
        ),
        (["oracle", "SET", "--set", "grader.x=1", "--set", "taskset.y=2"], "2 errors in the configuration:"),
        (["oracle", "SET"], "broken/tests/test.sh: missing"),
        (["oracle", "SET", "--sandbox", "moon"], "no sandbox named 'moon'"),
        (["split", "SET", "--eval", "1", "--out", "x"], "broken/tests/test.sh: missing"),
        (["make", "SET"], "is not a bundled task set"),
    ],
)
def test_a_users_mistake_is_one_error_and_exit_2(rlcore, mixed, arguments, message):
    status, _, err = rlcore(*(str(mixed) if argument == "SET" else argument for argument in arguments))
    assert status == 2
    assert err.startswith("rlcore: error: ")
    assert message in err


def test_make_list_stats_and_split_work_on_a_bundled_set(rlcore, tmp_path):
    folder = tmp_path / "set"
    status, out, _ = rlcore("make", folder, "--kinds", "all", "--per-kind", 2, "--split", "fresh")
    assert status == 0
    assert "34 tasks of 17 kinds" in out
    tasks = json.loads(rlcore("list", folder, "--json", "--set", "taskset.slice=[-3:]")[1])["tasks"]
    assert [task["id"] for task in tasks] == ["upper-0001", "write-0000", "write-0001"]
    stats = json.loads(rlcore("stats", folder, "--json")[1])
    assert stats["counts"]["difficulty"] == {"easy": 28, "medium": 6}
    assert stats["numbers"]["memory MiB"]["median"] == 256
    status, out, _ = rlcore("split", folder, "--eval", 17, "--out", tmp_path / "parts", "--json")
    assert json.loads(out) == {"out": str(tmp_path / "parts"), "train": 17, "eval": 17}
    held = json.loads((tmp_path / "parts" / "eval.json").read_text())
    kinds = sorted(name.rpartition("-")[0] for name in held["tasks"])
    assert len(set(kinds)) == 17
    only = json.loads(rlcore("list", folder, "--json", "--set", f"taskset.split={tmp_path / 'parts' / 'eval.json'}")[1])
    assert len(only["tasks"]) == 17


def test_oracle_proves_a_set_and_does_not_run_a_task_twice(rlcore, tmp_path):
    folder, out = write_tasks(tmp_path / "set", kinds=["write", "read_mkdir"], per_kind=2), tmp_path / "oracle.jsonl"
    status, text, _ = rlcore("oracle", folder, "--out", out)
    assert status == 0
    assert "4 of 4 solutions pass" in text
    before = out.read_text()
    out.write_text(before + '{"task": "cut off by a cra')
    (folder / "write-0001" / "solution" / "solve.sh").write_text("#!/bin/sh\nexit 3\n")
    status, text, _ = rlcore("oracle", folder, "--out", out, "--json")
    found = json.loads(text)
    assert status == 1
    assert (found["passed"], found["tasks"]) == (3, 4)
    assert "exit code 3" in found["results"][3]["error"]
    after = out.read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 5
    status, text, _ = rlcore("oracle", folder, "--wrong")
    assert status == 0
    assert "0 of 4 wrong solutions pass" in text


def test_a_solution_gets_a_host_variable_by_permission_only(rlcore, tmp_path, monkeypatch):
    """A task of somebody else must not read this machine's keys, in its solution either."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    folder = write_tasks(tmp_path / "set", kinds=["write"], per_kind=1)
    with (folder / "write-0000" / "task.toml").open("a") as file:
        file.write('\n[solution.env]\nA = "${JUDGE_KEY}"\n')
    status, out, _ = rlcore("oracle", folder, "--json")
    assert status == 1
    assert "solution.env.A asks for the host variable JUDGE_KEY" in json.loads(out)["results"][0]["error"]
    status, _, _ = rlcore("oracle", folder, "--set", "taskset.host_env=['JUDGE_KEY']")
    assert status == 0


def test_the_plugin_brings_nothing_heavy_to_the_command_line():
    import subprocess

    code = "import sys; from rlcore.cli import main\ntry: main(['tasks', '--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'numpy', 'pyarrow', 'transformers') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.splitlines()[-1] == "[]"
