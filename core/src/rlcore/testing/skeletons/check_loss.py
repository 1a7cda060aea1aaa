"""The loss keeps its contract."""

from rlcore.testing import LossConformance, Token
from rlcore.testing.skeletons.loss import Skeleton


class TestSkeleton(LossConformance):
    """Against the formula of one token in plain Python."""

    loss = Skeleton

    def term(self, token: Token) -> tuple[float, float]:
        """The token's term and its derivative by the log-prob."""
        return -token.advantage * token.logprob, -token.advantage
