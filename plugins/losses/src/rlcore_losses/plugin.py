"""What rlcore-losses offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_advantages(register):
    """Advantage estimators."""
    register("grpo", "rlcore_losses.advantages:GRPO")


@hookimpl
def rlcore_register_corrections(register):
    """Corrections."""
    register("none", "rlcore_losses.corrections:NoCorrection")
    register("token_tis", "rlcore_losses.corrections:TokenTIS")


@hookimpl
def rlcore_register_losses(register):
    """Policy losses."""
    register("ppo_clip", "rlcore_losses.losses:PPOClip")


@hookimpl
def rlcore_register_aggregations(register):
    """Aggregations."""
    register("token_mean", "rlcore_losses.aggregations:TokenMean")
