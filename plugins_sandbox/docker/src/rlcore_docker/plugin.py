"""What rlcore-docker offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_sandboxes(register):
    """``sandbox.name = "docker"``."""
    register("docker", "rlcore_docker.backend:DockerBackend")


@hookimpl
def rlcore_preflight(config):
    """Whether an engine answers, if the run needs one."""
    if config.sandbox is None or config.sandbox.name.rpartition(":")[2] != "docker":
        return ()
    from rlcore_docker.backend import preflight

    return preflight(config.sandbox.options)
