"""``launcher.name = "ray"``: the run as a job of a Ray cluster that stands already."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError
from rlcore.quoting import quoted

if TYPE_CHECKING:
    from rlcore.config import RunConfig
    from rlcore.types import Cluster

__all__ = ["RayJob"]


class RayJob:
    """Submits the driver by ``ray job submit`` and follows it.

    No variable is sent along: a job's runtime environment is logged. Credentials are on the cluster's nodes, as variables
    or files.
    """

    class Config(BaseModel):
        """Which cluster, which job."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        address: str = Field("http://127.0.0.1:8265", description="the cluster's dashboard")
        submission_id: str | None = Field(None, description="id of the job; default: Ray's choice")
        follow: bool = Field(True, description="wait for the job's end and take its exit status")

    elsewhere: frozenset[str] = frozenset({"gpus", "nodes", "ports", "scratch", "fabric", "head", "clock", "packages"})

    def __init__(self, config: Config) -> None:
        self.config = config

    def render(self, run: RunConfig, cluster: Cluster) -> str:
        """The submission's command line."""
        return quoted(self._line(cluster)) + "\n"

    def launch(self, run: RunConfig, cluster: Cluster) -> int:
        """Submit it, and follow it if that is wanted."""
        if shutil.which("ray") is None:
            raise ConfigError("launcher 'ray' needs the ray command: pip install 'rlcore-launchers[ray]'")
        status = subprocess.run(self._line(cluster), check=False).returncode
        return status if status >= 0 else 128 - status

    def _line(self, cluster: Cluster) -> list[str]:
        config = self.config
        line = ["ray", "job", "submit", f"--address={config.address}"]
        if config.submission_id is not None:
            line.append(f"--submission-id={config.submission_id}")
        if not config.follow:
            line.append("--no-wait")
        return [*line, "--", *cluster.driver]
