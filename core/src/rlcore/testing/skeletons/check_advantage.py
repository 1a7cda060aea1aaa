"""The estimator keeps its contract."""

from collections.abc import Sequence

from rlcore.testing import AdvantageConformance
from rlcore.testing.skeletons.advantage import Skeleton
from rlcore.types import Trajectory


class TestSkeleton(AdvantageConformance):
    """Against the formula of one group in plain Python."""

    estimator = Skeleton

    def group(self, members: Sequence[Trajectory]) -> Sequence[float]:
        """Advantages of the members that have a verdict."""
        rewards = [float(member.reward or 0.0) for member in members]
        return [reward - sum(rewards) / len(rewards) for reward in rewards]
