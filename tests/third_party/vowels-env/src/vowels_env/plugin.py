"""What this distribution offers."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_tasksets(register):
    register("vowels", "vowels_env.environment:VowelTasks")


@hookimpl
def rlcore_register_agent_loops(register):
    register("vowels", "vowels_env.environment:VowelAgent")
