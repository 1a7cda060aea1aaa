"""A tracker: sends metrics somewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlcore.types import RunContext


class Skeleton:
    """One JSON line for each step, in a file."""

    class Config(BaseModel):
        """Options of this tracker."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field("metrics.json", description="the file, below the run's directory")

    def __init__(self, config: Config) -> None:
        self.config = config
        self._path = Path()

    def start(self, context: RunContext, config: Mapping[str, Any]) -> None:
        """The run begins; see :class:`rlcore.protocols.Tracker`."""
        self._path = context.run_dir / self.config.path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run ended; everything is written."""
