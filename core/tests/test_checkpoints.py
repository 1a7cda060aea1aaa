"""Checkpoints: a directory is complete or absent, and the last good one outlives every failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlcore.errors import ConfigError, RunFailed
from rlcore.learn import checkpoints

pytestmark = pytest.mark.anyio


async def write(directory: Path) -> None:
    (directory / "weights").mkdir()
    (directory / "weights" / "w.bin").write_bytes(b"x" * 1000)


async def fail_after_a_file(directory: Path) -> None:
    await write(directory)
    raise OSError(28, "No space left on device")


async def test_a_saved_checkpoint_is_the_latest(tmp_path: Path) -> None:
    await checkpoints.save(tmp_path, 3, {"version": 2}, write, keep=2)
    path, state = checkpoints.latest(tmp_path)
    assert path.name == "step-000003"
    assert state == {"version": 2, "step": 3}
    assert (path / "weights" / "w.bin").stat().st_size == 1000


@pytest.mark.fault("CKP-02")
async def test_a_failed_save_keeps_the_only_checkpoint(tmp_path: Path) -> None:
    await checkpoints.save(tmp_path, 3, {}, write, keep=1)
    with pytest.raises(RunFailed, match=r"step 6 could not be written.*No space left"):
        await checkpoints.save(tmp_path, 6, {}, fail_after_a_file, keep=1)
    assert [path.name for path in checkpoints.complete(tmp_path)] == ["step-000003"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


async def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 100, 1000000):
        await checkpoints.save(tmp_path, step, {}, write, keep=2)
    assert [path.name for path in checkpoints.complete(tmp_path)] == ["step-000100", "step-1000000"]


@pytest.mark.fault("CKP-01")
def test_a_kill_during_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    """SIGKILL in the middle of a save: what was there before is still the latest, and the half one is not picked up."""
    script = f"""
import asyncio, time
from pathlib import Path
from rlcore.learn import checkpoints
folder = Path({str(tmp_path)!r})
async def write(directory):
    (directory / "w").write_bytes(b"x")
async def hang(directory):
    (directory / "w").write_bytes(b"x")
    print("half", flush=True)
    time.sleep(60)
asyncio.run(checkpoints.save(folder, 1, {{}}, write, keep=1))
asyncio.run(checkpoints.save(folder, 2, {{}}, hang, keep=1))
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"half\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=10)
    child.stdout.close()
    assert checkpoints.latest(tmp_path)[0].name == "step-000001"


async def test_a_directory_without_its_state_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-000009").mkdir()
    (tmp_path / "step-000008.tmp").mkdir()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        checkpoints.latest(tmp_path)


async def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    await checkpoints.save(tmp_path, 5, {"life": 0}, write, keep=2)
    before = time.time_ns()
    await checkpoints.save(tmp_path, 5, {"life": 1}, write, keep=2)
    path, state = checkpoints.latest(tmp_path)
    assert state["life"] == 1
    assert path.stat().st_mtime_ns >= before - 10**9
    assert json.loads((path / "state.json").read_text())["step"] == 5
