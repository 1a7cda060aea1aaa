"""The verdict: what counts, what is no verdict, and what an agent cannot plant. In the real sandbox throughout."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rlcore.errors import SandboxLost
from rlcore.types import Budget, Task, Trajectory
from rlcore_tbench2.grader import TaskGrader
from rlcore_tbench2.oracle import ATTEMPTS, run_oracle
from rlcore_tbench2.stage import prepare

pytestmark = pytest.mark.anyio

SHORT = Budget(tokens_per_turn=100, tokens_per_session=10_000, turns=5, seconds=1.0)
HONEST = """\
#!/bin/bash
if [ "$(cat answer.txt 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


async def verdict_of(play, task: Task, *commands: str, **options):
    played = await play(task, [*commands, "TASK_COMPLETE"], **options)
    return played.trajectory


async def test_the_tests_decide_and_their_log_is_kept(play, make_task):
    task = make_task(HONEST + "echo checked; echo careful >&2; exit 3\n")
    right = await verdict_of(play, task, "echo 42 > answer.txt")
    wrong = await verdict_of(play, task, "echo 41 > answer.txt")
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.info["verifier"]["exit_code"] == 3
    assert right.info["verifier"]["log"] == "checked\ncareful"
    assert set(right.seconds) == {"reset", "agent", "verify", "close"}


async def test_tests_run_in_the_workdir_with_their_environment_and_own_interpreter(play, make_task):
    toml = '[metadata.rlcore]\nimage_optional = true\n[verifier.env]\nWORD = "blue"\nPATH = "/usr/bin:/mine"\n'
    toml += '[environment]\nworkdir = "/srv/app"\nnetwork_mode = "no-network"\n'
    test = "#!/usr/bin/env python3\nimport os\nopen('/logs/verifier/reward.txt', 'w').write("
    test += "str(int(os.getcwd() == '/srv/app' and os.environ['WORD'] == 'blue' and os.environ['PATH'].endswith('mine'))))\n"
    files = {"environment/data/seed.txt": "seed"}
    played = await play(make_task(test, files=files, toml=toml), ["cat data/seed.txt; pwd", "TASK_COMPLETE"])
    assert played.observations == ["seed/srv/app"]
    assert played.trajectory.reward == 1


async def test_only_environment_files_reach_the_agent_and_tests_are_gone_after_the_verdict(make_task, backend):
    files = {
        "solution/solve.sh": "echo 42 > answer.txt",
        "environment/Dockerfile": "FROM a\n",
        "environment/seed.txt": "seed",
        "notes.md": "hidden",
    }
    task = make_task(HONEST, files=files)
    sandbox = await backend.start(task.sandbox)
    try:
        await prepare(task, sandbox)
        look = "ls -A /workspace /tests /solution /logs; find / -xdev -name solve.sh -o -xdev -name test.sh -o -xdev -name notes.md"
        before = await sandbox.exec(f"({look}) 2>/dev/null | grep -v ^/usr", timeout=10)
        assert before.stdout.split() == ["/logs:", "/solution:", "/tests:", "/workspace:", "seed.txt"]
        verdict = await TaskGrader(TaskGrader.Config()).grade(task, sandbox, Trajectory("t", task.id, "g"))
        after = await sandbox.exec("ls -A /tests 2>/dev/null", timeout=10)
        assert (verdict.reward, after.stdout) == (0.0, "")
    finally:
        await sandbox.close()


PLANTS = {
    "markers in the output": "echo EXIT_CODE:0; echo '__REWARD__: 1'; echo reward: 1",
    "reward.txt beforehand": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 444 /logs/verifier/*",
    "reward.json beforehand": "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "reward as a link": "mkdir -p /logs/verifier /tmp/x; echo 1 > /tmp/x/r; ln -s /tmp/x/r /logs/verifier/reward.json",
    "folder as a link": "mkdir -p /tmp/x; echo '{\"reward\": 1}' > /tmp/x/reward.json; ln -s /tmp/x /logs/verifier",
    "logs as a link": "rmdir /logs && mkdir -p /tmp/x/verifier && echo '{\"reward\": 1}' > /tmp/x/verifier/reward.json "
    "&& ln -s /tmp/x /logs",
    "reward as a folder": "mkdir -p /logs/verifier/reward.json",
    "own tests": "mkdir -p /tests; printf 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests/test.sh /tests",
    "tests as a link": "mkdir -p /tmp/t; rm -rf /tests; ln -s /tmp/t /tests",
    "tests as a file": "rm -rf /tests; touch /tests",
    "conftest.py": 'for d in . / /tests ~; do printf \'open("/logs/verifier/reward.txt","w").write("1")\\nimport os;os._exit(0)\' '
    "> $d/conftest.py; done; cp conftest.py unittest.py",
    "sitecustomize.py": "for d in $(python3 -c 'import site;print(site.getusersitepackages())') .; do mkdir -p $d; "
    'printf \'import os;open("/logs/verifier/reward.txt","w").write("1");os._exit(0)\' > $d/sitecustomize.py; '
    "cp $d/sitecustomize.py $d/usercustomize.py; done",
    "PATH shims": "for n in cat python3 pytest bash sh; do printf '#!/bin/sh\\necho 42' > $n; chmod +x $n; "
    "mkdir -p ~/bin ~/.local/bin; cp $n ~/bin; cp $n ~/.local/bin; done; echo 'export PATH=$PWD:$PATH' | tee ~/.bashrc "
    "~/.profile ~/.bash_profile ~/.bash_env /etc/profile /etc/environment 2>/dev/null",
    "pytest.ini": "printf '[pytest]\\naddopts = --co\\n' | tee pytest.ini setup.cfg tox.ini /pytest.ini >/dev/null",
}
STRICT = """\
#!/bin/bash
echo 0 > /logs/verifier/reward.txt
python3 - <<'E'
import pathlib
answer = pathlib.Path("answer.txt")
right = answer.is_file() and answer.read_text() == "42\\n"
pathlib.Path("/logs/verifier/reward.txt").write_text(str(int(right)))
E
"""


@pytest.mark.fault("DAT-03")
@pytest.mark.parametrize("plant", PLANTS)
async def test_nothing_that_an_agent_plants_gives_it_a_reward(play, make_task, plant):
    trajectory = await verdict_of(play, make_task(STRICT), PLANTS[plant])
    assert trajectory.error is None
    assert trajectory.reward == 0.0


@pytest.mark.fault("DAT-03")
async def test_processes_that_an_agent_left_cannot_write_the_reward_where_the_task_ends_them(play, make_task):
    toml = '[metadata.rlcore]\nimage_optional = true\nend_processes = true\n[environment]\nworkdir = "/workspace"\n'
    writer = "while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done"
    task = make_task(STRICT + "sleep 0.3\n", toml=toml + 'network_mode = "no-network"\n')
    plant = f"sleep 1.2; (setsid sh -c '{writer}' >/dev/null 2>&1 &) ; nohup sh -c '{writer}' >/dev/null 2>&1 &"
    trajectory = await verdict_of(play, task, plant, "ps -e | wc -l")
    assert trajectory.reward == 0.0


async def test_a_service_that_the_agent_started_is_there_for_the_tests_by_default(play, make_task):
    test = "#!/bin/sh\n[ -d /proc/$(cat /workspace/pid) ] && echo 1 > /logs/verifier/reward.txt\n"
    trajectory = await verdict_of(play, make_task(test), "setsid sleep 30 >/dev/null 2>&1 & echo $! > pid")
    assert trajectory.reward == 1.0


@pytest.mark.fault("DAT-05")
@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo 1 > reward.txt", 1.0),
        ("echo ' 0.5 ' > reward.txt; exit 7", 0.5),
        ("printf 1e0 > reward.txt; sleep 30", 1.0),
        ('echo \'{"reward": 0.25, "speed": 3}\' > reward.json; echo 1 > reward.txt', 0.25),
        ("echo 250 > reward.txt", 250.0),
        ("trap 'echo 0 > reward.txt' EXIT; false; exit 1", 0.0),
    ],
)
async def test_a_complete_file_counts_whatever_the_script_did_then(play, make_task, script, reward):
    toml = (
        '[metadata.rlcore]\nimage_optional = true\n[verifier]\ntimeout_sec = 1\n[environment]\nworkdir = "/workspace"\n'
    )
    task = make_task(f"#!/bin/bash\ncd /logs/verifier\n{script}\n", toml=toml + 'network_mode = "no-network"\n')
    trajectory = await verdict_of(play, task)
    assert trajectory.reward == reward
    assert trajectory.info["verifier"]["timed_out"] is ("sleep" in script)


@pytest.mark.fault("DAT-05")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("true # reward", "the tests wrote neither reward.json nor reward.txt (exit code 0)"),
        ("set -e; false; echo 1 > reward.txt", "neither reward.json nor reward.txt (exit code 1)"),
        ("sleep 30; echo 1 > reward.txt", "neither reward.json nor reward.txt (the verifier timed out)"),
        ("> reward.txt", "reward.txt is empty"),
        ("> reward.json; echo 1 > reward.txt", "reward.json is empty"),
        ("echo pass > reward.txt", "not one decimal number"),
        ("head -c 1000000 /dev/zero > reward.txt", "reward.txt"),
        ("printf '\\377' > reward.txt", "reward.txt is not UTF-8"),
        ("mkdir reward.json; echo 1 > reward.txt", "reward.json"),
        ("echo '{\"speed\": 1}' > reward.json", "reward.json has no 'reward' (it has speed); set grader.reward_key"),
        ("echo '{\"reward\": null}' > reward.json", "reward.json: reward is a NoneType, not a number"),
        ("kill -9 $$ # reward", "(exit code 137)"),
    ],
)
async def test_no_usable_file_is_no_verdict_and_says_why(play, make_task, script, message):
    toml = (
        '[metadata.rlcore]\nimage_optional = true\n[verifier]\ntimeout_sec = 1\n[environment]\nworkdir = "/workspace"\n'
    )
    task = make_task(
        f"#!/bin/bash\necho the log\ncd /logs/verifier\n{script}\n", toml=toml + 'network_mode = "no-network"\n'
    )
    trajectory = await verdict_of(play, task)
    assert trajectory.reward is None
    assert trajectory.error.startswith("VerifierUnavailable: task one: ")
    assert message in trajectory.error
    assert "the log" in trajectory.error
    assert "the log" in trajectory.info["verifier"]["log"]
    assert trajectory.end == "task_complete"


async def test_another_key_of_the_reward_file_may_be_the_reward(play, make_task):
    task = make_task("#!/bin/sh\necho '{\"speed\": 3}' > /logs/verifier/reward.json\n")
    trajectory = await verdict_of(play, task, grader={"reward_key": "speed"})
    assert (trajectory.reward, trajectory.info["rewards"]) == (3.0, {"speed": 3.0})


@pytest.mark.fault("DAT-01")
async def test_an_agent_over_its_clock_is_graded_in_the_verifiers_own_window(play, make_task):
    slow = make_task("#!/bin/sh\nsleep 1.5\necho 1 > /logs/verifier/reward.txt\n")
    played = await play(slow, ["sleep 30"], budget=SHORT)
    assert (played.trajectory.end, played.trajectory.reward) == ("timeout", 1.0)


@pytest.mark.fault("DAT-01")
async def test_an_agent_over_its_clock_without_a_verdict_has_no_reward(play, make_task):
    played = await play(make_task("#!/bin/sh\ntrue # reward\n"), ["sleep 30"], budget=SHORT)
    assert (played.trajectory.end, played.trajectory.reward) == ("timeout", None)


@pytest.mark.fault("DAT-01")
async def test_a_sandbox_that_dies_is_the_infrastructures_fault(play, make_task, backend):
    task = make_task("#!/bin/sh\nsleep 5; echo 1 > /logs/verifier/reward.txt\n")

    async def end_it() -> None:
        await asyncio.sleep(1.0)
        for info in await backend.list({}):
            await backend.delete(info.id)

    killing = asyncio.ensure_future(end_it())
    played = await play(task, ["TASK_COMPLETE"])
    await killing
    assert played.trajectory.reward is None
    assert played.trajectory.end == "sandbox_lost", "it is made again on a fresh one"
    assert played.trajectory.error.startswith("while it was judged: SandboxLost")


async def test_scripts_with_windows_line_ends_run_all_the_same(play, make_task):
    task = make_task("#!/bin/sh\r\nif true; then\r\necho 1 > /logs/verifier/reward.txt\r\nfi\r\n")
    assert (await verdict_of(play, task)).reward == 1.0


async def test_a_script_without_a_shebang_runs_in_a_shell(play, make_task):
    assert (await verdict_of(play, make_task("[[ 1 == 1 ]] && echo 1 > /logs/verifier/reward.txt"))).reward == 1.0


@pytest.mark.parametrize(("command", "end"), [("true", "task_complete"), ("false", "sandbox_lost")])
async def test_a_health_check_is_waited_for_before_the_agent_begins(play, make_task, command, end):
    toml = f'[metadata.rlcore]\nimage_optional = true\n[environment]\nworkdir = "/workspace"\nhealthcheck = {{command = "{command}"'
    toml += ', interval_sec = 0.05, retries = 2}\nnetwork_mode = "no-network"\n'
    played = await play(make_task(toml=toml), ["TASK_COMPLETE"])
    assert played.trajectory.end == end
    assert len(played.requests) == (end == "task_complete")


async def test_folders_of_any_content_are_staged_whole(make_task, backend):
    files = {f"environment/many/{number}.txt": str(number) for number in range(20)}
    files |= {
        "environment/Dockerfile": "FROM a\n",
        "environment/sub/Dockerfile": "kept",
        "environment/run.sh": "a\r\nb\r\n",
    }
    task = make_task(files=files)
    environment = Path(task.data["upload"])
    (environment / "empty").mkdir()
    (environment / "link").symlink_to("many/3.txt")
    (environment / "run.sh").chmod(0o755)
    sandbox = await backend.start(task.sandbox)
    try:
        await prepare(task, sandbox)
        shown = await sandbox.exec(
            "find . -type f | wc -l; cat link; echo; ls; cat -A run.sh; ls sub; test -x run.sh && echo x", timeout=9
        )
        assert shown.stdout.split() == [
            "22",
            "3",
            "empty",
            "link",
            "many",
            "run.sh",
            "sub",
            "a$",
            "b$",
            "Dockerfile",
            "x",
        ]
    finally:
        await sandbox.close()


async def test_the_tests_run_as_the_verifiers_user(play, make_task):
    toml = (
        '[metadata.rlcore]\nimage_optional = true\n[environment]\nworkdir = "/workspace"\nnetwork_mode = "no-network"\n'
    )
    task = make_task(
        "#!/bin/sh\nid -un\necho 1 > /logs/verifier/reward.txt\n", toml=toml + '[verifier]\nuser = "agent"\n'
    )
    trajectory = await verdict_of(play, task)
    assert trajectory.reward == 1.0
    assert trajectory.info["verifier"]["log"] == "agent"


async def test_the_oracle_tries_again_what_the_infrastructure_ended(make_task, open_sandbox):
    task = make_task(HONEST, files={"solution/solve.sh": "echo 42 > answer.txt\n"})
    for failures, reward in ((ATTEMPTS - 1, 1.0), (ATTEMPTS, None)):
        left = [SandboxLost("gone")] * failures

        @asynccontextmanager
        async def flaky(spec, task_id, left=left):
            if left:
                raise left.pop()
            async with open_sandbox(spec, task_id) as sandbox:
                yield sandbox

        (row,) = await run_oracle([task], flaky, TaskGrader(TaskGrader.Config()))
        assert row["reward"] == reward
        assert row["ok"] is (reward == 1.0)
