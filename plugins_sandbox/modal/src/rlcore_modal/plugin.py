"""What rlcore-modal offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_sandboxes(register):
    """``sandbox.name = "modal"``."""
    register("modal", "rlcore_modal.backend:ModalBackend")


@hookimpl
def rlcore_preflight(config):
    """Whether a sandbox outlives an episode, and whether there are credentials, if the run needs one."""
    if config.sandbox is None or config.sandbox.name.rpartition(":")[2] != "modal":
        return ()
    from rlcore_modal.backend import preflight

    return preflight(config.sandbox.options, config.budget.seconds)
