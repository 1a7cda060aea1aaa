"""``rlcore check sandbox`` and ``rlcore sandboxes``, as a user types them."""

import asyncio
import json
import socket
import subprocess
import sys

import pytest
from rlcore.sandbox_tools import ownership
from rlcore.types import SandboxSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
def rlcore(tmp_path):
    """Run a command line; the local backend's records are the test's own."""

    async def run(*words, own_state=True):
        state = ["--set", f"state_dir={tmp_path}/state"] if own_state else []
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from rlcore.cli import main; main()", *words, *state),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 100)
        return process.returncode, out.decode(), err.decode()

    return run


async def test_sweep_deletes_what_dead_runs_left_and_nothing_else(rlcore, backend):
    async def start(**labels):
        return await backend.start(SandboxSpec(labels=labels))

    dead = {"launcher": "rlcore", "run": "dead", "owner": f"{socket.gethostname()}:99999999:1"}
    left, live = await start(**dead, task="t1"), await start(**ownership("live"))
    elsewhere = await start(launcher="rlcore", run="far", owner="another-host:1:1")
    foreign = await start(launcher="somebody", run="dead")
    code, out, _ = await rlcore("sandboxes", "list", "-b", "local", "--json")
    assert code == 0
    assert {row["id"]: row["owner"] for row in json.loads(out)["sandboxes"]} == {
        left.id: "ended",
        live.id: "running",
        elsewhere.id: "on another machine",
    }
    code, out, _ = await rlcore("sandboxes", "sweep", "-b", "local", "--dry-run")
    assert f"{left.id}  dead  t1" in out
    assert await left.alive()
    code, out, _ = await rlcore("sandboxes", "sweep", "-b", "local", "--json")
    fates = {row["id"]: row["fate"] for row in json.loads(out)["sandboxes"]}
    assert (code, fates) == (0, {left.id: "deleted", live.id: "kept", elsewhere.id: "kept"})
    code, out, _ = await rlcore("sandboxes", "sweep", "-b", "local", "--run", "far", "--older-than", "2h")
    assert "0 sandboxes" in out, "it is not two hours old"
    code, out, _ = await rlcore("sandboxes", "sweep", "-b", "local", "--run", "far")
    assert [await box.alive() for box in (left, live, elsewhere, foreign)] == [False, True, False, True]


async def test_check_prints_a_table_and_json_and_fails_where_it_must(rlcore):
    code, out, _ = await rlcore("check", "sandbox", "local", "--only", "exit_codes,users")
    assert (code, out.splitlines()[-1]) == (0, "local: 1 pass, 0 fail, 1 declared gaps")
    code, out, _ = await rlcore("check", "sandbox", "local", "--only", "exit_codes", "--json", "--set", "bwrap=nothing")
    told = json.loads(out)
    assert (code, told["ok"], told["behaviours"][0]["status"]) == (1, False, "fail")
    assert "not installed" in told["behaviours"][0]["detail"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "sandbox", "lokal"), "local"),
        (
            ("check", "sandbox", "local", "--set", "memory=3"),
            "unknown key; did you mean 'memory_mb'? (--set sandbox.memory)",
        ),
        (("check", "sandbox", "local", "--set", "isolation=jail"), "isolation"),
        (("check", "sandbox", "local", "--only", "exit_code"), "exit_codes"),
        (("sandboxes", "sweep", "--older-than", "soon"), "2h"),
        (("sandboxes", "list", "--set", "pids=30"), "--backend"),
        (("sandboxes", "report", "/nowhere"), "sandboxes.jsonl"),
    ],
)
async def test_mistakes_are_one_line_that_says_what_to_write(rlcore, words, said):
    code, _, err = await rlcore(*words, own_state=False)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
