"""What this distribution offers."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_sandboxes(register):
    register("noting", "noting_sandbox.backend:NotingBackend")
