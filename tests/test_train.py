"""``rlcore train`` from start to end, killed, interrupted, resumed, on a full disk: with the real engine and trainer."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from rlcore.record.jsonl import read_jsonl

SETS = ("--set", "agent.seconds=0.2", "--set", "run.steps=1000")


def wait_for_step(folder: Any, step: int, process: Any, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (folder.run / "checkpoints" / f"step-{step:06d}" / "state.json").exists():
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"step {step} did not come: {process.stdout.read()}")


def steps_of(folder: Any) -> list[int]:
    return [line["step"] for line in read_jsonl(folder.run / "metrics.jsonl")]


def test_a_run_leaves_everything_in_its_directory(folder: Any) -> None:
    done = folder.train("--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["end"] == "finished"
    assert summary["steps"] == 3
    assert len(summary["reward_by_step"]) == 3
    assert 0 < summary["peak_rss_gib"] < 8
    assert json.loads((folder.run / "summary.json").read_text()) == summary
    assert steps_of(folder) == [1, 2, 3]
    manifest = json.loads((folder.run / "manifest.json").read_text())
    assert manifest["config"]["trainer"]["lr"] == 1e-3
    assert {"losses", "engine", "torch", "say_env"} <= {p["name"] for p in manifest["plugins"]["plugins"]}
    attempts = list(read_jsonl(folder.run / "attempts.jsonl"))
    assert len({a["id"] for a in attempts}) == len(attempts) == 24
    assert [p.name for p in sorted((folder.run / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    for step in (1, 2, 3):
        for row in pq.read_table(folder.run / "trajectories" / f"step-{step:06d}.parquet").to_pylist():
            pairs = [
                (rollout, now)
                for rollout, now, mask in zip(row["rollout_logprobs"], row["logprobs"], row["mask"], strict=True)
                if mask
            ]
            assert pairs
            assert all(abs(rollout - now) < 1e-4 for rollout, now in pairs), "engine and trainer disagree"
            assert all(math.isnan(r) for r, m in zip(row["rollout_logprobs"], row["mask"], strict=True) if not m)
    requests = list(read_jsonl(folder.run / "requests.jsonl"))
    assert sum(r["event"] == "intent" for r in requests) == sum(r["event"] == "answered" for r in requests) == 24
    assert (folder.run / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_plain_lines_without_a_terminal(folder: Any) -> None:
    done = folder.train("--set", "run.steps=1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "step 1/1 reward=" in done.stdout
    assert f"everything       {Path('runs') / 'run'}" in done.stdout


def test_a_killed_run_goes_on_from_its_last_complete_step(folder: Any) -> None:
    """SIGKILL in the middle of a step: nothing is left running, and --resume takes up the next step."""
    process = folder.start("train", "-p", "say_env", "--config", "run.toml", *SETS)
    wait_for_step(folder, 2, process)
    time.sleep(0.15)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    saved = max(int(p.name[5:]) for p in (folder.run / "checkpoints").glob("step-*"))
    done = folder.rlcore("train", "-p", "say_env", "--resume", "runs/run", "--set", f"run.steps={saved + 2}")
    assert done.returncode == 0, done.stderr
    assert steps_of(folder)[-2:] == [saved + 1, saved + 2]
    summary = json.loads((folder.run / "summary.json").read_text())
    assert (summary["steps"], summary["end"]) == (saved + 2, "finished")
    assert len(summary["reward_by_step"]) == saved + 2
    attempts = [a["id"] for a in read_jsonl(folder.run / "attempts.jsonl")]
    assert len(set(attempts)) == len(attempts), "an attempt was recorded twice"


def test_no_two_lives_of_a_run_give_out_the_same_ids(make_folder: Any) -> None:
    """Killed again before its next checkpoint, a resumed run starts from the same one a second time."""
    folder = make_folder()
    assert folder.train("--set", "run.steps=1").returncode == 0
    resume = ("train", "-p", "say_env", "--resume", "runs/run", "--set", "run.checkpoint_every=0")
    for life in (1, 2):
        known = len(list(read_jsonl(folder.run / "requests.jsonl")))
        process = folder.start(*resume, *SETS)
        until = time.monotonic() + 60
        while len(list(read_jsonl(folder.run / "requests.jsonl"))) < known + 24 and time.monotonic() < until:
            time.sleep(0.1)
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
        assert len(list(read_jsonl(folder.run / "resumed.jsonl"))) == life
    ids = [record["id"] for record in read_jsonl(folder.run / "requests.jsonl") if record["event"] == "intent"]
    assert len(ids) >= 8 + 2 * 8
    assert len(set(ids)) == len(ids), "a request was made twice under one id"


@pytest.mark.fault("CKP-06")
@pytest.mark.fault("CKP-04")
def test_a_resumed_run_takes_the_tasks_of_an_uninterrupted_one(make_folder: Any) -> None:
    whole, parted = make_folder(), make_folder()
    assert whole.train("--set", "run.steps=4").returncode == 0
    assert parted.train("--set", "run.steps=2").returncode == 0
    done = parted.rlcore("train", "-p", "say_env", "--resume", "runs/run", "--set", "run.steps=4")
    assert done.returncode == 0, done.stderr
    tasks = [[a["task"] for a in read_jsonl(f.run / "attempts.jsonl")] for f in (whole, parted)]
    per_step = [[sorted(t[i : i + 8]) for i in range(0, 32, 8)] for t in tasks]
    assert per_step[0] == per_step[1]
    assert steps_of(parted) == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_cleanly_within_five_seconds(folder: Any, number: signal.Signals) -> None:
    process = folder.start("train", "-p", "say_env", "--config", "run.toml", *SETS)
    wait_for_step(folder, 1, process)
    started = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=10)
    assert time.monotonic() - started < 5
    assert process.returncode == 128 + number
    assert json.loads((folder.run / "summary.json").read_text())["end"] == "interrupted"
    assert "to go on" in output
    assert "Traceback" not in output


@pytest.mark.fault("CKP-02")
def test_a_full_disk_ends_the_run_and_keeps_the_last_good_step(folder: Any) -> None:
    """Exit 1 with the reason; the checkpoint of the step before is complete and can be resumed."""
    assert folder.train("--set", "run.steps=1").returncode == 0
    metrics = folder.run / "metrics.jsonl"
    metrics.rename(folder.run / "kept.jsonl")
    metrics.symlink_to("/dev/full")
    done = folder.rlcore("train", "-p", "say_env", "--resume", "runs/run", "--set", "run.steps=5")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder.run / "checkpoints" / "step-000001" / "state.json").exists()


@pytest.mark.fault("ASY-14")
def test_nothing_to_learn_stops_the_run_with_the_reason(folder: Any) -> None:
    done = folder.train("--set", "agent.reward=1.0", "--set", "run.steps=50", "--set", "run.max_empty_steps=3")
    assert done.returncode == 1
    assert "3 steps in a row changed nothing" in done.stderr
    assert steps_of(folder) == [1, 2, 3]
    assert all(line["skipped"] for line in read_jsonl(folder.run / "metrics.jsonl"))


def test_an_update_that_was_not_made_is_no_version(folder: Any) -> None:
    """A gradient that is not finite changes no weights: nothing is published, and a row of them ends the run."""
    done = folder.train("--set", "loss.name=broken", "--set", "run.steps=50", "--set", "run.max_empty_steps=2")
    assert done.returncode == 1
    assert "2 steps in a row changed nothing" in done.stderr
    lines = list(read_jsonl(folder.run / "metrics.jsonl"))
    assert [(line["skipped"], line["nonfinite"], line["policy_version"]) for line in lines] == [(1, 1, 0)] * 2
    assert [alarm["kind"] for alarm in read_jsonl(folder.run / "alarms.jsonl")] == ["nonfinite"] * 2


def test_a_run_without_a_checkpoint_does_not_offer_to_go_on(folder: Any) -> None:
    process = folder.start("train", "-p", "say_env", "--config", "run.toml", "--set", "agent.seconds=30")
    until = time.monotonic() + 60
    while not (folder.run / "requests.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT
    assert "interrupted after 0 steps" in output
    assert "to go on" not in output


@pytest.mark.fault("ASY-13")
def test_a_run_directory_that_exists_is_refused(folder: Any) -> None:
    (folder.run / "trajectories").mkdir(parents=True)
    (folder.run / "trajectories" / "old.parquet").write_text("old")
    done = folder.train()
    assert done.returncode == 2
    assert "exists; resume it with --resume runs/run" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.fault("CKP-10")
def test_the_last_step_is_saved_whatever_the_interval(folder: Any) -> None:
    done = folder.train("--set", "run.steps=5", "--set", "run.checkpoint_every=3", "--set", "run.keep_checkpoints=9")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (folder.run / "checkpoints").iterdir()) == ["step-000003", "step-000005"]


@pytest.mark.fault("ASY-17")
def test_a_run_goes_through_its_tasks_as_often_as_it_has_steps(folder: Any) -> None:
    """3 tasks, 2 a step, 4 steps: the epochs follow each other without a hole or a wait."""
    done = folder.train("--set", "taskset.count=3", "--set", "run.steps=4")
    assert done.returncode == 0, done.stderr
    tasks = [a["task"] for a in read_jsonl(folder.run / "attempts.jsonl")]
    assert {tasks.count(task) for task in set(tasks)} <= {8, 12}


def test_asynchronous_rollout_trains_nothing_older_than_the_bound(folder: Any) -> None:
    done = folder.train("--set", "rollout.max_age=2", "--set", "run.steps=6", "--set", "agent.seconds=0.05")
    assert done.returncode == 0, done.stderr
    ages = [line["age/max"] for line in read_jsonl(folder.run / "metrics.jsonl")]
    assert max(ages) <= 2
    assert max(ages) > 0, "rollout never ran ahead"


@pytest.mark.fault("CFG-08")
@pytest.mark.parametrize("name", [".", "..", "", "/", "a/b", "/tmp", "../x"])
def test_a_run_directory_is_always_a_strict_child_and_nothing_is_deleted(folder: Any, name: str) -> None:
    """There is no option that deletes: a run's name is one plain folder name below ``run.dir``."""
    (folder.path / "runs").mkdir()
    (folder.path / "runs" / "kept").write_text("kept")
    done = folder.train("--set", f"run.id={name}")
    assert done.returncode == 2, done.stderr
    assert "is not a plain directory name" in done.stderr
    assert sorted(p.name for p in (folder.path / "runs").iterdir()) == ["kept"]
