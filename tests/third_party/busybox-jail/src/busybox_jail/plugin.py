"""What it offers."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_sandboxes(register):
    """``sandbox.name = "jail"``."""
    register("jail", "busybox_jail.backend:JailBackend")
