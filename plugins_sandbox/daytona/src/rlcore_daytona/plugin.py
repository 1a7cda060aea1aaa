"""What rlcore-daytona offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_sandboxes(register):
    """``sandbox.name = "daytona"``."""
    register("daytona", "rlcore_daytona.backend:DaytonaBackend")


@hookimpl
def rlcore_preflight(config):
    """Whether there are credentials, and whether a sandbox outlives an episode, if the run needs one."""
    if config.sandbox is None or config.sandbox.name.rpartition(":")[2] != "daytona":
        return ()
    from rlcore_daytona.backend import preflight

    return preflight(config.sandbox.options, config.budget.seconds)
