from math import sqrt

from rlcore.testing import CorrectionConformance, Token, capped_exp
from root_tis.correction import RootTIS


class TestRootTIS(CorrectionConformance):
    correction = RootTIS

    def token(self, token: Token) -> tuple[float, bool]:
        return min(sqrt(capped_exp(token.old - token.rollout)), 1.5), True
