"""What rlcore-local offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_sandboxes(register):
    """``sandbox.name = "local"``."""
    register("local", "rlcore_local.backend:LocalBackend")


@hookimpl
def rlcore_preflight(config):
    """Whether this machine can run the sandbox that the run names."""
    if config.sandbox is None or config.sandbox.name.rpartition(":")[2] != "local":
        return ()
    from rlcore_local.backend import preflight

    return preflight(config.sandbox)
