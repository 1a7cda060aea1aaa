"""The run directory: the one place where a run's facts are, readable on any machine."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlcore.errors import ConfigError
from rlcore.record.jsonl import JsonlWriter, plain
from rlcore.types import Group, Sample, Trajectory

__all__ = ["RunDirectory", "claim"]


class RunDirectory:
    """Writes ``manifest.json``, ``metrics.jsonl``, ``attempts.jsonl``, ``alarms.jsonl``, ``trajectories/``, ``summary.json``.

    Use :meth:`create` for a new run and :meth:`reopen` to go on with one; ``resumed.jsonl`` has a line for each time.

    Attributes:
        path: the directory.
        life: how often the run was resumed; it makes the ids of attempts that are made again unique.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.life = 0
        self._claim = claim(path)
        self._metrics = JsonlWriter(path / "metrics.jsonl")
        self._attempts = JsonlWriter(path / "attempts.jsonl")
        self._alarms = JsonlWriter(path / "alarms.jsonl")

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any]) -> RunDirectory:
        """Make the directory of a new run.

        Raises:
            ConfigError: it exists and holds something: a fresh run never mixes with an old one's leftovers.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"run directory {path} exists; resume it with --resume {path}, or choose another with --set run.id=NAME"
            )
        (path / "trajectories").mkdir(parents=True, exist_ok=True)
        (path / "checkpoints").mkdir(exist_ok=True)
        write_json(path / "manifest.json", manifest)
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, manifest: Mapping[str, Any]) -> RunDirectory:
        """Go on with a run; ``manifest`` is what it goes on with.

        Raises:
            ConfigError: ``path`` is not the directory of a run, or another process still works in it.
        """
        cls.manifest_of(path)
        directory, record = cls(path), path / "resumed.jsonl"
        with JsonlWriter(record) as resumed:
            resumed.write({"time": time.time(), **manifest}, flush=True)
        directory.life = record.read_bytes().count(b"\n")
        return directory

    @staticmethod
    def manifest_of(path: Path) -> dict[str, Any]:
        """A run's manifest. Raises ``ConfigError`` if ``path`` is not the directory of a run."""
        if not (path / "manifest.json").is_file():
            raise ConfigError(f"{path} is not a run directory: it has no manifest.json")
        return read_json(path / "manifest.json")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of ``metrics.jsonl``; missing measurements are left out."""
        present = {key: value for key, value in metrics.items() if value is not None}
        self._metrics.write({"step": step, "time": time.time(), **present}, flush=True)

    def attempt(self, trajectory: Trajectory) -> None:
        """The one terminal record of an attempt."""
        self._attempts.write(
            {
                "id": trajectory.id,
                "task": trajectory.task_id,
                "group": trajectory.group_id,
                "end": trajectory.end,
                "reward": trajectory.reward,
                "error": trajectory.error,
                "turns": len(trajectory.turns),
                "tokens": trajectory.sampled_tokens,
                "seconds": trajectory.seconds,
                "info": trajectory.info,
            }
        )

    def alarm(self, alarm: Mapping[str, Any]) -> None:
        """One line of ``alarms.jsonl``."""
        self._alarms.write({"time": time.time(), **alarm}, flush=True)

    def samples(
        self,
        step: int,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        logprobs: Sequence[Sequence[float]],
        old_logprobs: Sequence[Sequence[float]] | None,
    ) -> None:
        """``trajectories/step-N.parquet``: one row per sample, with the three log-prob families.

        ``logprobs`` (current) and ``old_logprobs`` are per sample ``[T]``, NaN outside the mask.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        ends = {t.id: t.end for group in groups for t in group.trajectories}
        floats, ints = pa.list_(pa.float32()), pa.list_(pa.int32())
        table = pa.table(
            {
                "step": pa.array([step] * len(samples), pa.int32()),
                "trajectory": pa.array([s.trajectory_id for s in samples]),
                "group": pa.array([s.group_id for s in samples]),
                "task": pa.array([s.task_id for s in samples]),
                "row": pa.array([s.row for s in samples], pa.int32()),
                "reward": pa.array([s.reward for s in samples], pa.float64()),
                "end": pa.array([ends[s.trajectory_id] for s in samples]),
                "token_ids": pa.array([s.token_ids for s in samples], ints),
                "mask": pa.array([s.mask for s in samples], pa.list_(pa.bool_())),
                "rollout_logprobs": pa.array([s.rollout_logprobs for s in samples], floats),
                "old_logprobs": pa.array([None] * len(samples) if old_logprobs is None else old_logprobs, floats),
                "logprobs": pa.array(logprobs, floats),
                "advantages": pa.array([s.advantages for s in samples], floats),
                "turns": pa.array([s.turn_ids for s in samples], ints),
                "versions": pa.array([s.versions for s in samples], ints),
            }
        )
        target = self.path / "trajectories" / f"step-{step:06d}.parquet"
        part = target.with_suffix(".part")
        pq.write_table(table, part)
        os.replace(part, target)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """``summary.json``, replaced as a whole."""
        write_json(self.path / "summary.json", summary)

    def close(self) -> None:
        """Flush and close every file, and let go of the directory."""
        for file in (self._metrics, self._attempts, self._alarms, self._claim):
            file.close()


def claim(path: Path) -> IO[str]:
    """Hold a directory (made if need be) until what this returns is closed: two processes that write into one would make work twice.

    Raises ``ConfigError`` if another process holds it.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"another process works in {path}: wait for its end, or choose another directory") from None
    return lock


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file as a whole: a reader sees the old or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(plain(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    value = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value
