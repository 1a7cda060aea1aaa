"""The run directory: what is written can be read again, and a fresh run never mixes with an old one."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rlcore.errors import ConfigError
from rlcore.record.directory import RunDirectory
from rlcore.record.jsonl import read_jsonl
from rlcore.record.manifest import manifest
from rlcore.record.memory import PeakMemory
from rlcore.record.picture import reward_png, sparkline
from rlcore.record.trackers import Trackers
from rlcore.types import Group, RunContext, Sample, Task, Trajectory


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory.create(tmp_path / "run", manifest("quickstart", {"run": {"seed": 1}}, {"hash": "abc"}))
    yield made
    made.close()


@pytest.mark.fault("ASY-13")
@pytest.mark.parametrize("leftover", ["metrics.jsonl", "trajectories/step-000005.parquet", "checkpoints/step-000001/x"])
def test_a_fresh_run_refuses_a_directory_with_leftovers(tmp_path: Path, leftover: str) -> None:
    (tmp_path / "run" / leftover).parent.mkdir(parents=True)
    (tmp_path / "run" / leftover).write_text("old")
    with pytest.raises(ConfigError, match="run exists; resume it with --resume"):
        RunDirectory.create(tmp_path / "run", {})
    assert (tmp_path / "run" / leftover).read_text() == "old"


def test_what_is_not_a_run_directory_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no manifest\.json"):
        RunDirectory.reopen(tmp_path, {})


def test_every_time_that_a_run_is_resumed_counts(directory: RunDirectory) -> None:
    """Killed before its next checkpoint and resumed again, a run must not give out the same ids of attempts."""
    directory.close()
    lives = []
    for _ in range(3):
        again = RunDirectory.reopen(directory.path, {"recipe": "x"})
        lives.append(again.life)
        again.close()
    assert lives == [1, 2, 3]


def test_a_run_that_another_process_works_in_is_not_resumed(directory: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=f"another process works in {directory.path}"):
        RunDirectory.reopen(directory.path, {})
    assert not (directory.path / "resumed.jsonl").exists()


def test_the_manifest_says_how_to_make_the_run_again(directory: RunDirectory) -> None:
    said = RunDirectory.manifest_of(directory.path)
    assert said["config"] == {"run": {"seed": 1}}
    assert said["plugins"]["hash"] == "abc"
    assert said["packages"]["pydantic"]


@pytest.mark.fault("OBS-03")
def test_a_missing_measurement_is_not_written(directory: RunDirectory) -> None:
    directory.step(1, {"reward": 0.5, "k3": None, "bad": math.nan})
    directory.close()
    (line,) = read_jsonl(directory.path / "metrics.jsonl")
    assert line["reward"] == 0.5
    assert "k3" not in line
    assert line["bad"] is None


def test_samples_come_back_from_parquet_with_every_family(directory: RunDirectory) -> None:
    nan = math.nan
    sample = Sample(
        "t", "g", "task", 0, [5, 6, 7], [False, True, True], [nan, -0.5, -12.34], [0, 1, 1], [-1, 0, 0], [-1, 3, 3], 1.0
    )
    group = Group("g", Task("task"), [Trajectory("t", "task", "g", end="done")])
    directory.samples(4, [sample], [group], [[nan, -0.25, -1.5]], None)
    (row,) = pq.read_table(directory.path / "trajectories" / "step-000004.parquet").to_pylist()
    assert row["token_ids"] == [5, 6, 7]
    assert row["mask"] == [False, True, True]
    assert row["rollout_logprobs"][1:] == pytest.approx([-0.5, -12.34], abs=1e-6)
    assert row["logprobs"][1:] == [-0.25, -1.5]
    assert row["old_logprobs"] is None
    assert row["versions"] == [-1, 3, 3]
    assert (row["end"], row["reward"], row["step"]) == ("done", 1.0, 4)
    assert not list((directory.path / "trajectories").glob("*.part"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.0, 0.5, 1.0], "▁▅█"), ([1.0, 1.0], "▁▁"), ([0.0, None, 1.0], "▁ █"), ([], ""), ([None], "")],
)
def test_a_sparkline_spans_least_to_largest(values: list[float | None], expected: str) -> None:
    assert sparkline(values) == expected


def test_a_long_sparkline_fits() -> None:
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40


def test_the_reward_is_drawn_as_png(tmp_path: Path) -> None:
    summary = {"run": "r", "end": "finished", "reward_by_step": [0.1, None, 0.9], "heldout_success_before": 0.1}
    assert reward_png(tmp_path / "reward.png", summary)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert not reward_png(tmp_path / "none.png", summary | {"reward_by_step": []})


def test_memory_of_the_tree_is_measured() -> None:
    with PeakMemory(every=0.01) as memory:
        held = bytearray(300 * 2**20)
        held[:: 2**12] = b"x" * len(held[:: 2**12])
        time.sleep(0.1)
        del held
    assert 0.3 < memory.peak_gib < 20


class Tracker:
    def __init__(self, fail_at: str = "", hang_at: str = "") -> None:
        self.fail_at, self.hang_at = fail_at, hang_at
        self.seen: list[Any] = []
        self.release = threading.Event()

    def _do(self, what: str, *arguments: Any) -> None:
        self.seen.append((what, *arguments))
        if what == self.fail_at:
            raise RuntimeError("no connection")
        if what == self.hang_at:
            self.release.wait(30)

    def start(self, context: RunContext, config: Mapping[str, Any]) -> None:
        self._do("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._do("log", step, dict(metrics))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._do("finish")


CONTEXT = RunContext("r", Path("r"), 0, {})


def test_a_tracker_gets_numbers_and_nothing_that_was_not_measured() -> None:
    tracker = Tracker()
    trackers = Trackers([tracker], lambda alarm: pytest.fail(str(alarm)))
    trackers.start(CONTEXT, {})
    trackers.log(1, {"reward": 0.5, "k3": None, "bad": math.nan, "end": "x"})
    trackers.finish({})
    assert tracker.seen == [("start",), ("log", 1, {"reward": 0.5}), ("finish",)]


@pytest.mark.fault("OBS-09")
def test_a_tracker_that_fails_is_switched_off_with_one_alarm() -> None:
    bad, good, alarms = Tracker(fail_at="log"), Tracker(), list[Mapping[str, Any]]()
    trackers = Trackers([bad, good], alarms.append)
    trackers.start(CONTEXT, {})
    for step in range(50):
        trackers.log(step, {"reward": 1.0})
        time.sleep(0.002)
    trackers.finish({})
    assert [alarm["kind"] for alarm in alarms] == ["tracker"]
    assert "no connection" in alarms[0]["message"]
    assert len(good.seen) == 52


@pytest.mark.fault("OBS-09")
def test_a_tracker_that_hangs_does_not_block_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.record.trackers.FINISH_SECONDS", 0.2)
    tracker, alarms = Tracker(hang_at="log"), list[Mapping[str, Any]]()
    trackers = Trackers([tracker], alarms.append)
    trackers.log(1, {"reward": 1.0})
    started = time.monotonic()
    trackers.finish({})
    assert time.monotonic() - started < 5
    tracker.release.set()
    assert ["did not take everything" in alarm["message"] for alarm in alarms] == [True]


def test_a_tracker_that_fails_at_the_very_end_is_an_alarm_too() -> None:
    alarms: list[Mapping[str, Any]] = []
    Trackers([Tracker(fail_at="finish")], alarms.append).finish({})
    assert ["finish failed" in alarm["message"] for alarm in alarms] == [True]


def test_json_files_are_replaced_as_a_whole(directory: RunDirectory) -> None:
    directory.summary({"end": "running", "x": math.inf})
    directory.summary({"end": "finished"})
    assert json.loads((directory.path / "summary.json").read_text()) == {"end": "finished"}
    assert not list(directory.path.glob("*.part"))
