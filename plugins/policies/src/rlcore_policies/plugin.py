"""What rlcore-policies offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_policy_clients(register):
    """Clients of servers that speak HTTP."""
    register("openai", "rlcore_policies.chat:OpenAIClient")
    register("sglang", "rlcore_policies.native:SGLangClient")
