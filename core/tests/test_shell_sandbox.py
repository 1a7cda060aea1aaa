"""Ending what a command started, by a shell's builtins: all of it, and nothing else."""

import asyncio
import shutil
import subprocess
import time

import pytest
from rlcore.shell_sandbox import ShellSandbox, kill_marked

pytestmark = pytest.mark.anyio

SHELLS = {"dash": ["dash"], "bash": ["bash"], "busybox": ["busybox", "ash"]}


@pytest.mark.parametrize("shell", [name for name in SHELLS if shutil.which(name)])
def test_all_that_carries_the_mark_ends_and_what_runs_it_lives_on(shell, processes_with):
    mark = f"mark-{shell}"
    inside = "sleep 60 & setsid sleep 60 & sleep 60"
    script = f"RLCORE_EXEC={mark} setsid sh -c '{inside}' & RLCORE_EXEC={mark} sleep 60 & echo up; wait; echo lives"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True) as runner:
        assert runner.stdout.readline() == "up\n"
        until = time.monotonic() + 10
        while len(processes_with(mark)) < 5 and time.monotonic() < until:
            time.sleep(0.01)
        told = subprocess.run([*SHELLS[shell], "-c", f"{kill_marked(mark)}; echo $n"], capture_output=True, text=True)
        assert (told.stdout, told.stderr) == ("0\n", "")
        assert runner.stdout.read() == "lives\n"
    assert processes_with(mark) == []


class OnThisMachine:
    """A carrier without a sandbox, for commands that do no harm."""

    def __init__(self):
        self.scripts = []

    async def call(self, script, *, seconds):
        self.scripts.append(script)
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", script, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        out, _ = await asyncio.wait_for(process.communicate(), seconds)
        return out.decode()

    async def alive(self):
        return True

    async def close(self):
        pass


async def test_a_time_out_that_has_begun_to_kill_goes_on_to_the_end(tmp_path, monkeypatch, processes_with):
    """The command itself is the first to die; what was stopped and not yet killed stayed stopped for ever."""
    monkeypatch.setattr("rlcore.shell_sandbox.SCRATCH", str(tmp_path / "scratch"))
    carrier = OnThisMachine()
    box = ShellSandbox(carrier, sandbox_id="here", workdir=str(tmp_path))  # not prepared: that would make folders here
    result = await box.exec("for i in $(seq 80); do setsid sleep 60 & done; wait", timeout=1.0, env={"MANY": "of-them"})
    assert result.timed_out
    assert processes_with("MANY=of-them") == []
    assert sum("kill -STOP" in script for script in carrier.scripts) == 1, "the watchdog needed no help"
