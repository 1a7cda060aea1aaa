"""What this distribution offers."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_corrections(register):
    register("root_tis", "root_tis.correction:RootTIS")
