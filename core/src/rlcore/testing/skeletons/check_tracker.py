"""The tracker writes what it is told."""

import json
from pathlib import Path

from rlcore.testing.skeletons.tracker import Skeleton
from rlcore.types import RunContext


def test_each_step_is_a_line(tmp_path: Path) -> None:
    """In order; a missing measurement is missing."""
    tracker = Skeleton(Skeleton.Config())
    tracker.start(RunContext("r", tmp_path, 0, {}), {})
    tracker.log(1, {"reward": 0.5})
    tracker.log(2, {})
    tracker.finish({"end": "finished"})
    lines = (tmp_path / "metrics.json").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "reward": 0.5}, {"step": 2}]
