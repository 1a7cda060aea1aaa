"""The backend keeps its contract."""

from rlcore.protocols import SandboxBackend
from rlcore.testing.sandbox import SandboxConformance
from rlcore.testing.skeletons.sandbox import Skeleton


class TestSkeleton(SandboxConformance):
    """Small experiments on real sandboxes; what the backend cannot do, ``lacks`` says."""

    def make_backend(self) -> SandboxBackend:
        """A new backend with its default options."""
        return Skeleton(Skeleton.Config())
