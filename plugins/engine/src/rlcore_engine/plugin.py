"""What rlcore-engine offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_engines(register):
    """The engine in process."""
    register("embedded", "rlcore_engine.engine:EmbeddedEngine")


@hookimpl
def rlcore_register_policy_clients(register):
    """Its client."""
    register("embedded", "rlcore_engine.policy:EmbeddedPolicy")


@hookimpl
def rlcore_add_commands(group):
    """``rlcore serve``."""
    group.lazy("serve", "rlcore_engine.serve:serve", "Serve a model over HTTP, as SGLang and OpenAI clients expect.")
