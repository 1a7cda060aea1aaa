"""The ``tensorboard`` tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlcore.errors import ConfigError
from rlcore.types import RunContext

__all__ = ["TensorBoard"]


class TensorBoard:
    """Scalars as TensorBoard event files, in ``tensorboard/`` of the run directory."""

    class Config(BaseModel):
        """Where the event files go."""

        model_config = ConfigDict(extra="forbid")
        folder: str = Field("tensorboard", description="folder inside the run directory")

    def __init__(self, config: Config) -> None:
        self._folder = config.folder
        self._writer: Any = None

    def start(self, context: RunContext, config: Mapping[str, Any]) -> None:
        """Open the event file."""
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise ConfigError("tracker tensorboard: install it with `pip install 'rlcore[tensorboard]'`") from error
        self._writer = Writer(str(context.run_dir / self._folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the event file."""
        self._writer.close()
