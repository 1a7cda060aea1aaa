"""What the core itself offers, registered like any plugin."""

from __future__ import annotations

from rlcore.hookspecs import Register, hookimpl


@hookimpl
def rlcore_register_trackers(register: Register) -> None:
    """TensorBoard and Weights & Biases."""
    register("tensorboard", "rlcore.record.tensorboard:TensorBoard")
    register("wandb", "rlcore.record.wandb:WandB")
