from math import tanh

from rlcore.testing import LossConformance, Token, capped_exp
from soft_clip.loss import SoftClip


class TestSoftClip(LossConformance):
    loss = SoftClip

    def term(self, token: Token) -> tuple[float, float]:
        far = token.logprob - token.old
        bent = tanh((capped_exp(far) - 1) / 0.3)
        slope = capped_exp(far) * (1 - bent**2) if far <= 20 else 0.0
        return -token.advantage * (1 + 0.3 * bent), -token.advantage * slope
