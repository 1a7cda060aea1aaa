"""``launcher.name = "inline"``: the run, here, in a process of its own."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from rlcore.quoting import quoted

if TYPE_CHECKING:
    from rlcore.config import RunConfig
    from rlcore.types import Cluster

__all__ = ["Inline"]


class Inline:
    """Runs the driver on this machine."""

    class Config(BaseModel):
        """Nothing to choose."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    elsewhere: frozenset[str] = frozenset()
    """Checks of a preflight that are about other machines than this one."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def render(self, run: RunConfig, cluster: Cluster) -> str:
        """The driver's command line."""
        return quoted(cluster.driver) + "\n"

    def launch(self, run: RunConfig, cluster: Cluster) -> int:
        """Run it; its exit status."""
        status = subprocess.run(cluster.driver, check=False).returncode
        return status if status >= 0 else 128 - status
