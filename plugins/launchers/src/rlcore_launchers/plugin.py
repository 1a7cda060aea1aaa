"""What rlcore-launchers offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_launchers(register):
    """``launcher.name``."""
    register("inline", "rlcore_launchers.inline:Inline")
    register("slurm", "rlcore_launchers.slurm:Slurm")
    register("ray", "rlcore_launchers.ray:RayJob")


@hookimpl
def rlcore_add_commands(group):
    """``rlcore launch``."""
    group.lazy("launch", "rlcore_launchers.command:launch", "Render a run for a cluster, and submit it.")
