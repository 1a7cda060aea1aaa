"""The ``wandb`` tracker. The API key comes from the environment or from ``wandb login``; it is never configured here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlcore.errors import ConfigError
from rlcore.types import RunContext

__all__ = ["WandB"]


class WandB:
    """Metrics to Weights & Biases."""

    class Config(BaseModel):
        """Which project the run goes to."""

        model_config = ConfigDict(extra="forbid")
        project: str = Field("rlcore", description="project of the run")
        entity: str | None = Field(None, description="user or team; default: that of the login")
        mode: Literal["online", "offline"] = Field("online", description="offline: files to be synced later")

    def __init__(self, config: Config) -> None:
        self._config = config
        self._run: Any = None

    def start(self, context: RunContext, config: Mapping[str, Any]) -> None:
        """Open the run, named like the run directory."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("tracker wandb: install it with `pip install 'rlcore[wandb]'`") from error
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=self._config.mode,
            id=context.run_id,
            name=context.run_id,
            dir=str(context.run_dir),
            config=dict(config),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the run with its summary figures."""
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, int | float | str)})
        self._run.finish()
