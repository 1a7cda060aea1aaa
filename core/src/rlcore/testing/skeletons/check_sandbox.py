"""The backend keeps its contract."""

from pathlib import Path

import pytest

from rlcore.testing.sandbox import SandboxConformance
from rlcore.testing.skeletons.sandbox import Skeleton


class TestSkeleton(SandboxConformance):
    """Every behaviour on real sandboxes; those in ``lacks`` are tried too."""

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path) -> None:
        self.folder = str(tmp_path)

    def make_backend(self) -> Skeleton:
        """A new backend for each test."""
        return Skeleton(Skeleton.Config(folder=self.folder))
