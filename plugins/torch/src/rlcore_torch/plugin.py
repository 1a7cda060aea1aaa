"""What rlcore-torch offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_trainers(register):
    """The single-process trainer."""
    register("torch", "rlcore_torch.trainer:TorchTrainer")
