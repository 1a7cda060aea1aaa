"""The conformance kit: what a plugin's own tests subclass or call to show that it keeps its contract.

Needs ``rlcore[testing]`` (pytest, hypothesis); the kits of the objective need torch too, and only when they run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.testing._rows import Token as Token
    from rlcore.testing._rows import capped_exp as capped_exp
    from rlcore.testing.advantage import AdvantageConformance as AdvantageConformance
    from rlcore.testing.agent import AgentLoopConformance as AgentLoopConformance
    from rlcore.testing.correction import CorrectionConformance as CorrectionConformance
    from rlcore.testing.loss import LossConformance as LossConformance
    from rlcore.testing.policy import PolicyClientConformance as PolicyClientConformance
    from rlcore.testing.sandbox import SandboxConformance as SandboxConformance

_WHERE = {
    "AdvantageConformance": "rlcore.testing.advantage",
    "AgentLoopConformance": "rlcore.testing.agent",
    "CorrectionConformance": "rlcore.testing.correction",
    "LossConformance": "rlcore.testing.loss",
    "PolicyClientConformance": "rlcore.testing.policy",
    "SandboxConformance": "rlcore.testing.sandbox",
    "Token": "rlcore.testing._rows",
    "capped_exp": "rlcore.testing._rows",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """Each kit is imported when it is asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
