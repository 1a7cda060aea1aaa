"""What rlcore-tbench2 offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_tasksets(register):
    """Harbor / terminal-bench-2 task folders."""
    register("tbench2", "rlcore_tbench2.taskset:TaskFolders")


@hookimpl
def rlcore_register_agent_loops(register):
    """One shell command per turn."""
    register("terminal", "rlcore_tbench2.agent:TerminalAgent")


@hookimpl
def rlcore_register_graders(register):
    """The task's own tests."""
    register("tbench2", "rlcore_tbench2.grader:TaskGrader")


@hookimpl
def rlcore_add_commands(group):
    """``rlcore tasks``."""
    group.lazy("tasks", "rlcore_tbench2.commands:app", "List, check, make and split tasks.")


@hookimpl
def rlcore_preflight(config):
    """Every task folder of the run, and whether training and evaluation share tasks."""
    from rlcore_tbench2.preflight import problems_of

    return problems_of(config)
