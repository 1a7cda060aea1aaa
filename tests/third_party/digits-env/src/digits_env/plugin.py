"""What this distribution offers."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_tasksets(register):
    register("digits", "digits_env.environment:DigitTasks")


@hookimpl
def rlcore_register_agent_loops(register):
    register("digits", "digits_env.environment:DigitAgent")
