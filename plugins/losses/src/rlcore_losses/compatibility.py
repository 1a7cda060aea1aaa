"""Combinations of the parts of an objective that would train something else than they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["check"]


def check(config: RunConfig) -> None:
    """Refuse a gap that is corrected twice, and staleness that nothing sees.

    Raises:
        ConfigError: names both sections and the ways out.
    """
    correction, loss = config.correction, config.loss
    options = loss.options
    looks_at_engine = loss.name == "decoupled" or getattr(options, "ratio_to", None) == "rollout"
    if looks_at_engine and (weighing := _weighing(correction.name, correction.options)):
        how = "it weighs by the behaviour policy" if loss.name == "decoupled" else "loss.ratio_to = 'rollout'"
        raise ConfigError(
            f"correction {weighing!r} and loss {loss.name!r} both correct the gap to the engine ({how}): "
            "set correction.name = 'none' or a rejection, or let the loss take its ratio to 'old'"
        )
    if (
        config.rollout.max_age > 0
        and correction.name == "none"
        and not looks_at_engine
        and loss.name != "cross_entropy"
    ):
        raise ConfigError(
            f"rollout.max_age = {config.rollout.max_age} trains samples of older policies, but nothing sees their age: "
            f"correction is 'none' and the ratio of loss {loss.name!r} is to log-probs of the new policy. "
            "Set correction.name = 'token_tis', or loss.ratio_to = 'rollout'"
        )


_WEIGHING = frozenset({"token_tis", "sequence_tis", "geometric_tis", "turn_tis", "icepop"})


def _weighing(name: str, options: Any) -> str:
    """The name of the shipped correction that weighs, if there is one in it."""
    if name == "chain":
        return next((step.name for step in options.steps if step.name in _WEIGHING), "")
    return name if name in _WEIGHING else ""
