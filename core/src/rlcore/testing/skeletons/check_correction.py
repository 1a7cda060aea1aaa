"""The correction keeps its contract."""

from rlcore.testing import CorrectionConformance, Token, capped_exp
from rlcore.testing.skeletons.correction import Skeleton


class TestSkeleton(CorrectionConformance):
    """Against the formula of one token in plain Python."""

    correction = Skeleton

    def token(self, token: Token) -> tuple[float, bool]:
        """Its weight, and whether it is kept."""
        return min(capped_exp(token.old - token.rollout), 2.0), True
